"""MessageStore: append and read, recovery, and what runs beside them (docs/concepts/store.md).

The invariant: nobody outside hears of a record (reply, queue unit) before it is confirmed (D2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from popmq.broker.index.key_index import KeyIndex
from popmq.broker.log.admission import Admission
from popmq.broker.log.commit_log import CommitLog, ScannedRecord
from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.disk_guard import DiskGuard
from popmq.broker.log.dispatch import Dispatch, PendingUnit
from popmq.broker.log.group_commit import GroupCommit
from popmq.broker.log.log_block import LogBlock
from popmq.broker.log.message_reader import MessageReader, find_unit
from popmq.broker.log.queue_unit import UNIT_SIZE, index_unit
from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.log.store_metrics import EpochLogTime
from popmq.broker.persistence.abort_file import ABORT, FOLLOWS, leads, mark_running
from popmq.broker.persistence.bulk_copy import MessageCopy, put_copies, put_moved
from popmq.broker.persistence.checkpoint_scheduler import CheckpointScheduler
from popmq.broker.persistence.index_flusher import IndexFlusher
from popmq.broker.persistence.log_time import LogTime, RecoveryResult
from popmq.broker.persistence.recovery import ApplyRecord, Recovery
from popmq.broker.persistence.retention import LiveBody, Retention
from popmq.broker.persistence.snapshot import SnapshotHeader
from popmq.broker.persistence.snapshot_scheduler import SnapshotScheduler
from popmq.broker.persistence.state_hashes import Compared
from popmq.broker.store.replica_log import ReplicaLog
from popmq.broker.store.slave_applier import SlaveApplier
from popmq.broker.store.slave_store import SlaveStore
from popmq.common.clock import Clock, LogClock
from popmq.common.disk import Disk
from popmq.common.record.message import (
    HEADER_SIZE,
    RecordKind,
    Stamp,
    encode_message,
    encode_record,
    message_size,
)
from popmq.common.settings.settings import StoreSettings
from popmq.common.step_loop import Flusher, Work


def _run_now(work: Work) -> None:
    work()


def _raise(error: BaseException) -> None:
    raise error


@dataclass(frozen=True, slots=True)
class StoreThreads:
    """Where a store's work runs, beside the turn of the loop that asks for it."""

    flusher: Flusher  # group commits
    # Index files, snapshots and deletions: their many syncs must not delay a group commit.
    housekeeper: Flusher
    readers: Flusher  # cold reads
    call_soon: Callable[[Work], object] = _run_now  # at the end of this turn of the loop
    on_failure: Callable[[BaseException], None] = _raise  # the disk failed: the process stops (D2)

    @classmethod
    def of_one(
        cls, flusher: Flusher, call_soon: Callable[[Work], object] = _run_now
    ) -> "StoreThreads":
        """Of tools and tests: everything is done by one."""
        return cls(flusher, flusher, flusher, call_soon)


class StoreListener(Protocol):
    """What the services above the store hear of it."""

    def before_batch(self) -> None:
        """A group commit begins: what is appended now goes with it."""
        ...

    def before_snapshot(self) -> None:
        """A snapshot of the tables is about to be made, of what is a record only."""
        ...

    def on_dispatched(self, grown: set[tuple[int, int]]) -> None:
        """Confirmed messages are in these queues (topic, queue)."""
        ...

    def on_relocated(self, body: LiveBody) -> None:
        """Retention has copied a message that is still needed to the log's end."""
        ...

    def on_snapshot_made(self, position: int, state_hash: int) -> None: ...

    def on_log_start(self, position: int) -> None:
        """The log begins here from now on."""
        ...


def _same_epoch(epoch: int, position: int) -> int:
    return epoch


class NoListener:
    """Of a store without services: nothing has to be done."""

    def before_batch(self) -> None: ...

    def before_snapshot(self) -> None: ...

    def on_dispatched(self, grown: set[tuple[int, int]]) -> None: ...

    def on_relocated(self, body: LiveBody) -> None: ...

    def on_snapshot_made(self, position: int, state_hash: int) -> None: ...

    def on_log_start(self, position: int) -> None: ...


