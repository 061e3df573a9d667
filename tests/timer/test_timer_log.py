"""The TimerLog and its units: what is read is what was written, or it is said to be damaged."""

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
from timer.timer_rig import LOG, SEGMENT, SLOT_MS

from popmq.broker.timer.timer_log import TimerLog
from popmq.broker.timer.timer_unit import (
    UNIT_SIZE,
    TimerDamaged,
    TimerUnit,
    encode_unit,
    intact_unit,
)
from popmq.broker.timer.timer_wheel import Slot
from popmq.common.disk import ColdRead, DiskFile, RealDisk
from popmq.common.errors import StoreDamaged
from popmq.testing.disk.lying_disk import ResidentFile
from popmq.testing.disk.sim_disk import SimDisk

PER_SEGMENT = 78
BLANK_AT = PER_SEGMENT * UNIT_SIZE
DAY_MS = 86_400_000


def unit(number: int, *, prev: int = -1, slot: int = 5) -> TimerUnit:
    position = 100 * number
    time_ms = slot * SLOT_MS
    return TimerUnit(prev, False, False, position, 100, 64, time_ms + 7, position, time_ms)


def opened(disk: SimDisk) -> TimerLog:
    log = TimerLog(disk, LOG, segment_bytes=SEGMENT, slot_ms=SLOT_MS)
    assert log.load()
    return log


def synced(log: TimerLog) -> None:
    for file in log.flush():
        file.sync()


def filled(disk: SimDisk, count: int, *, slot: int = 5) -> TimerLog:
    """One chain of `count` units."""
    log = opened(disk)
    prev = -1
    for number in range(count):
        prev = log.append(unit(number, prev=prev, slot=slot), now_ms=0)
    return log


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(random.Random(1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"roll": True, "due_ms": 90 * DAY_MS},
        {"moved": True, "identity": 1 << 47},
        {"moved": True, "identity": 0, "roll": True, "due_ms": 366 * DAY_MS},
        {"position": (1 << 48) - 1, "size": (1 << 32) - 1, "topic_id": (1 << 32) - 1},
        {"slot_time_ms": 100 * 366 * DAY_MS, "due_ms": 100 * 366 * DAY_MS + 1},
    ],
)
@pytest.mark.parametrize("now_ms", [0, 4_999, 1_800_000_000_123])
def test_a_unit_is_read_as_it_was_written(changes: dict[str, Any], now_ms: int) -> None:
    written = unit(3, prev=104)._replace(**changes)
    if not written.moved:
        written = written._replace(identity=written.position)
    data = encode_unit(5200, written, slot_ms=SLOT_MS, now_ms=now_ms)
    assert len(data) == UNIT_SIZE
    assert intact_unit(data, 0, 5200, SLOT_MS) == written


def test_every_byte_of_a_unit_that_changes_is_seen() -> None:
    data = bytearray(encode_unit(5200, unit(3), slot_ms=SLOT_MS, now_ms=0))
    for at in range(UNIT_SIZE):
        for bit in range(8):
            data[at] ^= 1 << bit
            assert intact_unit(data, 0, 5200, SLOT_MS) is None
            data[at] ^= 1 << bit
    assert intact_unit(data, 0, 5200 + UNIT_SIZE, SLOT_MS) is None
    assert intact_unit(bytes(UNIT_SIZE), 0, 0, SLOT_MS) is None


def test_a_unit_that_does_not_fit_goes_to_the_next_segment_behind_a_blank(disk: SimDisk) -> None:
    log = filled(disk, PER_SEGMENT + 1)
    assert log.end == SEGMENT + UNIT_SIZE
    assert log.unit(SEGMENT).position == 100 * PER_SEGMENT
    log.flush()
    assert log.unit(SEGMENT).prev == BLANK_AT - UNIT_SIZE
    blank = disk.open(f"{LOG}/{0:020d}").read(SEGMENT, BLANK_AT)
    assert int.from_bytes(blank[2:4], "big") == len(blank) == SEGMENT - BLANK_AT
    assert int.from_bytes(blank[4:12], "big") == 5000
    assert blank[12:16].hex() == "cbd43194"


def test_units_are_found_again_after_a_start(disk: SimDisk) -> None:
    log = filled(disk, 200)
    synced(log)
    again = opened(disk)
    positions = [position for position, _ in again.scan(0)]
    assert again.scanned == again.end == log.end
    assert [again.unit(position) for position in positions] == [
        log.unit(position) for position in positions
    ]
    assert len(positions) == 200


