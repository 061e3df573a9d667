"""OffsetRanges: a set of queue offsets, kept as the ranges that it consists of.

Behind one message that is stuck a million others may have ended; they are one range.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise


class OffsetRanges:
    """Ranges [start, end) that neither touch nor overlap, in ascending order."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> None:
        """Every offset of [start, end) is in the set from now on."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)  # the first range that touches or follows
        behind = bisect_right(self._starts, end)  # the first that does not touch any more
        if first < behind:
            start = min(start, self._starts[first])
            end = max(end, self._ends[behind - 1])
        self._starts[first:behind] = [start]
        self._ends[first:behind] = [end]

    def end_of(self, offset: int) -> int:
        """End of the range that holds `offset`, or `offset` itself when none does."""
        at = bisect_right(self._starts, offset) - 1
        return max(offset, self._ends[at]) if at >= 0 else offset

    def next_start(self, offset: int) -> int | None:
        """Where the first range at or after `offset` begins."""
        at = bisect_left(self._starts, offset)
        return self._starts[at] if at < len(self._starts) else None

    def count(self, start: int, end: int) -> int:
        """How many offsets of [start, end) are in the set."""
        first = bisect_right(self._ends, start)
        behind = bisect_left(self._starts, end)
        return sum(
            min(end, self._ends[at]) - max(start, self._starts[at]) for at in range(first, behind)
        )

    def cut_below(self, offset: int) -> None:
        """Forget the offsets below `offset`."""
        gone = bisect_right(self._ends, offset)
        del self._starts[:gone], self._ends[:gone]
        if self._starts and self._starts[0] < offset:
            self._starts[0] = offset

    def check_invariants(self) -> None:
        borders = [border for start_and_end in self for border in start_and_end]
        assert all(low < high for low, high in pairwise(borders)), f"ranges touch: {borders[:20]}"
