"""What the simulator found in the store, each in its smallest form on a simulated disk."""

import random
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from popmq.broker.log.commit_log import CommitLog, FlushBatch
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.queue_unit import UNIT_SIZE, index_unit, queue_seed, with_check
from popmq.broker.log.segment_file import SegmentFiles
from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.persistence.checkpoint_scheduler import CheckpointScheduler, IndexPieces
from popmq.broker.persistence.snapshot_scheduler import SnapshotScheduler
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.disk_faults import FailedPages
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.core_broker import QueuedFlusher

SEGMENT = 4096
FOLDER = "data/queue"


def unit(offset: int, position: int) -> bytes:
    return with_check(index_unit(position, 50, 0), queue_seed(FOLDER), offset)


def segments(disk: SimDisk) -> SegmentFiles:
    return SegmentFiles(disk, "data/log", segment_bytes=SEGMENT, preallocate=True)


def test_a_crash_while_the_tail_is_cut_leaves_no_gap_between_segments() -> None:
    """Seed 5 at 6dc8590: the lowest empty segment is removed first."""
    for operations in range(8):
        disk = SimDisk(random.Random(1))
        files = segments(disk)
        for start in range(0, 4 * SEGMENT, SEGMENT):
            files.segment_for_write(start)
        disk.faults.cut_at(operations)
        with suppress(PowerCut):
            files.truncate(100)
        disk.crash(Loss.NOTHING)
        segments(disk).load()


def test_a_tail_cut_by_two_processes_in_turn_leaves_no_gap() -> None:
    """Replica seed 10312: what the first removed came back, what the second removed did not."""
    for seed in range(20):
        disk = SimDisk(random.Random(seed))
        files = segments(disk)
        for start in range(0, 4 * SEGMENT, SEGMENT):
            files.segment_for_write(start)
        for _ in range(2):
            disk.faults.cut_at(seed % 5)
            with suppress(PowerCut):
                files.truncate(100)
            disk.crash(Loss.NOTHING)
            files = segments(disk)
            files.load()
        disk.crash(Loss.SCATTERED)
        segments(disk).load()


def test_a_crash_while_segments_are_reserved_leaves_no_gap() -> None:
    """Seed 59 at 6dc8590: segments are made in one go and their names synced once."""
    for seed in range(40):
        disk = SimDisk(random.Random(seed))
        files = segments(disk)
        files.segment_for_write(0)
        disk.faults.cut_at(seed % 12)
        with suppress(PowerCut):
            files.reserve(0, 2)
            files.reserve(SEGMENT, 2)
        disk.crash(Loss.SCATTERED)
        segments(disk).load()


def test_a_segment_that_recovery_kept_has_a_durable_name() -> None:
    """Seed 765 at ec09d46: made, its name not synced, kept over a crash of the process."""
    disk = SimDisk(random.Random(1))
    segments(disk).segment_for_write(0)
    sim_file = disk.open(f"data/log/{SEGMENT:020d}", create=True)
    sim_file.allocate(SEGMENT)
    sim_file.sync()
    disk.crash(Loss.NOTHING)
    log = CommitLog(disk, "data/log", segment_bytes=SEGMENT)
    log.load()
    log.sync()
    log.write(FlushBatch(SEGMENT + 5, [(SEGMENT, [b"bytes"])]))
    disk.crash(Loss.ALL)
    assert disk.exists(f"data/log/{SEGMENT:020d}")


def test_a_unit_torn_between_two_sectors_is_not_trusted() -> None:
    """Seed 407: the sector with the unit's position was lost, the one with its size was not."""
    disk = SimDisk(random.Random(1))
    folder = disk.open(f"{FOLDER}/{0:020d}", create=True)
    whole = unit(0, 100) + unit(1, 150)
    torn = struct.pack(">Q", 0) + unit(2, 200)[8:]
    folder.write(whole + torn, 0)
    queue = ConsumeQueue(disk, FOLDER)
    queue.load(trusted_position=200, log_start=0)
    assert queue.count == 2


def test_a_hole_before_a_torn_unit_is_not_taken_for_blanks() -> None:
    """Seed 10162: the sectors of units 1 to 3 were lost, and with them the position of unit 4."""
    disk = SimDisk(random.Random(1))
    folder = disk.open(f"{FOLDER}/{0:020d}", create=True)
    torn = struct.pack(">Q", 0) + unit(4, 300)[8:]
    folder.write(unit(0, 100) + bytes(3 * UNIT_SIZE) + torn, 0)
    queue = ConsumeQueue(disk, FOLDER)
    # The search looks at unit 4 first when nine are there.
    folder.write(bytes(4 * UNIT_SIZE), 5 * UNIT_SIZE)
    queue.load(trusted_position=200, log_start=0)
    assert queue.count == 1


