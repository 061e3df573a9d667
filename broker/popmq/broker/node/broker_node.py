"""BrokerNode: one broker of a group through all its roles: alone, slave, master, and in between.

No asyncio and no threads: requests, orders and steps come in through methods, so that all of it
runs under virtual time too.  What the group's record says becomes a role (ha/role.py); a broker
without replicas is its own master and needs no orders.
"""

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial

from google.protobuf.message import DecodeError

from popmq.broker.core.broker import Broker
from popmq.broker.ha.controller_clients import ControllerClients
from popmq.broker.ha.controller_wire import record_of
from popmq.broker.ha.epoch_file import FILE_NAME as EPOCHS
from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.identity import FILE_NAME as IDENTITY
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.initial_epochs import begin_alone, begin_epochs
from popmq.broker.ha.role import BrokerRole, GroupView, RoleOrder, newest, order
from popmq.broker.ha.status import BrokerStatus, described, registration
from popmq.broker.ha.text_slots import TextSlots
from popmq.broker.handlers.server import BrokerServer
from popmq.broker.node.broker_incarnation import RETRY_MS, BrokerIncarnation, nowhere
from popmq.broker.node.gate import Gate
from popmq.broker.node.master_role import MasterRole
from popmq.broker.node.meta_follower import MetaFollower
from popmq.broker.node.slave_role import SlaveRole
from popmq.broker.node.timer_migrator import TimerMigrator
from popmq.broker.persistence.state_hashes import Compared
from popmq.broker.persistence.wipe import wipe
from popmq.broker.store.message_store import StoreThreads
from popmq.common.clock import Clock
from popmq.common.disk import Disk, is_shortage
from popmq.common.errors import Code, NotMaster, Refused
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.settings.settings import Settings
from popmq.common.wire.controller_pb2 import HandOverRequest, RegisterReply

logger = logging.getLogger(__name__)


