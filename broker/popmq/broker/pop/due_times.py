"""When check points are due: buckets of 16 ms, so that each costs one insertion.

A check point is found at most 16 ms late and never early, and leaves its bucket at once when
nothing of it is left to revive.
"""

import heapq

from popmq.broker.pop.pop_check_point import PopCheckPoint

_BUCKET_MS = 16


class DueTimes:
    def __init__(self) -> None:
        self._buckets: dict[int, dict[tuple[int, int], PopCheckPoint]] = {}
        self._order: list[int] = []  # a heap of bucket numbers; some may be empty by now

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def add(self, ck: PopCheckPoint, due_ms: int | None = None) -> None:
        """Look at this check point (again) at its revive time, or at `due_ms`."""
        ck.due_ms = ck.revive_at_ms if due_ms is None else due_ms
        bucket = ck.due_ms // _BUCKET_MS
        waiting = self._buckets.get(bucket)
        if waiting is None:
            self._buckets[bucket] = {ck.key: ck}
            heapq.heappush(self._order, bucket)
        else:
            waiting[ck.key] = ck

    def remove(self, ck: PopCheckPoint) -> None:
        bucket = ck.due_ms // _BUCKET_MS
        waiting = self._buckets.get(bucket)
        if waiting is not None:
            waiting.pop(ck.key, None)
            if not waiting:
                del self._buckets[bucket]

    def take(self, now_ms: int) -> PopCheckPoint | None:
        """A check point whose time has come, or None; the caller ends it or adds it again."""
        while self._order and (self._order[0] + 1) * _BUCKET_MS <= now_ms:
            waiting = self._buckets.get(self._order[0])
            if waiting:
                return waiting.pop(next(iter(waiting)))
            self._buckets.pop(heapq.heappop(self._order), None)
        return None
