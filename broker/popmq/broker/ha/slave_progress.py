"""What a master knows of one slave, and when it last kept up.

A slave keeps up while each end of the log that it was shown is on its disk within
`replication.laggard_ms`; one that fell silent does not, even when there is nothing to copy.
"""

from dataclasses import dataclass, field

from popmq.common.protocol.messaging_payloads import OnReply
from popmq.common.protocol.replication_payloads import TablesMark

CLOSED_GRACE_MS = 300  # for a slave whose connection ended to be back


@dataclass(slots=True)
class WaitingFetch:
    """A FETCH that has nothing to be told yet."""

    number: int
    position: int
    max_bytes: int
    since_ms: int
    until_ms: int
    on_reply: OnReply
    reading: bool = False  # from the disk, for this answer


@dataclass(slots=True)
class SlaveProgress:
    store_id: str
    node: str
    session: int
    last_seen_ms: int
    caught_up_ms: int  # at this time it had all that there was, as far as it is known
    position: int = 0  # of its last fetch
    acked: int = 0
    sent_confirmed: int = 0  # confirmed position in the last answer
    fetch: WaitingFetch | None = None
    sent_round: int = 0  # in the last answer (memory_confirmation.py)
    seen_round: int = 0  # it had that answer when it spoke
    tables: TablesMark = TablesMark.EQUAL  # as it said with its last ack
    mark_position: int = field(default=0)
    mark_ms: int = field(default=0)
    features: int = 0  # of its handshake

    def mark_seen(self, now_ms: int) -> None:
        self.last_seen_ms = now_ms

    def ack(self, position: int, *, end: int, now_ms: int) -> None:
        """It has everything below `position`, while the log ends at `end`."""
        self.acked = max(self.acked, position)
        if self.acked >= self.mark_position:
            self.caught_up_ms = max(self.caught_up_ms, self.mark_ms)
            self.mark_position, self.mark_ms = end, now_ms

    def check_caught_up(self, *, end: int, now_ms: int) -> None:
        """Nothing was acked for a while: fine, if there is nothing to ack and it still speaks."""
        if self.acked >= end:
            self.caught_up_ms = max(self.caught_up_ms, self.last_seen_ms)
            self.mark_position, self.mark_ms = end, now_ms

    def extend_deadlines(self, ms: int) -> None:
        """The master itself stood still: nobody's silence in that time counts."""
        self.last_seen_ms += ms
        self.caught_up_ms += ms
        self.mark_ms += ms

    def is_silent(self, now_ms: int, laggard_ms: int) -> bool:
        return now_ms - self.last_seen_ms >= laggard_ms

    def lags(self, now_ms: int, laggard_ms: int) -> bool:
        return now_ms - self.caught_up_ms >= laggard_ms

    def on_connection_closed(self, now_ms: int, laggard_ms: int) -> None:
        """Its connection ended: a hint that it is gone, and no proof."""
        last_ms = now_ms - laggard_ms + CLOSED_GRACE_MS
        self.last_seen_ms = min(self.last_seen_ms, last_ms)
        self.caught_up_ms = min(self.caught_up_ms, last_ms)


class ByteRate:
    """How many bytes may go out; 0 a second: as many as anybody wants."""

    def __init__(self, bytes_per_second: int, burst_bytes: int, now_ms: int) -> None:
        self._per_second = bytes_per_second
        self._burst = max(burst_bytes, bytes_per_second // 10)
        self._left = self._burst
        self._at_ms = now_ms

    def left(self, now_ms: int) -> int:
        if not self._per_second:
            return 1 << 62
        passed_ms = now_ms - self._at_ms
        gained = passed_ms * self._per_second // 1_000
        if gained:
            self._left = min(self._burst, self._left + gained)
            self._at_ms = now_ms
        return self._left

    def take(self, size: int) -> None:
        if self._per_second:
            self._left -= size  # may go below zero: the next ones wait for it
