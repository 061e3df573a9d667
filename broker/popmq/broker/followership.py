"""Followership: a broker as a slave: of whom, how far behind, and what it was told of timers."""

from collections.abc import Callable

from popmq.broker.broker import Broker
from popmq.broker.ha.copying import Copying
from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.master_side import NEAR_BLOCKS
from popmq.broker.ha.role import GroupRecord, Role, TimersHeard
from popmq.broker.ha.slave_side import SlaveSide
from popmq.broker.ha.snapshot_copy import SnapshotCopy
from popmq.broker.store.store_metrics import Lived
from popmq.common.config import Settings
from popmq.common.hop import Port
from popmq.common.replication import MasterTimers


class Followership:
    """`begin` for each life of the broker, then `follow`.

    `on_rebuild` hears why this store is of no use, `on_broken` of a rule that was broken.
    """

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        epochs: EpochFile,
        *,
        open_port: Callable[[str], Port],
        now_ms: Callable[[], int],
        on_rebuild: Callable[[str], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        self.side: SlaveSide | None = None
        self.copying = Copying(NEAR_BLOCKS * settings.replication.fetch_bytes)
        self.timers: TimersHeard | None = None  # newest, of any master of this group
        self._settings = settings
        self._broker: Broker
        self._snapshot: SnapshotCopy
        self._identity = identity
        self._epochs = epochs
        self._open_port = open_port
        self._now_ms = now_ms
        self._on_rebuild = on_rebuild
        self._on_broken = on_broken
        self._leader_at = ""
        self.diverged = 0  # tables that were not the master's
        self._truncations = self._truncated_bytes = 0  # of followings that are over

    def begin(self, broker: Broker) -> None:
        """`broker` stands on the disk now, and nothing of the last one is left."""
        self._broker = broker
        self._snapshot = SnapshotCopy(broker.following.begin_install)
        broker.store.log_time.epoch_starts = lambda: self._epochs.starts
        slave = broker.store.slave
        assert slave is not None
        slave.hashes.on_diverged = self._on_diverged

    def _on_diverged(self, position: int) -> None:
        self.diverged += 1
        self._on_rebuild(f"its tables are not the master's at {position}")

    def follow(self, record: GroupRecord, address: str, *, is_new: bool) -> None:
        """The record names another leader, at `address` if that is known; `is_new`: its epoch."""
        # Two controllers may know two addresses; the one that works is right.
        works = self.side is not None and self.side.following
        if is_new or (address and address != self._leader_at and not works):
            self.stop()
        if self.side is not None:
            self.side.members = record.members
        elif address:
            self._leader_at = address
            self.side = self._new_side(record, address)

    def stop(self) -> None:
        if self.side is not None:
            self.side.stop()
            self._truncations += self.side.truncations
            self._truncated_bytes += self.side.truncated_bytes
            self.side = None

    def step(self) -> int:
        done = self._broker.step()
        return done + self.side.step() if self.side is not None else done

    @property
    def role(self) -> Role:
        return Role.COPYING if self.copying.active or self._identity.copying else Role.SLAVE

    @property
    def is_cutting(self) -> bool:
        """Nothing may be begun with the log before that is over."""
        return self.side is not None and self.side.cutting

    @property
    def truncations(self) -> int:
        return self._truncations + (self.side.truncations if self.side else 0)

    @property
    def truncated_bytes(self) -> int:
        return self._truncated_bytes + (self.side.truncated_bytes if self.side else 0)

    @property
    def behind_bytes(self) -> int:
        """Of the master's log, as far as it said."""
        return max(0, self.side.master_end - self._broker.store.end) if self.side else 0

    def hear_timers(self, heard: TimersHeard) -> None:
        """Of a master, by itself or by way of a controller. The freshest is where a promoted
        slave's wheel goes on; what was fired, the log says (D9)."""
        if heard.is_newer_than(self.timers):
            self.timers = heard
            if self._broker.store.slave is not None:
                timers = self._broker.timers.service
                timers.hear_master(heard.last_read_ms, heard.queue_offset)

    def _told_timers(self, told: MasterTimers) -> None:
        now_ms, following = self._now_ms(), self._broker.following
        following.master_lived = max(following.master_lived, Lived(told.epoch, told.log_ms))
        if told.log_ms:
            self._broker.store.log_clock.sample(told.log_ms, epoch=told.epoch)
        self.hear_timers(TimersHeard(told.epoch, told.last_read_ms, told.queue_offset, now_ms))

    def _new_side(self, record: GroupRecord, address: str) -> SlaveSide:
        broker = self._broker
        return SlaveSide(
            broker.store,
            self._identity,
            self._epochs,
            self._open_port(address),
            self._settings.replication,
            node=self._settings.node,
            members=record.members,
            log_id=lambda: broker.registry.log_id,
            timer_sync_ms=self._settings.timer.checkpoint_sync_ms,
            now_ms=self._now_ms,
            on_rebuild=self._on_rebuild,
            on_broken=self._on_broken,
            on_timers=self._told_timers,
            copying=self.copying,
            snapshot=self._snapshot,
        )
