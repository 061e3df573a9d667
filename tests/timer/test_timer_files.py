"""The timer's files together: start, flush, a full disk, a failing one, and beginning anew."""

import errno
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest
from timer.timer_rig import (
    CHECKPOINT,
    LOG,
    SEGMENT,
    SETTINGS,
    SLOT_MS,
    SLOTS,
    WHEEL,
    Rig,
)

from popmq.broker.timer import timer_files
from popmq.broker.timer.timer_checkpoint import read_checkpoint
from popmq.broker.timer.timer_unit import UNIT_SIZE, TimerDamaged
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.disk_faults import FailedPages
from popmq.testing.disk.sim_disk import SimDisk, SimFile
from popmq.testing.harness.core_broker import QueuedFlusher


@pytest.fixture
def rig() -> Rig:
    return Rig()


def crash(rig: Rig, loss: Loss = Loss.ALL) -> None:
    rig.disk.crash(loss)
    rig.start()


def fill(rig: Rig, count: int, *, slots: int = 40) -> None:
    for number in range(count):
        rig.add(number % slots)


def test_the_first_start_begins_anew(rig: Rig) -> None:
    assert rig.files.rebuilt
    assert rig.files.last_unit is None
    crash(rig)
    assert not rig.files.rebuilt


def test_what_was_flushed_is_found_after_a_crash(rig: Rig) -> None:
    fill(rig, 200)
    rig.add(50, ahead=70)
    rig.add(50, moved_from=4)
    rig.last_read_ms = 3000
    rig.flush()
    crash(rig)
    assert not rig.files.rebuilt
    assert rig.found() == rig.added
    assert rig.files.last_unit is not None
    assert rig.files.last_unit.identity == 4
    check_point = rig.files.checkpoint
    assert (check_point.last_read_ms, check_point.queue_offset, check_point.epoch) == (3000, 202, 3)


def test_units_behind_the_checkpoint_that_are_whole_are_counted_once(rig: Rig) -> None:
    fill(rig, 100)
    rig.flush()
    old = rig.disk.open(CHECKPOINT).read(4096, 0)
    fill(rig, 100)
    rig.flush()
    file = rig.disk.open(CHECKPOINT)
    file.write(old, 0)
    file.sync()
    crash(rig, Loss.NOTHING)
    assert rig.found() == rig.added


def test_a_clean_stop_leaves_everything(rig: Rig) -> None:
    fill(rig, 30)
    rig.files.flush_now(rig.cursors())
    rig.files.close()
    crash(rig)
    assert rig.found() == rig.added
    assert rig.files.checkpoint.queue_offset == 30


def test_a_slot_that_was_cleared_stays_so(rig: Rig) -> None:
    fill(rig, 80)
    rig.flush()
    rig.files.wheel.clear(0)
    rig.files.wheel.clear(1000)
    rig.last_read_ms = 2000
    rig.flush()
    crash(rig)
    assert rig.found() == [unit for unit in rig.added if unit.slot_time_ms >= 2000]
    assert rig.files.wheel.next_occupied(0, 9000) == 2000


@pytest.mark.parametrize(("path", "at"), [(WHEEL, 7 * 32 + 20), (WHEEL, 900 * 32)])
def test_a_damaged_slot_begins_both_anew(rig: Rig, path: str, at: int) -> None:
    fill(rig, 200)
    rig.last_read_ms = 1000
    rig.flush()
    rig.flip(path, at)
    crash(rig)
    assert rig.files.rebuilt
    assert (rig.found(), rig.files.last_unit) == ([], None)
    assert rig.disk.names(LOG) == []
    assert (rig.files.checkpoint.queue_offset, rig.files.checkpoint.last_read_ms) == (0, 1000)
    rig.added.clear()
    fill(rig, 5)
    rig.flush()
    crash(rig)
    assert not rig.files.rebuilt
    assert rig.found() == rig.added


def test_a_missing_wheel_or_segment_begins_both_anew(rig: Rig) -> None:
    for path in (WHEEL, f"{LOG}/{SEGMENT:020d}"):
        rig.added.clear()
        fill(rig, 300)
        rig.flush()
        rig.disk.remove(path)
        crash(rig, Loss.NOTHING)
        assert rig.files.rebuilt
        assert rig.found() == []


def test_a_log_that_ends_below_the_checkpoint_begins_both_anew(rig: Rig) -> None:
    fill(rig, 200)
    rig.flush()
    rig.flip(f"{LOG}/{2 * SEGMENT:020d}", 5 * UNIT_SIZE + 3)
    crash(rig)
    assert rig.files.rebuilt
    assert rig.found() == []


