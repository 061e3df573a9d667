"""SlaveStore: what a store does while its log follows another one's (docs/concepts/store.md).

Blocks in, records applied, snapshots where the master makes its own, segments deleted when the
master says so.  Nothing here appends a record.
"""

from collections.abc import Callable

from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.log.commit_log import ScannedRecord
from popmq.broker.log.disk_guard import DiskGuard
from popmq.broker.log.log_block import LogBlock
from popmq.broker.persistence.retention import EVERYTHING, Retention
from popmq.broker.persistence.snapshot import SnapshotHeader
from popmq.broker.persistence.snapshot_install import SnapshotInstall
from popmq.broker.persistence.snapshot_scheduler import SnapshotScheduler
from popmq.broker.persistence.state_hashes import Compared, StateHashes
from popmq.broker.store.replica_log import ReplicaLog
from popmq.broker.store.replica_records import LogStart, StateHash
from popmq.broker.store.slave_applier import SlaveApplier
from popmq.common.disk import ColdRead, suppress_shortage
from popmq.common.record.message import HEADER_SIZE, RecordKind
from popmq.common.step_loop import Flusher

APPLY_LIMIT = 512  # records of one step


class SlaveStore:
    def __init__(
        self,
        apply: SlaveApplier,
        log: ReplicaLog,
        snapshots: SnapshotScheduler,
        retention: Retention,
        guard: DiskGuard,
        readers: Flusher,
        on_compared: Callable[[Compared], None],
        keep_from: Callable[[], int] | None = None,
    ) -> None:
        """What is not in memory is read by `readers`, which may wait; nothing from `keep_from` on
        may be deleted yet, says who reads beside the tables."""
        self.apply = apply
        self.hashes = StateHashes(on_compared)
        self._snapshots = snapshots
        self._retention = retention
        self._guard = guard
        self._log = log
        self._cold = ColdReadRetry(readers)
        self._publishing = False
        self.install: SnapshotInstall | None = None
        self._starts_at = 0  # where the master's log begins, as far as records say
        self._keep_from = keep_from or (lambda: EVERYTHING)

    @property
    def applied(self) -> int:
        """Everything below this position is in the tables."""
        return self.apply.applied

    def append_block(self, position: int, data: bytes) -> LogBlock:
        """Take a master's records at this log's end (`ReplicaLog.append_block`).

        TooManyRequests, with nothing changed, while the disk is full.
        """
        self._guard.check_block(len(data))
        return self._log.append_block(position, data)

    def truncate(self, position: int, done: Callable[[], None]) -> None:
        """Remove what the master does not have, from `position` on; `done` when that is durable.

        A position below `applied` breaks a rule (R22).
        """
        self._log.truncate(position, known=self.applied, done=done)

    def begin_install(self, start: int) -> SnapshotInstall:
        """Into an empty store: give it the file of a master's snapshot, then `finish`.

        `start` is where the master's log begins; from there blocks come when that is done.
        """
        self.install = self.apply.install(self._snapshots, start)
        return self.install

    def step(self, limit: int = APPLY_LIMIT) -> int:
        """Apply some of what is confirmed; returns how many records."""
        if self._cold.waiting:
            return 0
        if self.install is not None and (done := self._install_some(self.install)):
            return done
        try:
            return self.apply.step(limit)
        except ColdRead as cold:
            self._cold.warm(cold)
            return 1

    def vouch_for_less(self) -> bool:
        """See `SlaveApplier.vouch_for_less`; False while the machine is short of something."""
        with suppress_shortage():
            self.apply.vouch_for_less()
            return True
        return False

    def run_housekeeping(self, *, now_ms: int, safe: int) -> int:
        """A piece of a snapshot, or of what retention has to do. `safe` is checkpointed."""
        done = self._snapshots.write_chunk(safe_position=safe)
        keep_from = min(safe, self._snapshots.older_position - 1, self._keep_from())
        return done + self._retention.run_as_slave(
            now_ms=now_ms, starts_at=self._starts_at, keep_from=keep_from
        )

    def head(self) -> SnapshotHeader:
        """Of a snapshot of the tables as they are."""
        passed = self.apply.passed
        return SnapshotHeader(
            self.applied, passed.epoch, passed.log_ms, passed.wall_ms, self.apply.last_position
        )

    # -- inside

    def _install_some(self, install: SnapshotInstall) -> int:
        """Tables first; then, once the log has come up to them, the snapshot's name."""
        apply = self.apply
        if not apply.unpublished or apply.applied < apply.apply_from or self._publishing:
            return install.step()
        self._publishing = True
        position = apply.apply_from

        def published() -> None:
            self._publishing, self.install, apply.unpublished = False, None, False
            self._snapshots.load()
            self._snapshots.position = position

        install.publish(position, published)
        return 1

    def marked(self, record: ScannedRecord) -> None:
        """A record by which replicas stay equal is applied (store/replica_records.py)."""
        body = record.data[HEADER_SIZE:]
        match record.header.kind:
            case RecordKind.SNAPSHOT_MARK:
                self._snapshots.start_at(self.head())
            case RecordKind.STATE_HASH:
                state_hash = StateHash.decode(body)
                self.hashes.add_masters(state_hash.position, state_hash.hash, record.header.epoch)
            case RecordKind.LOG_START:
                self._starts_at = max(self._starts_at, LogStart.decode(body).position)
