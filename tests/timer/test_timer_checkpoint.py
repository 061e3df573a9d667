"""The timer's checkpoint: two copies, of which the newer intact one counts."""

import random

import pytest

from popmq.broker.timer.timer_checkpoint import (
    COPY_SIZE,
    TimerFilesCheckPoint,
    decode_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk

PATH = "data/timercheckpoint"
FIRST = TimerFilesCheckPoint(1, 2, 3, 4, 5, 6, counter=7, early_ms=8)
SECOND = TimerFilesCheckPoint(10, 20, 30, 40, 50, 60, counter=8, early_ms=80)


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(random.Random(1))


def test_a_checkpoint_is_eight_numbers_and_a_check() -> None:
    data = FIRST.encode()
    assert len(data) == COPY_SIZE == 68
    assert [int.from_bytes(data[at : at + 8], "big") for at in range(0, 64, 8)] == [*range(1, 9)]
    assert decode_checkpoint(data) == FIRST


def test_every_byte_of_a_checkpoint_that_changes_is_seen() -> None:
    data = bytearray(FIRST.encode())
    for at in range(len(data)):
        data[at] ^= 0x80
        assert decode_checkpoint(bytes(data)) is None
        data[at] ^= 0x80
    assert decode_checkpoint(b"") is None
    assert decode_checkpoint(bytes(COPY_SIZE)) is None


def test_what_was_written_last_is_read(disk: SimDisk) -> None:
    assert read_checkpoint(disk, PATH) is None
    for checkpoint in (FIRST, SECOND):
        write_checkpoint(disk, PATH, checkpoint)
        disk.crash(Loss.ALL)
        assert read_checkpoint(disk, PATH) == checkpoint
    assert disk.open(PATH).size() == 4096


def test_without_the_newer_copy_the_older_one_counts(disk: SimDisk) -> None:
    write_checkpoint(disk, PATH, FIRST)
    write_checkpoint(disk, PATH, SECOND)
    disk.open(PATH).write(b"\xff", 4)
    assert read_checkpoint(disk, PATH) == FIRST
    disk.open(PATH).write(b"\xff", 2048 + 4)
    assert read_checkpoint(disk, PATH) is None


@pytest.mark.parametrize("loss", list(Loss))
def test_a_crash_while_it_is_written_leaves_the_old_or_the_new_one(loss: Loss) -> None:
    for seed in range(20):
        for operations in range(8):
            disk = SimDisk(random.Random(seed))
            write_checkpoint(disk, PATH, FIRST)
            disk.faults.cut_at(operations)
            try:
                write_checkpoint(disk, PATH, SECOND)
                expected = {SECOND}
            except PowerCut:
                expected = {FIRST, SECOND}
            disk.crash(loss)
            assert read_checkpoint(disk, PATH) in expected
