"""What became of ended check points, kept for a while so that a late ack gets a true answer."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

Key = tuple[int, int]  # epoch, sequence of a check point
# Acked, revived, moved members. Both of the first two: dead letter. None: ended by a reset.
MemberMasks = tuple[int, int, int]

OUTCOME_MS = 600_000
OUTCOME_LIMIT = 500_000


class EndedCheckPoints:
    def __init__(self) -> None:
        self._masks: dict[Key, MemberMasks] = {}
        self._order: deque[tuple[int, Key, MemberMasks]] = deque()
        self.added = 0  # ever, the dropped ones included
        self.dropped = 0  # for want of room, before their 10 minutes

    def add(self, log_ms: int, key: Key, masks: MemberMasks) -> None:
        """What is added again is kept from then on."""
        self._masks[key] = masks
        self._order.append((log_ms, key, masks))
        self.added += 1

    def get(self, key: Key) -> MemberMasks | None:
        return self._masks.get(key)

    def order(self) -> list[tuple[int, Key, MemberMasks]]:
        """Log time, key and masks of each time that one was added, oldest first."""
        return list(self._order)

    def added_until(self, end: int, piece: int) -> Iterator[list[tuple[int, Key, MemberMasks]]]:
        """Of `order`, those that are among the first `end` ever added, in pieces; not those that
        `forget` drops meanwhile."""
        at = 0
        while (at := max(at, self.added - len(self._order))) < end:
            first = self.added - len(self._order)
            yield list(islice(self._order, at - first, min(at + piece, end) - first))
            at += piece

    def forget(self, now_ms: int) -> None:
        """Drop those that are too old, or too many."""
        order = self._order
        while order and (order[0][0] + OUTCOME_MS < now_ms or len(order) > OUTCOME_LIMIT):
            if order[0][0] + OUTCOME_MS >= now_ms:
                self.dropped += 1
            _, key, masks = order.popleft()
            if self._masks[key] is masks:  # else it was added again
                del self._masks[key]
