"""After a start the log's segments have all their blocks, whatever a crash or a copy left of them:
what was allocated ahead is what keeps ENOSPC out of the middle of a segment (D10)."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.testing.disk.lying_disk import LyingDisk, ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

SEGMENT = SMALL.store.segment_bytes


def real_core(folder: Path) -> CoreBroker:
    settings = replace(SMALL, broker=replace(SMALL.broker, data=str(folder)))
    return CoreBroker(disk=ResidentDisk(), settings=settings)


def stopped_with_two_messages(core: CoreBroker) -> int:
    """Returns where the log ends then."""
    core.topic("orders", queues=1)
    for body in (b"one", b"two"):
        core.send("orders", body)
    core.advance(2_000)
    assert core.broker.store.guard._log.reserved == 2
    core.stop()
    return core.broker.store.end


def sizes(folder: Path) -> list[tuple[int, bool]]:
    """Length of each segment, and whether all its blocks are there."""
    stat_results = [os.stat(path) for path in sorted((folder / "commitlog").iterdir())]
    return [(entry.st_size, entry.st_blocks * 512 >= SEGMENT) for entry in stat_results]


def test_a_segment_that_was_cut_and_not_allocated_again_is_whole_after_the_start(
    tmp_path: Path,
) -> None:
    """With segments behind it, which a cut of an older version or of the doctor leaves."""
    core = real_core(tmp_path)
    end = stopped_with_two_messages(core)
    assert sizes(tmp_path) == [(SEGMENT, True)] * 3
    os.truncate(tmp_path / "commitlog" / f"{0:020d}", end)
    core.start()
    assert sizes(tmp_path) == [(SEGMENT, True)] * 3
    assert [delivery.head for delivery in core.receive("orders", "g")] == [b"one", b"two"]


def test_a_copy_with_holes_has_all_its_blocks_after_the_start(tmp_path: Path) -> None:
    """As `cp --sparse` and many backup programs leave them."""
    core = real_core(tmp_path)
    stopped_with_two_messages(core)
    for path in sorted((tmp_path / "commitlog").iterdir()):
        data = path.read_bytes().rstrip(b"\0")
        path.unlink()
        path.write_bytes(data)
        os.truncate(path, SEGMENT)
    assert sizes(tmp_path) == [(SEGMENT, False)] * 3
    core.start()
    assert sizes(tmp_path) == [(SEGMENT, True)] * 3
    assert [delivery.head for delivery in core.receive("orders", "g")] == [b"one", b"two"]


def full_disk_with_a_short_segment(*, spare: int) -> CoreBroker:
    """All is taken but `spare` bytes; the current segment ends where the log does."""
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.group("g")
    end = stopped_with_two_messages(core)
    file = disk.open(f"{SMALL.broker.data}/commitlog/{0:020d}")
    file.truncate(end)
    file.sync()
    disk.capacity = disk.capacity - disk.space("")[0] + spare
    return core


def test_on_a_full_disk_a_reserved_segment_is_given_up_for_the_current_one() -> None:
    core = full_disk_with_a_short_segment(spare=64 << 10)
    core.start()
    log = core.broker.store.guard._log
    assert log.reserved == 1
    assert log.room == 2 * SEGMENT - log.end
    for number in range(8):  # would not fit into the segment as it was
        core.send("orders", b"%d" % number + bytes(100_000))
    assert len(core.receive("orders", "g", limit=32)) == 10


def test_without_room_for_the_current_segment_the_start_says_so_and_leaves_it() -> None:
    core = full_disk_with_a_short_segment(spare=0)
    disk = core.disk
    assert isinstance(disk, LyingDisk)
    for name in disk.names(f"{SMALL.broker.data}/commitlog")[1:]:
        disk.remove(f"{SMALL.broker.data}/commitlog/{name}")
    disk.capacity -= 2 * SEGMENT
    with pytest.raises(OSError, match="No space left") as refused:
        core.start()
    assert refused.value.errno == errno.ENOSPC
    disk.capacity += SEGMENT
    core.start()
    assert len(core.receive("orders", "g")) == 2
