"""SlaveApplier: a slave's tables follow its log, up to what is confirmed and on its own disk.

The same records in the same order through the same code as at a recovery, in bounded steps.  The
invariant: nothing that a later `cut` could take away was ever applied (RULES R17, R22).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from popmq.broker.index.key_index import KeyIndex
from popmq.broker.log.commit_log import CommitLog, ScannedRecord
from popmq.broker.log.dispatch import Dispatch
from popmq.broker.log.group_commit import GroupCommit
from popmq.broker.log.log_block import LogBlock, whole_records
from popmq.broker.persistence.log_time import RecoveryResult
from popmq.broker.persistence.recovery import (
    ApplyRecord,
    SlaveRecoveryResult,
    queued,
)
from popmq.broker.persistence.snapshot import SnapshotHeader
from popmq.broker.persistence.snapshot_install import SnapshotInstall
from popmq.broker.persistence.snapshot_scheduler import SnapshotScheduler
from popmq.common.disk import suppress_shortage
from popmq.common.errors import StoreDamaged
from popmq.common.record.message import (
    HEADER_SIZE,
    BadRecord,
    Header,
    RecordKind,
    check_record,
    decode_header,
)

_READ_BYTES = 256 << 10


class SlaveApplier:
    """`applied` is where the next record begins that is not in the tables yet.

    Records below `apply_from` were in the tables from the start: they go to queues and key index
    only, which are built anew.
    """

    def __init__(
        self,
        log: CommitLog,
        commit: GroupCommit,
        dispatch: Dispatch,
        index: KeyIndex,
        apply: ApplyRecord,
        followed: SlaveRecoveryResult,
        lower_checkpoint: Callable[[], None],
        on_snapshot_mark: Callable[[ScannedRecord], None],
    ) -> None:
        self._log = log
        self._commit = commit
        self._dispatch = dispatch
        self._index = index
        self._apply = apply
        self._lower_checkpoint = lower_checkpoint
        self._blocks: deque[LogBlock] = deque()  # not applied, adjacent, up to the log's end
        self._kept_bytes = 0
        self._chunk, self._chunk_at, self._checked = b"", 0, False
        self._lowered = False
        self.unpublished = False  # the snapshot that it began with has no name yet
        self.keep_bytes = 16 << 20  # of what is not applied, in memory
        self.applied = followed.begin
        self.apply_from = followed.apply_from
        self.last_position = 0  # of the newest applied record
        self.passed = followed.passed
        self.records = 0
        # Hears of a record by which replicas stay equal, when it is applied (replica_records.py).
        self._on_snapshot_mark = on_snapshot_mark

    @property
    def bound(self) -> int:
        """What may be applied now: confirmed, and durable here (R17)."""
        return min(self._commit.confirmed, self._commit.durable)

    @property
    def rebuilding(self) -> bool:
        """Whether queues and key index still lack what the tables know of, or a start would find
        less than there is."""
        return self.applied < self.apply_from or self.unpublished

    def installed(self, head: SnapshotHeader, start: int) -> None:
        """The tables are a master's now; its log, from `start` on, is to come."""
        self.applied, self.apply_from = start, head.position
        self.passed = RecoveryResult()
        self.passed.begin(head)
        self.unpublished = True
        self._dispatch.rebuilding = True
        for _ in self._dispatch.log_starts_at(start):
            pass  # it has no queues yet
        self._dispatch.position = start
        self._index.close()
        self._index.load(start)
        self._commit.restarted(start)

    def install(self, snapshots: SnapshotScheduler, start: int) -> SnapshotInstall:
        """Begin with a master's snapshot, and its log from `start` on."""
        return SnapshotInstall(
            snapshots,
            self._log,
            self._commit,
            start=start,
            restored=lambda head: self.installed(head, start),
        )

    def add_block(self, block: LogBlock) -> None:
        """A block was appended: it waits here, so that nobody has to read it again."""
        self._blocks.append(block)
        self._kept_bytes += len(block.data)
        while self._kept_bytes > self.keep_bytes and self._blocks[0].end <= self._commit.durable:
            self._kept_bytes -= len(self._blocks.popleft().data)

    def truncate(self, position: int) -> None:
        """The log is cut at `position`, which is not below `applied`."""
        assert position >= self.applied, f"a cut at {position} below {self.applied}, applied"
        while self._blocks and self._blocks[-1].end > position:
            self._kept_bytes -= len(self._blocks.pop().data)
        self._chunk, self._chunk_at = b"", 0

    def step(self, limit: int) -> int:
        """Apply at most `limit` records; returns how many, fewer while a queue cannot be opened.
        ColdRead: call again when it is warm."""
        done, bound = 0, self.bound
        with suppress_shortage():
            self._end_rebuild()
            while done < limit and self.applied < bound:
                if self._chunk_at >= len(self._chunk):
                    self._read(bound)
                self._apply_one(self._next_header())
                done += 1
                self._end_rebuild()
        self._dispatch.position = self.applied
        return done

    def vouch_for_less(self) -> None:
        """Before units are written: where some below the checkpoint are written anew, it must not
        vouch for them until they are synced, or holes of a crash in between would pass for
        units."""
        if self._dispatch.rewrites_vouched and not self._lowered:
            self._lower_checkpoint()
            self._lowered = True

    def newest(self, end: int) -> RecoveryResult:
        """Epoch and times of the newest record below `end`, all of it durable."""
        recovery_result = replace(self.passed)
        at = self.applied
        while at < end:
            header = self._log.record_at(at)
            if header is None:
                raise StoreDamaged(
                    f"{self._log.path_of(at)}: no intact record at position {at}: "
                    "run `popmq doctor`"
                )
            if header.kind != RecordKind.PADDING:
                recovery_result.passed(header)
            at = self._log.position_after(header.end)
        return recovery_result

    # -- inside

    def _read(self, bound: int) -> None:
        blocks = self._blocks
        while blocks and blocks[0].end <= self.applied:
            self._kept_bytes -= len(blocks.popleft().data)
        self._chunk, self._chunk_at = b"", 0  # what is cold leaves nothing to go on with
        if blocks and blocks[0].position == self.applied:
            block = blocks.popleft()
            self._kept_bytes -= len(block.data)
            self._chunk, self._checked = block.data, True
            return
        until = min(bound, self._log.segment_end(self.applied))
        size = min(_READ_BYTES, until - self.applied)
        data = self._log.view_warm(self.applied, size)
        count = whole_records(data, size)
        if not count and len(data) >= HEADER_SIZE:  # a record larger than that
            size = min(int.from_bytes(data[:4], "big"), until - self.applied)
            data = self._log.view_warm(self.applied, size)
            count = whole_records(data, size)
        self._chunk, self._checked = bytes(data[:count]), False

    def _next_header(self) -> Header:
        at = self._chunk_at
        try:
            if self._checked:
                return decode_header(self._chunk, at)
            return check_record(self._chunk, at, self.applied)
        except BadRecord as error:
            raise StoreDamaged(
                f"{self._log.path_of(self.applied)}: the record at position {self.applied} is "
                f"damaged ({error}): run `popmq doctor`"
            ) from error

    def _apply_one(self, header: Header) -> None:
        if header.kind == RecordKind.PADDING:
            self._chunk_at += HEADER_SIZE
            self._passed(header)
            return
        data = self._chunk[self._chunk_at : self._chunk_at + header.size]
        record = ScannedRecord(header, data)
        if (unit := queued(record, self._dispatch)) is not None:
            self._dispatch.queue(unit.topic_id, unit.queue_id)  # before anything is changed
        if header.position >= self.apply_from:
            self._apply(record)  # a shortage in it has changed nothing
            self.passed.passed(header)
        self._chunk_at += header.size
        unit = queued(record, self._dispatch)
        if unit is not None:
            self._dispatch.append_unit(unit)
        self._index.enter(record)
        self.last_position = header.position
        self.records += 1
        self._passed(header)
        if header.kind >= RecordKind.SNAPSHOT_MARK and header.position >= self.apply_from:
            self._dispatch.position = self.applied
            self._on_snapshot_mark(record)

    def _passed(self, header: Header) -> None:
        self.applied = self._log.position_after(header.end)

    def _end_rebuild(self) -> None:
        if self._dispatch.rebuilding and self.applied >= self.apply_from:
            self._dispatch.rebuilt()
