"""What became of ended check points, kept for a while so that a late ack gets a true answer."""

from collections import deque

Key = tuple[int, int]  # epoch, sequence of a check point
# Acked, revived, moved members. Both of the first two: dead letter. None: ended by a reset.
MemberMasks = tuple[int, int, int]

OUTCOME_MS = 600_000
OUTCOME_LIMIT = 500_000


class EndedCheckPoints:
    def __init__(self) -> None:
        self._masks: dict[Key, MemberMasks] = {}
        self._order: deque[tuple[int, Key]] = deque()
        self.dropped = 0  # for want of room, before their 10 minutes

    def add(self, log_ms: int, key: Key, masks: MemberMasks) -> None:
        self._masks[key] = masks
        self._order.append((log_ms, key))

    def get(self, key: Key) -> MemberMasks | None:
        return self._masks.get(key)

    def order(self) -> list[tuple[int, Key]]:
        """Log time and key of each, oldest first."""
        return list(self._order)

    def forget(self, now_ms: int) -> None:
        """Drop those that are too old, or too many."""
        order = self._order
        while order and (order[0][0] + OUTCOME_MS < now_ms or len(order) > OUTCOME_LIMIT):
            if order[0][0] + OUTCOME_MS >= now_ms:
                self.dropped += 1
            self._masks.pop(order.popleft()[1], None)
