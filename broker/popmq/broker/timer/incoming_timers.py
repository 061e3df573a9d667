"""IncomingTimers: timers that came from broker groups that are drained, each stored once.

A function of the log.  A group numbers its moves, asks for them in that order, and asks for the
next ones only when the last are settled in its own log; so of each origin, which is one life of
its master, one number is enough to know what came already (docs/concepts/timer.md, "Moved to
another broker group").
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from popmq.broker.log.snapshot_table import Row, SnapshotTable, snapshot_pieces
from popmq.broker.timer.timer_admission import TimerAdmission
from popmq.common.errors import TooManyRequests
from popmq.common.record.timer_token import TimerToken

ORIGIN_LIMIT = 4_096
_ENTRY = struct.Struct(">QQ")  # origin, number of its newest move that is here


class IncomingTimer(NamedTuple):
    """A timer of another group; `move` is its number there."""

    move: int
    topic_id: int
    queue_id: int
    tag_hash: int
    due_ms: int
    head: bytes
    properties: bytes


class IncomingTimers(SnapshotTable):
    table_number = 11

    def __init__(self, admission: TimerAdmission) -> None:
        self._admission = admission
        self._newest: dict[int, int] = {}  # move, by origin
        self.taken = 0

    def has_taken(self, origin: int, move: int) -> bool:
        return move <= self._newest.get(origin, 0)

    def store_migrated(self, origin: int, timer: IncomingTimer) -> None:
        """Store it if it is not here; whoever asks waits for the store's end.

        TooManyRequests: it is not here, nor will be before somebody asks again.
        """
        if self.has_taken(origin, timer.move):
            return
        if origin not in self._newest and len(self._newest) >= ORIGIN_LIMIT:
            raise TooManyRequests(
                f"timers of {ORIGIN_LIMIT} masters of broker groups that are drained came here, "
                "which is the limit"
            )
        token = TimerToken(
            timer.topic_id, timer.queue_id, timer.tag_hash, taken=(origin, timer.move)
        )
        self._admission.take(timer.head, timer.properties, timer.due_ms, token)
        self.apply(origin, timer.move)
        self.taken += 1

    def apply(self, origin: int, move: int) -> None:
        """A timer of that origin, in the order of this log."""
        self._newest[origin] = max(move, self._newest.get(origin, 0))

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        return snapshot_pieces(list(self._newest.items()), lambda entry: _ENTRY.pack(*entry))

    def restore(self, content: bytes) -> None:
        self._newest.update(dict(_ENTRY.iter_unpack(content)))


def snapshot_rows(content: bytes) -> Iterator[Row]:
    for origin, move in _ENTRY.iter_unpack(content):
        yield Row(f"origin {origin}", {"newest_move": move})
