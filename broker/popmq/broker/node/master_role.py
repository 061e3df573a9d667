"""MasterRole: a broker as master of one epoch, from its promotion to its resignation (R11 to R17).

Clients are admitted when everything before this epoch is confirmed, and sends only while enough
replicas are in sync to confirm them.  During a hand-over no client is admitted.
"""

import logging
from collections.abc import Callable

from popmq.broker.core.broker import Broker
from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.hand_over import MasterHandOver
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.replication_server import ReplicationServer
from popmq.broker.ha.role import BrokerRole
from popmq.broker.ha.snapshot_source import SnapshotSource
from popmq.broker.ha.status import SlaveStatus
from popmq.broker.ha.sync_state import SyncState
from popmq.broker.ha.sync_state_set_updater import SyncStateSetOwner
from popmq.broker.handlers.server import BrokerServer
from popmq.broker.node.gate import Gate
from popmq.common.errors import Code, NotMaster, Refused, TooManyRequests, Unavailable
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import OnReply
from popmq.common.protocol.replication_payloads import MasterTimers
from popmq.common.wire.controller_pb2 import HandOverRequest

logger = logging.getLogger(__name__)


class MasterRole:
    """Call `start`, then `step` until `resign`. `become` is called with each new role."""

    def __init__(
        self,
        broker: Broker,
        identity: Identity,
        epochs: EpochFile,
        gate: Gate,
        record: GroupRecord,
        *,
        controllers: SyncStateSetOwner,
        become: Callable[[BrokerRole], None],
        now_ms: Callable[[], int],
    ) -> None:
        """The epoch keeps the whole local log: it has every acknowledged record (R11)."""
        self.role = BrokerRole.OPENING
        self._settings = settings = broker.settings
        self._broker = broker
        self._store = store = broker.store
        self._gate = gate
        self._become = become
        self._now_ms = now_ms
        self._short = ""  # why sends are refused now; empty: they are admitted
        self._hand_over: MasterHandOver | None = None
        self.epoch = record.epoch
        self.epoch_start = store.end
        sync = SyncState(
            identity.store_id,
            epoch=record.epoch,
            epoch_start=store.end,
            members=frozenset(record.sync_state_set),
            version=record.version,
            min_in_sync=settings.replication.effective_min_in_sync,
            confirmed=store.confirmed,
        )
        epochs.append(record.epoch, store.end)  # on disk before the first record (R6, R12)
        self.replication_server = ReplicationServer(
            store,
            sync,
            epochs,
            SnapshotSource(broker.disk, settings.broker.data, store.readers),
            settings.replication,
            self,
            controllers=controllers,
            now_ms=now_ms,
            rng=broker.rng,
        )
        self.server = BrokerServer(broker, self.replication_server.received)

    def start(self) -> None:
        """Write the first record of the epoch and admit slaves; `_opened` admits clients."""
        # The timers continue from the last master's TimerCheckPoint, which has this wall time.
        read_ms = self._broker.timers.service.masters_read_ms
        logger.info(
            "leading",
            extra={
                "epoch": self.epoch,
                "start_position": self.epoch_start,
                "timers_read_ms": read_ms,
            },
        )
        self._gate.slaves.open(self.replication_server)
        self._broker.records.slave_lifecycle.promote(self.epoch, self._opened)
        self.replication_server.durable(self._store.durable)

    def step(self) -> int:
        """During a hand-over only replication runs: new records would delay the hand-over."""
        done = self._broker.step() if self.role is not BrokerRole.HANDING_OVER else 0
        done += self.replication_server.step()
        self._short = self._shortage()
        if self._hand_over is not None and self._hand_over.step(self._now_ms()):
            self._hand_over = None
            logger.warning("the hand-over failed, serving again")
            self._serve()
        return done

    def resign(self, reason: str) -> None:
        """Another broker is master: replies that depend on unconfirmed records are not sent."""
        self._gate.closed_reason = reason
        self._gate.clients.close()
        self._broker.polling.answer_all_empty()
        self.server.end()
        if self._hand_over is not None:
            self._hand_over.give_up(reason)
        self.replication_server.stop()
        self._gate.slaves.detach()
        self._gate.clients.detach()

    def hand_over(self, request: HandOverRequest, on_reply: OnReply) -> None:
        """Admit no clients until another epoch begins or the time is over."""
        own_id = self.replication_server.sync.own_id
        if self.role is not BrokerRole.MASTER or (request.epoch, request.leader) != (
            self.epoch,
            own_id,
        ):
            raise NotMaster(f"this is not the serving master of epoch {request.epoch}")
        successor = self.replication_server.followers.get(request.to)
        if successor is None or request.to not in self.replication_server.sync.members:
            raise Refused(
                Code.PRECONDITION_FAILED, f"store {request.to[:32]} is not in the SyncStateSet"
            )
        self._change(BrokerRole.HANDING_OVER)
        self._gate.closed_reason = (
            f"{self._settings.broker.name} is being handed over to {successor.node}"
        )
        self._gate.clients.close()
        self._broker.buffer.write_all()
        limit_ms = self._settings.replication.hand_over_ms
        until_ms = self._now_ms() + min(request.wait_ms or limit_ms, limit_ms)
        self._hand_over = MasterHandOver(
            self._store, successor, until_ms=until_ms, on_reply=on_reply
        )

    @property
    def log_id(self) -> str:
        return self._broker.registry.log_id

    def timer_check_point(self) -> MasterTimers:
        cursors = self._broker.timers.service.cursors()
        return MasterTimers(self.epoch, cursors.last_read_ms, cursors.queue_offset, cursors.log_ms)

    def slaves(self) -> tuple[SlaveStatus, ...]:
        """One status for each node: that of the store seen last. `followers` has old stores too."""
        members, now_ms = self.replication_server.sync.members, self._now_ms()
        by_last_seen = sorted(
            self.replication_server.followers.values(), key=lambda progress: progress.last_seen_ms
        )
        newest = {progress.node: progress for progress in by_last_seen}
        return tuple(
            SlaveStatus(
                progress.store_id,
                progress.node,
                progress.acked,
                progress.store_id in members,
                now_ms - progress.last_seen_ms,
            )
            for progress in newest.values()
        )

    def _opened(self) -> None:
        """Everything before this epoch is confirmed, so what clients saw is visible again (R14)."""
        self._serve()
        logger.info("master", extra={"epoch": self.epoch, "end_bytes": self._store.end})

    def _serve(self) -> None:
        self._gate.open_clients(
            self.server, self._admit, self.replication_server.check_signing_keys
        )
        self._change(BrokerRole.MASTER)

    def _change(self, role: BrokerRole) -> None:
        self.role = role
        self._become(role)

    def _shortage(self) -> str:
        """Why a send could not be confirmed now, or "". Fewer replicas never confirm it (D2)."""
        least = self._settings.replication.effective_min_in_sync
        reachable = self.replication_server.keeper.reachable_members(self._now_ms())
        if reachable >= least and self.replication_server.sync.has_quorum:
            return ""
        return (
            f"{min(reachable, len(self.replication_server.sync.members))} replicas of "
            f"{self._settings.broker.name} are in sync, {least} are required "
            "(replication.min_in_sync): try again"
        )

    def _admit(self) -> None:
        if self._short:
            raise Unavailable(self._short)
        waiting, limit = self._store.end - self._store.confirmed, self._settings.store
        if waiting > limit.max_pending_bytes:
            raise TooManyRequests(
                f"{waiting} bytes wait for replicas, the limit is {limit.max_pending_bytes} "
                "(store.max_pending_bytes); try again"
            )
