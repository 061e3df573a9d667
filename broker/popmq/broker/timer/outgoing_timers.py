"""Timers of a broker group that is drained, on their way to other groups.

A function of the log.  One record says which timers leave and where to: from there on they are
neither fired nor recalled here, whatever crashes, and the group that was named is asked until it
has them.  Another record says that it has.  Between the two there is one batch, of a bounded
size (docs/concepts/timer.md, "Moved to another broker group").
"""

import struct
from collections.abc import Iterator, Sequence

from popmq.broker.log.snapshot_table import Row, SnapshotTable, entry_hash
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_state import TimerState
from popmq.common.record.message import RecordKind
from popmq.common.record.timer_migration import (
    MigratingTimer,
    TimerMigrationBatch,
    TimerMigrationDone,
)

_HEAD = struct.Struct(">BQQ")  # 1, timers that were moved, number of the next move
_TARGET = struct.Struct(">BH")  # 2, size of the name; then the name
_BATCH = struct.Struct(">BI")  # 3, size of the departure; then the departure


class OutgoingTimers(SnapshotTable):
    table_number = 10

    def __init__(self, store: MessageStore, state: TimerState) -> None:
        self._store = store
        self._state = state
        self.moved = 0  # timers that others have now
        self.targets: list[str] = []  # groups that took some, in the order of the first
        self.target = ""  # the group that is asked now
        self.origin = 0  # whose moves the batch is (TimerMover)
        self.first = 1  # number of the batch's first move; the next one's while there is none
        self._leaving: dict[int, MigratingTimer] = {}  # by identity, in the order of the moves
        self._end = 0  # of the batch's record
        self.waits_for = ""  # why no more timers leave just now; for people

    @property
    def leaving(self) -> list[MigratingTimer]:
        """The batch that is on its way, with each body where it is now."""
        return list(self._leaving.values())

    @property
    def is_under_way(self) -> bool:
        return bool(self._leaving)

    @property
    def is_confirmed(self) -> bool:
        """Nobody can take back that the batch leaves: from here on the other one may have it."""
        return self._end <= self._store.confirmed

    def is_migrating(self, identity: int) -> bool:
        return identity in self._leaving

    # -- change

    def start_migration(self, target: str, origin: int, timers: Sequence[MigratingTimer]) -> None:
        """These, which are pending, are the target's from now on."""
        assert not self._leaving, "one batch at a time"
        departure = TimerMigrationBatch(
            target, self.first, self._state.classified, origin, tuple(timers)
        )
        self._put(departure.encode())
        self.apply_departure(departure, self._store.end)

    def finish_migration(self) -> None:
        """The target has the whole batch, and said so when it was confirmed there."""
        settled = TimerMigrationDone(self.first + len(self._leaving))
        self._put(settled.encode())
        self.apply_settled(settled)

    def _put(self, body: bytes) -> None:
        self._store.put_record(RecordKind.TIMER, topic_id=0, queue_id=0, body=body)

    # -- apply, in the order of the log

    def apply_departure(self, departure: TimerMigrationBatch, end: int) -> None:
        """`end` is that of its record."""
        self.target, self.first, self._end = departure.target, departure.first, end
        self.origin = departure.origin
        self._leaving = {entry.identity: entry for entry in departure.timers}
        for timer in departure.timers:
            self._state.migrate(timer.due_ms, timer.identity, timer.topic_id)

    def apply_settled(self, settled: TimerMigrationDone) -> None:
        self.moved += len(self._leaving)
        if self.target not in self.targets:
            self.targets.append(self.target)
        self.first, self.target = settled.before, ""
        self._leaving = {}

    def apply_moved_body(self, identity: int, position: int, size: int) -> None:
        """Retention appended the timer's message again."""
        timer = self._leaving.get(identity)
        if timer is not None:
            self._leaving[identity] = timer._replace(position=position, size=size)

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        entries = [_HEAD.pack(1, self.moved, self.first)]
        for name in self.targets:
            entries.append(_TARGET.pack(2, len(name.encode())) + name.encode())
        if self._leaving:
            timers = tuple(self._leaving.values())
            batch = TimerMigrationBatch(self.target, self.first, 0, self.origin, timers).encode()
            entries.append(_BATCH.pack(3, len(batch)) + batch)
        return iter([(b"".join(entries), sum(map(entry_hash, entries)))])

    def restore(self, content: bytes) -> None:
        at = 0
        while at < len(content):
            if content[at] == 1:
                _, self.moved, self.first = _HEAD.unpack_from(content, at)
                at += _HEAD.size
                continue
            layout = _TARGET if content[at] == 2 else _BATCH
            kind, size = layout.unpack_from(content, at)
            at += layout.size
            value, at = content[at : at + size], at + size
            if kind == 2:
                self.targets.append(value.decode())
            else:
                batch = TimerMigrationBatch.decode(value)
                self.target, self.origin = batch.target, batch.origin
                self._leaving = {timer.identity: timer for timer in batch.timers}


def snapshot_rows(content: bytes) -> Iterator[Row]:
    at = number = 0
    while at < len(content):
        if content[at] == 1:
            _, moved, first = _HEAD.unpack_from(content, at)
            at += _HEAD.size
            yield Row("moves", {"moved": moved, "next": first})
            continue
        layout = _TARGET if content[at] == 2 else _BATCH
        kind, size = layout.unpack_from(content, at)
        at += layout.size
        value, at = content[at : at + size], at + size
        number += 1
        if kind == 2:
            yield Row(f"target {number}", {"name": value.decode()})
        else:
            yield Row("batch", {"is": TimerMigrationBatch.decode(value)})
