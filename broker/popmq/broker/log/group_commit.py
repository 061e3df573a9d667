"""GroupCommit: makes appended records durable, then confirmed; one fdatasync for a batch (D2).

The invariant: a position is durable only after the fdatasync that covers it returned, and replies
to clients are sent only for confirmed positions.  A batch is handed over whole on the loop's
thread; records appended meanwhile form the next batch.  A broker without replicas confirms what is
durable; with replicas, their acks confirm it (docs/concepts/replication.md).
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
    """Every byte below `durable` is on this disk, every byte below `confirmed` on all disks that
    the broker requires.

    `before_batch` may append records that the next batch must contain.  `on_batch` is called when
    a batch is about to be written, `on_durable` when it is on disk; that callback calls `confirm`
    if one disk is enough.  `on_confirmed` is called with each new confirmed position, before the
    callbacks that wait for it.  `on_failure` is called with an error after which nothing more is
    confirmed.
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
        self._records = 0  # of all batches, including the one in flight
        self._batch_records = 0
        self._truncation: tuple[int, int, Callable[[], None]] | None = None
        # The batch that lacked disk space or file descriptors, and the boot time of the next try.
        self._unwritten: FlushBatch | None = None
        self._retry_at_ms = 0
        self.durable = 0
        self.confirmed = 0
        self.failed = False

    def schedule_flush(self) -> None:
        """Write the appended records at the end of this iteration of the loop."""
        if not self._flushing and not self._scheduled:
            self._scheduled = True
            self._soon(self._hand_over)

    def when_log_confirmed(self, *callbacks: Callable[[], None]) -> None:
        """Run `callbacks` when everything appended so far is confirmed; at once if it is."""
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
        assert position <= self._log.end, (
            f"confirmed {position}, but the log ends at {self._log.end}"
        )
        self.confirmed = position
        try:
            self._on_confirmed(position)
        except Exception as broken:
            # The queues no longer match the log, or a pop failed: a restart rebuilds both from it.
            self.fail(broken)

    def truncate(self, position: int, known: int, done: Callable[[], None]) -> None:
        """Remove everything from `position` on, physically and durably, then call `done`.

        `known` is the start of a record, at or below `position`.  Records that wait for the disk
        are written first; nothing may be appended until `done` is called.
        """
        assert self._truncation is None, "a truncation is already running"
        assert position >= self.confirmed, (
            f"truncation at {position}, below confirmed {self.confirmed}"
        )
        self._truncation = position, known, done
        if not self._flushing:
            self._hand_over()

    def step(self) -> None:
        """Retry the batch or truncation that lacked disk space or file descriptors."""
        if self.failed or self._clock.boot_ms() < self._retry_at_ms:
            return
        if self._unwritten is not None:
            batch, self._unwritten = self._unwritten, None
            self._write(batch)
        elif self._truncation is not None and not self._flushing:
            self._hand_over()

    def fail(self, error: BaseException) -> None:
        """Stop confirming: after a failed fsync it is unknown which pages the kernel dropped.  The
        process ends."""
        self.failed = True
        self.metrics.disk_failed |= isinstance(error, OSError)
        self._on_failure(error)

    def _hand_over(self) -> None:
        if self._flushing or self.failed:
            self._scheduled = False
            return
        self._scheduled = True  # what `before_batch` appends is in this batch
        self._before_batch()
        self._scheduled = False
        batch = self._log.take_batch()
        if batch is None:
            if self._truncation is not None:
                self._begin_truncation(*self._truncation)
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
        logger.warning("log write failed, will be retried", extra={"reason": str(error)})
        self._retry_at_ms = self._clock.boot_ms() + RETRY_MS

    @property
    def flusher(self) -> Flusher:
        """For disk work that must run in order with the batches."""
        return self._flusher

    def restarted(self, position: int) -> None:
        """The log is empty, begins at `position`, and is durable and confirmed up to it."""
        self.durable = self.confirmed = position

    def _begin_truncation(self, position: int, known: int, done: Callable[[], None]) -> None:
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
            self._flushing, self._truncation = False, None
            self._log.set_end(position)
            self.durable = min(self.durable, position)
            done()

        self._flusher.submit(lambda: self._log.truncate(position, known), finished)

    def release(self) -> None:
        """Run the callbacks up to the confirmed position; an exception loses only its own reply."""
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
