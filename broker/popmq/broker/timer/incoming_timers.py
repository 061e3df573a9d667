"""IncomingTimers: timers that drained broker groups moved here, each stored once.

The table is a function of the log.  A source group numbers its moves and sends them in that order;
it sends the next batch only when its own log has the end of the last one.  An origin is one
incarnation of the source's master.  So the newest number of each origin is enough to know which
moves are stored (docs/concepts/timer.md, "Moved to another broker group").
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from popmq.broker.log.snapshot_table import Row, SnapshotTable, snapshot_pieces
from popmq.broker.timer.timer_admission import TimerAdmission
from popmq.common.errors import TooManyRequests
from popmq.common.record.timer_token import TimerToken

ORIGIN_LIMIT = 4_096
_ENTRY = struct.Struct(">QQ")  # origin, number of its newest stored move


class IncomingTimer(NamedTuple):
    """A timer of another broker group, which numbered its move `move`."""

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
        self._newest: dict[int, int] = {}  # number of the newest stored move, by origin
        self.taken = 0  # timers stored since the start

    def has_taken(self, origin: int, move: int) -> bool:
        return move <= self._newest.get(origin, 0)

    def store_migrated(self, origin: int, timer: IncomingTimer) -> None:
        """Store the timer unless it is here already. The caller waits until the log is confirmed.

        TooManyRequests: the timer is not stored; the source has to send it again.
        """
        if self.has_taken(origin, timer.move):
            return
        if origin not in self._newest and len(self._newest) >= ORIGIN_LIMIT:
            raise TooManyRequests(
                f"this broker group has timers of {ORIGIN_LIMIT} masters of drained broker groups, "
                "which is the limit"
            )
        token = TimerToken(
            timer.topic_id, timer.queue_id, timer.tag_hash, taken=(origin, timer.move)
        )
        self._admission.take(timer.head, timer.properties, timer.due_ms, token)
        self.apply(origin, timer.move)
        self.taken += 1

    def apply(self, origin: int, move: int) -> None:
        """Note that the timer is in this log; called in the order of the log."""
        self._newest[origin] = max(move, self._newest.get(origin, 0))

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        return snapshot_pieces(list(self._newest.items()), lambda entry: _ENTRY.pack(*entry))

    def restore(self, content: bytes) -> None:
        self._newest.update(dict(_ENTRY.iter_unpack(content)))


def snapshot_rows(content: bytes) -> Iterator[Row]:
    for origin, move in _ENTRY.iter_unpack(content):
        yield Row(f"origin {origin}", {"newest_move": move})
