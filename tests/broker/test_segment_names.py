"""Names of index segments: the loop makes files, the flusher syncs the folders they lie in."""

import os
import random
from pathlib import Path

import pytest
from broker.index_pieces import index_files

from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.queue_unit import index_unit
from popmq.broker.log.segment_file import SegmentFiles
from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.persistence.checkpoint_scheduler import CheckpointScheduler
from popmq.common.disk import RealDisk
from popmq.common.step_loop import InlineFlusher
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.disk.sim_disk import SimDisk

SEGMENT_BYTES = 8


class SyncedFolders(RealDisk):
    def __init__(self) -> None:
        self.synced: list[str] = []

    def sync_folder(self, path: str) -> None:
        self.synced.append(path)
        super().sync_folder(path)


def test_a_new_queue_costs_the_loop_no_sync_of_a_folder(tmp_path: Path) -> None:
    disk = SyncedFolders()
    topic = tmp_path / "consumequeue" / "7"
    queue = ConsumeQueue(disk, f"{topic}/3")
    queue.append(index_unit(100, 50, 0), 100)
    queue.flush()
    assert disk.synced == []
    assert len(os.listdir(topic / "3")) == 1
    for file in queue.files():
        file.sync()
    expected = [tmp_path, tmp_path / "consumequeue", topic, topic / "3"]
    assert disk.synced == [str(path) for path in expected]
    assert len(queue.files()) == 1, "a name that is durable is synced again"


def test_a_checkpoint_vouches_for_names_too() -> None:
    """Without the name the units are gone, and nobody reads them from the log again."""
    disk = LyingDisk()
    queue = ConsumeQueue(disk, "data/consumequeue/7/3")
    keeper = CheckpointScheduler(disk, "data", InlineFlusher(), lambda error: None)
    queue.append(index_unit(100, 50, 0), 100)
    queue.flush()
    keeper.step(
        index_files(*queue.files()), lambda: StoreCheckpoint(150), now_ms=20_000, requested=False
    )
    disk.restore_power()
    assert keeper.read().position == 150
    found_queue = ConsumeQueue(disk, "data/consumequeue/7/3")
    found_queue.load(trusted_position=150, log_start=0)
    assert found_queue.count == 1


def test_folders_that_a_killed_process_made_are_durable_with_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    disk = SyncedFolders()
    topic = tmp_path / "consumequeue" / "7"
    before = ConsumeQueue(disk, f"{topic}/3")
    before.append(index_unit(100, 50, 0), 100)
    before.flush()
    before.close()
    queue = ConsumeQueue(disk, f"{topic}/3")
    queue.load(trusted_position=150, log_start=0)
    disk.synced.clear()
    for file in queue.files():
        file.sync()
    assert disk.synced == [str(tmp_path / "consumequeue"), str(topic)]


def test_the_data_directory_may_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # it is made, then it is found
        files = SegmentFiles(
            RealDisk(), "data/timerlog", segment_bytes=8, preallocate=False, names_later=True
        )
        files.load()
        files.segment_for_write(0)
        files.sync_names()
        files.close()
    assert os.listdir("data/timerlog") == ["0" * 20]


@pytest.mark.parametrize("loss", [Loss.TORN, Loss.SCATTERED])
def test_no_crash_leaves_a_name_without_the_one_before(loss: Loss) -> None:
    """Unsynced names survive in any order, and a gap would look like a lost segment."""
    for seed in range(64):
        disk = SimDisk(random.Random(seed))
        files = SegmentFiles(
            disk, "data/q", segment_bytes=SEGMENT_BYTES, preallocate=False, names_later=True
        )
        for start in range(0, 4 * SEGMENT_BYTES, SEGMENT_BYTES):
            files.segment_for_write(start).write(start, [b"x" * SEGMENT_BYTES])
        disk.crash(loss)
        again = SegmentFiles(
            disk, "data/q", segment_bytes=SEGMENT_BYTES, preallocate=False, names_later=True
        )
        again.load()  # raises StoreDamaged when there is a gap
        starts = [file.start for file in again]
        assert starts[:3] == [0, 8, 16], f"seed {seed}: {starts}"


def test_a_name_that_comes_while_names_are_synced_is_synced_too(tmp_path: Path) -> None:
    """The flusher is at it when the loop makes the next segment."""

    class Meanwhile(SyncedFolders):
        def sync_folder(self, path: str) -> None:
            super().sync_folder(path)
            if len(self.synced) == 1:
                files.segment_for_write(SEGMENT_BYTES)

    disk = Meanwhile()
    files = SegmentFiles(
        disk, str(tmp_path), segment_bytes=SEGMENT_BYTES, preallocate=False, names_later=True
    )
    files.segment_for_write(0)
    (names,) = files.names
    names.sync()
    assert len(files.names) == 1, "the second segment's name counts as durable"
