"""Recovery: the newest good snapshot, then the log behind it (docs/concepts/store.md).

Index files are trusted up to the checkpoint only.  When a queue holds fewer units than the
snapshot says, the index is rebuilt from the whole log; the tables still come from the snapshot.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from popmq.broker.index.key_index import KeyIndex
from popmq.broker.log.commit_log import CommitLog, ScannedRecord
from popmq.broker.log.dispatch import Dispatch, PendingUnit
from popmq.broker.log.queue_unit import index_unit
from popmq.broker.log.snapshot_table import SnapshotTable
from popmq.broker.log.store_checkpoint import StoreCheckpoint
from popmq.broker.persistence.abort_file import has_abort, own_from_epoch
from popmq.broker.persistence.log_time import RecoveryResult
from popmq.broker.persistence.snapshot import (
    Snapshot,
    SnapshotHeader,
    read_snapshot,
    snapshot_names,
)
from popmq.common.disk import Disk
from popmq.common.errors import StoreDamaged
from popmq.common.record.message import RecordKind, peek_message

logger = logging.getLogger(__name__)

ApplyRecord = Callable[[ScannedRecord], None]


@dataclass(frozen=True, slots=True)
class SlaveRecoveryResult:
    """Where a slave's tables begin to follow its log."""

    begin: int  # first record that has to be entered into queues or key index
    apply_from: int  # and into the tables
    confirmed: int  # all below is known to be confirmed
    passed: RecoveryResult


# The position of the first record that is lost, and that of one behind it which shows that.
OnTailLost = Callable[[int, int], None]


