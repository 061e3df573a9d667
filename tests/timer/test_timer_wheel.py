"""The wheel: what its slots say, now, after a start and after damage."""

import random

import pytest
from timer.timer_rig import SLOT_MS, SLOTS

from popmq.broker.timer.timer_unit import TimerDamaged
from popmq.broker.timer.timer_wheel import EMPTY, SLOT_SIZE, Slot, TimerWheel
from popmq.testing.disk.sim_disk import SimDisk

LAP_MS = SLOTS * SLOT_MS
PATH = "data/timerwheel"


def opened(disk: SimDisk, slots: int = SLOTS) -> TimerWheel:
    wheel = TimerWheel(disk, PATH, slots=slots, slot_ms=SLOT_MS)
    if not wheel.load():
        wheel.reset()
        wheel.file.begin()
    return wheel


def flush(wheel: TimerWheel) -> None:
    wheel.file.write(wheel.take_dirty())
    wheel.file.sync()
    wheel.flushed()


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(random.Random(1))


@pytest.fixture
def wheel(disk: SimDisk) -> TimerWheel:
    return opened(disk)


def test_a_slot_knows_its_oldest_and_newest_unit_and_their_number(wheel: TimerWheel) -> None:
    assert [wheel.add(5000, position) for position in (52, 104, 520)] == [-1, 52, 104]
    assert wheel.get(5000) == wheel.get(5999) == Slot(5000, 52, 520, 3)
    assert wheel.get(6000) == EMPTY


def test_a_slot_of_another_lap_reads_as_empty(wheel: TimerWheel) -> None:
    wheel.add(5000, 52)
    assert wheel.get(5000 + LAP_MS) == EMPTY
    assert wheel.next_occupied(LAP_MS, 2 * LAP_MS) is None
    wheel.clear(5000 + LAP_MS)
    assert wheel.get(5000).num == 1


def test_the_next_lap_takes_a_slot_over(wheel: TimerWheel) -> None:
    wheel.add(5000, 52)
    assert wheel.add(5000 + LAP_MS, 104) == -1
    assert wheel.get(5000) == EMPTY
    assert wheel.get(5000 + LAP_MS) == Slot(5000 + LAP_MS, 104, 104, 1)


def test_a_slot_that_is_cleared_is_empty(disk: SimDisk, wheel: TimerWheel) -> None:
    wheel.add(5000, 52)
    flush(wheel)
    wheel.clear(5000)
    assert wheel.get(5000) == EMPTY
    assert wheel.add(5000, 104) == -1
    wheel.clear(5000)
    flush(wheel)
    assert opened(disk).get(5000) == EMPTY


def test_revising_counts_only_what_is_behind_the_last_unit(wheel: TimerWheel) -> None:
    wheel.add(5000, 104)
    for position in (52, 104, 156, 104):
        wheel.revise(5000, position)
    assert wheel.get(5000) == Slot(5000, 104, 156, 2)


def test_revising_takes_an_older_lap_over_and_leaves_a_newer_one(wheel: TimerWheel) -> None:
    wheel.add(5000, 104)
    wheel.revise(5000 + LAP_MS, 156)
    wheel.revise(5000, 208)
    assert wheel.get(5000 + LAP_MS) == Slot(5000 + LAP_MS, 156, 156, 1)


def test_a_unit_that_starts_a_chain_is_the_only_one_counted(wheel: TimerWheel) -> None:
    wheel.revise(5000, 52)
    wheel.revise(5000, 104, starts=True)
    assert wheel.get(5000) == Slot(5000, 104, 104, 1)


def test_slots_are_what_they_were_after_a_start(disk: SimDisk, wheel: TimerWheel) -> None:
    times = [1000, 2000, 9000, 500_000, (SLOTS - 1) * SLOT_MS, LAP_MS]
    for position, time_ms in enumerate(times):
        wheel.add(time_ms, position)
    flush(wheel)
    again = opened(disk)
    assert [again.get(time_ms).last for time_ms in times] == [0, 1, 2, 3, 4, 5]
    assert again.highest == 5


