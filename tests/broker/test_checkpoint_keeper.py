"""Checkpoints and a disk without room: they vouch for what was synced, and for nothing else."""

import errno
import os

import pytest

from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.persistence.checkpoint_scheduler import CheckpointScheduler
from popmq.common.step_loop import InlineFlusher
from popmq.testing.disk.lying_disk import LyingDisk


class Segment:
    """Something to sync, of which the file system says what a disk said to it."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.syncs = 0

    def sync(self) -> None:
        self.syncs += 1
        if self.number:
            raise OSError(self.number, os.strerror(self.number))


def keeper_of(disk: LyingDisk, failures: list[BaseException]) -> CheckpointScheduler:
    return CheckpointScheduler(disk, "data", InlineFlusher(), failures.append)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_sync_that_failed_for_want_of_room_is_a_failed_sync(number: int) -> None:
    """The kernel may have dropped those pages, and says so once."""
    disk, failures, segment = LyingDisk(), list[BaseException](), Segment(number)
    keeper = keeper_of(disk, failures)
    for now_ms in (20_000, 40_000):
        keeper.step(lambda: [segment], lambda: StoreCheckpoint(150), now_ms=now_ms, wanted=True)
    assert [getattr(error, "errno", 0) for error in failures] == [number]
    assert segment.syncs == 1
    assert keeper.read().position == 0


def test_a_checkpoint_without_room_is_written_when_there_is_some() -> None:
    disk, failures, segment = LyingDisk(), list[BaseException](), Segment()
    keeper = keeper_of(disk, failures)
    disk.capacity = 0
    keeper.step(lambda: [segment], lambda: StoreCheckpoint(150), now_ms=20_000, wanted=True)
    assert (keeper.read().position, failures) == (0, [])
    disk.capacity = 1 << 20
    keeper.step(lambda: [], lambda: StoreCheckpoint(150), now_ms=40_000, wanted=True)
    assert (keeper.read().position, failures) == (150, [])
    assert segment.syncs == 1
