"""I12, state is a function of the log: a second broker on an older snapshot, or on none, knows
the same.

It starts on a copy of the durable disk, right after the first one recovered.  What a filter or
an expiry passed over is no record, and what fades with time or in rounds is compared as far as
both must still have it (docs/concepts/store.md, check_point_snapshot.py).
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum, auto

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.ended_check_points import (
    OUTCOME_MS,
    EndedCheckPoints,
    Key,
    MemberMasks,
)
from popmq.broker.deliveries.pop_check_point import PopCheckPoint, member_bits
from popmq.broker.deliveries.queue_progress import FifoProgress, QueueProgress
from popmq.broker.index.message_keys import names_in
from popmq.broker.persistence.snapshot import snapshot_names
from popmq.broker.store.message_store import StoreThreads
from popmq.broker.timer.timer_state import TimerState
from popmq.broker.transaction.transaction_table import KEEP_ENDED_MS
from popmq.common import topics
from popmq.common.errors import StoreDamaged
from popmq.common.settings.settings import Settings
from popmq.common.wire.meta_pb2 import MetaRecord
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import QueuedFlusher
from popmq.testing.oracle.delivery_oracle import Oracle

# What the log does not say of a live check point; the root is compared by its key.
_SOFT = ("first_check_point", "due_ms", "snapshot", "marks")
_LIVE_FIELDS = [field.name for field in fields(PopCheckPoint) if field.name not in _SOFT]
_LIVE_FIELDS.append("buffered")  # of the marks the only one that is not soft
_INDEX_SHARE = 8  # one message of so many is looked for in both key indexes


class Replay(Enum):
    """What a second start had to read."""

    NOT_POSSIBLE = auto()
    LONGER = auto()
    FULL = auto()


class ReplayCheck:
    def __init__(
        self,
        settings: Settings,
        clock: ManualClock,
        oracle: Oracle,
        raised: set[tuple[int, int]],
    ) -> None:
        """`raised` are the queues of which something expired, as far as the run goes."""
        self._raised = raised
        self._settings = settings
        self._clock = clock
        self._oracle = oracle
        self._lived_ms = 0

    def after_recovery(
        self, first: Broker, disk: SimDisk, seed: int, *, lived_ms: int = 0
    ) -> Replay:
        """Right after `first.start()`: nothing was asked of it yet. `seed` is that of its dice.

        Brokers before it lived until `lived_ms`, by log time: what had faded then is missing in
        their snapshots, though no record is as young as that.
        """
        self._lived_ms = lived_ms
        folder = f"{self._settings.broker.data}/snapshot"
        position = first.store.snapshots.position
        if not position or self._oracle.log_lost:
            return Replay.NOT_POSSIBLE
        copy = disk.copy_of_durable()
        older = 0
        for name in snapshot_names(copy, folder):
            if int(name) >= position:
                copy.remove(f"{folder}/{name}")
            else:
                older += 1
        if first.store.index.start > 0 and not older:
            return Replay.NOT_POSSIBLE  # only this snapshot knows what was before
        second = Broker(
            self._settings,
            disk=copy,
            clock=self._clock,
            threads=StoreThreads.of_one(QueuedFlusher(deque()), lambda work: None),
            rng=random.Random(seed),
        )
        try:
            # What the first has classified it has said in a record, which the second does not have.
            second.start(first.epoch_start)
        except StoreDamaged as refusal:
            self._complain(f"the start without snapshot {position} is refused: {refusal}")
            return Replay.NOT_POSSIBLE
        self.compare(first, second)
        return Replay.LONGER if second.store.snapshots.position else Replay.FULL

    def compare(self, first: Broker, second: Broker) -> None:
        """Both have applied the same records and nothing else is in their tables."""
        # What retention has given up is not found any more, before its segment is deleted.
        floor = max(first.store.index.start, second.store.index.start)
        self._compare_entries(dict(self._entries(first, floor)), dict(self._entries(second, floor)))
        self._compare_progress(first, second)
        self._compare_outcomes(first, second)
        self._compare_receipts(first, second)
        self._compare_endings(first, second)

    def _complain(self, what: str) -> None:
        self._oracle.report_violation("I12 function-of-the-log", what)

    # -- what has to be the same, entry by entry

    def _entries(self, broker: Broker, floor: int) -> Iterator[tuple[str, object]]:
        for content, _ in broker.registry.begin_snapshot():
            yield from _meta_records(content)
        for ck in broker.table:
            root = ck.first_check_point.key if ck.first_check_point is not None else None
            yield f"check point {ck.key}", (*(getattr(ck, name) for name in _LIVE_FIELDS), root)
            for member in member_bits(ck.members & ~(ck.acked | ck.revived)):
                if ck.first_check_point is None:
                    place = f"{ck.topic_id}/{ck.queue_id}/{ck.offset_of(member)}"
                    yield f"moved body {place}", broker.table.moved.of_member(ck, member)
            yield f"attempt id of {ck.key}", _receive_of(broker, ck)
        yield "check points: in flight", broker.table.in_flight
        for group in broker.registry.groups():
            for key in broker.table.parked.of_group(group.id):
                name = (group.name, key.topic_id, key.queue_id, key.name)
                states = (key.state, key.action_end_offset, key.since_ms)
                yield f"parked {name}", (states, key.messages)
        redriven = b"".join(content for content, _ in broker.deliveries.redriven.begin_snapshot())
        yield (
            "redriven letters",
            sorted(redriven[at : at + 20] for at in range(0, len(redriven), 20)),
        )
        for topic_id, queue_id in _queues(broker):
            following = broker.store.dispatch.next_offset(topic_id, queue_id)
            yield f"dispatch: next offset of {topic_id}/{queue_id}", following
        yield from _timers(broker)
        pending = broker.transactions.table.pending.values()
        yield (
            "transactions: pending",
            sorted((h.offset, h.place, h.unit, h.first_ms, h.due_ms, h.checks) for h in pending),
        )
        yield from self._found(broker, floor)

    def _found(self, broker: Broker, floor: int) -> Iterator[tuple[str, object]]:
        """Where the key index says some of the messages are, from position `floor` on."""
        turn = broker.store.confirmed % _INDEX_SHARE
        for sent in self._oracle.messages[turn::_INDEX_SHARE]:
            topic = broker.registry.find_topic(sent.topic.name)
            if topic is None:
                continue
            for kind, name in names_in(sent.properties):
                everything = broker.store.index.find(topic.id, kind, name)
                results = {key for key in everything if key[0] >= floor}
                yield f"key index: {topic.name} {name!r}", results

    def _compare_entries(self, first: dict[str, object], second: dict[str, object]) -> None:
        for name in sorted(first.keys() | second.keys()):
            if first.get(name) != second.get(name):
                self._complain(
                    f"{name}: {first.get(name)!r} with the newest snapshot, "
                    f"{second.get(name)!r} without it"
                )

    # -- what is the same but for its soft part

    def _compare_progress(self, first: Broker, second: Broker) -> None:
        queue_progresses, other = (
            dict(first.table.progress_items()),
            dict(second.table.progress_items()),
        )
        filtering = {reader.group.name for reader in self._oracle.readers if reader.tags}
        for place in sorted(queue_progresses.keys() | other.keys()):
            group = first.registry.group_by_id(place[0])
            topic = first.registry.topic_by_id(place[1])
            brief = topic is not None and topic.retention_ms > 0  # its minimum may go back
            expired = place[1:] in self._raised or first.store.queue(*place[1:]).min_offset > 0
            soft = brief or expired or (group is not None and group.name in filtering)
            mine, theirs = queue_progresses.get(place), other.get(place)
            if mine is None or theirs is None:
                # A first look that found nothing is no record, wherever it began.
                known = mine or theirs
                if known is not None and any(_hard(known)):
                    self._complain(f"progress {place}: {_show(mine)} and {_show(theirs)}")
            elif _hard(mine) != _hard(theirs) or (not soft and _read(mine) != _read(theirs)):
                self._complain(f"progress {place}: {_show(mine)} and {_show(theirs)}")

    def _now_ms(self, first: Broker) -> int:
        return max(first.store.log_ms(), self._lived_ms)

    def _compare_outcomes(self, first: Broker, second: Broker) -> None:
        now_ms = self._now_ms(first)
        mine, theirs = first.table, second.table
        self._compare_ended(mine.outcomes, theirs.outcomes, now_ms)
        self._compare_ended(mine.acked_in_memory, theirs.acked_in_memory, now_ms)

    def _compare_ended(
        self, first: EndedCheckPoints, second: EndedCheckPoints, now_ms: int
    ) -> None:
        outcomes, other = _outcomes(first), _outcomes(second)
        for key in sorted(outcomes.keys() | other.keys()):
            mine, theirs = outcomes.get(key), other.get(key)
            log_ms = (mine or theirs or (0,))[0]
            faded = (mine is None or theirs is None) and log_ms + OUTCOME_MS < now_ms
            if mine != theirs and not faded:
                self._complain(f"outcome {key}: {mine} and {theirs}")

    def _compare_receipts(self, first: Broker, second: Broker) -> None:
        receipts, other = _receipts(first), _receipts(second)
        old_ms = self._now_ms(first) - first.settings.dedup.window_ms
        for key in sorted(receipts.keys() | other.keys()):
            mine, theirs = receipts.get(key), other.get(key)
            faded = (mine or theirs or (0,))[0] <= old_ms
            same = mine is not None and theirs is not None and mine[1] == theirs[1]
            if not same and not faded:
                self._complain(f"first receipt of {key!r}: {mine} and {theirs}")

    def _compare_endings(self, first: Broker, second: Broker) -> None:
        endings, other = (set(broker.transactions.table.endings()) for broker in (first, second))
        old_ms = self._now_ms(first) - KEEP_ENDED_MS
        for log_ms, offset, ending in sorted(endings ^ other):
            if log_ms > old_ms:
                self._complain(f"end of transaction {offset}: {ending.name} at {log_ms} in one")


def _receipts(broker: Broker) -> dict[bytes, tuple[int, int]]:
    """Of ids that one message has; which of several was first, a snapshot may not know."""
    return {
        key: (from_ms, receipt)
        for key, receipt, from_ms in broker.send_deduplication.items()
        if key[4:5] == b"m"
    }


def _timers(broker: Broker) -> Iterator[tuple[str, object]]:
    """As soon as all that is confirmed is enqueued; until then a snapshot may be further."""
    state, queue = TimerState(), broker.timers.service.queue
    for content, _ in broker.timers.state.begin_snapshot():
        state.restore(content)
    state.skip(queue.queue.min_offset)
    for entry in queue.read(state.classified, queue.count):
        if entry.timer is not None:
            state.classify(entry.timer, moved=entry.moved)
    yield "timers: cursor, classified", (state.cursor, state.classified)
    yield "timers: pending", sorted(state.pending.items())
    yield "timers: late", sorted(state.late.values())
    yield "timers: recalled", sorted(state.cancelled.items())


def _receive_of(broker: Broker, ck: PopCheckPoint) -> bool:
    """Whether a receive with the check point's attempt id is told of it."""
    return ck in broker.table.receives.of(ck.receive)


