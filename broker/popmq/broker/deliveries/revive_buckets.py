"""When check points are due: buckets of `pop.revive_step_ms`, so that each costs one insertion.

A check point is found at the first multiple of the step from its time on, so never early, and
leaves its bucket at once when nothing of it is left to revive.
"""

import heapq

from popmq.broker.deliveries.pop_check_point import NEVER_DUE, PopCheckPoint

STEP_MS = 16


class _ReviveBucket:
    """Check points in the order in which they came; a list takes a fifth of what a dict would."""

    __slots__ = ("line", "live", "taken")

    def __init__(self, first: PopCheckPoint) -> None:
        self.line = [first]
        self.taken = 0  # from the line's front
        self.live = 1  # of the rest; the others were removed, or moved to another bucket


class ReviveBuckets:
    def __init__(self, step_ms: int = STEP_MS) -> None:
        self._step_ms = step_ms
        self._buckets: dict[int, _ReviveBucket] = {}  # by the time at which they are due
        self._order: list[int] = []  # a heap of those times; some buckets may be gone by now

    def __len__(self) -> int:
        return sum(bucket.live for bucket in self._buckets.values())

    def add(self, ck: PopCheckPoint, due_ms: int | None = None) -> None:
        """Look at this check point (again) at its revive time, or at `due_ms`."""
        ck.due_ms = ck.revive_at_ms if due_ms is None else due_ms
        time_ms = self._time_of(ck)
        bucket = self._buckets.get(time_ms)
        if bucket is None:
            self._buckets[time_ms] = _ReviveBucket(ck)
            heapq.heappush(self._order, time_ms)
        else:
            _share_times(bucket.line[-1], ck)
            bucket.line.append(ck)
            bucket.live += 1

    def remove(self, ck: PopCheckPoint) -> None:
        time_ms = self._time_of(ck)
        bucket = self._buckets.get(time_ms)
        if bucket is not None and ck.due_ms != NEVER_DUE:
            ck.due_ms = NEVER_DUE
            bucket.live -= 1
            if not bucket.live:
                del self._buckets[time_ms]
            elif bucket.live * 2 < len(bucket.line) - bucket.taken:
                rest = bucket.line[bucket.taken :]
                bucket.line = [
                    check_point for check_point in rest if self._time_of(check_point) == time_ms
                ]
                bucket.taken = 0

    def take(self, now_ms: int) -> PopCheckPoint | None:
        """A check point whose time has come, or None; the caller ends it or adds it again."""
        while self._order and self._order[0] <= now_ms:
            time_ms = self._order[0]
            bucket = self._buckets.get(time_ms)
            if bucket is None or bucket.taken == len(bucket.line):
                self._buckets.pop(time_ms, None)
                heapq.heappop(self._order)
                continue
            ck = bucket.line[bucket.taken]
            bucket.taken += 1
            if self._time_of(ck) == time_ms:
                ck.due_ms = NEVER_DUE
                bucket.live -= 1
                if not bucket.live:
                    del self._buckets[time_ms]
                return ck
        return None

    def next_ms(self, now_ms: int, at_most_ms: int) -> int:
        """How long until a check point may be due; at most `at_most_ms`."""
        return min(at_most_ms, self._order[0] - now_ms) if self._order else at_most_ms

    def overdue(self, now_ms: int) -> tuple[int, int]:
        """How many check points are due, and for how many milliseconds the first of them is."""
        count, since_ms = 0, now_ms
        seen: set[int] = set()
        look = [0]  # places in the heap: below one that is not due there is none that is
        while look:
            at = look.pop()
            if at >= len(self._order) or self._order[at] > now_ms:
                continue
            bucket = self._order[at]
            waiting = self._buckets.get(bucket)
            if waiting is not None and bucket not in seen:
                seen.add(bucket)
                count += waiting.live
                since_ms = min(since_ms, bucket)
            look += (2 * at + 1, 2 * at + 2)
        return count, now_ms - since_ms

    def check_invariants(self) -> None:
        """Each bucket is in the heap and counts the check points that are due at its time."""
        for time_ms, bucket in self._buckets.items():
            assert time_ms in self._order, f"the bucket of {time_ms} is not in the heap"
            rest = {id(ck) for ck in bucket.line[bucket.taken :] if self._time_of(ck) == time_ms}
            assert bucket.live == len(rest) > 0, f"{bucket.live} at {time_ms}, {len(rest)} there"

    def _time_of(self, ck: PopCheckPoint) -> int:
        return -(-ck.due_ms // self._step_ms) * self._step_ms


def _share_times(before: PopCheckPoint, ck: PopCheckPoint) -> None:
    """Check points of one millisecond have one object each for its two times."""
    if ck.popped_at_ms == before.popped_at_ms:
        ck.popped_at_ms = before.popped_at_ms
    if ck.due_ms == ck.revive_at_ms == before.revive_at_ms:
        ck.due_ms = ck.revive_at_ms = before.revive_at_ms
