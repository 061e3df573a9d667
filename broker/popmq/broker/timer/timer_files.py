"""TimerFiles: wheel, log and checkpoint of the timers, as one thing (docs/concepts/timer.md).

Nothing of it is needed: what is missing or damaged is begun anew, and the timer queue tells the
rest.  The checkpoint vouches only for what was synced before it was written.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from popmq.broker.log.segment_file import SegmentFile, Syncable
from popmq.broker.timer.timer_checkpoint import (
    TimerFilesCheckPoint,
    read_checkpoint,
    write_checkpoint,
)
from popmq.broker.timer.timer_log import TimerLog
from popmq.broker.timer.timer_recovery import recover
from popmq.broker.timer.timer_unit import TimerUnit
from popmq.broker.timer.timer_wheel import SlotFields, TimerWheel
from popmq.common.disk import Disk, is_shortage
from popmq.common.settings.settings import TimerSettings
from popmq.common.step_loop import Flusher

logger = logging.getLogger(__name__)

_SPILL_BYTES = 64 << 10
TAIL_LIMIT_BYTES = 64 << 20
DIRTY_LIMIT_SLOTS = 200_000


class Cursors(NamedTuple):
    """What the checkpoint vouches for beside the TimerLog, at the moment a flush begins."""

    last_read_ms: int = 0
    queue_offset: int = 0
    master_offset: int = 0
    epoch: int = 0
    log_ms: int = 0  # 0: something is not confirmed yet


class TimerFiles:
    def __init__(
        self,
        disk: Disk,
        folder: str,
        settings: TimerSettings,
        flusher: Flusher,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`folder` is the broker's data folder; `on_failure` hears of a disk error (D2)."""
        self._disk = disk
        self._settings = settings
        self._path = f"{folder}/timercheckpoint"
        self._flusher = flusher
        self._on_failure = on_failure
        self.wheel = TimerWheel(
            disk, f"{folder}/timerwheel", slots=settings.wheel_slots, slot_ms=settings.slot_ms
        )
        self.log = TimerLog(
            disk,
            f"{folder}/timerlog",
            segment_bytes=settings.log_segment_bytes,
            slot_ms=settings.slot_ms,
        )
        self._running = False
        self._failed: BaseException | None = None
        self._leaving: list[SegmentFile] = []  # over, and on the disk still
        self._replaced: list[SegmentFile] | None = None  # a reset that the disk has yet to see
        self._replacing: list[SegmentFile] | None = None  # the same, handed to the flusher
        self._turned_ms: int | None = None  # slots before it are over since then
        self._flush_due_ms = self._clean_due_ms = self._idle_due_ms = 0
        self.checkpoint = TimerFilesCheckPoint()  # the newest durable one
        self.last_unit: TimerUnit | None = None  # that `open` found
        self.newest_position: int | None = None  # of the records whose units were found
        self.early_ms = 0  # the latest slot with timers that are due before it
        self.rebuilt = False  # begun anew: the queue is enqueued from its start
        self.blocked = False  # the disk is full; everything waits in memory
        self.flushes = 0

    def open(self) -> None:
        """Steps 1 to 3 of a start; may wait. What it found is durable when it returns.

        Sets `rebuilt`, `last_unit` and `checkpoint`.  OSError when the disk fails or is full,
        StoreDamaged when a file lies in the log's folder that is no segment.
        """
        self.checkpoint = check_point = (
            read_checkpoint(self._disk, self._path) or TimerFilesCheckPoint()
        )
        fresh = not (check_point.counter or self.log.names() or self.wheel.file.exists())
        recovered = recover(self.wheel, self.log, check_point)
        if recovered is None:
            self.log.close()
            self.wheel.file.close()
            self.wheel.reset()
            self.wheel.file.remove()
            self.log.remove_files()
            self._begin_anew([])
            self.rebuilt = True
            if not fresh:
                logger.warning("timer files begun anew", extra={"folder": self._path})
            return
        self.last_unit, self.newest_position = recovered.last_unit, recovered.newest_position
        self.early_ms = max(check_point.early_ms, recovered.early_ms)
        self.log.write_again(check_point.log_position)
        self.log.synced = check_point.log_position
        files, taken = self.log.flush(), self.wheel.take_dirty()
        new_check_point = replace(check_point, log_position=self.log.end, early_ms=self.early_ms)
        self._write(files, taken, new_check_point)
        self._flushed()

    def reset(self, *, turned_ms: int | None = None) -> None:
        """Begin both files anew, at once; on the disk with the next flush.

        A crash before that finds the former ones, or a gap that makes it begin anew.  The wheel
        may be `turned_ms` back: slots from there on count as not over, whatever the checkpoint
        said.
        """
        if turned_ms is not None:
            self._turned_ms = turned_ms
        self._replaced = (self._replaced or []) + self.log.reset()
        self.wheel.reset()
        self._flush_due_ms = 0
        self.rebuilt = True
        self.last_unit = None
        self.early_ms = 0
        logger.warning("timer files begun anew", extra={"folder": self._path})

    def close(self) -> None:
        for file in (*(self._replaced or ()), *(self._replacing or ()), *self._leaving):
            file.close()
        self.wheel.file.close()
        self.log.close()

    # -- timers

    @property
    def full(self) -> bool:
        """Too much waits to be written: add nothing until a flush went through."""
        return (
            self.log.unwritten_bytes >= TAIL_LIMIT_BYTES
            or self.wheel.dirty_slots >= DIRTY_LIMIT_SLOTS
        )

    def add(
        self,
        *,
        slot_time_ms: int,
        due_ms: int,
        position: int,
        size: int,
        identity: int,
        topic_id: int,
        roll: bool,
        now_ms: int,
        wait: bool = True,
    ) -> None:
        """Put a timer into the slot of `slot_time_ms`, a multiple of slot_ms.

        The record at `position` is `identity`, or was moved from there.  Slots stay within one
        lap of the wheel.  Raises TimerDamaged, and with `wait` off ColdRead; then nothing was
        added.
        """
        log = self.log
        prev = self.wheel.add(slot_time_ms, log.next_position, wait=wait)
        moved = identity != position
        if due_ms < slot_time_ms:
            self.early_ms = max(self.early_ms, slot_time_ms)
        log.append(
            TimerUnit(prev, roll, moved, position, size, topic_id, due_ms, identity, slot_time_ms),
            now_ms=now_ms,
        )
        if log.unwritten_bytes >= _SPILL_BYTES and not self.blocked:
            try:
                log.flush()
            except OSError as error:
                self._write_failed(error)

    @property
    def first_in_use_ms(self) -> int:
        """No slot before this time is in use; the first that is may be later."""
        return self.wheel.first_in_use(self._over_ms())

    # -- flush

    def step(self, now_ms: int, cursors: Callable[[], Cursors]) -> int:
        """Start a flush, or a deletion of old segments, when one is due (`now_ms` since boot)."""
        if self._running:
            return 0
        if now_ms >= self._clean_due_ms:
            self._clean_due_ms = now_ms + self._settings.clean_ms
            if self._delete_old():
                return 1
        if now_ms < self._flush_due_ms and (self.blocked or not self.full):
            return 0
        self._flush_due_ms = now_ms + self._settings.flush_ms
        passed = cursors()
        if not self._is_due(passed, now_ms):
            return 0
        try:
            files = self.log.flush()
        except OSError as error:
            self._write_failed(error)
            return 0
        self._idle_due_ms = now_ms + self._settings.clean_ms
        self._running = True
        replaced = self._replaced
        self._replaced, self._replacing = None, replaced
        taken, check_point = self.wheel.take_dirty(), self._vouched(passed)

        def work() -> None:
            try:
                if replaced is not None:
                    self._begin_anew(replaced)
                self._write(files, taken, check_point)
            except OSError as error:
                self._failed = error  # a stop may come before `_done`
                raise

        self._flusher.submit(work, self._done)
        return 1

    def flush_now(self, cursors: Cursors) -> None:
        """On this thread, at a clean stop with an idle flusher.

        Raises the OSError of a flush that failed: then nothing may be vouched for.
        """
        if self._failed is not None and not is_shortage(self._failed):
            raise self._failed
        self.wheel.keep()
        self._wait_again()
        if self._replaced is not None:
            self._begin_anew(self._replaced)
            self._replaced = None
        files, taken = self.log.flush(), self.wheel.take_dirty()
        self._write(files, taken, self._vouched(cursors))
        self._flushed()

    # -- inside

    def _over_ms(self) -> int:
        """Slots before it are over."""
        return self.checkpoint.last_read_ms if self._turned_ms is None else self._turned_ms

    def _is_due(self, cursors: Cursors, now_ms: int) -> bool:
        """Whether there is something to write; how far it was read alone can wait."""
        known = self.checkpoint
        return (
            self.log.end != self.log.synced
            or self.wheel.dirty_slots > 0
            or self._replaced is not None
            or cursors[1:4] != (known.queue_offset, known.master_offset, known.epoch)
            or (cursors.last_read_ms != known.last_read_ms and now_ms >= self._idle_due_ms)
        )

    def _vouched(self, cursors: Cursors) -> TimerFilesCheckPoint:
        return TimerFilesCheckPoint(
            last_read_ms=cursors.last_read_ms,
            log_position=self.log.end,
            queue_offset=cursors.queue_offset,
            master_offset=cursors.master_offset,
            epoch=cursors.epoch,
            log_ms=cursors.log_ms,
            early_ms=self.early_ms,
        )

    def _write(
        self,
        files: Sequence[Syncable],
        taken: Mapping[int, SlotFields | None],
        check_point: TimerFilesCheckPoint,
    ) -> None:
        """The documented order; the log was written. On the flusher while the broker runs."""
        for file in files:
            file.sync()
        if taken:
            self.wheel.file.write(taken)
            self.wheel.file.sync()
        self._write_checkpoint(check_point)

    def _write_checkpoint(self, check_point: TimerFilesCheckPoint) -> None:
        """Over the older copy, so that the newest durable one stays until this one is."""
        check_point = replace(check_point, counter=self.checkpoint.counter + 1)
        write_checkpoint(self._disk, self._path, check_point)
        self.checkpoint = check_point

    def _begin_anew(self, replaced: list[SegmentFile]) -> None:
        """No wheel: from here on a crash begins anew; and the wheel comes last."""
        self.wheel.file.remove()
        while replaced:
            replaced[0].delete()
            del replaced[0]
        check_point = TimerFilesCheckPoint(
            last_read_ms=self._over_ms(), epoch=self.checkpoint.epoch
        )
        for _ in range(2):  # over both copies: should one be damaged, the other counts
            self._write_checkpoint(check_point)
        self.wheel.file.begin()

    def _done(self, error: BaseException | None) -> None:
        if error is not None and not is_shortage(error):
            # Still "running": after a failed fsync nothing may be vouched for any more.
            self._on_failure(error)
            return
        self._running = False
        self._failed = None
        if isinstance(error, OSError):
            self.wheel.keep()
            self._wait_again()
            self._write_failed(error)
            return
        self._replacing = None
        self._flushed()

    def _flushed(self) -> None:
        if self._replaced is None:
            self._turned_ms = None  # the checkpoint says so now
        self.log.synced = self.checkpoint.log_position
        self.wheel.flushed()
        self.blocked = False
        self.flushes += 1

    def _wait_again(self) -> None:
        """The flusher may not have done all of a reset."""
        if self._replacing is not None:
            self._replaced = self._replacing + (self._replaced or [])
            self._replacing = None

    def _delete_old(self) -> bool:
        """Segments whose slots a durable checkpoint says are over."""
        if self._turned_ms is not None:
            return False  # the checkpoint is of another wheel
        gone = self._leaving
        gone += self.log.take_over(self.checkpoint.last_read_ms)
        if not gone:
            return False
        self._running = True

        def work() -> None:
            while gone:
                gone[0].delete()
                del gone[0]

        def deleted(error: BaseException | None) -> None:
            if error is not None and not is_shortage(error):
                self._failed = error
                self._on_failure(error)
                return
            self._running = False

        self._flusher.submit(work, deleted)
        return True

    def _write_failed(self, error: OSError) -> None:
        if not is_shortage(error):
            self._running = True
            self._failed = error
            self._on_failure(error)
        elif not self.blocked:
            self.blocked = True
            logger.warning("timer files not written", extra={"reason": str(error)})
