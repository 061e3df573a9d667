"""ModelNode: a light broker, all of its part in replication and nothing else.

The cores are the product's (identity, EpochFile, SyncState, the payloads); log and shell are
made of a few lines, one method for each rule, so that a mistake can be planted in each
(docs/reference/cluster-simulator.md, "The light replicas").
"""

from collections.abc import Callable, Sequence
from functools import partial

from popmq.broker.ha.epoch_file import EpochFile, consistent_point
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.sync_state import AlterSyncStateSet, SyncState
from popmq.common.errors import Code, NotMaster, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.protocol.replication_payloads import (
    Acked,
    AckedReply,
    Block,
    Fetch,
    Handshake,
    HandshakeReply,
    decode_acked,
    decode_acked_reply,
    decode_block,
    decode_fetch,
    decode_handshake,
    decode_handshake_reply,
    encode_acked,
    encode_acked_reply,
    encode_block,
    encode_fetch,
    encode_handshake,
    encode_handshake_reply,
)
from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.wire import controller_pb2 as pb
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.cluster_world.sim_network import SimNet
from popmq.testing.cluster_world.sometimes_states import ModelSometimes
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.model.log import RECORD, RECORD_SIZE, START, VALUE, ModelLog

CLUSTER, GROUP = "c", "g"
BEAT_MS = 250
TICK_MS = 50
LAGGARD_MS = 1_200
GIVE_UPS_MS = (150, 1_500)  # on a candidate that fell silent
FETCH_RECORDS = 16
_FETCH_WAIT_MS = 200
_CLOSE_BYTES = 60 * RECORD_SIZE  # behind the log's end; further away it is a laggard


