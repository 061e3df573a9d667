"""Checkpoints and a disk without room: they vouch for what was synced, and for nothing else."""

import errno
import os

import pytest
from broker.index_pieces import index_files

from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.persistence.checkpoint_scheduler import CheckpointScheduler, IndexPieces
from popmq.common.disk import SyncFailed
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
            raise SyncFailed(self.number, os.strerror(self.number))


def keeper_of(disk: LyingDisk, failures: list[BaseException]) -> CheckpointScheduler:
    return CheckpointScheduler(disk, "data", InlineFlusher(), failures.append)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_sync_that_failed_for_want_of_room_is_a_failed_sync(number: int) -> None:
    """The kernel may have dropped those pages, and says so once."""
    disk, failures, segment = LyingDisk(), list[BaseException](), Segment(number)
    keeper = keeper_of(disk, failures)
    for now_ms in (20_000, 40_000):
        keeper.step(
            index_files(segment), lambda: StoreCheckpoint(150), now_ms=now_ms, requested=True
        )
    assert [getattr(error, "errno", 0) for error in failures] == [number]
    assert segment.syncs == 1
    assert keeper.read().position == 0


def test_a_checkpoint_without_room_is_written_when_there_is_some() -> None:
    disk, failures, segment = LyingDisk(), list[BaseException](), Segment()
    keeper = keeper_of(disk, failures)
    disk.capacity = 0
    keeper.step(index_files(segment), lambda: StoreCheckpoint(150), now_ms=20_000, requested=True)
    assert (keeper.read().position, failures) == (0, [])
    disk.capacity = 1 << 20
    keeper.step(index_files(), lambda: StoreCheckpoint(150), now_ms=40_000, requested=True)
    assert (keeper.read().position, failures) == (150, [])
    assert segment.syncs == 1


def test_a_checkpoint_vouches_for_what_was_confirmed_when_its_first_piece_was_written() -> None:
    """Units that come between the pieces may be in no file yet."""
    keeper, segment = keeper_of(LyingDisk(), []), Segment()
    confirmed = iter([100, 200])
    flush = index_files(segment, pieces=3)
    done = [
        keeper.step(flush, lambda: StoreCheckpoint(next(confirmed)), now_ms=20_000, requested=False)
        for _ in range(3)
    ]
    assert done == [1, 1, 1]
    assert (keeper.position, keeper.read().position, segment.syncs) == (100, 100, 1)
    keeper.step(flush, lambda: StoreCheckpoint(next(confirmed)), now_ms=20_001, requested=False)
    assert keeper.position == 100


def test_pieces_that_do_not_fit_are_begun_anew_and_vouched_for_by_a_later_checkpoint() -> None:
    keeper, segment = keeper_of(LyingDisk(), []), Segment()
    full = True

    def flush() -> IndexPieces:
        yield
        if full:
            raise OSError(errno.ENOSPC, "no room")
        return [segment]

    def step(now_ms: int) -> int:
        return keeper.step(flush, lambda: StoreCheckpoint(150), now_ms=now_ms, requested=True)

    assert step(20_000) == 1
    with pytest.raises(OSError, match="no room"):
        step(20_001)
    full = False
    assert step(20_002) == 0
    assert step(22_000) == 1
    assert step(22_001) == 1
    assert (keeper.position, segment.syncs) == (150, 1)


def test_pieces_begun_before_the_checkpoint_was_lowered_vouch_for_nothing() -> None:
    keeper, segment = keeper_of(LyingDisk(), []), Segment()
    flush = index_files(segment, pieces=2)
    keeper.step(flush, lambda: StoreCheckpoint(150), now_ms=20_000, requested=False)
    keeper.lower()
    keeper.step(flush, lambda: StoreCheckpoint(150), now_ms=20_001, requested=False)
    assert keeper.read().position == 0
