"""LogTail: the log's newest bytes in memory, for slaves and consumers that follow close behind.

A record is here from the moment it is appended, so that a slave's disk and this one's sync it
side by side.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from popmq.broker.log.queue_unit import QueueUnit


class LogTail:
    """Pieces of whole records, adjacent but for what lies dead at a segment's end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._positions: list[int] = []
        self._pieces: list[bytes] = []
        self._bytes = 0

    def add(self, position: int, piece: bytes) -> None:
        self._positions.append(position)
        self._pieces.append(piece)
        self._bytes += len(piece)

    def add_all(self, position: int, records: Sequence[bytes]) -> None:
        """Adjacent records, the first of them at `position`."""
        *positions, end = accumulate(map(len, records), initial=position)
        self._positions += positions
        self._pieces += records
        self._bytes += end - position

    def records(self, units: Sequence[QueueUnit]) -> list[bytes] | None:
        """The records of units, which are in the order of the log; None unless all are here."""
        positions, pieces = self._positions, self._pieces
        at = -1
        records: list[bytes] = []
        for position, size, _ in units:
            at = bisect_left(positions, position, at + 1)
            if at == len(positions) or positions[at] != position or len(pieces[at]) != size:
                return None
            records.append(pieces[at])
        return records

    def cut(self, position: int) -> None:
        """The log ends here now, and goes on with other bytes."""
        at = bisect_left(self._positions, position)
        del self._positions[at:], self._pieces[at:]
        if at and self._positions[-1] + len(self._pieces[-1]) > position:
            self._pieces[-1] = self._pieces[-1][: position - self._positions[-1]]
        self._bytes = sum(map(len, self._pieces))

    def forget_before(self, position: int) -> None:
        """The log begins there now."""
        count = bisect_left(self._positions, position)
        self._bytes -= sum(map(len, self._pieces[:count]))
        del self._positions[:count], self._pieces[:count]

    def trim(self, durable: int) -> None:
        """Forget the oldest beyond the limit; what is not durable can be read nowhere else."""
        if self._bytes <= self._limit:
            return
        count, kept = 0, self._bytes
        last = bisect_right(self._positions, durable) - 1  # the piece before it may reach behind
        while count < last and kept > self._limit - self._limit // 4:
            kept -= len(self._pieces[count])
            count += 1
        del self._positions[:count], self._pieces[:count]
        self._bytes = kept

    def read(self, position: int, limit: int, until: int) -> bytes | None:
        """Adjacent records from `position`: at least one, and no more than `limit` bytes of them.

        Only what begins below `until`.  None when `position` is not here.
        """
        at = bisect_right(self._positions, position) - 1
        if at < 0 or self._positions[at] != position:
            return None
        pieces, size, end = [], 0, position
        while at < len(self._pieces) and self._positions[at] == end < until:
            piece = self._pieces[at]
            if size and size + len(piece) > limit:
                break
            pieces.append(piece)
            size += len(piece)
            end += len(piece)
            at += 1
        return b"".join(pieces)
