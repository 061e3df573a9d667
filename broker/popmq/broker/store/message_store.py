"""MessageStore: append, group commit, confirmed position, recovery (docs/concepts/store.md).

The invariant: a position is confirmed only after the fdatasync that covers it returned, and
nobody outside hears of a record (reply, queue unit) before it is confirmed (D2).
"""

import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from popmq.broker.store.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from popmq.broker.store.commit_log import Batch, CommitLog
from popmq.broker.store.consume_queue import UNIT_SIZE, ConsumeQueue, index_unit
from popmq.broker.store.disk_guard import DiskGuard
from popmq.broker.store.dispatch import Dispatch, Queued
from popmq.broker.store.message_reader import MessageReader
from popmq.broker.store.recovery import Apply, Recovery
from popmq.broker.store.snapshot import SnapshotHead
from popmq.broker.store.snapshot_keeper import SnapshotKeeper
from popmq.common.clock import Clock, LogClock
from popmq.common.config import StoreSettings
from popmq.common.disk import Disk
from popmq.common.errors import TooManyRequests
from popmq.common.message import (
    HEADER_SIZE,
    RecordKind,
    Stamp,
    encode_message,
    encode_record,
    message_size,
)
from popmq.common.steps import Flusher

logger = logging.getLogger(__name__)

# How often the index files are synced, so that a start need not rebuild them.
CHECKPOINT_MS = 10_000
CHECKPOINT_RETRY_MS = 1_000
SLOW_FLUSH_MS = 1_000


@dataclass(slots=True)
class StoreMetrics:
    records: int = 0
    bytes: int = 0
    flushes: int = 0
    flushed_bytes: int = 0
    torn_bytes: int = 0
    recovered_records: int = 0
    checkpoints: int = 0
    flush_ms: int = 0
    slow_flushes: int = 0


