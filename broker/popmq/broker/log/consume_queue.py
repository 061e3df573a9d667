"""ConsumeQueue: one queue's index into the log (docs/concepts/store.md).

A user topic's unit is 20 bytes (big-endian), RocketMQ's shape with a check in it:

    0 check u16 | 2 position u48 | 8 size u32 | 12 tag_hash u64

A queue of the revive topic holds the fixed-width record itself instead (D1), so that recovery
and reports read it in sequence.  Both are rebuilt from the log: only units whose record lies
below the checkpoint are trusted after a crash, and those were synced.
"""

import logging
import struct
from contextlib import suppress
from functools import partial

from popmq.broker.log.open_files import OpenFiles, PooledSegment
from popmq.broker.log.queue_unit import (
    UNIT,
    UNIT_SIZE,
    FindUnit,
    QueueUnit,
    intact_unit,
    intact_units,
    queue_seed,
    with_check,
)
from popmq.broker.log.segment_file import SegmentFile, SegmentFiles, Syncable
from popmq.common.disk import ColdRead, Disk

logger = logging.getLogger(__name__)

_UNITS_PER_FILE = 300_000
_POSITION = struct.Struct(">Q")
_RECORD_POSITION_AT = 16  # of the position inside a record's header (message.py)


class ConsumeQueue:
    """`count` units, numbered from 0; new ones stay in memory until `flush`."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        *,
        unit_size: int = UNIT_SIZE,
        place: tuple[int, int] = (0, 0),
        find: FindUnit = lambda place, offset, first, last: None,
        open_files: OpenFiles | None = None,
    ) -> None:
        """`find` looks in the log for a unit of topic and queue `place` that is damaged here.

        `open_files` is shared with other queues.
        """
        self._folder = folder
        self._unit_size = unit_size
        self._checked = unit_size == UNIT_SIZE  # a revive record has its own checksum
        self._position_at = 0 if self._checked else _RECORD_POSITION_AT
        self._seed = queue_seed(folder)
        self._place = place
        self._find = find
        self._found: dict[int, QueueUnit | None] = {}
        self._files = SegmentFiles(
            disk,
            folder,
            segment_bytes=unit_size * _UNITS_PER_FILE,
            preallocate=False,
            names_later=True,
            open_segment=partial(PooledSegment, pool=open_files or OpenFiles(disk.open_limit())),
        )
        self._tail = bytearray()
        self._written = 0
        self._dirty = False
        self._base = 0  # first unit that a file may hold
        self.count = 0
        self.min_offset = 0
        self.max_position = -1  # of the newest unit's record

    def load(self, *, trusted_position: int, log_start: int) -> None:
        """Keep the units whose record starts below `trusted_position`; cut all others."""
        self._files.load()
        first, last = self._files.first, self._files.last
        low = first.start // self._unit_size if first else 0
        high = (last.start + last.bytes_present()) // self._unit_size if last else 0
        base = low
        while low < high:
            middle = (low + high) // 2
            if self._is_trusted(middle, trusted_position):
                low = middle + 1
            else:
                high = middle
        # A unit may lie across two sectors of which one was written, behind others of which none
        # was: the search may have stepped over them.
        while low > base and not self._is_trusted(low - 1, trusted_position):
            low -= 1
        self.count = self._written = low
        self._base = base
        if last:
            self._files.truncate(low * self._unit_size)
        if low > base:
            self.max_position = self._position_of(low - 1)
        self.log_starts_at(log_start)

    def log_starts_at(self, position: int) -> None:
        """Records below `position` are gone: `min_offset` moves to the first that is not."""
        low, high = max(self._base, self.min_offset), self.count
        while low < high:
            middle = (low + high) // 2
            if self._position_of(middle) < position:
                low = middle + 1
            else:
                high = middle
        self.min_offset = low

    def raise_minimum(self, offset: int) -> None:
        """Messages below `offset` are too old for this topic."""
        self.min_offset = max(self.min_offset, min(offset, self.count))

    def detach_files_below_minimum(self) -> list[SegmentFile]:
        """Forget the files that hold expired units only; the caller deletes them."""
        written = min(self.min_offset, self._written)
        gone = self._files.detach_before(written * self._unit_size)
        if gone:
            self._base = gone[-1].end // self._unit_size
        return gone

    def fill_to(self, offset: int) -> None:
        """Number the next unit `offset`: those before were deleted with their records.

        They are filled with blanks (RocketMQ does so too): position 0 and a size.
        """
        if offset <= self.count:
            return
        if self.count == self._base == 0 and not self._tail:
            # Nothing is there: begin in the file that `offset` belongs to.
            self._base = self.count = self._written = offset - offset % _UNITS_PER_FILE
        blank = bytearray(self._unit_size)
        size_at = 8 if self._position_at == 0 else 0
        blank[size_at : size_at + 4] = b"\0\0\0\1"
        self._tail += bytes(blank) * (offset - self.count)
        self.count = offset
        self.min_offset = max(self.min_offset, offset)
        self._dirty = True

    def append(self, unit: bytes, position: int) -> None:
        """Take the unit of the record at `position`; the caller appends in log order."""
        self._tail += with_check(unit, self._seed, self.count) if self._checked else unit
        self.count += 1
        self.max_position = position
        self._dirty = True

    def units(self, offset: int, limit: int, *, wait: bool = True) -> list[QueueUnit]:
        """At most `limit` units from `offset` (at least `min_offset`).

        With `wait` off ColdRead is raised instead of waiting for the disk.
        """
        units = intact_units(self.raw(offset, limit, wait=wait), self._seed, offset)
        return [unit or self._mend(number, wait=wait) for number, unit in enumerate(units, offset)]

    def raw(self, offset: int, limit: int, *, wait: bool = True) -> bytes:
        end = min(offset + limit, self.count)
        if offset >= end:
            return b""
        if offset >= self._written:
            first = (offset - self._written) * self._unit_size
            return bytes(self._tail[first : (end - self._written) * self._unit_size])
        parts = [self._from_files(offset, min(end, self._written), wait=wait)]
        if end > self._written:
            parts.append(bytes(self._tail[: (end - self._written) * self._unit_size]))
        return b"".join(parts)

    def flush(self) -> None:
        """Write what is in memory to the files (page cache); `sync` makes it durable.

        OSError when the disk is full; what was not written stays in memory.
        """
        while self._tail:
            position = self._written * self._unit_size
            file = self._files.segment_for_write(position)
            piece = bytes(self._tail[: file.end - position])
            file.write(position, [piece])
            del self._tail[: len(piece)]
            self._written += len(piece) // self._unit_size

    @property
    def unwritten_bytes(self) -> int:
        return len(self._tail)

    def clear_dirty(self) -> bool:
        """Whether units came since the last call; a checkpoint then syncs the files."""
        dirty, self._dirty = self._dirty, False
        return dirty

    def files(self) -> list[Syncable]:
        """To be synced on the flusher, after `flush` on the loop."""
        return [*self._files, *self._files.names]

    def close(self) -> None:
        self._files.close()

    def take_files(self) -> list[SegmentFile]:
        """The queue is no more; the flusher deletes its files."""
        self._tail.clear()
        return self._files.take_all()

    def _mend(self, offset: int, *, wait: bool) -> QueueUnit:
        """The unit that should stand here, from the log; it is written in its place.

        One whose record is gone too leads to no record, and reads as a damaged message.
        """
        if offset not in self._found:
            first, last = self._neighbours(offset)

            def look() -> None:
                self._found[offset] = self._find(self._place, offset, first, last)

            if not wait:
                raise ColdRead(look)
            look()
        unit = self._found.pop(offset)
        logger.error(
            "damaged index unit",
            extra={"path": self._folder, "offset": offset, "found_again": unit is not None},
        )
        unit = unit or QueueUnit(self._neighbours(offset)[0], 1, 0)
        right = with_check(UNIT.pack(*unit), self._seed, offset)
        if offset < self._written:
            position = offset * UNIT_SIZE
            file = self._files.at(position)
            assert file is not None, f"unit {offset} of {self.count} is in no file"
            with suppress(OSError):  # then the next reader looks for it again
                file.write(position, [right])
                self._dirty = True
        return unit

    def _neighbours(self, offset: int) -> tuple[int, int | None]:
        """The piece of the log between the records of the nearest intact units."""
        first, last = 0, None
        for before in range(offset - 1, max(self._base, self.min_offset) - 1, -1):
            unit = intact_unit(self.raw(before, 1), 0, self._seed, before)
            if unit is not None:
                first = unit.position + unit.size if unit.position else 0
                break
        for behind in range(offset + 1, self.count):
            unit = intact_unit(self.raw(behind, 1), 0, self._seed, behind)
            if unit is not None:
                last = unit.position
                break
        return first, last

    def _from_files(self, offset: int, end: int, *, wait: bool = True) -> bytes:
        parts = []
        while offset < end:
            position = offset * self._unit_size
            file = self._files.at(position)
            assert file is not None, f"unit {offset} of {self.count} is in no file"
            read = file.read if wait else file.read_warm
            data = read(position, (end - offset) * self._unit_size)
            assert data, f"unit {offset} of {self.count} is behind the file's end"
            parts.append(data)
            offset += len(data) // self._unit_size
        return b"".join(parts)

    def _position_of(self, offset: int) -> int:
        if self._checked:
            return self.units(offset, 1)[0].position
        position: int = _POSITION.unpack_from(self.raw(offset, 1), self._position_at)[0]
        return position

    def _is_trusted(self, offset: int, trusted_position: int) -> bool:
        data = self._from_files(offset, offset + 1)
        if self._checked:
            if len(data) < UNIT_SIZE:
                return False
            unit = intact_unit(data, 0, self._seed, offset)
            return unit is not None and unit.position < trusted_position
        size = int.from_bytes(data[:4], "big")
        position: int = _POSITION.unpack_from(data, self._position_at)[0]
        return size > 0 and position < trusted_position
