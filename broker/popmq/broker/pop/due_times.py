"""When check points are due: buckets of `pop.revive_step_ms`, so that each costs one insertion.

A check point is found at the first multiple of the step from its time on, so never early, and
leaves its bucket at once when nothing of it is left to revive.
"""

import heapq
from collections import deque

from popmq.broker.pop.pop_check_point import PopCheckPoint

STEP_MS = 16


class DueTimes:
    def __init__(self, step_ms: int = STEP_MS) -> None:
        self._step_ms = step_ms
        # By the time at which the bucket is due.
        self._buckets: dict[int, dict[tuple[int, int], PopCheckPoint]] = {}
        self._order: list[int] = []  # a heap of those times; some buckets may be empty by now
        # The bucket that is being taken, in a line: from a dict's front each takes longer.
        self._line: deque[PopCheckPoint] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, ck: PopCheckPoint, due_ms: int | None = None) -> None:
        """Look at this check point (again) at its revive time, or at `due_ms`."""
        ck.due_ms = ck.revive_at_ms if due_ms is None else due_ms
        bucket = self._bucket_of(ck)
        waiting = self._buckets.get(bucket)
        if waiting is None:
            self._buckets[bucket] = {ck.key: ck}
            heapq.heappush(self._order, bucket)
        else:
            waiting[ck.key] = ck

    def remove(self, ck: PopCheckPoint) -> None:
        bucket = self._bucket_of(ck)
        waiting = self._buckets.get(bucket)
        if waiting is not None:
            waiting.pop(ck.key, None)
            if not waiting:
                del self._buckets[bucket]

    def take(self, now_ms: int) -> PopCheckPoint | None:
        """A check point whose time has come, or None; the caller ends it or adds it again."""
        while self._order and self._order[0] <= now_ms:
            waiting = self._buckets.get(self._order[0])
            if not waiting:
                self._buckets.pop(heapq.heappop(self._order), None)
                continue
            if not self._line:
                self._line.extend(waiting.values())
            ck = self._line.popleft()
            if waiting.get(ck.key) is ck:
                return waiting.pop(ck.key)
        return None

    def next_ms(self, now_ms: int, at_most_ms: int) -> int:
        """How long until a check point may be due; at most `at_most_ms`."""
        return min(at_most_ms, self._order[0] - now_ms) if self._order else at_most_ms

    def _bucket_of(self, ck: PopCheckPoint) -> int:
        return -(-ck.due_ms // self._step_ms) * self._step_ms
