"""PriorityOrder: in which order a receive visits the queues of a topic of type PRIORITY.

A message's priority is the number of its queue (RocketMQ: RIP-80), so the highest queue comes
first.  A bound against starvation: every so many receives of a group one begins with a lower
queue in which something waits, each of these in turn.
"""

from collections import OrderedDict
from collections.abc import Callable

PLACES_LIMIT = 10_000  # groups in topics; one that is forgotten only begins a round anew


class PriorityOrder:
    """Soft state: turns are counted from anew after a start."""

    def __init__(self, every: int) -> None:
        self._every = every
        # Receives since the last turn of a lower queue, and which one that was.
        self._turns: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()

    def order(
        self, place: tuple[int, int], queues: int, waiting: Callable[[int], bool]
    ) -> list[int]:
        """Of one receive of `place`, a group in a topic.

        While messages wait in `n` queues, each of them comes first at least once in
        `every * (n - 1)` receives.
        """
        falling = list(range(queues - 1, -1, -1))
        count, last = self._turns.pop(place, (0, 0))
        count += 1
        if count >= self._every:
            count = 0
            found_queues = [queue for queue in falling if waiting(queue)][1:]
            if found_queues:
                last = next((queue for queue in found_queues if queue < last), found_queues[0])
                falling.remove(last)
                falling.insert(0, last)
        self._turns[place] = (count, last)
        if len(self._turns) > PLACES_LIMIT:
            self._turns.popitem(last=False)
        return falling