def test_what_a_failed_fsync_left_in_the_page_cache_is_not_taken_for_durable() -> None:
    """Seed 73 at ec09d46: on ext4 the pages are clean after the error, and stay readable."""
    disk = SimDisk(random.Random(1))
    disk.faults.failed_pages = FailedPages.CLEAN
    first = CommitLog(disk, "data/log", segment_bytes=SEGMENT)
    first.write(FlushBatch(4, [(0, [b"kept"])]))
    disk.faults.fail_sync_at(0)
    with suppress(OSError):
        first.write(FlushBatch(9, [(4, [b"bytes"])]))
    disk.crash(Loss.NOTHING)
    log = CommitLog(disk, "data/log", segment_bytes=SEGMENT)
    log.load()
    seen = log.read_up_to(0, 9)
    log.end = len(seen.rstrip(b"\0"))
    log.rewrite_from(0)
    log.sync()
    disk.crash(Loss.ALL)
    log = CommitLog(disk, "data/log", segment_bytes=SEGMENT)
    log.load()
    assert log.read_up_to(0, 9) == seen


def test_the_disk_loses_what_was_not_synced_as_the_crash_says() -> None:
    for loss, kept in (
        (Loss.NOTHING, b"old+new"),
        (Loss.ALL, b"old"),
        (Loss.KEPT, b"old+new"),
    ):
        disk = SimDisk(random.Random(1))
        file = disk.open("data/file", create=True)
        file.write(b"old", 0)
        file.sync()
        disk.sync_folder("data")
        file.write(b"+new", 3)
        disk.crash(loss)
        assert disk.open("data/file").read(10, 0) == kept


def test_a_scattered_write_survives_by_sectors() -> None:
    seen = set()
    for seed in range(30):
        disk = SimDisk(random.Random(seed))
        disk.losses.sector_bytes = 512
        file = disk.open("data/file", create=True)
        file.allocate(1024)
        file.sync()
        disk.sync_folder("data")
        file.write(b"x" * 1024, 0)
        disk.crash(Loss.SCATTERED)
        data = disk.open("data/file").read(1024, 0)
        assert {len(set(data[:512])), len(set(data[512:]))} == {1}
        seen.add((data[:1], data[-1:]))
    assert len(seen) == 4


def test_a_stop_does_not_vouch_for_files_whose_sync_failed_just_before() -> None:
    """Seed 1390: the threads end before the loop hears of their last jobs."""
    disk = SimDisk(random.Random(1))
    calls: deque[Callable[[], None]] = deque()
    queue = ConsumeQueue(disk, FOLDER)
    keeper = CheckpointScheduler(disk, "data", QueuedFlusher(calls), lambda error: None)

    def flush() -> IndexPieces:
        queue.flush()
        yield from ()
        return queue.files()

    queue.append(index_unit(100, 50, 0), 100)
    keeper.step(flush, lambda: StoreCheckpoint(150), now_ms=20_000, requested=False)
    disk.faults.fail_sync_at(0)
    calls.popleft()()
    with suppress(OSError):
        keeper.write_now(flush, StoreCheckpoint(150))
    assert keeper.read().position == 0


def test_a_snapshot_that_a_start_counts_on_is_there_after_a_power_cut() -> None:
    """Timer seed 102033: a process died between a snapshot's rename and the sync of its folder."""
    disk = SimDisk(random.Random(1))
    older, newer = f"{0:020}", f"{1:020}"
    for name in (older, newer):
        disk.open(f"data/snapshot/{name}.new", create=True).sync()
        disk.sync_folder("data/snapshot")
        disk.faults.cut_at(0 if name == newer else 1 << 60)
        with suppress(PowerCut):
            disk.replace(f"data/snapshot/{name}.new", f"data/snapshot/{name}")
        disk.faults.heal()
    disk.crash(Loss.NOTHING)
    keeper = SnapshotScheduler(disk, "data", QueuedFlusher(deque()), every_bytes=1)
    keeper.load()
    assert keeper.older_position == int(older)
    disk.crash(Loss.ALL)
    assert disk.names("data/snapshot") == [older, newer]
