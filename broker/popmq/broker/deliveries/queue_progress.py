"""How far a group is in a queue: QueueProgress, and FifoProgress for groups that keep order.

A function of the log, apart from what filters passed over, which is no record and is done
again when it was lost.
"""

from collections import deque
from collections.abc import Sequence

from popmq.broker.deliveries.offset_ranges import OffsetRanges
from popmq.broker.deliveries.order_info import OrderInfo
from popmq.broker.deliveries.pop_check_point import PopCheckPoint

GroupQueue = tuple[int, int, int]  # group, topic, queue


class QueueProgress:
    """One group in one queue: where it reads on, and what it has open."""

    __slots__ = (
        *("committed", "cursor", "expired", "filtered"),
        *("in_flight", "is_logged", "open", "place", "snapshot", "was_reset"),
    )

    def __init__(self, start: int, place: GroupQueue) -> None:
        self.place = place  # group, topic, queue
        self.committed = start
        self.cursor = start
        self.is_logged = 0  # the part of `cursor` that records say; a first look is none
        self.in_flight = 0
        self.expired = 0  # soft: went by retention unread, since the broker started
        self.filtered = 0  # soft: passed over since then, unwanted or damaged
        self.snapshot = 0
        self.was_reset = False  # soft: and no pull has begun there yet
        self.open: deque[PopCheckPoint] = deque()

    def reset_to(self, offset: int) -> None:
        """Reset by an operator: the group reads on at `offset`; open deliveries are dropped."""
        self.committed = self.cursor = self.is_logged = offset
        self.in_flight = 0
        self.open.clear()

    def waiting(self, count: int) -> int:
        """Of `count` messages in the queue, those that were not handed out."""
        return max(0, count - self.cursor)

    def skip_to(self, offset: int) -> None:
        """Pass over messages that no one is to get (filtered); not a record, redone if lost."""
        self.cursor = max(self.cursor, offset)
        if not self.open:
            self.committed = self.cursor

    def check_invariants(self) -> None:
        """What is open is in order, below `cursor`, and no end of it is below `committed`."""
        borders = []
        for ck in self.open:  # those without members only stand for their end after a start
            borders += [ck.start_offset, ck.next_offset] if ck.members else [ck.next_offset]
        ends = [self.committed, *(ck.next_offset for ck in self.open), self.cursor]
        assert borders == sorted(borders), f"{self.place} is not in order: {borders[:20]}"
        assert ends == sorted(ends), f"{self.place} ends out of order: {ends[:20]}"