class Recovery:
    def __init__(
        self,
        disk: Disk,
        folder: str,
        log: CommitLog,
        dispatch: Dispatch,
        index: KeyIndex,
        tables: Sequence[SnapshotTable],
        lower_checkpoint: Callable[[], None],
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._log = log
        self._dispatch = dispatch
        self._index = index
        self._tables = tables
        self._lower_checkpoint = lower_checkpoint

    def replay(self, apply: ApplyRecord, trusted: StoreCheckpoint) -> RecoveryResult:
        """Restore the tables and enter every record; `apply` sees those behind the snapshot.

        Raises StoreDamaged, with the log unchanged, when records are missing below the
        position that the checkpoint vouches for.
        """
        done = RecoveryResult(own_from=own_from_epoch(self._disk, self._folder))
        snapshot = self._load_snapshot()
        if snapshot is not None:
            done.begin(snapshot)
        lowered = False
        start = min(self._first_to_enter(done), self._index.covered)
        for record in self._log.scan(max(start, self._log.start)):
            header = record.header
            if header.position >= done.snapshot_position:
                apply(record)
                done.passed(header)
            unit = queued(record, self._dispatch)
            if unit is not None:
                self._dispatch.append_unit(unit)
            if self._dispatch.rewrites_vouched and not lowered:
                # Units that the checkpoint vouches for are written anew: until they are synced
                # it must not, or holes of a crash in between would pass for units.
                self._lower_checkpoint()
                lowered = True
            self._dispatch.flush_large_tails()
            self._index.enter(record)
            self._index.spill()
            done.records += 1
        if done.rebuilt_index:
            self._dispatch.rebuilt()
        self._check_end(max(trusted.vouched, done.snapshot_position))
        if self._index.truncate(self._log.end):
            for record in self._log.scan(self._index.covered):
                self._index.enter(record)
                self._index.spill()
        return done

    def follow(
        self, trusted: StoreCheckpoint, known: int, on_tail_lost: OnTailLost
    ) -> SlaveRecoveryResult:
        """Restore the tables and find the log's end; what is between is for SlaveApply.

        The record at `known` was confirmed once, says an index.  Raises StoreDamaged when what
        the checkpoint vouches for is missing, and tells `on_tail_lost` before a tail goes of which
        the master said that it was confirmed.
        """
        done = RecoveryResult()
        if has_abort(self._disk, self._folder):
            done.own_from = own_from_epoch(self._disk, self._folder)
        snapshot = self._load_snapshot()
        if snapshot is not None:
            done.begin(snapshot)
        begin = self._first_to_enter(done)
        for _ in self._log.scan(max(done.snapshot_position, self._log.start)):
            done.records += 1
        vouched = max(trusted.vouched, done.snapshot_position)
        self._check_end(vouched)
        lost = self._log.durable_beyond(self._log.end)
        if lost is not None:
            on_tail_lost(self._log.end, lost)
        self._index.truncate(self._log.end)
        confirmed = max(vouched, self._log.position_after(self._index.covered))
        last = self._log.record_at(known) if known < self._log.end else None
        if last is not None:
            confirmed = max(confirmed, self._log.position_after(last.end))
        begin = max(min(begin, self._index.covered), self._log.start)
        return SlaveRecoveryResult(begin, done.snapshot_position, confirmed, done)

    def _first_to_enter(self, done: RecoveryResult) -> int:
        """Behind the snapshot; or the log's start, when the queues have less than it knows of."""
        start = done.snapshot_position
        if start and not self._dispatch.covers_restored():
            done.rebuilt_index = self._dispatch.rebuilding = True
            start = self._log.start
        return start

    def _check_end(self, vouched: int) -> None:
        """What stands behind a torn tail was never confirmed; behind damage it may have been."""
        if self._log.end < vouched:
            raise StoreDamaged(
                f"{self._log.path_of(self._log.end)}: no intact record at position "
                f"{self._log.end}, but everything below {vouched} was durable: the file was "
                f"damaged. Look with `popmq doctor --data {self._folder}`, or restore the folder "
                "from a copy"
            )
        own = own_from_epoch(self._disk, self._folder)
        proof = self._log.durable_beyond(self._log.end, from_epoch=own)
        if proof is not None:
            raise StoreDamaged(
                f"{self._log.path_of(self._log.end)}: the record at position {self._log.end} is "
                f"damaged, and the one at {proof} shows that it was durable. Look with "
                f"`popmq doctor --data {self._folder}`, or restore the folder from a copy"
            )

    def _load_snapshot(self) -> SnapshotHeader | None:
        folder = f"{self._folder}/snapshot"
        for name in reversed(snapshot_names(self._disk, folder)):
            snapshot = read_snapshot(self._disk, f"{folder}/{name}")
            if snapshot is None or not self._belongs_to_log(snapshot):
                logger.warning("snapshot not used", extra={"path": f"{folder}/{name}"})
                continue
            by_number = {table.table_number: table for table in self._tables}
            for number, content in snapshot.pieces():
                if number in by_number:
                    by_number[number].restore(content)
            for table in self._tables:
                table.restored()
            return snapshot.head
        if self._log.start > 0:
            raise StoreDamaged(
                f"{folder}: no snapshot can be read, and the log begins at {self._log.start}: "
                "what was before is known to snapshots only. Restore the folder from a copy"
            )
        return None

    def _belongs_to_log(self, snapshot: Snapshot) -> bool:
        head = snapshot.head
        if head.position == 0:
            return True
        last = self._log.record_at(head.last_position)
        if last is None or last.epoch != head.epoch:
            return False
        return head.position in (last.end, self._log.position_after(last.end))


def queued(record: ScannedRecord, dispatch: Dispatch) -> PendingUnit | None:
    """The record's place in its queue, and its unit; None when it belongs into none."""
    header = record.header
    if header.kind == RecordKind.MOVED or not dispatch.has_topic(header.topic_id):
        return None
    if header.kind == RecordKind.REVIVE:
        unit = record.data
    else:
        is_message = header.kind == RecordKind.MESSAGE
        tag_hash = peek_message(record.data)[0] if is_message else 0
        unit = index_unit(header.position, header.size, tag_hash)
    return PendingUnit(
        header.end,
        header.position,
        header.topic_id,
        header.queue_id,
        header.queue_offset,
        unit,
    )