class BrokerNode:
    """`open_port` gives a way to a peer's frames; `controllers` are the ways to those.

    `threads.on_failure` ends the process, `on_demoted` drops the clients' connections: answers that
    were not confirmed must not be given.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        disk: Disk,
        clock: Clock,
        waits: Clock | None = None,
        threads: StoreThreads,
        rng: random.Random,
        open_port: Callable[[str], Port] | None = None,
        controllers: Sequence[Port] = (),
        on_demoted: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings
        self.address = ""  # what the others are told
        self.role = BrokerRole.NOBODY
        self.record: GroupRecord | None = None  # the newest of the accepted epoch
        self.view = GroupView(None)
        self.master_role: MasterRole | None = None
        self.elections = 0  # epochs accepted since the start
        self.rebuilds = 0
        self.gate = Gate(self._serve_node)
        self.identity: Identity
        self.epochs: EpochFile
        self.slave_role: SlaveRole
        self._server: BrokerServer | None = None
        self._disk = disk
        self._clock = clock
        self._rng = rng
        self._open_port = open_port or nowhere
        self._on_failure = threads.on_failure
        self._on_demoted = on_demoted or (lambda: None)
        self._postponed: GroupRecord | None = None
        self._shortage, self._log_due_ms = "", 0  # the newest, and from when on it is an old one
        self._short_until_ms = 0  # nothing that writes a small file is tried before
        self._pending_promotion: GroupRecord | None = (
            None  # to be master, once this disk has everything
        )
        self._life = BrokerIncarnation(
            settings,
            disk=disk,
            clock=clock,
            waits=waits,
            threads=threads,
            rng=rng,
            node=self,
        )
        self.controllers = ControllerClients(
            controllers,
            self,
            cluster=settings.cluster.name,
            group=settings.broker.name,
            heartbeat_ms=settings.controller.heartbeat_ms,
            watches=not self.solo,
            now_ms=self.now_ms,
        )
        self.meta = MetaFollower(
            cluster=settings.cluster.name,
            group=settings.broker.name,
            open_port=open_port or nowhere,
            now_ms=self.now_ms,
        )
        self.mover = TimerMigrator(settings, open_port=open_port or nowhere, clock=clock, rng=rng)

    # -- start, stop, steps

    @property
    def solo(self) -> bool:
        return self.settings.replication.is_single

    @property
    def broker(self) -> Broker:
        """The one on the disk now; another after each demotion."""
        return self._life.broker

    @property
    def changing(self) -> bool:
        """Between two lives of the broker: nobody is served."""
        return self._life.changing

    @property
    def port(self) -> Port:
        """What serves this broker's frames; without replicas nothing stands in between."""
        return self._server or self.gate

    def now_ms(self) -> int:
        return self._clock.boot_ms()

    def start(self) -> None:
        """Recover. A broker alone is master then; one with replicas waits for its first order."""
        folder, limit = self.settings.broker.data, self.settings.replication.epochs
        cluster = self.settings.cluster
        self._disk.make_folder(folder)
        self.identity = Identity(self._disk, f"{folder}/{IDENTITY}", self._rng, cluster=cluster)
        self.epochs = EpochFile(self._disk, f"{folder}/{EPOCHS}", limit=limit)
        self.slave_role = SlaveRole(
            self.settings,
            self.identity,
            self.epochs,
            disk=self._disk,
            open_port=self._open_port,
            now_ms=self.now_ms,
            on_broken=self._on_failure,
        )
        if not self.solo:
            self._open_slave()
            for file in self._text_files:
                file.open()
            return
        broker = self._life.begin()
        broker.start()
        self._server = BrokerServer(broker)
        self.role = BrokerRole.MASTER

    def step(self) -> int:
        """One round of the background work; returns how much was done."""
        self.controllers.step()
        try:
            return self._step()
        except OSError as error:
            # A queue could not be opened: what reads from the disk is ready to try again.
            if not is_shortage(error):
                raise
            self._log_shortage(error)
            return 0

    def _step(self) -> int:
        if self._server is not None:
            return self.broker.step() + self.meta.step(self.broker) + self.mover.step(self.broker)
        if self.changing:
            self._life.step()
            return 0
        may_try = self.now_ms() >= self._short_until_ms
        if self._postponed is not None and may_try and not self.slave_role.is_cutting:
            record, self._postponed = self._postponed, None
            self.on_record(record)
            return 1
        if self.master_role is not None:
            done = self.master_role.step()
            if self.master_role is not None and self.master_role.role is BrokerRole.MASTER:
                done += self.meta.step(self.broker) + self.mover.step(self.broker)
            return done
        if (
            self._pending_promotion is not None
            and self.broker.store.durable == self.broker.store.end
        ):
            if may_try:
                self._unless_short(partial(self._begin_to_lead, self._pending_promotion))
            return int(may_try)
        return self._step_slave() + (self._rebuild_if_allowed() if may_try else 0)

    def stop(self) -> None:
        """Answer everybody who waits. The shell then lets the store settle."""
        self.controllers.stop()
        self.gate.clients.close()
        self.gate.closed_reason = "this broker stops"
        if not self.changing:
            self.broker.stop()

    def close(self) -> None:
        """A clean stop, the flushers idle. Leaves a whole store, but for a master of which not
        everything is confirmed."""
        store = self.broker.store
        whole = not self.changing and not self.identity.copying and store.durable == store.end
        if whole and (store.slave is not None or store.confirmed == store.end):
            self.broker.close()
            for file in self._text_files:
                file.close()
        else:
            self.release_files()

    def release_files(self) -> None:
        """Close every file without a word; after a crash in tests, or a failed start."""
        self._life.release_files()
        for file in self._text_files:
            file.close()

    @property
    def _text_files(self) -> Sequence[TextSlots]:
        """Those that a change of roles writes, as far as a start came."""
        if not hasattr(self, "slave_role"):
            return ()
        return self.identity.file, self.epochs.file, self.slave_role.tables.file

    @property
    def is_serving(self) -> bool:
        """Whether this is the master, and what it says can be confirmed."""
        return self._server is not None or self.master_role is not None

    def answers_lost(self, request_ids: Sequence[int]) -> None:
        """A client's connection broke on which these receives were answered."""
        for request_id in request_ids:
            if self._server is not None:
                self._server.answer_lost(request_id)
            elif self.master_role is not None:
                number = self.gate.client_request(request_id)
                if number is not None:
                    self.master_role.server.answer_lost(number)

    @property
    def refused_by_code(self) -> dict[int, int]:
        server = self._server or (self.master_role.server if self.master_role else None)
        by_code = dict(self.gate.refused_by_code)
        for code, count in (server.refused_by_code if server else {}).items():
            by_code[code] = by_code.get(code, 0) + count
        return by_code

    # -- what controllers say (ControlledNode)

    @property
    def store_id(self) -> str:
        return self.identity.store_id

    def registration(self) -> bytes:
        return registration(self.status())

    def on_view(self, view: GroupView) -> None:
        """A controller said what the group looks like now."""
        self.view = view
        if view.timers is not None and not self.changing:
            self.slave_role.on_timer_check_point(view.timers)
        if view.record is not None:
            self.on_record(view.record)

    def on_record(self, record: GroupRecord) -> None:
        """The group's record was read, here or there; it may be old."""
        if self.changing or self.slave_role.is_cutting:
            known = self._postponed
            if known is None or (record.epoch, record.version) > (known.epoch, known.version):
                self._postponed = record
            return
        record = newest(record, self.record)
        if not self._unless_short(partial(self._obey, record)):
            self._postponed = record

    def _obey(self, record: GroupRecord) -> None:
        """What is written for an order is written first: an OSError leaves all as it was."""
        own_id, accepted = self.identity.store_id, self.identity.epoch
        match order(record, own_id=own_id, accepted=accepted, role=self.role):
            case RoleOrder.LEARN:
                self._learn(record)
            case RoleOrder.FOLLOW if self.master_role is not None:
                self._demote(self.master_role, record)
            case RoleOrder.FOLLOW:
                self._follow(record)
            case RoleOrder.LEAD if self.identity.copying or own_id not in record.sync_state_set:
                logger.error("an impossible order", extra={"epoch": record.epoch, "id": own_id})
            case RoleOrder.LEAD if self.master_role is not None:
                # A controller took it for lost: its epoch ends like any other, the next is its own.
                self._step_down(self.master_role, record)
            case RoleOrder.LEAD:
                self._lead(record)

    def _unless_short(self, work: Callable[[], None]) -> bool:
        """Whether `work` was done. For want of room or descriptors it is not, and what asked for
        it tries again in a second (D10)."""
        try:
            work()
        except OSError as error:
            if not is_shortage(error):
                raise
            self._log_shortage(error)
            self._short_until_ms = self.now_ms() + RETRY_MS
            self.controllers.heartbeat_now()
            return False
        return True

    def _log_shortage(self, error: OSError) -> None:
        """Once a second."""
        now_ms = self.now_ms()
        if now_ms >= self._log_due_ms:
            self._shortage, self._log_due_ms = str(error), now_ms + RETRY_MS
            logger.warning("not done, tried again", extra={"reason": self._shortage})

    def on_cluster(self, reply: RegisterReply) -> None:
        self.meta.hear(reply.owner, reply.owner_address, reply.owner_epoch)
        self.mover.hear(reply.peers)
        self.slave_role.hear_grant(
            grants=reply.grants_rebuilds,
            store_id=reply.rebuild,
            record=record_of(reply.state),
        )
        if not self.changing:
            self.broker.metadata_resolver.set_cluster_groups(reply.groups, now_ms=self.now_ms())

    def _learn(self, record: GroupRecord) -> None:
        assert self.master_role is not None
        self.record = record
        self.master_role.replication_server.learn(
            epoch=record.epoch, version=record.version, members=frozenset(record.sync_state_set)
        )

    def _accept(self, record: GroupRecord) -> None:
        """From here on everything older is refused, also after a crash (R6, R7)."""
        is_new = record.epoch > self.identity.epoch
        self.identity.accept(record.epoch)
        self.elections += is_new
        self.record = record

    # -- slave

    def _follow(self, record: GroupRecord) -> None:
        is_new = record.epoch > self.identity.epoch
        self._accept(record)
        self._pending_promotion = None
        self.slave_role.follow(record, self.view.address_of(record.leader), is_new=is_new)
        self._become(self.slave_role.role)

    def _step_slave(self) -> int:
        done = self.slave_role.step()
        if self.slave_role.replication_client is not None:
            self._become(self.slave_role.role)
        return done

    # -- master

    def _lead(self, record: GroupRecord) -> None:
        """Everything that is here counts, so it has to be on the disk first (R11)."""
        self._accept(record)
        self.slave_role.stop()
        self._pending_promotion = record

    def _begin_to_lead(self, record: GroupRecord) -> None:
        self.master_role = MasterRole(
            self.broker,
            self.identity,
            self.epochs,
            self.gate,
            record,
            controllers=self.controllers,
            become=self._become,
            now_ms=self.now_ms,
        )
        self._pending_promotion = None
        self.slave_role.tables.leads()
        self._become(BrokerRole.OPENING)
        self.master_role.start()

    # -- from master to slave, and from the wrong log to none

    def _demote(self, leadership: MasterRole, record: GroupRecord) -> None:
        epoch = self.identity.epoch
        self._accept(record)
        logger.warning("deposed", extra={"epoch": epoch, "by_epoch": record.epoch})
        self._step_down(leadership, record)

    def _step_down(self, leadership: MasterRole, record: GroupRecord) -> None:
        """Begin anew on the disk, and then do what the record says."""
        self.master_role = None
        leadership.resign(f"epoch {record.epoch} has begun")
        self._become(BrokerRole.NOBODY)
        self._on_demoted()
        self._postponed = record
        self._life.end(self._open_slave)

    def _rebuild_if_allowed(self) -> int:
        """A new store takes the place of this one (R9), between two steps of the broker, which ends
        here. One that leads, or is named master, never rebuilds."""
        wish = self.slave_role.allowed_rebuild(self.record)
        if wish is None or self.master_role is not None or self._pending_promotion is not None:
            return 0
        tables, of_tables = self.slave_role.tables, wish.because_of_tables

        def renew() -> None:
            tables.begin_rebuild(because_of_tables=of_tables)
            self.identity.renew(copying=True)

        if not self._unless_short(renew):
            tables.keep_store()
            return 0
        logger.warning("rebuilding this store", extra={"reason": wish.reason})
        self.rebuilds += 1
        self.slave_role.stop()
        self._become(BrokerRole.COPYING)
        self._postponed = self.record
        self._life.end(self._open_slave)
        return 1

    def _open_slave(self) -> None:
        """Begin on what the disk holds. What is no whole copy is worth nothing."""
        broker = self._life.begin()
        if self.identity.copying:
            self.identity.renew(copying=True)
            self.epochs.clear()
            wipe(self._disk, self.settings.broker.data)
            self.slave_role.tables.wiped()
        broker.open()
        broker.records.slave_lifecycle.start()
        self._begin_epochs()
        self.slave_role.begin(broker)

    # -- what the store says (ReplicaListener)

    def open_epoch(self, epoch: int, position: int) -> int:
        if not self.solo:
            return epoch  # MasterRole has written it already
        self._begin_epochs()
        return begin_alone(self.epochs, self.identity, epoch, position)

    def epoch_starts(self) -> Sequence[int]:
        return self.epochs.starts

    def on_batch(self) -> None:
        if self.master_role is not None:
            self.master_role.replication_server.grown()

    def on_durable(self, position: int) -> None:
        if self.solo:
            self.broker.store.confirm(position)
        elif self.master_role is not None:
            self.master_role.replication_server.durable(position)
        elif self.slave_role.replication_client is not None:
            self.slave_role.replication_client.durable(position)

    def on_tables_compared(self, compared: Compared) -> None:
        self.slave_role.tables.compared(compared)

    def on_tail_lost(self, position: int, proof: int) -> None:
        """What is cut now was confirmed, maybe with the word of this store: nobody may count on
        it any more, so it is in no set from here on (R9), and copies the rest again."""
        logger.error("the log's end is damaged", extra={"position": position, "proof": proof})
        self.identity.renew(copying=self.identity.copying)

    def _begin_epochs(self) -> None:
        store = self.broker.store
        begin_epochs(
            self.epochs, self.identity, store_epoch=store.epoch, start=store.start, end=store.end
        )

    # -- what it says of itself

    def _become(self, role: BrokerRole) -> None:
        if role is not self.role:
            self.role = role
            self.controllers.heartbeat_now()

    def _serve_node(self, kind: Kind, body: bytes, on_reply: OnReply) -> None:
        if kind is Kind.DESCRIBE_ROLE:
            on_reply(described(self.status()))
        elif self.master_role is None:
            raise NotMaster(self.gate.closed_reason)
        else:
            try:
                asked = HandOverRequest.FromString(body)
            except DecodeError:
                raise Refused(Code.BAD_REQUEST, f"the request is no {kind.name}") from None
            self.master_role.hand_over(asked, on_reply)

    def status(self) -> BrokerStatus:
        """As of now, for controllers, operators and metrics."""
        store, following, copying = self.broker.store, self.slave_role, self.slave_role.copying
        slaves = self.master_role.slaves() if self.master_role else ()
        return BrokerStatus(
            settings=self.settings,
            address=self.address,
            store_id=self.identity.store_id,
            log_id=self.broker.registry.log_id,
            role=self.role,
            epoch=self.identity.epoch,
            record=self.record,
            start=store.start,
            end=store.end,
            durable=store.durable,
            confirmed=store.confirmed,
            slaves=slaves,
            lag_bytes=max([following.behind_bytes, *(store.end - slave.acked for slave in slaves)]),
            copying_from=copying.began_at if copying.active else 0,
            copying_to=copying.target if copying.active else 0,
            timers=following.newest_timers(self.broker, leads=self.role is BrokerRole.MASTER),
            now_ms=self.now_ms(),
            trouble=self.view.trouble,
            state_hash=(store.snapshots.position, store.snapshots.state_hash),
            owner=self.broker.registry.owner,
            meta_version=self.broker.registry.changes,
            draining=self.broker.registry.draining,
            moves_timers=self.mover.wants_peers(self.broker),
            shortage=self._shortage if self.now_ms() < self._log_due_ms + RETRY_MS else "",
            tables=following.tables,
            rebuild_wish=following.rebuild_wish,
        )
