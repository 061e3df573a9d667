"""Small files in two slots: whole after any crash, and written while the disk is full."""

import errno
import itertools

import pytest
from crc32c import crc32c

from popmq.broker.ha.text_slots import TextSlots
from popmq.common.disk import write_atomically
from popmq.common.errors import StoreDamaged
from popmq.testing.disk.lying_disk import LyingDisk, LyingFile, PowerCut

PATH, KIND, SLOT_BYTES = "data/epochs", "epochs", 4_096
OLD, NEW = [["1", "100"]], [["1", "100"], ["2", "3000"]]


def slots(disk: LyingDisk) -> TextSlots:
    return TextSlots(disk, PATH, KIND, SLOT_BYTES)


def lines(disk: LyingDisk) -> list[list[str]] | None:
    return slots(disk).read()


def damage(disk: LyingDisk, slot: int) -> None:
    disk.open(PATH).write(b"XX", slot * SLOT_BYTES + 20)


def test_a_file_that_is_not_there_has_no_lines() -> None:
    assert lines(LyingDisk()) is None


def test_after_a_crash_at_any_operation_there_are_the_old_lines_or_the_new_ones() -> None:
    """Also where the power goes again and again, at each change of a file that lost a slot."""
    for operations in itertools.count():
        disk = LyingDisk()
        slots(disk).write(OLD)
        cuts = 0
        for written in (NEW, OLD, NEW):
            before = lines(disk)
            file = slots(disk)
            file.read()
            disk.cut_at(operations)
            try:
                file.write(written)
            except PowerCut:
                cuts += 1
            disk.restore_power()
            assert lines(disk) in (before, written)
        if not cuts:
            assert lines(disk) == NEW
            return


def test_a_change_needs_no_room_on_the_disk() -> None:
    disk = LyingDisk()
    file = slots(disk)
    file.write(OLD)
    disk.capacity = 0
    file.write(NEW)
    assert lines(disk) == NEW


@pytest.mark.parametrize("slot", [0, 1])
def test_one_damaged_slot_costs_nothing_and_is_mended_by_the_next_change(slot: int) -> None:
    disk = LyingDisk()
    slots(disk).write(NEW)
    damage(disk, slot)
    assert lines(disk) == NEW
    file = slots(disk)
    file.read()
    file.write(OLD)
    damage(disk, 1 - slot)
    assert lines(disk) == OLD


def test_a_file_whose_slots_are_both_damaged_is_not_believed() -> None:
    disk = LyingDisk()
    slots(disk).write(NEW)
    damage(disk, 0)
    damage(disk, 1)
    with pytest.raises(StoreDamaged, match="data/epochs is damaged"):
        lines(disk)


@pytest.mark.parametrize("failing", [1, 2], ids=["first write", "second write"])
def test_a_write_that_fails_leaves_the_old_lines_or_has_the_new_ones(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = LyingDisk()
    file = slots(disk)
    file.write(OLD)
    calls, write = itertools.count(1), LyingFile.write

    def fails_once(self: LyingFile, data: bytes, offset: int) -> None:
        if next(calls) == failing:
            raise OSError(errno.EIO, "Input/output error")
        write(self, data, offset)

    monkeypatch.setattr(LyingFile, "write", fails_once)
    if failing == 1:
        with pytest.raises(OSError, match="Input/output error"):
            file.write(NEW)
        assert lines(disk) == OLD
    else:
        file.write(NEW)
        assert lines(disk) == NEW
    file.write([["3", "9"]])
    assert lines(disk) == [["3", "9"]]


@pytest.mark.parametrize("full", [False, True])
def test_a_file_of_an_older_popmq_is_read_and_gets_slots_when_there_is_room(full: bool) -> None:
    disk = LyingDisk()
    text = b"1 100\n"
    write_atomically(disk, PATH, f"popmq {KIND} 1 {crc32c(text):08x}\n".encode() + text)
    room, disk.capacity = disk.capacity, 0 if full else disk.capacity
    file = slots(disk)
    assert file.read() == OLD
    file.upgrade()
    disk.capacity = room
    assert (disk.open(PATH).size() == 2 * SLOT_BYTES) is not full
    file.write(NEW)
    assert lines(disk) == NEW
    assert disk.open(PATH).size() == 2 * SLOT_BYTES