class MessageStore:
    def __init__(
        self, disk: Disk, folder: str, settings: StoreSettings, clock: Clock, flusher: Flusher
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._settings = settings
        self._clock = clock
        self._flusher = flusher
        self._log = CommitLog(disk, f"{folder}/commitlog", segment_bytes=settings.segment_bytes)
        self.reader = MessageReader(self._log, folder, settings.segment_bytes)
        self._checkpoint_path = f"{folder}/checkpoint"
        self._abort_path = f"{folder}/abort"
        self._waiters: deque[tuple[int, Callable[[], None]]] = deque()
        self._flushing = False
        self._checkpoint_running = False
        self._checkpoint_due_ms = 0
        self._checkpoint_retry_ms = 0
        self._flush_began_ms = 0
        self._scheduled = False
        self._checkpointed = 0
        self._log_clock: LogClock | None = None
        self._checkpoint: Checkpoint | None = None
        self.snapshots = SnapshotKeeper(
            disk,
            folder,
            flusher,
            every_bytes=settings.snapshot_bytes,
        )
        self.guard = DiskGuard(
            disk, folder, self._log, settings, flusher, lambda error: self.on_failure(error)
        )
        self.dispatch: Dispatch
        self.epoch = 0
        self.confirmed = 0
        self.metrics = StoreMetrics()
        self.stopped_cleanly = False
        # The shell sets these: how to run something at the end of this tick, who hears of
        # grown queues, and what to do when the disk failed (the process stops: D2).
        self.soon: Callable[[Callable[[], None]], object] = lambda work: work()
        self.on_grown: Callable[[set[tuple[int, int]]], None] = lambda grown: None
        self.on_failure: Callable[[BaseException], None] = _raise

    # -- start and stop

    def open(self) -> None:
        """Open the files. System topics are added next, then `recover` is called."""
        self._disk.make_folder(self._folder)
        self._checkpoint = read_checkpoint(self._disk, self._checkpoint_path)
        self._log.load()
        trusted = self._checkpoint.position if self._checkpoint else 0
        self.dispatch = Dispatch(self._disk, trusted_position=trusted)

    def recover(self, apply: Apply) -> None:
        """Bring the tables to the log's end: from a snapshot, then `apply` for each record.

        Afterwards the torn tail is gone from the disk, all kept bytes are synced, and the
        confirmed position is the log's end.  Raises StoreDamaged when durable records are
        missing; the log is then unchanged.
        """
        trusted = self._checkpoint or Checkpoint()
        self.stopped_cleanly = not self._disk.exists(self._abort_path)
        recovery = Recovery(
            self._disk, self._folder, self._log, self.dispatch, self.snapshots.tables
        )
        replayed = recovery.replay(apply, trusted)
        self.metrics.recovered_records = replayed.records
        self.metrics.torn_bytes = self._log.cut_tail()
        self._log.sync()  # what only the page cache kept does not count yet
        self.epoch = replayed.epoch
        self.snapshots.position = replayed.snapshot_position
        self._log_clock = LogClock(
            self._clock, last_log_ms=replayed.log_ms, last_wall_ms=replayed.wall_ms
        )
        self.confirmed = self.dispatch.position = self._log.end
        self._checkpointed = trusted.position
        self._mark_running()

    def start_epoch(self) -> None:
        """Write the first record of this start as master; later records carry its epoch."""
        self.epoch += 1
        self.put_record(RecordKind.EPOCH_START, topic_id=0, queue_id=0, body=b"")

    def close(self) -> None:
        """A clean stop: everything durable, a last checkpoint, no abort file.

        The flusher must be idle (the caller waited for `confirmed == end`).
        """
        assert self.confirmed == self._log.end, "closed with unconfirmed records"
        for queue in self.dispatch.flush():
            queue.sync()
        write_checkpoint(self._disk, self._checkpoint_path, self._checkpoint_now())
        if self.snapshots.position < self._log.end:
            self.snapshots.make_now(self._snapshot_head())
        self._disk.remove(self._abort_path)
        self._disk.sync_folder(self._folder)
        self.release_files()

    def release_files(self) -> None:
        """Close every file without a word; after a crash in tests, or a failed start."""
        self._log.close()
        self.dispatch.close()

    # -- append

    @property
    def end(self) -> int:
        return self._log.end

    def log_ms(self) -> int:
        assert self._log_clock is not None, "the store is not recovered yet"
        return self._log_clock.now_ms()

    @property
    def pending_bytes(self) -> int:
        """Appended but not yet on the way to the disk."""
        return self._log.pending_bytes

    def check_admission(self) -> None:
        """Raise TooManyRequests while the disk is full, or too much waits for it."""
        self.guard.check_send()
        pending = self._log.pending_bytes
        if pending > self._settings.max_pending_bytes:
            raise TooManyRequests(
                f"{pending} bytes wait for the disk, the limit is "
                f"{self._settings.max_pending_bytes} (store.max_pending_bytes); try again"
            )

    def put_message(
        self,
        *,
        topic_id: int,
        queue_id: int,
        head: bytes,
        properties: bytes,
        tag_hash: int = 0,
        token: bytes = b"",
        attempt: int = 1,
    ) -> int:
        """Append a message; returns its queue offset. Wait for `end` before you tell anyone."""
        stamp = self._stamp()
        queue_offset = self.dispatch.next_offset(topic_id, queue_id)
        size = message_size(head, properties, token)
        position = self._log.place(size, stamp)
        record = encode_message(
            stamp=stamp,
            position=position,
            topic_id=topic_id,
            queue_id=queue_id,
            queue_offset=queue_offset,
            tag_hash=tag_hash,
            head=head,
            properties=properties,
            token=token,
            attempt=attempt,
        )
        self._log.append(record)
        unit = index_unit(position, size, tag_hash)
        self.dispatch.expect(
            Queued(position + size, position, topic_id, queue_id, queue_offset, unit)
        )
        self._appended(size)
        return queue_offset

    def put_record(self, kind: RecordKind, *, topic_id: int, queue_id: int, body: bytes) -> None:
        """Append a system record; a topic id of 0 belongs to no queue."""
        stamp = self._stamp()
        queue_offset = self.dispatch.next_offset(topic_id, queue_id) if topic_id else 0
        size = HEADER_SIZE + len(body)
        position = self._log.place(size, stamp)
        record = encode_record(
            kind=kind,
            stamp=stamp,
            position=position,
            topic_id=topic_id,
            queue_id=queue_id,
            queue_offset=queue_offset,
            body=body,
        )
        self._log.append(record)
        if topic_id:
            unit = record if kind == RecordKind.REVIVE else index_unit(position, size, 0)
            self.dispatch.expect(
                Queued(position + size, position, topic_id, queue_id, queue_offset, unit)
            )
        self._appended(size)

    def when_confirmed(self, callback: Callable[[], None]) -> None:
        """Run `callback` once everything appended so far is confirmed; at once if it is."""
        if self.confirmed >= self._log.end:
            callback()
        else:
            self._waiters.append((self._log.end, callback))

    # -- read

    def add_topic(self, topic_id: int, folder_name: str, *, unit_size: int = UNIT_SIZE) -> None:
        room = "consumequeue" if unit_size == UNIT_SIZE else "system"
        folder = f"{self._folder}/{room}/{folder_name}"
        self.dispatch.add_topic(topic_id, folder, unit_size)

    def queue(self, topic_id: int, queue_id: int) -> ConsumeQueue:
        return self.dispatch.queue(topic_id, queue_id)

    # -- steps

    def step(self) -> int:
        """A checkpoint when one is due, a piece of a snapshot. Returns how much was done."""
        done = self.guard.step(self._clock.boot_ms())
        try:
            self.dispatch.spill()
            done += self._step_checkpoint()
            self.guard.index_blocked = False
        except OSError as error:
            # Index files are rebuilt from the log, so their trouble stops sends and no more.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.guard.index_blocked = True
        safe = min(self.confirmed, self._checkpointed)
        return done + self.snapshots.step(self._snapshot_head, safe_position=safe)

    def _step_checkpoint(self) -> int:
        now_ms = self._clock.boot_ms()
        wanted = self._checkpointed < self.snapshots.wanted_checkpoint <= self.confirmed
        due_ms = self._checkpoint_retry_ms if wanted else self._checkpoint_due_ms
        if self._checkpoint_running or now_ms < due_ms:
            return 0
        self._checkpoint_due_ms = now_ms + CHECKPOINT_MS
        dirty = self.dispatch.flush()
        if not dirty and not wanted:
            return 0
        self._checkpoint_running = True
        checkpoint = self._checkpoint_now()

        def work() -> None:
            for queue in dirty:
                queue.sync()
            write_checkpoint(self._disk, self._checkpoint_path, checkpoint)

        self._flusher.submit(work, lambda error: self._checkpoint_done(checkpoint, error))
        return 1

    # -- inside

    def _stamp(self) -> Stamp:
        assert self._log_clock is not None, "the store is not recovered yet"
        return Stamp(self.epoch, self._log_clock.now_ms(), self._clock.wall_ms())

    def _appended(self, size: int) -> None:
        self.metrics.records += 1
        self.metrics.bytes += size
        if not self._flushing and not self._scheduled:
            self._scheduled = True
            self.soon(self._hand_over)

    def _hand_over(self) -> None:
        """Give the flusher everything appended up to now: one fdatasync for all of it."""
        self._scheduled = False
        if self._flushing:
            return
        batch = self._log.take_batch()
        if batch is None:
            return
        self._flushing = True
        self._flush_began_ms = self._clock.boot_ms()
        self._flusher.submit(
            lambda: self._log.write(batch), lambda error: self._flushed(batch, error)
        )

    def _flushed(self, batch: Batch, error: BaseException | None) -> None:
        if error is not None:
            # Stays "flushing": after a failed fsync nothing is written any more, because nobody
            # can say which pages the kernel dropped.  The process ends.
            self.on_failure(error)
            return
        self._flushing = False
        took_ms = self._clock.boot_ms() - self._flush_began_ms
        self.metrics.flush_ms += took_ms
        if took_ms >= SLOW_FLUSH_MS:
            self.metrics.slow_flushes += 1
            logger.warning("slow disk", extra={"flush_ms": took_ms, "bytes": batch.end})
        self.metrics.flushes += 1
        self.metrics.flushed_bytes += batch.end - self.confirmed
        self.confirmed = batch.end
        self._hand_over()
        grown = self.dispatch.advance(batch.end)
        waiters = self._waiters
        while waiters and waiters[0][0] <= batch.end:
            waiters.popleft()[1]()
        if grown:
            self.on_grown(grown)

    def _checkpoint_done(self, checkpoint: Checkpoint, error: BaseException | None) -> None:
        self._checkpoint_running = False
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            logger.warning("checkpoint not written", extra={"reason": str(error)})
            self._checkpoint_retry_ms = self._clock.boot_ms() + CHECKPOINT_RETRY_MS
        elif error is not None:
            self.on_failure(error)
        else:
            self._checkpointed = checkpoint.position
            self.metrics.checkpoints += 1

    def _checkpoint_now(self) -> Checkpoint:
        return Checkpoint(self.dispatch.position, self.epoch, self._clock.wall_ms())

    def _snapshot_head(self) -> SnapshotHead:
        return SnapshotHead(self._log.end, self.epoch, self.log_ms(), self._clock.wall_ms())

    def _mark_running(self) -> None:
        file = self._disk.open(self._abort_path, create=True)
        try:
            file.truncate(0)
            file.write(str(os.getpid()).encode(), 0)
            file.sync()
        finally:
            file.close()
        self._disk.sync_folder(self._folder)


def _raise(error: BaseException) -> None:
    raise error
