"""A broker as a slave: its master, how far behind it is, and what it knows of
timers."""

from collections.abc import Callable

from popmq.broker.core.broker import Broker
from popmq.broker.ha.catch_up_progress import CatchUpProgress
from popmq.broker.ha.differing_snapshots import DifferingSnapshots
from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.replication_client import Phase, ReplicationClient
from popmq.broker.ha.replication_server import NEAR_BLOCKS
from popmq.broker.ha.role import BrokerRole
from popmq.broker.ha.snapshot_download import SnapshotDownload
from popmq.broker.ha.tables_check import FILE_NAME as DIVERGENCE
from popmq.broker.ha.tables_check import RebuildWish, TablesCheck
from popmq.broker.log.store_metrics import EpochLogTime
from popmq.common.disk import Disk
from popmq.common.protocol.group_record import GroupRecord, TimerCheckPoint
from popmq.common.protocol.messaging_payloads import Port
from popmq.common.protocol.replication_payloads import MasterTimers, TablesMark
from popmq.common.settings.settings import Settings

COPY_AGAIN_MS = 1_000  # from the begin of a copy that was of no use to the next one


class SlaveRole:
    """`begin` for each life of the broker, then `follow`.

    `rebuild_wish` says why this store should be rebuilt; `on_broken` hears of a rule that was
    broken.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        epochs: EpochFile,
        *,
        disk: Disk,
        open_port: Callable[[str], Port],
        now_ms: Callable[[], int],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self.replication_client: ReplicationClient | None = None
        self.copying = CatchUpProgress(NEAR_BLOCKS * settings.replication.fetch_bytes)
        self.timers: TimerCheckPoint | None = None  # newest, of any master of this group
        self._settings = settings
        self._broker: Broker
        self._began_ms: int  # the life of that broker
        self._snapshot: SnapshotDownload
        self._identity = identity
        self._epochs = epochs
        self._open_port = open_port
        self._now_ms = now_ms
        self._on_broken = on_broken
        self._leader_at = ""
        path = f"{settings.broker.data}/{DIVERGENCE}"
        self.tables = TablesCheck(disk, path, lambda: identity.epoch, copying=identity.copying)
        # Whether the controller that answered last grants rebuilds; None: none has answered yet.
        self._controller_grants: bool | None = None
        self._granted = ("", 0, 0)  # a store, and epoch and version of the record it rests on
        self._disk = disk
        self._differing: DifferingSnapshots | None = None
        self._useless = ""  # why the log cannot be brought to this master's
        self._truncations = self._truncated_bytes = 0  # of followings that are over

    def begin(self, broker: Broker) -> None:
        """`broker` stands on the disk now, and nothing of the last one is left."""
        self._broker = broker
        self._began_ms = self._now_ms()
        self._snapshot = SnapshotDownload(broker.records.slave_lifecycle.begin_install)
        self._differing = DifferingSnapshots(
            self._disk, self._settings.broker.data, broker.store.readers
        )

    @property
    def rebuild_wish(self) -> RebuildWish | None:
        if self._useless:
            return RebuildWish(self._useless, because_of_tables=False)
        position = self.tables.known.differs_at
        kept = self._differing is not None and self._differing.settled(position)
        if not self.tables.wants_rebuild or not kept:
            return None
        reason = f"its tables are not the master's at {position}"
        return RebuildWish(reason, because_of_tables=True)

    def hear_grant(self, *, grants: bool, store_id: str, record: GroupRecord | None) -> None:
        """A controller answered: whether it grants rebuilds at all, that of which store, and by
        which record."""
        self._controller_grants = grants
        self._granted = (store_id, record.epoch, record.version) if record else ("", 0, 0)

    def allowed_rebuild(self, record: GroupRecord | None) -> RebuildWish | None:
        """The rebuild that may begin now, if there is one; `record` is the newest that was read."""
        wish, own_id = self.rebuild_wish, self._identity.store_id
        if wish is None or self._identity.copying or not self._broker.store.end:
            # What is here is no copy, or no whole one: nothing is lost with it.
            return wish if self._now_ms() - self._began_ms >= COPY_AGAIN_MS else None
        if wish.because_of_tables and (record is None or own_id in record.sync_state_set):
            return None
        if self._controller_grants is None:
            return None  # a controller of this version may refuse
        if self._controller_grants:
            known = (own_id, record.epoch, record.version) if record is not None else None
            return wish if self._granted == known else None
        return None if wish.because_of_tables else wish  # an older one knows of no grant

    # -- what its client asks and says (FollowingBroker)

    @property
    def log_id(self) -> str:
        return self._broker.registry.log_id

    @property
    def tables_mark(self) -> TablesMark:
        return self.tables.mark

    def on_useless_log(self, reason: str) -> None:
        self._useless = reason

    def on_broken(self, broken: BaseException) -> None:
        self._on_broken(broken)

    def on_timers(self, timers: MasterTimers) -> None:
        now_ms, following = self._now_ms(), self._broker.records.slave_lifecycle
        lived = EpochLogTime(timers.epoch, timers.log_ms)
        following.master_lived = max(following.master_lived, lived)
        if timers.log_ms:
            self._broker.store.log_clock.sample(timers.log_ms, epoch=timers.epoch)
        self.on_timer_check_point(
            TimerCheckPoint(timers.epoch, timers.queue_offset, timers.last_read_ms, now_ms)
        )

    # -- orders

    def follow(self, record: GroupRecord, address: str, *, is_new: bool) -> None:
        """The record names another leader, at `address` if that is known; `is_new`: its epoch."""
        # Two controllers may know two addresses; the one that works is right.
        works = (
            self.replication_client is not None and self.replication_client.phase is Phase.FOLLOWING
        )
        if is_new:
            self._granted = ("", 0, 0)
        if is_new or (address and address != self._leader_at and not works):
            self.stop()
        if self.replication_client is not None:
            self.replication_client.members = frozenset(record.sync_state_set)
        elif address:
            self._leader_at = address
            self.replication_client = ReplicationClient(
                self._broker.store,
                self._identity,
                self._epochs,
                self._open_port(address),
                self._settings,
                self,
                members=frozenset(record.sync_state_set),
                now_ms=self._now_ms,
                snapshot=self._snapshot,
            )

    def stop(self) -> None:
        if self.replication_client is not None:
            self.replication_client.stop()
            self._truncations += self.replication_client.truncations
            self._truncated_bytes += self.replication_client.truncated_bytes
            self.replication_client = None
        self._useless = ""  # the next master may have what this one lacks

    def step(self) -> int:
        done = self._broker.step()
        if self.tables.differs_now and self._differing is not None:
            self._differing.step(self.tables.known.differs_at, self.replication_client)
        return (
            done + self.replication_client.step() if self.replication_client is not None else done
        )

    @property
    def role(self) -> BrokerRole:
        return (
            BrokerRole.COPYING
            if self.copying.active or self._identity.copying
            else BrokerRole.SLAVE
        )

    @property
    def is_cutting(self) -> bool:
        """Nothing may be begun with the log before that is over."""
        return self.replication_client is not None and self.replication_client.cutting

    @property
    def truncations(self) -> int:
        return self._truncations + (
            self.replication_client.truncations if self.replication_client else 0
        )

    @property
    def truncated_bytes(self) -> int:
        return self._truncated_bytes + (
            self.replication_client.truncated_bytes if self.replication_client else 0
        )

    @property
    def behind_bytes(self) -> int:
        """Of the master's log, as far as it said."""
        return (
            max(0, self.replication_client.master_end - self._broker.store.end)
            if self.replication_client
            else 0
        )

    def on_timer_check_point(self, timers_heard: TimerCheckPoint) -> None:
        """Of a master, by itself or by way of a controller. The freshest is where a promoted
        slave's wheel goes on; what was fired, the log says (D9)."""
        if timers_heard.is_newer_than(self.timers):
            self.timers = timers_heard
            if self._broker.store.slave is not None:
                timers = self._broker.timers.service
                timers.on_master_check_point(timers_heard.last_read_ms, timers_heard.queue_offset)

    def newest_timers(self, broker: Broker, *, leads: bool) -> TimerCheckPoint | None:
        """The newest TimerCheckPoint that is known; of a broker that leads its own, as of now."""
        if not leads:
            return self.timers
        cursors = broker.timers.service.cursors()
        epoch, now_ms = self._identity.epoch, self._now_ms()
        return TimerCheckPoint(epoch, cursors.queue_offset, cursors.last_read_ms, now_ms)
