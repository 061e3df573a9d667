"""GroupCommit: from appended to durable to confirmed, one fdatasync for all that waits (D2).

The invariant: a position is durable only after the fdatasync that covers it returned, and what a
client hears of is confirmed.  A batch is handed over whole on the loop's thread; what is appended
meanwhile is the next batch.  A broker alone confirms what is durable; one with replicas is told
by them (docs/concepts/replication.md).
"""

import logging
from collections import deque
from collections.abc import Callable

from popmq.broker.log.commit_log import CommitLog, FlushBatch
from popmq.broker.log.store_metrics import StoreMetrics
from popmq.common.clock import Clock
from popmq.common.disk import is_shortage
from popmq.common.step_loop import Flusher

logger = logging.getLogger(__name__)

SLOW_FLUSH_MS = 1_000
RETRY_MS = 1_000


class GroupCommit:
    """Everything below `durable` is on this disk, everything below `confirmed` where it has to be.

    `before_batch` may append what has to be in the next batch, `on_batch` hears of each one that
    is about to go to the disk, `on_durable` when it is there and says `confirm` when that is
    enough, `on_confirmed` hears of each new
    position before the callbacks that waited for it run, `on_failure` of the one error after which
    nothing is confirmed any more.
    """

    def __init__(
        self,
        log: CommitLog,
        flusher: Flusher,
        clock: Clock,
        *,
        soon: Callable[[Callable[[], None]], object],
        before_batch: Callable[[], None],
        on_batch: Callable[[], None],
        on_durable: Callable[[int], None],
        on_confirmed: Callable[[int], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._log = log
        self._flusher = flusher
        self._clock = clock
        self.metrics = StoreMetrics()  # of the whole store
        self._soon = soon
        self._before_batch = before_batch
        self._on_batch = on_batch
        self._on_durable = on_durable
        self._on_confirmed = on_confirmed
        self._on_failure = on_failure
        self._waiters: deque[tuple[int, Callable[[], None]]] = deque()
        self._flushing = False
        self._scheduled = False
        self._began_ms = 0
        self._records = 0  # of all batches, that in flight included
        self._batch_records = 0
        self._cut: tuple[int, int, Callable[[], None]] | None = None
        # What the machine was short of something for, and when it is tried again.
        self._unwritten: FlushBatch | None = None
        self._again_ms = 0
        self.durable = 0
        self.confirmed = 0
        self.failed = False

    def schedule_flush(self) -> None:
        """Something was appended: hand it over at the end of this turn of the loop."""
        if not self._flushing and not self._scheduled:
            self._scheduled = True
            self._soon(self._hand_over)

    def when_log_confirmed(self, *callbacks: Callable[[], None]) -> None:
        """Run them once everything appended so far is confirmed; at once if it is."""
        end = self._log.end
        if self.confirmed < end:
            for callback in callbacks:
                self._waiters.append((end, callback))
            return
        for callback in callbacks:
            callback()

    def confirm(self, position: int) -> None:
        """Everything below `position` is confirmed; an older position changes nothing."""
        if position < self.confirmed or self.failed:
            return
        assert position <= self._log.end, f"confirmed {position} of a log that ends before it"
        self.confirmed = position
        try:
            self._on_confirmed(position)
        except Exception as broken:
            # Queues that do not follow the log, or a pop that broke: start again from the log.
            self.fail(broken)

    def truncate(self, position: int, known: int, done: Callable[[], None]) -> None:
        """Remove everything from `position` on, physically and durably, then call `done`.

        A record begins at `known`, at or below it.  What waits for the disk goes there first;
        nothing may be appended until `done`.
        """
        assert self._cut is None, "one cut at a time"
        assert position >= self.confirmed, f"a cut at {position} below {self.confirmed}, confirmed"
        self._cut = position, known, done
        if not self._flushing:
            self._hand_over()

    def step(self) -> None:
        """Try again a batch, or a cut, for which the machine was short of something."""
        if self.failed or self._clock.boot_ms() < self._again_ms:
            return
        if self._unwritten is not None:
            batch, self._unwritten = self._unwritten, None
            self._write(batch)
        elif self._cut is not None and not self._flushing:
            self._hand_over()

    def fail(self, error: BaseException) -> None:
        """Confirm nothing any more: after a failed fsync nobody can say which pages the kernel
        dropped.  The process ends."""
        self.failed = True
        self.metrics.disk_failed |= isinstance(error, OSError)
        self._on_failure(error)

    def _hand_over(self) -> None:
        if self._flushing or self.failed:
            self._scheduled = False
            return
        self._scheduled = True  # what comes now goes with this batch
        self._before_batch()
        self._scheduled = False
        batch = self._log.take_batch()
        if batch is None:
            if self._cut is not None:
                self._begin_cut(*self._cut)
            return
        self._flushing = True
        self._began_ms = self._clock.boot_ms()
        records = self.metrics.records
        self._batch_records, self._records = records - self._records, records
        self._on_batch()
        self._write(batch)

    def _write(self, batch: FlushBatch) -> None:
        self._flusher.submit(
            lambda: self._log.write(batch), lambda error: self._flushed(batch, error)
        )

    def _flushed(self, batch: FlushBatch, error: BaseException | None) -> None:
        if is_shortage(error):
            self._unwritten = batch
            self._try_later(error)
            return
        if error is not None:
            self.fail(error)
        if self.failed:
            return
        self._flushing = False
        self._count(batch)
        self.durable = batch.end
        self._hand_over()
        self._on_durable(batch.end)

    def _try_later(self, error: BaseException | None) -> None:
        logger.warning("log not written, tried again", extra={"reason": str(error)})
        self._again_ms = self._clock.boot_ms() + RETRY_MS

    @property
    def flusher(self) -> Flusher:
        """For work that has to stand in line with the batches."""
        return self._flusher

    def restarted(self, position: int) -> None:
        """An empty log begins, and is durable and confirmed up to, there."""
        self.durable = self.confirmed = position

    def _begin_cut(self, position: int, known: int, done: Callable[[], None]) -> None:
        self._flushing = True

        def finished(error: BaseException | None) -> None:
            if is_shortage(error):
                self._flushing = False
                self._try_later(error)
                return
            if error is not None:
                self.fail(error)
            if self.failed:
                return
            self._flushing, self._cut = False, None
            self._log.set_end(position)
            self.durable = min(self.durable, position)
            done()

        self._flusher.submit(lambda: self._log.truncate(position, known), finished)

    def release(self) -> None:
        """Run the callbacks up to the confirmed position; one that fails spoils its own reply."""
        waiters, confirmed = self._waiters, self.confirmed
        while waiters and waiters[0][0] <= confirmed:
            callback = waiters.popleft()[1]
            try:
                callback()
            except Exception:
                logger.exception("a reply could not be given")

    def _count(self, batch: FlushBatch) -> None:
        metrics = self.metrics
        took_ms = self._clock.boot_ms() - self._began_ms
        metrics.flush_ms.observe(took_ms)
        metrics.flush_records.observe(self._batch_records)
        metrics.flush_bytes.observe(batch.end - self.durable)
        if took_ms >= SLOW_FLUSH_MS:
            metrics.slow_flushes += 1
            logger.warning("slow disk", extra={"flush_ms": took_ms, "bytes": batch.end})
        metrics.flushes += 1
        metrics.flushed_bytes += batch.end - self.durable