class FifoProgress(QueueProgress):
    """A group of type FIFO: messages end in any order and come back in place.

    Below `committed` everything is over; above it, what is in `over`.  `held` are the offsets
    in flight.  `attempts` counts the deliveries of a message that ended without an end to the
    message; 0 stands there for one that nobody saw.  `cursor` is the highest offset that was
    looked at, and `logged` what check points said of `committed`.  `open` stays empty: order does
    not hang on check points.
    """

    __slots__ = (
        "attempts",
        "expired_until",
        "finished",
        "in_flight_offsets",
        "order",
        "park_check_ms",
    )

    def __init__(self, start: int, place: GroupQueue) -> None:
        super().__init__(start, place)
        self.finished = OffsetRanges()
        self.in_flight_offsets: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.order: OrderInfo | None = None  # made at the first receive after a start
        self.expired_until = start  # retention was heeded up to here
        self.park_check_ms = 0  # when to look for stuck keys again

    # -- records

    def opened(self, offsets: Sequence[int], committed: int, log_ms: int) -> None:
        """A check point that holds `offsets` was written; all below `committed` was over then."""
        if committed > self.is_logged:
            self.is_logged = committed
            self.finished.add(min(self.committed, committed), committed)
            self._commit()
            if self.attempts:  # filters pass over returned messages too
                for offset in [offset for offset in self.attempts if offset < committed]:
                    del self.attempts[offset]
        self.in_flight_offsets.update(offsets)
        self.in_flight = len(self.in_flight_offsets)
        self.cursor = max(self.cursor, offsets[-1] + 1)
        if self.order is not None:
            for offset in offsets:
                self.order.mark_in_flight(offset, log_ms)

    def finish_delivery(
        self, offsets: Sequence[int], *, over: bool, log_ms: int, counted: bool = True
    ) -> None:
        """These deliveries ended: the messages are over, or wait for their next attempt; for the
        same one if this is not `counted`."""
        for offset in offsets:
            self.in_flight_offsets.discard(offset)
            if over:
                self.attempts.pop(offset, None)
                self.finished.add(offset, offset + 1)
                if self.order is not None:
                    self.order.finish(offset, log_ms)
            else:
                self.attempts[offset] = self.attempts.get(offset, 0) + counted
                if self.order is not None:
                    self.order.returned(offset)
        self.in_flight = len(self.in_flight_offsets)
        self._commit()

    def reset_to(self, offset: int) -> None:
        super().reset_to(offset)
        self.expired_until = offset
        self.in_flight_offsets.clear()
        self.attempts.clear()
        self.finished = OffsetRanges()
        self.order = None

    # -- no records

    def skip_filtered(self, start: int, end: int) -> None:
        """Nobody is to get [start, end): filtered, expired or damaged; redone if lost."""
        self.finished.add(start, end)
        self.cursor = max(self.cursor, end)
        self._commit()

    def is_waiting(self, offset: int) -> bool:
        """Whether the message is neither over nor in flight, as far as it was looked at."""
        return not self._is_finished(offset) and offset not in self.in_flight_offsets

    def _is_finished(self, offset: int) -> bool:
        return offset < self.committed or self.finished.end_of(offset) > offset

    def retained_below(self, low: int) -> tuple[int, list[int]]:
        """Where what retention took begins, if that ends at `low`, the queue's minimum offset; and
        what stays of it: all that was delivered is kept alive."""
        at = max(self.committed, self.expired_until)
        delivered = sorted(self.in_flight_offsets | self.attempts.keys()) if at < low else []
        return at, [
            offset
            for offset in delivered
            if at <= offset < low and self.finished.end_of(offset) == offset
        ]

    def expired_below(self, low: int) -> tuple[int, int]:
        """Of what waits, how much is gone by retention and not passed over yet; and how much of
        that counts as blocked."""
        at, kept = self.retained_below(low)
        if low <= at:
            return 0, 0
        blocked = self.order.blocked(at, low) if self.order is not None else []
        gone = low - at - self.finished.count(at, low) - len(kept)
        return gone, len(set(blocked).difference(kept))

    @property
    def blocked(self) -> int:
        """Of those that wait, those behind one of their key that is in flight."""
        return len(self.order.blocked()) if self.order is not None else 0

    def waiting(self, count: int) -> int:
        """Of `count` messages in the queue, those neither over nor in flight."""
        above = count - self.committed
        return max(0, above - self.finished.count(self.committed, count) - self.in_flight)

    def _commit(self) -> None:
        """Head of line: over whatever has ended."""
        end = self.finished.end_of(self.committed)
        if end > self.committed:
            self.committed = end
            self.finished.cut_below(end)
            self.cursor = max(self.cursor, end)

    def check_invariants(self) -> None:
        """Each offset above `committed` is finished, in flight or waiting: one of them."""
        super().check_invariants()
        self.finished.check_invariants()
        assert self.in_flight == len(self.in_flight_offsets), f"{self.place}: wrong count"
        for offset in self.in_flight_offsets:
            assert not self._is_finished(offset), (
                f"{self.place}: {offset} is in flight and finished"
            )
        # That a filter passed over a message, or damage, is no record: its attempts stay until a
        # check point says that all below it was over.
        over = [offset for offset in self.attempts if offset < self.is_logged]
        assert not over, f"{self.place}: {over[:20]} are finished and wait for another attempt"
        if self.order is not None:
            self.order.check_invariants()