def test_a_chain_is_read_newest_first_from_memory_and_files(disk: SimDisk) -> None:
    log = opened(disk)
    last, first = -1, -1
    for number in range(300):
        other = log.append(unit(1000 + number, slot=9), now_ms=0)
        last = log.append(unit(number, prev=last), now_ms=0)
        first = other + UNIT_SIZE if number == 0 else first
        if number == 250:
            log.flush()
    slices = list(log.chain(Slot(5000, first, last, 300), limit=64))
    assert [len(units) for units in slices] == [64, 64, 64, 64, 44]
    numbers = [unit.position // 100 for units in slices for unit in units]
    assert numbers == list(range(299, -1, -1))


@pytest.mark.parametrize("flushed", [0, 100, 300])
def test_units_of_all_slots_are_read_from_the_newest_down(disk: SimDisk, flushed: int) -> None:
    log = opened(disk)
    for number in range(300):
        log.append(unit(number, slot=number % 7), now_ms=0)
        if number + 1 == flushed:
            log.flush()
    result: list[int] = []
    position = log.end
    while position > log.start:
        units, position = log.units_before(position, 50)
        result += [unit.position // 100 for unit in units]
    assert result == list(range(299, -1, -1))


class ColdFile(ResidentFile):
    """A real file whose pages are not in memory until somebody warmed them."""

    warmed: ClassVar[set[int]] = set()

    def view_cached(self, size: int, offset: int) -> memoryview | None:
        return memoryview(self.read(size, offset)) if self._fd in self.warmed else None

    def read(self, size: int, offset: int) -> bytes:
        self.warmed.add(self._fd)
        return super().read(size, offset)

    def warm(self, size: int, offset: int) -> None:
        self.warmed.add(self._fd)


class ColdDisk(RealDisk):
    def open(self, path: str, *, create: bool = False) -> DiskFile:
        return ColdFile(path, create=create)


def test_a_chain_goes_on_where_the_disk_had_to_be_waited_for(tmp_path: Path) -> None:
    ColdFile.warmed.clear()
    log = TimerLog(ColdDisk(), str(tmp_path / "log"), segment_bytes=SEGMENT, slot_ms=SLOT_MS)
    prev = -1
    for number in range(100):
        prev = log.append(unit(number, prev=prev), now_ms=0)
    log.flush()
    chain = log.chain(Slot(5000, 0, prev, 100), wait=False, limit=30)
    numbers: list[int] = []
    waits = 0
    while len(numbers) < 100:
        try:
            numbers += [unit.position // 100 for unit in next(chain)]
        except ColdRead as read_again:
            read_again.warm()
            waits += 1
    assert waits == 1
    assert numbers == list(range(99, -1, -1))
    with pytest.raises(StopIteration):
        next(chain)
    log.close()


def test_a_chain_that_is_not_the_slots_is_damage(disk: SimDisk) -> None:
    log = filled(disk, 10)
    last = log.end - UNIT_SIZE
    for slot in (
        Slot(6000, 0, last, 10),  # another slot's units
        Slot(5000, 0, last, 9),  # stops before the first
        Slot(5000, UNIT_SIZE, last, 10),  # passes it
        Slot(5000, 0, last + UNIT_SIZE, 10),  # begins behind the end
        Slot(5000, 0, last + 1, 10),
    ):
        with pytest.raises(TimerDamaged):
            list(log.chain(slot))


def test_a_unit_that_was_damaged_on_the_disk_is_not_given_out(disk: SimDisk) -> None:
    log = filled(disk, 3)
    log.flush()
    disk.open(f"{LOG}/{0:020d}").write(b"\1", UNIT_SIZE + 30)
    assert log.unit(0).position == 0
    with pytest.raises(TimerDamaged):
        opened(disk).unit(UNIT_SIZE)


def test_what_was_cut_is_gone_and_its_place_is_used_again(disk: SimDisk) -> None:
    log = filled(disk, 200)
    synced(log)
    log = opened(disk)
    log.cut(SEGMENT + 2 * UNIT_SIZE)
    assert log.append(unit(7), now_ms=0) == SEGMENT + 2 * UNIT_SIZE
    synced(log)
    again = opened(disk)
    assert [unit.position // 100 for _, unit in again.scan(SEGMENT)] == [78, 79, 7]
    assert disk.names(LOG) == [f"{start:020d}" for start in (0, SEGMENT)]


@pytest.mark.parametrize("at", range(16))
def test_a_damaged_blank_ends_the_log(disk: SimDisk, at: int) -> None:
    synced(filled(disk, 100))
    file = disk.open(f"{LOG}/{0:020d}")
    file.write(bytes([file.read(1, BLANK_AT + at)[0] ^ 4]), BLANK_AT + at)
    log = opened(disk)
    assert len(list(log.scan(0))) == PER_SEGMENT
    assert log.scanned == BLANK_AT


@pytest.mark.parametrize("damaged_blank", [False, True])
def test_segments_whose_slots_are_over_go_and_the_newest_stays(
    disk: SimDisk, damaged_blank: bool
) -> None:
    log = opened(disk)
    for slot in (3, 9, 7, 2, 1):
        for number in range(PER_SEGMENT):
            log.append(unit(number, slot=slot if number == 40 else 1), now_ms=0)
    synced(log)
    if damaged_blank:
        disk.open(f"{LOG}/{0:020d}").write(b"\xff", BLANK_AT + 6)
    log = opened(disk)
    log.find_latest()
    assert log.take_over(3000) == []
    gone = log.take_over(3001)
    assert [file.start for file in gone] == [0]
    assert log.take_over(9000) == []
    gone += log.take_over(1 << 60)
    assert [file.start for file in gone] == [0, SEGMENT, 2 * SEGMENT, 3 * SEGMENT]
    for file in gone:
        file.delete()
    again = opened(disk)
    assert again.start == 4 * SEGMENT
    assert len(list(again.scan(again.start))) == PER_SEGMENT


def test_a_gap_between_segments_or_another_size_is_no_log(disk: SimDisk) -> None:
    synced(filled(disk, 300))
    assert not TimerLog(disk, LOG, segment_bytes=2 * SEGMENT, slot_ms=SLOT_MS).load()
    disk.remove(f"{LOG}/{SEGMENT:020d}")
    assert not TimerLog(disk, LOG, segment_bytes=SEGMENT, slot_ms=SLOT_MS).load()


def test_a_strange_file_in_the_folder_is_left_alone(disk: SimDisk) -> None:
    disk.open(f"{LOG}/notes.txt", create=True)
    with pytest.raises(StoreDamaged, match=r"notes\.txt"):
        TimerLog(disk, LOG, segment_bytes=SEGMENT, slot_ms=SLOT_MS).load()