def _meta_records(content: bytes) -> Iterator[tuple[str, object]]:
    at = 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        body = content[at + 4 : at + 4 + size]
        at += 4 + size
        record = MetaRecord.FromString(body)
        which = record.WhichOneof("change") or "nothing"
        changed = getattr(record, which, None)
        yield f"registry: {which} {getattr(changed, 'id', '')}", body


def _queues(broker: Broker) -> Iterator[tuple[int, int]]:
    yield topics.META_TOPIC_ID, 0
    yield topics.OFFSETS_TOPIC_ID, 0
    for queue_id in range(topics.REVIVE_QUEUES):
        yield topics.REVIVE_TOPIC_ID, queue_id
    for topic in broker.registry.topics():
        for queue_id in range(topic.queues):
            yield topic.id, queue_id


def _hard(progress: QueueProgress) -> tuple[object, ...]:
    """What records say: where it was read up to, where its line begins, and the line."""
    line = [(ck.next_offset, ck.finished) for ck in progress.open]
    begins = progress.open[0].start_offset if progress.open else progress.is_logged
    committed = progress.committed if progress.open else 0
    if isinstance(progress, FifoProgress):
        held, attempts = sorted(progress.in_flight_offsets), sorted(progress.attempts.items())
        return progress.is_logged, progress.in_flight, held, attempts
    return progress.is_logged, begins, committed, progress.in_flight, line


def _read(progress: QueueProgress) -> tuple[int, int]:
    # How far a FIFO group looked is no record: it looks again.
    fifo = isinstance(progress, FifoProgress)
    return progress.committed, 0 if fifo else progress.cursor


def _show(progress: QueueProgress | None) -> str:
    return f"{_read(progress)} {_hard(progress)}" if progress else "none"


def _outcomes(outcomes: EndedCheckPoints) -> dict[Key, tuple[int, MemberMasks | None]]:
    return {key: (log_ms, outcomes.get(key)) for log_ms, key, _ in outcomes.order()}