class ReplicaListener(Protocol):
    """What a store's node makes of it (node/broker_node.py)."""

    def open_epoch(self, epoch: int, position: int) -> int:
        """Given the next epoch and its start: which one it is, durable before its records."""
        ...

    def epoch_starts(self) -> Sequence[int]:
        """Where the epochs of the log begin, oldest first."""
        ...

    def on_batch(self) -> None:
        """A batch is about to go to the disk: slaves may have it, too."""
        ...

    def on_durable(self, position: int) -> None:
        """A batch is on this disk. A store without a listener confirms it at once."""
        ...

    def on_tail_lost(self, position: int, proof: int) -> None:
        """At a slave's start: a tail will be cut of which the master had confirmed a part."""
        ...

    def on_tables_compared(self, compared: Compared) -> None:
        """A slave's snapshot and its master's of the same position: whether they are equal."""
        ...


class MessageStore:
    def __init__(
        self,
        disk: Disk,
        folder: str,
        settings: StoreSettings,
        clock: Clock,
        threads: StoreThreads,
        listener: StoreListener | None = None,
        log_clock: LogClock | None = None,
        node: ReplicaListener | None = None,
    ) -> None:
        """`log_clock` knows the log time of this store's group already, or will.

        Without a node every batch that is on this disk is confirmed.
        """
        self._disk = disk
        self._folder = folder
        self._settings = settings
        self._clock = clock
        self._housekeeper, self.readers = threads.housekeeper, threads.readers
        self.call_soon, self.on_failure = threads.call_soon, threads.on_failure
        self._listener = listener = listener or NoListener()
        sizes = {"segment_bytes": settings.segment_bytes, "tail_bytes": settings.tail_bytes}
        self._log = CommitLog(disk, f"{folder}/commitlog", **sizes)
        self.log_clock = log_clock or LogClock(clock)
        self.reader = MessageReader(self._log, folder, clock, self.log_clock)
        self._commit = GroupCommit(
            self._log,
            threads.flusher,
            clock,
            soon=lambda work: self.call_soon(work),
            before_batch=listener.before_batch,
            on_batch=node.on_batch if node is not None else lambda: None,
            on_durable=self._on_disk,
            on_confirmed=self._advance,
            on_failure=lambda error: self.on_failure(error),
        )
        self.metrics = self._commit.metrics
        self.replicas = ReplicaLog(self._log, self._commit, self._on_block, self._before_truncate)
        self.slave: SlaveStore | None = None
        self._node = node
        starts = node.epoch_starts if node is not None else tuple
        self.log_time = LogTime(self._log, clock, self.log_clock, settings, starts)
        self._checkpoint = StoreCheckpoint()
        self.checkpoints = CheckpointScheduler(disk, folder, self._housekeeper, self._commit.fail)
        self.snapshots = SnapshotScheduler(
            disk,
            folder,
            self._housekeeper,
            every_bytes=settings.snapshot_bytes,
            before=listener.before_snapshot,
            on_finished=self._on_snapshot_made,
            log_starts_at=self.checkpoints.log_starts_at,
        )
        self.guard = DiskGuard(
            disk, folder, self._log, settings, threads.flusher, self._commit.fail
        )
        self.admission = Admission(self._log, self.guard, settings)
        self.index = KeyIndex(disk, f"{folder}/index")
        self.dispatch: Dispatch
        self.retention: Retention
        self.epoch, self.stopped_cleanly = 0, False
        self.open_epoch = _same_epoch if node is None else node.open_epoch

    # -- start and stop

    def open(self) -> None:
        """Open the files. System topics are added next, then `recover` is called."""
        self._disk.make_folder(self._folder)
        self._checkpoint = self.checkpoints.read()
        self.checkpoints.log_start = self._log.load(self._checkpoint.log_start)
        self.index.load(self._log.start)
        self.dispatch = Dispatch(
            self._disk,
            self._housekeeper,
            trusted_position=self._checkpoint.position,
            log_start=self._log.start,
            find=partial(find_unit, self._log),
        )
        self.retention = Retention(
            self._log,
            self.dispatch,
            self._settings,
            self._housekeeper,
            self.log_time,
            on_delete=self.index.drop_below,
            on_start=self._listener.on_log_start,
            log_starts_at=self.checkpoints.log_starts_at,
        )
        self._index_keeper = IndexFlusher(
            self.dispatch, lambda: self.index, self.checkpoints, self.log_time, lambda: self.epoch
        )

    def recover(self, apply: ApplyRecord) -> None:
        """Bring the tables to the log's end: from a snapshot, then `apply` for each record.

        Afterwards the torn tail is gone from the disk, all kept bytes are synced, and the
        confirmed position is the log's end.  Raises StoreDamaged when durable records are
        missing; the log is then unchanged.
        """
        replayed = self._recovery().replay(apply, self._checkpoint)
        self._recovered(replayed)
        self.log_time.go_on(replayed, self._checkpoint, epoch=self.epoch + 1)
        self._commit.confirmed = self.dispatch.position = self._log.end
        mark_running(self._disk, self._folder)

    def follow(
        self, apply: ApplyRecord, *, known: int = -1, keep_from: Callable[[], int] | None = None
    ) -> SlaveStore:
        """In place of `recover`, which leaves the log the same, but nothing is applied yet.

        Snapshot, checkpoint and key index, and the record at `known`, prove what is confirmed.
        Nothing from `keep_from` on is deleted.
        """
        followed = self._recovery().follow(self._checkpoint, known, self._on_tail_lost)
        self._recovered(followed.passed)
        self._commit.confirmed = followed.confirmed
        self.dispatch.position = followed.begin
        mark_running(self._disk, self._folder, FOLLOWS)
        lower, log, commit = self.checkpoints.lower, self._log, self._commit
        applies = SlaveApplier(
            log, commit, self.dispatch, self.index, apply, followed, lower, self._on_mark
        )
        self.slave = SlaveStore(
            applies,
            self.replicas,
            self.snapshots,
            self.retention,
            self.guard,
            self.readers,
            self._on_compared,
            keep_from,
        )
        return self.slave

    def lead(self, epoch: int, start: bytes) -> None:
        """Begin an epoch at the log's end, all of which is durable (R11, R12).

        Nothing else may be appended before `opened`.
        """
        assert self.slave is not None, "leads already"
        newest = self.slave.apply.newest(self._log.end)
        assert epoch > newest.epoch, f"epoch {epoch} behind epoch {newest.epoch}"
        self.epoch = epoch - 1
        self.log_time.go_on(newest, self._checkpoint, epoch=epoch)
        self.start_epoch(start)

    def opened(self) -> None:
        """Everything is applied, and confirmed: whatever a master does may begin (R14)."""
        assert self.slave is not None
        assert self.slave.applied == self._log.end == self.confirmed, "opened too early"
        self.slave = None
        mark = partial(mark_running, self._disk, self._folder, leads(self.epoch))
        # Should it fail, the next start trusts fewer records, and that is all.
        self._housekeeper.submit(mark, lambda error: None)

    def start_epoch(self, start: bytes) -> None:
        """Write the first record of this start as master; later records carry its epoch."""
        self.log_time.epoch_began(self.end)
        self.epoch = self.open_epoch(self.epoch + 1, self.end)
        # It belongs to no queue: its queue_id says what this start counted for downtime.
        downtime_ms = self.log_time.downtime_ms
        self.put_record(RecordKind.EPOCH_START, topic_id=0, queue_id=downtime_ms, body=start)

    def close(self) -> None:
        """A clean stop: everything durable, a last checkpoint, no abort file.

        The flusher must be idle (the caller waited for `confirmed == end`).
        """
        slave = self.slave
        assert slave or self.confirmed == self._log.end, "closed with unconfirmed records"
        self._index_keeper.write_now()
        head = self._snapshot_head()
        if self.snapshots.position < head.position and not (slave and slave.apply.rebuilding):
            self.snapshots.make_now(head)
        self._disk.remove(f"{self._folder}/{ABORT}")
        self._disk.sync_folder(self._folder)
        self.release_files()

    def release_files(self) -> None:
        """Close every file without a word; after a crash in tests, or a failed start."""
        self._log.close()
        if hasattr(self, "dispatch"):  # or the start failed before that
            self.dispatch.close()
        self.index.close()

    # -- append

    @property
    def start(self) -> int:
        """What is below this position is deleted."""
        return self._log.start

    @property
    def end(self) -> int:
        return self._log.end

    @property
    def last_position(self) -> int:
        """Of the newest record."""
        return self._log.last_position

    @property
    def confirmed(self) -> int:
        """Everything below this position is durable where it has to be, and in the queues."""
        return self._commit.confirmed

    def record_bytes(self, position: int, size: int) -> bytes:
        """The log's bytes there, fewer at its end; ColdRead if they are not in memory."""
        return self._log.read_warm(position, size)

    @property
    def durable(self) -> int:
        """Everything below this position is on this disk."""
        return self._commit.durable

    def confirm(self, position: int) -> None:
        """Everything below `position`, at most `end`, is confirmed: tell who waited for it."""
        self._commit.confirm(position)

    def log_ms(self) -> int:
        """Now; on a slave, of the newest record that was applied."""
        if not self.log_time.leads:
            assert self.slave is not None, "the store is not recovered yet"
            return self.slave.apply.passed.log_ms
        return self.log_clock.now_ms()

    @property
    def retention_ms(self) -> int:
        return self._settings.retention_hours * 3_600_000

    @property
    def pending_bytes(self) -> int:
        """Appended but not yet on the way to the disk."""
        return self._log.pending_bytes

    def stamp(self) -> Stamp:
        """Of records that are appended now; a slave appends none."""
        assert self.log_time.leads, "no master, or not recovered yet"
        return Stamp(self.epoch, self.log_clock.now_ms(), self._clock.wall_ms())

    def check_admission(self) -> None:
        """Raise TooManyRequests while the disk is full, or too much waits for it."""
        self.admission.check()

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
        stamp: Stamp | None = None,
    ) -> int:
        """Append a message; returns its queue offset. Reply once `confirmed >= end`.

        `stamp` is of this step, where many are put in one.
        """
        size = message_size(head, properties, token)
        stamp = stamp or self.stamp()
        queue_offset = self.dispatch.next_offset(topic_id, queue_id)
        position = self._log.make_room(size, stamp)
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
            unconfirmed=position - self._commit.confirmed,
        )
        self._log.append(record)
        unit = index_unit(position, size, tag_hash)
        queued = PendingUnit(position + size, position, topic_id, queue_id, queue_offset, unit)
        self.dispatch.expect(queued)
        self.index.expect(position, size, topic_id, stamp.wall_ms, properties)
        self._appended(size)
        return queue_offset

    def put_copies(self, copies: Sequence[MessageCopy], stamp: Stamp) -> list[PendingUnit]:
        """`put_message` of many in one step; returns where they are."""
        log, index, confirmed = self._log, self.index, self._commit.confirmed
        units, size = put_copies(log, self.dispatch, index, copies, stamp, confirmed)
        self._appended(size, records=len(units))
        return units

    def relocate(self, body: LiveBody) -> None:
        """Append a live body again at the tail, under its old identity (retention).

        ColdRead, with nothing changed, instead of a wait for the disk.
        """
        stamp, confirmed = self.stamp(), self._commit.confirmed
        moved = put_moved(self._log, self.index, self.reader, body, stamp, confirmed)
        if moved is not None:
            self._appended(moved.unit.size)
            self._listener.on_relocated(moved)

    def put_record(self, kind: RecordKind, *, topic_id: int, queue_id: int, body: bytes) -> int:
        """Append a system record; a topic id of 0 belongs to no queue. Returns its log time."""
        stamp = self.stamp()
        queue_offset = self.dispatch.next_offset(topic_id, queue_id) if topic_id else 0
        size = HEADER_SIZE + len(body)
        position = self._log.make_room(size, stamp)
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
            queued = PendingUnit(position + size, position, topic_id, queue_id, queue_offset, unit)
            self.dispatch.expect(queued)
        self._appended(size)
        return stamp.log_ms

    def when_log_confirmed(self, *callbacks: Callable[[], None]) -> None:
        """Run them once everything appended so far is confirmed; at once if it is."""
        self._commit.when_log_confirmed(*callbacks)

    def schedule_commit(self) -> None:
        """Something will be appended in `before_batch`."""
        self._commit.schedule_flush()

    # -- read

    def add_topic(self, topic_id: int, folder_name: str, *, unit_size: int = UNIT_SIZE) -> None:
        room = "consumequeue" if unit_size == UNIT_SIZE else "system"
        # A retry topic's name may be longer than a file system takes; the id tells them apart.
        folder = f"{self._folder}/{room}/{folder_name[:100]}@{topic_id}"
        self.dispatch.add_topic(topic_id, folder, unit_size)

    def queue(self, topic_id: int, queue_id: int) -> ConsumeQueue:
        return self.dispatch.queue(topic_id, queue_id)

    # -- steps

    def step(self) -> int:
        """A checkpoint when one is due, a piece of a snapshot. Returns how much was done."""
        if self._commit.failed:
            return 0
        now_ms = self._clock.boot_ms()
        self._commit.step()
        if self.dispatch.is_behind:
            self._advance(self.confirmed)
        done = self.guard.step(now_ms)
        if self.slave is not None and not self.slave.vouch_for_less():
            return done
        done += self._index_keeper.step(now_ms=now_ms, requested=self.snapshots.wanted_checkpoint)
        self.guard.index_blocked = self._index_keeper.blocked
        safe = min(self.confirmed, self.checkpoints.position)
        if self.slave is not None:
            if not self._index_keeper.blocked:
                done += self.slave.step()
            return done + self.slave.run_housekeeping(now_ms=now_ms, safe=safe)
        done += self.snapshots.step(self._snapshot_head, safe_position=safe)
        return done + self.retention.step(
            now_ms=now_ms,
            confirmed=self.confirmed,
            # With the record that ends at the older snapshot: it says whose snapshot it is.
            keep_from=min(safe, self.snapshots.older_position - 1),
        )

    # -- inside

    def _recovery(self) -> Recovery:
        self.stopped_cleanly = not self._disk.exists(f"{self._folder}/{ABORT}")
        tables, lower = self.snapshots.tables, self.checkpoints.lower
        return Recovery(
            self._disk, self._folder, self._log, self.dispatch, self.index, tables, lower
        )

    def _recovered(self, replayed: RecoveryResult) -> None:
        """The log's end is found: nothing stands behind it, and what stands before is synced."""
        self.metrics.recovered(replayed.records, EpochLogTime(replayed.epoch, replayed.log_ms))
        self.metrics.torn_bytes = self._log.truncate_torn_tail()
        self._log.reallocate()
        if not self.stopped_cleanly:
            self._log.rewrite_from(self._checkpoint.vouched)
        self._log.sync()  # what only the page cache kept does not count yet
        self.epoch = max(replayed.epoch, self._checkpoint.epoch)
        self.snapshots.load()
        self.snapshots.position = replayed.snapshot_position
        self._commit.durable = self._log.end

    def _appended(self, size: int, *, records: int = 1) -> None:
        self.metrics.records += records
        self.metrics.bytes += size
        self._commit.schedule_flush()

    def _on_disk(self, durable: int) -> None:
        self.replicas.trim_tail()
        if self._node is not None:
            self._node.on_durable(durable)
        elif self.slave is None:  # a slave learns from its master what is confirmed
            self.confirm(durable)

    def _advance(self, confirmed: int) -> None:
        if self.slave is not None:
            self._commit.release()
            return
        grown = self.dispatch.advance(confirmed)
        self.index.advance(confirmed)
        self._commit.release()
        if grown:
            self._listener.on_dispatched(grown)

    def _on_block(self, block: LogBlock) -> None:
        if self.slave is not None:
            self.slave.apply.add_block(block)

    def _before_truncate(self, position: int) -> None:
        if self.slave is not None:
            self.slave.apply.truncate(position)

    def _on_mark(self, record: ScannedRecord) -> None:
        assert self.slave is not None, "only a slave applies what a master has marked"
        self.slave.marked(record)

    def _on_tail_lost(self, position: int, proof: int) -> None:
        if self._node is not None:
            self._node.on_tail_lost(position, proof)

    def _on_compared(self, compared: Compared) -> None:
        if self._node is not None:
            self._node.on_tables_compared(compared)

    def _on_snapshot_made(self, position: int, state_hash: int) -> None:
        if self.slave is not None:
            self.slave.hashes.add_own(position, state_hash)
        else:
            self._listener.on_snapshot_made(position, state_hash)

    def _snapshot_head(self) -> SnapshotHeader:
        if self.slave is not None:
            return self.slave.head()
        log, wall_ms = self._log, self._clock.wall_ms()
        return SnapshotHeader(log.end, self.epoch, self.log_ms(), wall_ms, log.last_position)