def test_slots_that_point_behind_the_logs_end_keep_the_units_before_it(rig: Rig) -> None:
    fill(rig, 200)
    rig.flush()
    old = rig.disk.open(CHECKPOINT).read(4096, 0)
    fill(rig, 45)
    rig.flush()
    file = rig.disk.open(CHECKPOINT)
    file.write(old, 0)
    file.sync()
    rig.flip(f"{LOG}/{2 * SEGMENT:020d}", (220 - 156) * UNIT_SIZE + 9)
    crash(rig)
    assert not rig.files.rebuilt
    assert rig.found() == rig.added[:220]
    rig.added[220:] = []
    rig.add(11)
    rig.flush()
    crash(rig)
    assert rig.found() == rig.added


def test_a_lost_checkpoint_costs_a_longer_scan_only(rig: Rig) -> None:
    fill(rig, 300)
    rig.flush()
    rig.disk.remove(CHECKPOINT)
    crash(rig, Loss.NOTHING)
    assert not rig.files.rebuilt
    assert rig.found() == rig.added


def test_segments_whose_slots_are_over_are_deleted(rig: Rig) -> None:
    for number in range(400):
        rig.add(number // 10)
    rig.flush()
    rig.last_read_ms = 17_000
    for slot in range(17):
        rig.files.wheel.clear(slot * SLOT_MS)
    rig.flush()
    rig.now_ms += SETTINGS.clean_ms
    rig.flush()
    kept = [f"{start * SEGMENT:020d}" for start in (2, 3, 4, 5)]
    assert rig.disk.names(LOG) == kept
    rig.flush()
    crash(rig)
    assert rig.disk.names(LOG) == kept
    assert rig.found() == rig.added[170:]


def test_a_slot_is_damaged_when_its_chain_is(rig: Rig) -> None:
    fill(rig, 200)
    rig.flush()
    crash(rig)
    rig.flip(f"{LOG}/{0:020d}", 3 * UNIT_SIZE + 40)
    with pytest.raises(TimerDamaged):
        rig.in_slot(3)
    assert len(rig.in_slot(4)) == 5


def test_a_reset_at_run_time_begins_both_anew(rig: Rig) -> None:
    fill(rig, 300)
    rig.flush()
    rig.files.reset()
    assert rig.files.rebuilt
    assert rig.found() == []
    rig.added.clear()
    fill(rig, 1500)
    rig.flush()
    assert rig.found() == rig.added
    assert rig.disk.names(LOG)[0] == f"{5 * SEGMENT:020d}"
    crash(rig)
    assert not rig.files.rebuilt
    assert rig.found() == rig.added


def test_a_reset_during_a_flush_waits_for_it() -> None:
    rig = Rig()
    calls: deque[Callable[[], None]] = deque()
    flusher = QueuedFlusher(calls)
    rig.files = timer_files.TimerFiles(rig.disk, "data", SETTINGS, flusher, rig.failures.append)

    def run_all() -> None:
        while calls:
            calls.popleft()()

    rig.files.open()
    fill(rig, 100)
    rig.flush()
    rig.files.reset()
    rig.added.clear()
    fill(rig, 7)
    run_all()
    rig.flush()
    rig.files.reset()
    fill(rig, 9)
    run_all()
    rig.flush()
    run_all()
    crash(rig)
    assert rig.found() == rig.added[7:]


def test_units_of_a_wheel_that_was_turned_back_begin_anew_without_its_checkpoint(rig: Rig) -> None:
    """Seed 603510: its first log had no file, so no gap told of the reset, and its timers counted
    as enqueued in slots that were over."""
    rig.last_read_ms = 500 * SLOT_MS
    rig.flush()
    rig.files.reset(turned_ms=100 * SLOT_MS)
    for _ in range(2_000):  # some are written before a flush
        rig.add(100)
    rig.start()
    assert rig.files.rebuilt
    assert rig.files.newest_position is None


def test_a_full_disk_keeps_everything_in_memory_until_there_is_room(rig: Rig) -> None:
    fill(rig, 60)
    rig.flush()
    vouched = rig.files.checkpoint
    rig.disk.faults.budget = 100
    fill(rig, 1500)
    rig.flush()
    assert rig.files.blocked
    assert rig.files.checkpoint == vouched
    assert rig.found() == rig.added
    rig.flush()
    rig.disk.faults.budget = None
    rig.flush()
    assert not rig.files.blocked
    crash(rig)
    assert rig.found() == rig.added
    assert rig.failures == []


class FullDisk(SimDisk):
    """Has no room for the blocks of a file whose path ends with `full`."""

    full = "nothing"

    def open(self, path: str, *, create: bool = False) -> SimFile:
        file = super().open(path, create=create)
        return FullFile(self, file._content, path)


class FullFile(SimFile):
    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        assert isinstance(self._disk, FullDisk)
        if self._path.endswith(self._disk.full):
            raise OSError(errno.ENOSPC, "no room for a block")
        super().write(data, offset)


@pytest.mark.parametrize("path", [WHEEL, CHECKPOINT])
@pytest.mark.parametrize("anew", [False, True])
def test_a_wheel_or_checkpoint_that_does_not_fit_is_written_later(path: str, anew: bool) -> None:
    disk = FullDisk(random.Random(1))
    rig = Rig(disk)
    fill(rig, 300)
    if anew:
        rig.flush()
        rig.files.reset()
        rig.added.clear()
        fill(rig, 60)
    disk.full = path
    rig.flush()
    assert rig.files.blocked
    fill(rig, 5)
    rig.flush()
    assert rig.found() == sorted(rig.added, key=lambda unit: unit.position)
    disk.full = "nothing"
    rig.flush()
    assert not rig.files.blocked
    crash(rig)
    assert rig.found() == rig.added
    assert rig.failures == []


def test_slots_that_the_page_cache_alone_kept_are_written_again(rig: Rig) -> None:
    """After an fsync that failed the kernel may say that pages are clean which are not."""
    fill(rig, 100)
    rig.flush()
    rig.add(50)
    rig.disk.faults.failed_pages = FailedPages.CLEAN
    rig.disk.faults.fail_sync_at(1)
    rig.flush()
    assert len(rig.failures) == 1
    crash(rig, Loss.NOTHING)
    fill(rig, 400)
    rig.flush()
    crash(rig, Loss.ALL)
    assert rig.found() == rig.added


@pytest.mark.parametrize("sync", [0, 1, 2])
def test_after_a_sync_that_failed_nothing_is_vouched_for(rig: Rig, sync: int) -> None:
    fill(rig, 50)
    rig.flush()
    vouched = rig.files.checkpoint
    fill(rig, 20)
    rig.disk.faults.fail_sync_at(sync)
    rig.flush()
    assert len(rig.failures) == 1
    rig.disk.faults.heal()
    rig.flush()
    with pytest.raises(OSError, match="failed a sync"):
        rig.files.flush_now(rig.cursors())
    assert rig.files.checkpoint == vouched
    crash(rig, Loss.ALL)
    assert not rig.files.rebuilt
    assert rig.found()[:50] == rig.added[:50]


def test_nothing_is_written_while_nothing_changes(rig: Rig) -> None:
    fill(rig, 5)
    rig.flush()
    flushes = rig.files.flushes
    for _ in range(29):
        rig.last_read_ms += 1000
        rig.flush()
    assert rig.files.flushes == flushes
    rig.last_read_ms += 1000
    rig.flush()
    check_point = read_checkpoint(rig.disk, CHECKPOINT)
    assert check_point is not None
    assert check_point.last_read_ms == 30_000


def test_who_adds_is_told_when_too_much_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_files, "DIRTY_LIMIT_SLOTS", 10)
    rig.flush()
    fill(rig, 9)
    assert not rig.files.full
    rig.add(20)
    assert rig.files.full
    rig.files.step(rig.now_ms, rig.cursors)
    assert not rig.files.full
    monkeypatch.setattr(timer_files, "TAIL_LIMIT_BYTES", 10 * UNIT_SIZE)
    for _ in range(10):
        rig.add(20)
    assert rig.files.full


def test_the_next_lap_of_the_wheel_finds_its_own_units_only() -> None:
    rig = Rig(settings=replace(SETTINGS, wheel_slots=60))
    fill(rig, 120, slots=60)
    rig.flush()
    for slot in range(60):
        rig.files.wheel.clear(slot * SLOT_MS)
    rig.last_read_ms = 60_000
    rig.add(61)
    rig.flush()
    crash(rig)
    assert rig.in_slot(1) == []
    assert rig.in_slot(61) == rig.added[-1:]
    assert rig.files.wheel.next_occupied(60_000, SLOTS * SLOT_MS) == 61_000
