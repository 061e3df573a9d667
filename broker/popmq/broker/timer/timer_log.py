"""TimerLog: the units of all timers in the order in which they were enqueued.

Segments of `segment_bytes`, each `_units` units and a blank, so that a position is a place at
once.  Each unit leads to the one before it in its slot; a chain only goes down.  New units wait
in memory until `flush` (docs/concepts/timer.md).
"""

import struct
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from popmq.broker.log.segment_file import SegmentFile, SegmentFiles, Syncable
from popmq.broker.timer.timer_unit import (
    BLANK_SIZE,
    UNIT_SIZE,
    TimerDamaged,
    TimerUnit,
    encode_blank,
    encode_unit,
    intact_blank,
    intact_unit,
)
from popmq.broker.timer.timer_wheel import Slot
from popmq.common.disk import ColdRead, Disk
from popmq.common.errors import StoreDamaged

_BLOCK_BYTES = 32 * UNIT_SIZE
_PREV = struct.Struct(">q")
_PREV_AT = 4
# One trip of a thread that waits: others wait behind it.
_TRIP_READS, _TRIP_BYTES = 256, 8 << 20
_LEAST_BYTES, _MOST_BYTES = 2 * _BLOCK_BYTES, 160 * _BLOCK_BYTES
_BLOCKS = 256
_PIECE_BYTES = 16384 * UNIT_SIZE
_SLICE_UNITS = 512


