"""TimerWheel: a fixed array of slots, each the ends of a chain of units in the TimerLog.

    0 time i64, divided by slot_ms | 8 firstPos i64 | 16 lastPos i64 | 24 num u32
    28 check u32, crc32c of bytes [0, 28); a slot of 32 zero bytes is empty

In memory are a bit for each slot that is not empty and the slots that changed since the last
flush; everything else is read from the file (docs/concepts/timer.md).
"""

import re
import struct
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from crc32c import crc32c

from popmq.broker.timer.timer_unit import TimerDamaged
from popmq.common.disk import Disk, DiskFile, read_or_cold, skip_unwritten

SLOT_SIZE = 32
_SLOT = struct.Struct(">qqqII")
_FIELDS = struct.Struct(">qqqI")
_CHECK_AT = _FIELDS.size
_EMPTY_SLOT = bytes(SLOT_SIZE)
_PAGE_BYTES = 4096
_PAGE_SLOTS = _PAGE_BYTES // SLOT_SIZE
_EMPTY_PAGE = bytes(_PAGE_BYTES)
_PIECE_BYTES = 1 << 20
_NOT_ZERO = re.compile(rb"[^\0]")


class Slot(NamedTuple):
    """`first` and `last` are TimerLog positions of the oldest and the newest of `num` units."""

    time_ms: int
    first: int
    last: int
    num: int


EMPTY = Slot(-1, -1, -1, 0)
SlotFields = tuple[int, int, int, int]  # (time / slot_ms, first, last, num)