class ModelNode:
    """One process on what its disk holds. `on_confirmed` hears of every move of its confirmed."""

    def __init__(
        self,
        net: SimNet,
        host: Host,
        *,
        disk: SimDisk,
        log: ModelLog,
        controllers: Sequence[str],
        replication: ReplicationSettings,
        on_confirmed: Callable[["ModelNode"], None],
        note: Callable[[str], None],
        tally: StateCounts,
    ) -> None:
        self.net, self.host, self.rng, self.log = net, host, net.rng, log
        self.identity = Identity(disk, "identity", net.rng, cluster=ClusterSettings())
        self.epochs = EpochFile(disk, "epochs")
        self.trace_line = note
        self.tally = tally
        self.on_confirmed = on_confirmed
        self.role = pb.NOBODY
        self.confirmed = 0
        self.replication = replication
        self.sync: SyncState | None = None
        self.slave: ModelSlave | None = None
        self.address = f"{host.name}:1"
        self._controllers = [SimPort(net, host, address) for address in controllers]
        self._waiting: list[tuple[int, OnReply]] = []
        self._sessions: dict[str, int] = {}
        self._heard_ms: dict[str, int] = {}  # of each store, its last ack or fetch
        self._caught_ms: dict[str, int] = {}  # and when it had last reached our end
        self._pending_ms = 0
        self._give_up_ms = net.rng.choice(GIVE_UPS_MS)
        self._fetches: list[tuple[Fetch, OnReply]] = []
        self._syncing = False
        self.sync_ms: Callable[[], int] = lambda: 1
        self._opens_at = 0  # clients are served once this is confirmed

    def start(self) -> None:
        self.net.listen(self.address, self.host, self)
        self._flush()
        self._beat()
        self._tick()

    # -- requests of clients, slaves, controllers

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        match kind:
            case Kind.HANDSHAKE:
                on_reply(self._handshake(decode_handshake(body)))
            case Kind.FETCH:
                self._fetch(decode_fetch(body), on_reply)
            case Kind.ACKED:
                on_reply(self._take_ack(decode_acked(body)))
            case Kind.PUT:
                self._put(int.from_bytes(body, "big"), on_reply)
            case Kind.HAND_OVER:
                on_reply(Refused(Code.UNSUPPORTED, "a light replica hands nothing over"))
            case _:
                on_reply(Refused(Code.UNSUPPORTED, f"no {kind.name} here"))
        return 1

    def cancel(self, request_id: int) -> None:
        return

    @property
    def serves(self) -> bool:
        return self.role == pb.MASTER and self.confirmed >= self._opens_at

    def _put(self, number: int, on_reply: OnReply) -> None:
        sync = self.sync
        if sync is None or not self.serves or not sync.has_quorum:
            self.tally.hit(ModelSometimes.PUT_REFUSED)
            on_reply(NotMaster("not here"))
            return
        self.log.append(RECORD.pack(sync.epoch, VALUE, number))
        self._waiting.append((self.log.end, on_reply))
        self._grown()

    # -- orders (R6, R7, R8)

    def obey(self, record: pb.GroupRecord, members: Sequence[pb.Member]) -> None:
        """The group's record was read, perhaps long after it was written."""
        if self.is_old(record.epoch):
            self.tally.hit(ModelSometimes.OLD_ORDER)
            return
        mine = record.leader == self.identity.store_id
        if self.sync is not None and record.epoch == self.sync.epoch:
            self._learn(record)
        elif mine and self.may_lead(record):
            self.become_master(record)
        elif not mine:
            self._become_slave(record, members)

    def is_old(self, epoch: int) -> bool:
        return epoch < self.identity.epoch

    def may_lead(self, record: pb.GroupRecord) -> bool:
        """Only in a new epoch: one that restarted is nobody until then."""
        return record.epoch > self.identity.epoch

    def become_master(self, record: pb.GroupRecord) -> None:
        """R11 to R14: the whole tail stays."""
        self._leave_role()
        self.trace_line(f"master of epoch {record.epoch} at {self.log.end}")
        self.identity.accept(record.epoch)
        start = self.log.end
        self.epochs.append(record.epoch, start)
        self.log.append(RECORD.pack(record.epoch, START, 0))
        self._opens_at = self.log.end
        self.role = pb.MASTER
        self.sync = SyncState(
            self.identity.store_id,
            epoch=record.epoch,
            epoch_start=start,
            members=set(record.sync_state_set),
            version=record.version,
            min_in_sync=self.replication.min_in_sync,
            confirmed=self.confirmed,
        )
        now_ms = self.host.process_clock.boot_ms()
        self._heard_ms = dict.fromkeys(record.sync_state_set, now_ms)
        self._caught_ms = dict(self._heard_ms)
        self._flush()

    def _become_slave(self, record: pb.GroupRecord, members: Sequence[pb.Member]) -> None:
        addresses = [
            member.broker.address for member in members if member.broker.store_id == record.leader
        ]
        address = addresses[0] if addresses else ""
        if not address:
            return
        if self.slave is not None and self.slave.follows(record.epoch, address):
            return
        self._leave_role()
        self.identity.accept(record.epoch)
        self.role = pb.SLAVE
        self.slave = ModelSlave(self, record.epoch, record.leader, address)

    def _leave_role(self) -> None:
        self.role = pb.NOBODY
        self.sync = None
        self._sessions.clear()
        for _, on_reply in self._fetches:
            on_reply(NotMaster("not any more"))
        self._fetches.clear()
        # Nobody knows what becomes of what was not confirmed, so nobody is told anything.
        self._waiting.clear()
        if self.slave is not None:
            self.slave.stop()
            self.slave = None

    # -- master: slaves

    def _checked(self, epoch: int, store_id: str, session: int | None) -> SyncState:
        """R10: exactly this epoch, and the newest connection of that store."""
        sync = self.sync
        if sync is None or not self.is_of_this_epoch(epoch):
            self.tally.hit(ModelSometimes.OLD_FRAME)
            raise NotMaster(f"no master of epoch {epoch}")
        if session is not None and not self.is_session(store_id, session):
            raise Refused(Code.PRECONDITION_FAILED, "another session")
        return sync

    def is_of_this_epoch(self, epoch: int) -> bool:
        return self.sync is not None and epoch == self.sync.epoch

    def is_session(self, store_id: str, session: int) -> bool:
        return self._sessions.get(store_id) == session

    def _handshake(self, asked: Handshake) -> bytes:
        sync = self._checked(asked.epoch, asked.store_id, None)
        session = self._sessions[asked.store_id] = self.rng.randrange(1, 1 << 60)
        return encode_handshake_reply(
            HandshakeReply(
                sync.epoch,
                sync.own_id,
                session,
                "",
                0,
                self.log.end,
                self.confirmed,
                0,
                0,
                self.epochs.entries,
            )
        )

    def _fetch(self, asked: Fetch, on_reply: OnReply) -> None:
        self._checked(asked.epoch, asked.store_id, asked.session)
        self._heard_ms[asked.store_id] = self.host.process_clock.boot_ms()
        self._fetches.append((asked, on_reply))
        self.host.after(asked.wait_ms, partial(self._answer_fetches, asked))
        self._answer_fetches()

    def _answer_fetches(self, late: Fetch | None = None) -> None:
        """Those that have something new to hear, and the one whose time is over."""
        waiting, self._fetches = self._fetches, []
        for asked, on_reply in waiting:
            if asked.position < self.log.end or asked.confirmed < self.confirmed or asked is late:
                on_reply(self._block(asked))
            else:
                self._fetches.append((asked, on_reply))

    def _block(self, asked: Fetch) -> bytes:
        assert self.sync is not None
        position, end = asked.position, self.log.end
        entry = self.epochs.entry_at(position) if position < end else None
        epoch, start = entry or (0, 0)
        limit = min(position + FETCH_RECORDS * RECORD_SIZE, end)
        limit = min(limit, self.epochs.end_of_epoch(position, end))
        data = bytes(self.log.data[position:limit]) if entry else b""
        block = Block(self.sync.epoch, epoch, start, position, self.confirmed, end, data)
        return encode_block(block)

    def _take_ack(self, asked: Acked) -> bytes:
        sync = self._checked(asked.epoch, asked.store_id, asked.session)
        now_ms = self.host.process_clock.boot_ms()
        self._heard_ms[asked.store_id] = now_ms
        if asked.position + _CLOSE_BYTES >= self.log.end:
            self._caught_ms[asked.store_id] = now_ms
        if sync.on_fsynced(asked.store_id, asked.position):
            self._confirm()
        return encode_acked_reply(AckedReply(sync.epoch, self.confirmed))

    # -- master: confirming, shrink, expand

    def _confirm(self) -> None:
        assert self.sync is not None
        self.know_confirmed(self.sync.confirmed)
        released = [waiter for waiter in self._waiting if waiter[0] <= self.confirmed]
        self._waiting = [waiter for waiter in self._waiting if waiter[0] > self.confirmed]
        for _, on_reply in released:
            on_reply(b"")
        self._answer_fetches()

    def know_confirmed(self, position: int) -> None:
        if position > self.confirmed:
            self.confirmed = position
            self.on_confirmed(self)

    def own_position(self) -> int:
        return self.log.durable

    def _learn(self, record: pb.GroupRecord) -> None:
        sync = self.sync
        assert sync is not None
        if sync.on_record(
            epoch=record.epoch, version=record.version, members=set(record.sync_state_set)
        ):
            self._confirm()

    def _change_set(self) -> None:
        """Shrink, expand, cancel, or ask once more for what was proposed."""
        sync, now_ms = self.sync, self.host.process_clock.boot_ms()
        if sync is None:
            return
        silent = {member: now_ms - at for member, at in self._heard_ms.items()}
        behind = {member: now_ms - at for member, at in self._caught_ms.items()}
        requested = sync.proposal
        if sync.pending:
            limit_ms = self._give_up_ms
            gone = [member for member in sync.pending if silent.get(member, limit_ms) >= limit_ms]
            if gone and now_ms - self._pending_ms > limit_ms:
                self._pending_ms = now_ms
                requested = self.give_up(gone[0]) or requested
        elif requested is None:
            for member in sorted(sync.members - {sync.own_id}):
                if behind.get(member, LAGGARD_MS) >= LAGGARD_MS:
                    requested = requested or sync.shrink(member)
            for member in sorted(sync.acked.keys() - sync.maximal_set):
                if silent.get(member, LAGGARD_MS) < LAGGARD_MS // 2:
                    self._pending_ms = now_ms
                    requested = requested or sync.expand(member)
        if requested is not None and self.rng.random() < 0.5:
            self._alter(requested)

    def give_up(self, store_id: str) -> AlterSyncStateSet | None:
        assert self.sync is not None
        return self.sync.cancel()

    def _alter(self, requested: AlterSyncStateSet) -> None:
        body = pb.AlterSyncStateSetRequest(
            cluster=CLUSTER,
            group=GROUP,
            leader=self.identity.store_id,
            epoch=requested.epoch,
            expected_version=requested.expected_version,
            sync_state_set=sorted(requested.sync_state_set),
        ).SerializeToString()

        def heard(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                self.alter_failed(requested)
                return
            reply = pb.AlterSyncStateSetReply.FromString(answer)
            if reply.HasField("record"):
                self.obey(reply.record, ())
            elif reply.outcome == pb.AlterSyncStateSetReply.UNKNOWN:
                self.alter_failed(requested)

        self.rng.choice(self._controllers).request(Kind.ALTER_SYNC_STATE_SET, body, 1_000, heard)

    def alter_failed(self, requested: AlterSyncStateSet) -> None:
        """Nobody knows whether it was written; what is known is what is read (R18, R20)."""

    # -- disk

    def _grown(self) -> None:
        """Appended: to whoever waits for it, and to the disk."""
        self._answer_fetches()
        if not self._syncing:
            self._flush()

    def _flush(self) -> None:
        self._syncing = True
        covered = self.log.begin_sync()

        def done() -> None:
            self.log.synced(covered)
            self._syncing = False
            if self.log.durable < self.log.end:
                self._flush()
            self._durable_moved()

        self.host.after(self.sync_ms(), done)

    def _durable_moved(self) -> None:
        if self.sync is not None:
            if self.sync.on_fsynced(self.sync.own_id, self.own_position()):
                self._confirm()
        elif self.slave is not None:
            self.slave.fsynced()

    def store_block(self, block: Block) -> None:
        """The entry of its epoch is durable before the block is (R6)."""
        if block.block_epoch > self.epochs.last_epoch:
            self.epochs.append(block.block_epoch, block.epoch_start)
        self.log.append(block.data)
        self._grown()

    def cut_to(self, position: int) -> None:
        """R22: a cut below what it knows to be confirmed means that a rule was broken."""
        if position < self.log.end:
            self.trace_line(f"cuts {self.log.end - position} bytes at {position}")
            self.tally.hit(ModelSometimes.TRUNCATION)
            assert position >= self.confirmed, f"cut at {position}, confirmed {self.confirmed}"
            self.log.cut(position)
        self.epochs.cut_suffix(position)
        self._grown()

    # -- controllers

    def _beat(self) -> None:
        body = pb.RegisterRequest(
            cluster=CLUSTER,
            broker=pb.BrokerAddress(
                broker=GROUP,
                address=self.address,
                epoch=self.identity.epoch,
                store_id=self.identity.store_id,
                node=self.host.name,
            ),
            replicas=self.replication.replicas,
            min_in_sync=self.replication.min_in_sync,
            role=self.role,
            end=self.log.durable,
            confirmed=self.confirmed,
        ).SerializeToString()
        for port in self._controllers:
            port.request(Kind.REGISTER, body, 1_000, self._told)
        self.host.after(BEAT_MS, self._beat)

    def _told(self, answer: bytes | PopmqError) -> None:
        if isinstance(answer, bytes):
            state = pb.RegisterReply.FromString(answer).state
            if state.HasField("record"):
                self.obey(state.record, state.members)

    def _tick(self) -> None:
        self._change_set()
        self.host.after(TICK_MS, self._tick)


class ModelSlave:
    """The slave's side of a light replica: agree, cut, fetch, ack.

    Follows one master in one epoch; a connection that is lost begins anew."""

    def __init__(self, node: "ModelNode", epoch: int, master: str, address: str) -> None:
        self._node = node
        self.epoch, self.master, self.address = epoch, master, address
        self.session = 0
        self.agreed = False  # with the master, up to where both logs are the same
        self._attempt = 0
        self._over = False
        self._port = SimPort(node.net, node.host, address, on_state=self._connected)

    def follows(self, epoch: int, address: str) -> bool:
        return (self.epoch, self.address) == (epoch, address)

    def stop(self) -> None:
        self._over = True
        self._port.close()

    def fsynced(self) -> None:
        self.ack(self.ack_position())

    def ack_position(self) -> int:
        return self._node.log.durable

    def ack(self, position: int) -> None:
        if not self.agreed or self._over:
            return
        body = encode_acked(Acked(self.epoch, self._node.identity.store_id, self.session, position))
        connected = partial(self._confirmed, self._attempt)
        self._port.request(Kind.ACKED, body, 1_000, connected)

    # -- inside

    def _connected(self, up: bool) -> None:
        self.agreed = False
        self._attempt += 1
        if up and not self._over:
            self._shake_hands()

    def _shake_hands(self) -> None:
        node = self._node
        asked = Handshake(self.epoch, node.identity.store_id, node.host.name, "", node.log.end, 0)
        agree = partial(self._agree, self._attempt)
        self._port.request(Kind.HANDSHAKE, encode_handshake(asked), 1_000, agree)

    def is_stale(self, attempt: int) -> bool:
        """R10: an answer to an older connection."""
        return attempt != self._attempt or self._over

    def _again(self) -> None:
        self.agreed = False
        self._attempt += 1
        attempt = self._attempt

        def again() -> None:
            if not self.is_stale(attempt) and self._port.connected:
                self._shake_hands()

        self._node.host.after(100, again)

    def _agree(self, attempt: int, answer: bytes | PopmqError) -> None:
        if self.is_stale(attempt):
            return
        if isinstance(answer, PopmqError):
            self._again()
            return
        reply = decode_handshake_reply(answer)
        if reply.epoch != self._node.identity.epoch:
            return
        self._node.cut_to(self.agreed_position(reply))
        self.session, self.agreed = reply.session, True
        self._fetch()

    def agreed_position(self, reply: HandshakeReply) -> int:
        """R21."""
        node = self._node
        point = consistent_point(node.epochs.entries, node.log.end, reply.entries, reply.end)
        return point or 0

    def _fetch(self) -> None:
        node = self._node
        asked = Fetch(
            self.epoch,
            node.identity.store_id,
            self.session,
            node.log.end,
            FETCH_RECORDS * RECORD_SIZE,
            node.confirmed,
            _FETCH_WAIT_MS,
        )
        body = encode_fetch(asked)
        self._port.request(Kind.FETCH, body, 1_500, partial(self._take, self._attempt))

    def _take(self, attempt: int, answer: bytes | PopmqError) -> None:
        if self.is_stale(attempt) or not self.agreed:
            return
        if isinstance(answer, PopmqError):
            self._again()
            return
        node, block = self._node, decode_block(answer)
        if block.epoch != node.identity.epoch or not self.position_fits(block):
            self._again()
            return
        if block.data:
            node.store_block(block)
        else:
            self.fsynced()
        node.know_confirmed(min(block.confirmed, node.log.end))
        self._fetch()

    def position_fits(self, block: Block) -> bool:
        """R23."""
        return block.position == self._node.log.end

    def _confirmed(self, attempt: int, answer: bytes | PopmqError) -> None:
        node = self._node
        if self.is_stale(attempt) or not self.agreed or isinstance(answer, PopmqError):
            return
        reply = decode_acked_reply(answer)
        if reply.epoch == node.identity.epoch:
            node.know_confirmed(min(reply.confirmed, node.log.end))
