"""Askers that wait for news: bounded, ended by `due`, with no timers of their own."""

import heapq
from collections.abc import Callable

Answer = Callable[[], None]
WAITER_LIMIT = 10_000


class LongPolls:
    """Each waits under a key (a group's name; the empty one for routes) until its time is over."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[str, Answer]] = {}
        self._due: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= WAITER_LIMIT

    @property
    def next_ms(self) -> int | None:
        """When `due` may have something to do; None: never."""
        return self._due[0][0] if self._due else None

    def park(self, number: int, key: str, answer: Answer, *, due_ms: int) -> None:
        assert not self.full, "the caller looks first"
        self._waiting[number] = (key, answer)
        heapq.heappush(self._due, (due_ms, number))

    def cancel(self, number: int) -> bool:
        """False: nobody waits under that number."""
        return self._waiting.pop(number, None) is not None

    def wake(self, key: str) -> None:
        """Answer those of the key who wait now; one that asks again at once waits for the next."""
        for number in [n for n, (its, _) in self._waiting.items() if its == key]:
            self._answer(number)

    def wake_all(self) -> None:
        for number in list(self._waiting):
            self._answer(number)

    def due(self, now_ms: int) -> int:
        """Answer those whose time is over; returns how many."""
        count = 0
        while self._due and self._due[0][0] <= now_ms:
            count += self._answer(heapq.heappop(self._due)[1])
        if len(self._due) > 64 + 2 * len(self._waiting):
            self._due = [poll for poll in self._due if poll[1] in self._waiting]
            heapq.heapify(self._due)
        return count

    def _answer(self, number: int) -> int:
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return 0
        waiting[1]()
        return 1