class TimerLog:
    """`start` and `end` are positions; `end` is where the next unit goes, or a blank."""

    def __init__(self, disk: Disk, folder: str, *, segment_bytes: int, slot_ms: int) -> None:
        self._disk = disk
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._slot_ms = slot_ms
        self._blank_at = (segment_bytes - BLANK_SIZE) // UNIT_SIZE * UNIT_SIZE
        self._files = SegmentFiles(
            disk, folder, segment_bytes=segment_bytes, preallocate=False, names_later=True
        )
        self._tail = bytearray()
        self._written = 0
        self._next_blank = self._blank_at  # position of the newest segment's blank
        self._latest_ms = -1  # slot time in the newest segment
        self._latest: dict[int, int] = {}  # start of an older segment -> the same
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # by position
        self.end = 0
        self.synced = 0  # set by who syncs
        self.scanned = 0  # where the last `scan` stopped

    # -- start and stop

    def load(self) -> bool:
        """Open the segments; False when they have gaps or another size. `recover` comes next.

        Raises StoreDamaged for a file that is no segment.
        """
        for name in self._disk.names(self._folder):
            if len(name) != 20 or not name.isdigit():
                raise StoreDamaged(f"{self._folder}/{name} is no segment: move it away")
        try:
            self._files.load()
        except StoreDamaged:
            self._files.close()
            return False
        last = self._files.last
        self._place_end(last.start + last.bytes_present() if last else 0)
        return True

    def names(self) -> list[str]:
        """Of the segments that the folder holds."""
        return [name for name in self._disk.names(self._folder) if name.isdigit()]

    def remove_files(self) -> None:
        """Delete every segment that the folder holds; none is open then."""
        self.reset()
        self._place_end(0)
        names = self.names()
        for name in names:
            self._disk.remove(f"{self._folder}/{name}")
        if names:
            self._disk.sync_folder(self._folder)

    def reset(self) -> list[SegmentFile]:
        """Forget all units; the caller deletes the files, oldest first.

        New ones begin behind a gap: until the old files are gone a start sees that something
        is missing, and begins anew too.
        """
        files = self._files.take_all()
        start = files[-1].end + self._segment_bytes if files else 0
        self._tail.clear()
        self._blocks.clear()
        self._latest.clear()
        self._latest_ms = -1
        self._place_end(start)
        return files

    def close(self) -> None:
        self._files.close()

    @property
    def start(self) -> int:
        """Position of the oldest unit, as far as files go."""
        first = self._files.first
        return first.start if first else self._written

    def segment_before(self, position: int) -> int:
        """The start of the segment before the one that holds `position`, if there is one."""
        return max(self.start, position - position % self._segment_bytes - self._segment_bytes)

    # -- in

    def append(self, unit: TimerUnit, *, now_ms: int) -> int:
        """The unit's position. In memory only: this never fails for a full disk."""
        at = self.end
        if at == self._next_blank:
            at = self._append_blank(at)
        self._tail += encode_unit(at, unit, slot_ms=self._slot_ms, now_ms=now_ms)
        self.end = at + UNIT_SIZE
        if unit.slot_time_ms > self._latest_ms:
            self._latest_ms = unit.slot_time_ms
        return at

    @property
    def next_position(self) -> int:
        """What `append` will return."""
        at = self.end
        return at if at != self._next_blank else at + self._segment_bytes - self._blank_at

    @property
    def unwritten_bytes(self) -> int:
        return len(self._tail)

    def flush(self) -> list[Syncable]:
        """Write what is in memory to the files (page cache); returns what is to be synced.

        OSError when the disk is full; what was not written stays in memory.
        """
        while self._tail:
            file = self._files.segment_for_write(self._written)
            piece = bytes(self._tail[: file.end - self._written])
            file.write(self._written, [piece])
            del self._tail[: len(piece)]
            self._written += len(piece)
        return [*(file for file in self._files if file.end > self.synced), *self._files.names]

    # -- out

    def unit(self, position: int, *, wait: bool = True) -> TimerUnit:
        """TimerDamaged when none stands there; with `wait` off ColdRead instead of waiting."""
        data, offset = self.bytes_at(position, wait=wait)
        return self.unit_in(data, offset, position)

    def unit_in(self, data: bytes | bytearray, offset: int, position: int) -> TimerUnit:
        """The unit at `position`, which is at `offset` of what `bytes_at` gave."""
        unit = intact_unit(data, offset, position, self._slot_ms)
        if unit is None:
            raise TimerDamaged(f"{self._folder}: the unit at {position} is not what was written")
        return unit

    def bytes_at(self, position: int, *, wait: bool) -> tuple[bytes | bytearray, int]:
        """Bytes that hold the unit at `position`, and where in them it is."""
        if position >= self._written:
            return self._tail, position - self._written
        offset = position % self._segment_bytes % _BLOCK_BYTES
        start = position - offset
        block = self._blocks.get(start)
        if block is not None and len(block) >= offset + UNIT_SIZE:
            self._blocks.move_to_end(start)
            return block, offset
        place = start % self._segment_bytes
        size = min(_BLOCK_BYTES, self._blank_at - place, self._written - start)
        block = self._blocks[start] = self._from_files(start, size, wait)
        self._blocks.move_to_end(start)
        if len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        return block, offset

    def fetch(self, position: int, count: int) -> None:
        """Bring up to `count` units of a chain into memory, from the one at `position` down.

        On a thread that may wait.  A chain goes down, where no kernel reads ahead: as long as it
        stays near, each read is twice the one before.  It decides nothing: who reads the units
        does, and asks again where one trip was not enough.
        """
        begin = end = position
        data, size, left = b"", 0, _TRIP_BYTES
        for _ in range(_TRIP_READS):
            near = begin - position <= size
            size = min(2 * size, _MOST_BYTES) if size and near else _LEAST_BYTES
            begin, end = self._piece(position, size)
            file = self._files.at(position)
            data = file.read(begin, end - begin) if file is not None else b""
            left -= len(data)
            while begin <= position and position - begin + UNIT_SIZE <= len(data):
                (prev,) = _PREV.unpack_from(data, position - begin + _PREV_AT)
                count -= 1
                if count <= 0 or not 0 <= prev < position:
                    return
                position = prev
            if position >= begin or left <= 0:
                return  # what is not there cannot be waited for

    def _piece(self, position: int, size: int) -> tuple[int, int]:
        """Whole blocks of one segment, of which the last one holds `position`."""
        start = position - position % self._segment_bytes
        offset = (position - start) // _BLOCK_BYTES * _BLOCK_BYTES
        end = min(start + offset + _BLOCK_BYTES, start + self._blank_at, self._written)
        return max(start, start + offset + _BLOCK_BYTES - size), end

    def chain(self, slot: Slot, *, wait: bool = True, limit: int = _SLICE_UNITS) -> "SlotChain":
        """The units of a slot, newest first."""
        return SlotChain(self, slot, wait=wait, limit=limit)

    def scan(self, position: int, end: int | None = None) -> Iterator[tuple[int, TimerUnit]]:
        """The intact units of the files from `position`, which is a unit's, with their positions.

        It ends at the first one that is not intact, or at `end`: `scanned` says where.  It waits
        for the disk.
        """
        stop = self._written if end is None else end
        self.scanned = position
        while position < stop:
            place = position % self._segment_bytes
            if place == self._blank_at:
                if self._blank(position) is None:
                    return
                position += self._segment_bytes - place
                self.scanned = position
                continue
            size = min(_PIECE_BYTES, self._blank_at - place, stop - position)
            data = self._from_files(position, size, True)
            for offset in range(0, size, UNIT_SIZE):
                unit = intact_unit(data, offset, position, self._slot_ms)
                if unit is None:
                    return
                self.scanned = position + UNIT_SIZE
                yield position, unit
                position += UNIT_SIZE

    def units_before(self, position: int, limit: int) -> tuple[list[TimerUnit], int]:
        """Some `limit` intact units below `position`, of all slots, newest first; and where to go
        on.  Fewer, or none, do not say that it is the end: that is at `start`.

        Raises ColdRead: call again.
        """
        units: list[TimerUnit] = []
        while len(units) < limit and position > self.start:
            before = position - 1
            blank = before - before % self._segment_bytes + self._blank_at
            before = min(before, blank - 1)
            before -= before % self._segment_bytes % UNIT_SIZE
            try:
                data, offset = self.bytes_at(before, wait=False)
            except ColdRead:
                if units:
                    break
                begin, end = self._piece(before, _MOST_BYTES)
                raise ColdRead(partial(self._from_files, begin, end - begin, True)) from None
            begin = before - offset
            position = max(begin, before - before % self._segment_bytes)
            for at in range(before, position - 1, -UNIT_SIZE):
                unit = intact_unit(data, at - begin, at, self._slot_ms)
                if unit is not None:
                    units.append(unit)
        return units, position

    # -- recovery and cleaning

    def cut(self, position: int) -> None:
        """Drop every byte from `position`, on the disk too. Before anything is appended."""
        if self._files.last is not None:
            self._files.truncate(position)
        self._blocks.clear()
        self._place_end(position)

    def write_again(self, position: int) -> None:
        """Make what was read from `position` on dirty: the page cache alone may have kept it."""
        self._files.write_again(position, self._written)

    def find_latest(self) -> None:
        """Learn the latest slot time of each segment, after `cut`."""
        newest = self.end - self.end % self._segment_bytes
        for file in self._files:
            if file.start == newest:
                break
            latest_ms = self._blank(file.start + self._blank_at)
            self._latest[file.start] = (
                self._latest_in(file.start) if latest_ms is None else latest_ms
            )
        self._latest_ms = self._latest_in(newest)

    def take_over(self, time_ms: int) -> list[SegmentFile]:
        """Forget the oldest segments whose slots all lie below `time_ms`, never the newest.

        The caller deletes the files, in their order.
        """
        end = -1
        newest = self._files.last
        for file in self._files:
            latest_ms = self._latest.get(file.start)
            if file is newest or latest_ms is None or latest_ms >= time_ms:
                break
            end = file.end
            del self._latest[file.start]
        return self._files.detach_before(end)

    # -- inside

    def _append_blank(self, at: int) -> int:
        remaining = self._segment_bytes - self._blank_at
        self._tail += encode_blank(at, remaining, self._latest_ms)
        self._latest[at - self._blank_at] = self._latest_ms
        self._latest_ms = -1
        self._next_blank += self._segment_bytes
        return at + remaining

    def _place_end(self, position: int) -> None:
        self.end = self._written = self.synced = position
        self._next_blank = position - position % self._segment_bytes + self._blank_at

    def _latest_in(self, start: int) -> int:
        end = min(self.end, start + self._blank_at)
        latest_ms = -1
        while start < end:
            for _, unit in self.scan(start, end):
                latest_ms = max(latest_ms, unit.slot_time_ms)
            start = self.scanned + UNIT_SIZE  # a damaged one is its reader's trouble
        return latest_ms

    def _blank(self, position: int) -> int | None:
        data = self._from_files(position, BLANK_SIZE, True)
        return intact_blank(data, position, self._segment_bytes - self._blank_at)

    def _from_files(self, position: int, size: int, wait: bool) -> bytes:
        file = self._files.at(position)
        if file is None:
            return b""
        return file.read(position, size) if wait else file.read_warm(position, size)


