"""ConsumeQueue: one queue's index into the log (docs/concepts/store.md).

A user topic's unit is 20 bytes (big-endian), RocketMQ's shape:

    0 position u64 | 8 size u32 | 12 tag_hash u64

A queue of the revive topic holds the fixed-width record itself instead (D1), so that recovery
and reports read it in sequence.  Both are rebuilt from the log: only units whose record lies
below the checkpoint are trusted after a crash, and those were synced.
"""

import struct
from typing import NamedTuple

from popmq.broker.store.mapped_file import MappedFileQueue
from popmq.common.disk import Disk

UNIT = struct.Struct(">QIQ")
UNIT_SIZE = UNIT.size
_UNITS_PER_FILE = 300_000
_POSITION = struct.Struct(">Q")
_RECORD_POSITION_AT = 16  # of the position inside a record's header (message.py)


class Unit(NamedTuple):
    position: int
    size: int
    tag_hash: int


class ConsumeQueue:
    """`count` units, numbered from 0; new ones stay in memory until `flush`."""

    def __init__(self, disk: Disk, folder: str, *, unit_size: int = UNIT_SIZE) -> None:
        self._unit_size = unit_size
        self._position_at = 0 if unit_size == UNIT_SIZE else _RECORD_POSITION_AT
        self._files = MappedFileQueue(
            disk, folder, segment_bytes=unit_size * _UNITS_PER_FILE, preallocate=False
        )
        self._tail = bytearray()
        self._written = 0
        self._dirty = False
        self.count = 0
        self.min_offset = 0
        self.max_position = -1  # of the newest unit's record

    def load(self, trusted_position: int) -> None:
        """Keep the units whose record starts below `trusted_position`; cut all others."""
        self._files.load()
        last = self._files.last
        present = (last.start + last.bytes_present()) // self._unit_size if last else 0
        low, high = 0, present
        while low < high:
            middle = (low + high) // 2
            if self._is_trusted(middle, trusted_position):
                low = middle + 1
            else:
                high = middle
        self.count = self._written = low
        if last:
            self._files.cut(low * self._unit_size)
        if low:
            self.max_position = self._position_of(low - 1)

    def append(self, unit: bytes, position: int) -> None:
        """Take the unit of the record at `position`; the caller appends in log order."""
        self._tail += unit
        self.count += 1
        self.max_position = position
        self._dirty = True

    def units(self, offset: int, limit: int) -> list[Unit]:
        """At most `limit` units from `offset` (at least `min_offset`)."""
        data = self.raw(offset, limit)
        return [Unit(*fields) for fields in UNIT.iter_unpack(data)]

    def raw(self, offset: int, limit: int) -> bytes:
        end = min(offset + limit, self.count)
        if offset >= end:
            return b""
        if offset >= self._written:
            first = (offset - self._written) * self._unit_size
            return bytes(self._tail[first : (end - self._written) * self._unit_size])
        parts = [self._from_files(offset, min(end, self._written))]
        if end > self._written:
            parts.append(bytes(self._tail[: (end - self._written) * self._unit_size]))
        return b"".join(parts)

    def flush(self) -> None:
        """Write what is in memory to the files (page cache); `sync` makes it durable.

        OSError when the disk is full; what was not written stays in memory.
        """
        while self._tail:
            position = self._written * self._unit_size
            file = self._files.at_or_new(position)
            piece = bytes(self._tail[: file.end - position])
            file.write(position, [piece])
            del self._tail[: len(piece)]
            self._written += len(piece) // self._unit_size

    @property
    def unwritten_bytes(self) -> int:
        return len(self._tail)

    def take_dirty(self) -> bool:
        """Whether units came since the last call; a checkpoint then syncs the files."""
        dirty, self._dirty = self._dirty, False
        return dirty

    def sync(self) -> None:
        """fdatasync of every file; runs on the flusher, after `flush` on the loop."""
        self._files.sync()

    def close(self) -> None:
        self._files.close()

    def destroy(self) -> None:
        self._files.destroy()
        self._tail.clear()

    def _from_files(self, offset: int, end: int) -> bytes:
        parts = []
        while offset < end:
            position = offset * self._unit_size
            file = self._files.at(position)
            assert file is not None, f"unit {offset} of {self.count} is in no file"
            data = file.read(position, (end - offset) * self._unit_size)
            assert data, f"unit {offset} of {self.count} is behind the file's end"
            parts.append(data)
            offset += len(data) // self._unit_size
        return b"".join(parts)

    def _position_of(self, offset: int) -> int:
        data = self._from_files(offset, offset + 1)
        position: int = _POSITION.unpack_from(data, self._position_at)[0]
        return position

    def _is_trusted(self, offset: int, trusted_position: int) -> bool:
        data = self._from_files(offset, offset + 1)
        size_at = 8 if self._position_at == 0 else 0
        size = int.from_bytes(data[size_at : size_at + 4], "big")
        position: int = _POSITION.unpack_from(data, self._position_at)[0]
        return size > 0 and position < trusted_position


def index_unit(position: int, size: int, tag_hash: int) -> bytes:
    return UNIT.pack(position, size, tag_hash)
