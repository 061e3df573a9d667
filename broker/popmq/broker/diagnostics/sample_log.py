"""SampleLog: the samples of one table, the newest of them, in memory.

They are statistics of this broker since its start and no record of the log: a report that wants
more than these keeps a history of its own.
"""

from bisect import bisect_right
from collections import deque
from itertools import islice


class SampleLog:
    """Fixed-width rows, numbered from 0; whole samples leave when there are more than
    `limit_bytes`, all but the newest."""

    def __init__(self, row_bytes: int, limit_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._limit_bytes = limit_bytes
        self._firsts: deque[int] = deque()  # number of each sample's first row
        self._samples: deque[bytes] = deque()
        self.held_bytes = 0
        self.min = 0
        self.next = 0

    def append(self, rows: bytes) -> None:
        """One sample."""
        assert len(rows) % self._row_bytes == 0, f"{len(rows)} bytes are no rows"
        if not rows:
            return
        self._firsts.append(self.next)
        self._samples.append(rows)
        self.next += len(rows) // self._row_bytes
        self.held_bytes += len(rows)
        while self.held_bytes > self._limit_bytes and len(self._samples) > 1:
            self.held_bytes -= len(self._samples.popleft())
            self._firsts.popleft()
        self.min = self._firsts[0]

    def raw(self, first: int, end: int) -> bytes:
        """The rows of [first, end), as far as they are there."""
        first, end = max(first, self.min), min(end, self.next)
        if first >= end:
            return b""
        at = bisect_right(self._firsts, first) - 1
        parts = []
        for number, rows in zip(
            islice(self._firsts, at, None), islice(self._samples, at, None), strict=True
        ):
            if number >= end:
                break
            low = max(0, first - number) * self._row_bytes
            parts.append(rows[low : (end - number) * self._row_bytes])
        return b"".join(parts)