class TimerWheel:
    def __init__(self, disk: Disk, path: str, *, slots: int, slot_ms: int) -> None:
        self.file = WheelFile(disk, path, slots)
        self._slots = slots
        self._slot_ms = slot_ms
        self._used = bytearray((slots + 7) // 8)
        self._dirty: dict[int, SlotFields | None] = {}
        self._flushing: dict[int, SlotFields | None] = {}
        self.highest = -1  # lastPos of the slots that `load` found
        self._newest = 0  # time of the latest slot, divided by slot_ms

    # -- start and stop

    def load(self) -> bool:
        """Read which slots are used; False when the file is missing, has another length or a slot
        whose check fails.

        It is then not open: `reset` and the file's `begin` come next.
        """
        self.reset()
        if not self.file.open():
            return False
        try:
            for index, held in self.file.slots():
                self.highest = max(self.highest, held[2])
                self._newest = max(self._newest, held[0])
                self._used[index >> 3] |= 1 << (index & 7)
        except TimerDamaged:
            self.file.close()
            return False
        return True

    def reset(self) -> None:
        """Every slot is empty; for the disk `WheelFile.begin` follows."""
        self._used = bytearray(len(self._used))
        self._dirty = {}
        self._flushing = {}
        self.highest = -1
        self._newest = 0

    # -- slots

    def get(self, time_ms: int, *, wait: bool = True) -> Slot:
        """The slot of a time; EMPTY when it is another lap's.

        Raises TimerDamaged, and with `wait` off ColdRead instead of waiting for the disk.
        """
        time = time_ms // self._slot_ms
        held = self._held(time % self._slots, wait)
        if held is None or held[0] != time:
            return EMPTY
        return Slot(time * self._slot_ms, *held[1:])

    def add(self, time_ms: int, position: int, *, wait: bool = True) -> int:
        """Put a unit at the end of a slot's chain; returns the unit that was last, or -1.

        An earlier lap's slot is over and is taken; a later lap's must not be there.
        """
        time = time_ms // self._slot_ms
        index = time % self._slots
        held = self._held(index, wait)
        if held is None or held[0] < time:
            self._put(index, (time, position, position, 1))
            return -1
        held_time, first, last, num = held
        assert held_time == time, f"slot {time_ms} is a lap behind the wheel"
        self._dirty[index] = (time, first, position, num + 1)
        return last

    def revise(self, time_ms: int, position: int, *, starts: bool = False) -> bool:
        """A scan came by this unit: count it when it is behind the slot's last one.

        One that `starts` a chain came when the units before it were over.  False when the slot is
        a later lap's: the unit is over, and if it rolled, another one stands for its timer.
        """
        time = time_ms // self._slot_ms
        index = time % self._slots
        held = self._held(index, True)
        if held is None or held[0] < time:
            self._put(index, (time, position, position, 1))
        elif held[0] == time and position > held[2]:
            ends = (position, position, 1) if starts else (held[1], position, held[3] + 1)
            self._dirty[index] = (time, *ends)
        return held is None or held[0] <= time

    def touch(self, time_ms: int) -> None:
        """Write the slot again at the next flush: what was read of it may not be durable."""
        index = time_ms // self._slot_ms % self._slots
        self._dirty[index] = self._held(index, True)

    def clear(self, time_ms: int) -> None:
        """Empty the slot of a time; another lap's stays."""
        time = time_ms // self._slot_ms
        index = time % self._slots
        held = self._held(index, True)
        if held is not None and held[0] == time:
            self._used[index >> 3] &= ~(1 << (index & 7))
            self._dirty[index] = None

    def next_occupied(self, from_ms: int, to_ms: int, *, wait: bool = True) -> int | None:
        """The time of the first slot of [from_ms, to_ms) that is not empty; at most one lap."""
        for slot in self.occupied(from_ms, to_ms, wait=wait):
            return slot.time_ms
        return None

    def occupied(self, from_ms: int, to_ms: int, *, wait: bool = True) -> Iterator[Slot]:
        """The slots of [from_ms, to_ms) that are not empty, by time; at most one lap."""
        first = -(-from_ms // self._slot_ms)
        last = min(-(-to_ms // self._slot_ms), first + self._slots)
        while first < last:
            begin = first % self._slots
            count = min(last - first, self._slots - begin)
            for index in self._indexes(begin, begin + count):
                time = first + index - begin
                held = self._held(index, wait)
                if held is not None and held[0] == time:
                    yield Slot(time * self._slot_ms, *held[1:])
            first += count

    def first_in_use(self, from_ms: int) -> int:
        """The first slot that may be in use, of those from `from_ms` on.

        What is in use lies within the window; what is before it was left of laps that are over.
        """
        return max(from_ms // self._slot_ms, self._newest - window(self._slots)) * self._slot_ms

    def find_newest(self) -> None:
        """Slots were emptied that no unit is in any more: the latest may have been one of them."""
        self._newest = max((slot.time_ms // self._slot_ms for slot in self.every()), default=0)

    def every(self) -> Iterator[Slot]:
        """All slots that are not empty, of whatever lap; the caller may change the one it has."""
        for index in self._indexes(0, self._slots):
            held = self._held(index, True)
            if held is not None:
                yield Slot(held[0] * self._slot_ms, *held[1:])

    # -- flush

    @property
    def dirty_slots(self) -> int:
        return len(self._dirty) + len(self._flushing)

    def take_dirty(self) -> Mapping[int, SlotFields | None]:
        """Begin a flush of what changed, into the file; then comes `flushed` or `keep`."""
        assert not self._flushing, "two flushes of the wheel at once"
        self._flushing, self._dirty = self._dirty, {}
        return self._flushing

    def flushed(self) -> None:
        """What was taken is in the file."""
        self._flushing = {}

    def keep(self) -> None:
        """What was taken is not in the file, or not all of it: the next flush takes it again."""
        self._dirty = self._flushing | self._dirty
        self._flushing = {}

    # -- inside

    def _put(self, index: int, held: SlotFields) -> None:
        self._newest = max(self._newest, held[0])
        self._used[index >> 3] |= 1 << (index & 7)
        self._dirty[index] = held

    def _held(self, index: int, wait: bool) -> SlotFields | None:
        if not self._used[index >> 3] >> (index & 7) & 1:
            return None
        held = self._dirty.get(index)
        if held is not None:
            return held
        held = self._flushing.get(index)
        return held if held is not None else self.file.read(index, wait=wait)

    def _indexes(self, begin: int, end: int) -> Iterator[int]:
        """The indexes in [begin, end) whose bit is set."""
        at = begin >> 3
        stop = (end + 7) >> 3
        while at < stop:
            size = min(_PAGE_BYTES, stop - at)
            if self._used[at : at + size] == _EMPTY_PAGE[:size]:
                at += size
                continue
            match = _NOT_ZERO.search(self._used, at, at + size)
            if match is None:
                at += size
                continue
            at = match.start()
            for index in range(max(begin, at * 8), min(end, at * 8 + 8)):
                if self._used[index >> 3] >> (index & 7) & 1:
                    yield index
            at += 1


class WheelFile:
    """The slots on the disk, each with a check. Written on the flusher while the broker runs."""

    def __init__(self, disk: Disk, path: str, slots: int) -> None:
        self._disk = disk
        self._path = path
        self._slots = slots
        self._file: DiskFile | None = None
        self._former: list[DiskFile] = []  # somebody may still read them

    def open(self) -> bool:
        """False when it is missing, or has another length."""
        try:
            file = self._disk.open(self._path)
        except FileNotFoundError:
            return False
        if file.size() != self._slots * SLOT_SIZE:
            file.close()
            return False
        self._file = file
        return True

    def exists(self) -> bool:
        return self._disk.exists(self._path)

    def remove(self) -> None:
        """The file is gone, durably."""
        if self.exists():
            self._disk.remove(self._path)
        self._disk.sync_folder(self._path.rpartition("/")[0])

    def begin(self) -> None:
        """Make an empty file, durably."""
        file = self._disk.open(self._path, create=True)
        file.truncate(self._slots * SLOT_SIZE)
        file.sync()
        self._disk.sync_folder(self._path.rpartition("/")[0])
        if self._file is not None:
            self._former.append(self._file)
        self._file = file

    def close(self) -> None:
        for file in (self._file, *self._former):
            if file is not None:
                file.close()
        self._file = None
        self._former.clear()

    def read(self, index: int, *, wait: bool) -> SlotFields:
        """Raises TimerDamaged, and with `wait` off ColdRead instead of waiting for the disk."""
        file = self._opened()
        at = index * SLOT_SIZE
        data = file.read(SLOT_SIZE, at) if wait else read_or_cold(file, SLOT_SIZE, at)
        return self._intact(data, 0, index)

    def slots(self) -> Iterator[tuple[int, SlotFields]]:
        """Index and content of every slot that is not empty. Raises TimerDamaged."""
        file, end = self._opened(), self._slots * SLOT_SIZE
        result = skip_unwritten(file, 0)
        while result is not None and result < end:
            start = result - result % _PAGE_BYTES
            data = file.read(min(_PIECE_BYTES, end - start), start)
            for page in range(0, len(data), _PAGE_BYTES):
                if data[page : page + _PAGE_BYTES] == _EMPTY_PAGE:
                    continue
                for at in range(page, min(page + _PAGE_BYTES, len(data)), SLOT_SIZE):
                    if data[at : at + SLOT_SIZE] != _EMPTY_SLOT:
                        index = (start + at) // SLOT_SIZE
                        yield index, self._intact(data, at, index)
            result = skip_unwritten(file, start + len(data)) if data else None

    def write(self, slots: Mapping[int, SlotFields | None]) -> None:
        """Page by page. OSError when the disk is full."""
        file = self._opened()
        for page, group in groupby(sorted(slots), key=lambda index: index // _PAGE_SLOTS):
            indexes = list(group)
            first, count = indexes[0], indexes[-1] - indexes[0] + 1
            if count == len(indexes):
                data = b"".join(_encoded(slots[index]) for index in indexes)
                file.write(data, first * SLOT_SIZE)
                continue
            at = page * _PAGE_BYTES
            whole = bytearray(file.read(min(_PAGE_BYTES, self._slots * SLOT_SIZE - at), at))
            for index in indexes:
                offset = index * SLOT_SIZE - at
                whole[offset : offset + SLOT_SIZE] = _encoded(slots[index])
            file.write(whole, at)

    def sync(self) -> None:
        self._opened().sync()

    def _intact(self, data: bytes, at: int, index: int) -> SlotFields:
        if len(data) >= at + SLOT_SIZE:
            time, first, last, num, check = _SLOT.unpack_from(data, at)
            if crc32c(data[at : at + _CHECK_AT]) == check and time % self._slots == index:
                return time, first, last, num
        raise TimerDamaged(f"{self._path}: slot {index} is not what was written")

    def _opened(self) -> DiskFile:
        assert self._file is not None, "the wheel's file is not open"
        return self._file


def window(slots: int) -> int:
    """How many slots ahead of the oldest one may be used; some are kept free behind it."""
    return slots - max(2, slots // 100)


def _encoded(held: SlotFields | None) -> bytes:
    if held is None:
        return _EMPTY_SLOT
    fields = _FIELDS.pack(*held)
    return fields + crc32c(fields).to_bytes(4, "big")