def test_what_is_being_flushed_is_read_as_it_will_be(wheel: TimerWheel) -> None:
    wheel.add(5000, 52)
    taken = wheel.take_dirty()
    assert wheel.add(5000, 104) == 52
    wheel.file.write(taken)
    wheel.flushed()
    assert wheel.get(5000) == Slot(5000, 52, 104, 2)


def test_what_could_not_be_written_is_taken_again(disk: SimDisk, wheel: TimerWheel) -> None:
    wheel.add(5000, 52)
    wheel.add(7000, 104)
    wheel.take_dirty()
    wheel.clear(7000)
    wheel.keep()
    flush(wheel)
    again = opened(disk)
    assert (again.get(5000).num, again.get(7000)) == (1, EMPTY)


def test_a_wheel_of_another_length_is_not_loaded(disk: SimDisk, wheel: TimerWheel) -> None:
    assert not TimerWheel(disk, PATH, slots=SLOTS + 1, slot_ms=SLOT_MS).load()
    assert not TimerWheel(disk, "data/other", slots=SLOTS, slot_ms=SLOT_MS).load()


def test_every_byte_of_a_slot_that_changes_is_seen(disk: SimDisk, wheel: TimerWheel) -> None:
    wheel.add(5000, 52)
    flush(wheel)
    file = disk.open(PATH)
    for at in (*range(5 * SLOT_SIZE, 6 * SLOT_SIZE), 3 * SLOT_SIZE + 9):
        byte = file.read(1, at)
        file.write(bytes([byte[0] ^ 1]), at)
        assert not TimerWheel(disk, PATH, slots=SLOTS, slot_ms=SLOT_MS).load(), at
        if at >= 5 * SLOT_SIZE:
            with pytest.raises(TimerDamaged):
                wheel.get(5000)
        file.write(byte, at)
    assert wheel.get(5000).num == 1


def test_a_slot_in_another_ones_place_is_seen(disk: SimDisk, wheel: TimerWheel) -> None:
    wheel.add(5000, 52)
    flush(wheel)
    file = disk.open(PATH)
    file.write(file.read(SLOT_SIZE, 5 * SLOT_SIZE), 6 * SLOT_SIZE)
    assert not TimerWheel(disk, PATH, slots=SLOTS, slot_ms=SLOT_MS).load()


def test_the_next_slot_is_found_over_long_empty_stretches() -> None:
    disk = SimDisk(random.Random(1))
    slots = 604_800
    wheel = opened(disk, slots)
    wheel.add(600_000 * SLOT_MS, 52)
    wheel.add(slots * SLOT_MS + 3 * SLOT_MS, 104)
    assert wheel.next_occupied(0, slots * SLOT_MS) == 600_000 * SLOT_MS
    assert wheel.next_occupied(600_000_001, 10 * slots * SLOT_MS) == (slots + 3) * SLOT_MS
    assert wheel.next_occupied(600_000_001, slots * SLOT_MS) is None


def test_random_changes_leave_the_wheel_as_a_plain_table_says() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    disk = SimDisk(random.Random(seed))
    wheel = opened(disk)
    table: dict[int, Slot] = {}
    for position in range(3000):
        time_ms = SLOT_MS * rng.randrange(SLOTS)
        match rng.randrange(12):
            case 0:
                wheel.clear(time_ms)
                table.pop(time_ms, None)
            case 1:
                flush(wheel)
            case 2 if position % 7 == 0:
                flush(wheel)
                wheel = opened(disk)
            case _:
                wheel.add(time_ms, position)
                known = table.get(time_ms, Slot(time_ms, position, -1, 0))
                table[time_ms] = known._replace(last=position, num=known.num + 1)
        first = SLOT_MS * rng.randrange(SLOTS)
        expected = min((time for time in table if time >= first), default=None)
        assert wheel.next_occupied(first, LAP_MS) == expected
    assert list(wheel.occupied(0, LAP_MS)) == [table[time] for time in sorted(table)]