class SlotChain:
    """An iterator of bounded lists of units; after ColdRead it goes on where it stood."""

    def __init__(self, log: TimerLog, slot: Slot, *, wait: bool, limit: int) -> None:
        self._log = log
        self._slot = slot
        self._wait = wait
        self._limit = limit
        self._next = slot.last
        self._left = slot.num

    def __iter__(self) -> "SlotChain":
        return self

    def __next__(self) -> list[TimerUnit]:
        """Raises TimerDamaged for a chain that is not the slot's, and ColdRead."""
        if self._left == 0:
            raise StopIteration
        units: list[TimerUnit] = []
        log, time_ms, first = self._log, self._slot.time_ms, self._slot.first
        position, left = self._next, self._left
        begin = end = 0  # of the bytes at hand: the unit before is mostly among them
        for _ in range(min(self._limit, left)):
            if not begin <= position <= end - UNIT_SIZE:
                data, offset = self._bytes_at(position, left)
                begin, end = position - offset, position - offset + len(data)
            unit = log.unit_in(data, position - begin, position)
            left -= 1
            prev = unit.prev
            if (
                unit.slot_time_ms != time_ms
                or prev >= position
                or (not left) != (position == first)
            ):
                raise TimerDamaged(f"the chain of slot {time_ms} breaks at {position}")
            units.append(unit)
            position = prev
        self._next, self._left = position, left
        return units

    def _bytes_at(self, position: int, left: int) -> tuple[bytes | bytearray, int]:
        try:
            return self._log.bytes_at(position, wait=self._wait)
        except ColdRead:  # not block by block: what is left of the chain is fetched at once
            raise ColdRead(partial(self._log.fetch, position, left)) from None
