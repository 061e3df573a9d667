"""Mistakes planted into the product's replication, for whole brokers with clients to suffer from.

The first ones are rows of a table of unsafe variants that a model checker made; the docstring of a
row is the shortest way in which it loses something.  The others break what stands on replication:
replies, roles, timers, tables.  Whole brokers showed nothing in 200 seeds of a timeout taken for a
failure, an alter without the expected version, an expansion that is never given up, an accepted
epoch not kept, a confirmed position used before the cut, a rebuilt store that keeps its identity,
and a min_in_sync that nobody looks at: `tests/ha` and `tests/controller` find those.  Where one
cluster in a hundred shows a mistake, the seeds begin shortly before the first that does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from popmq.broker.core import slave_lifecycle as following
from popmq.broker.deliveries.client_liveness import ClientLiveness
from popmq.broker.ha import role
from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.hand_over import MasterHandOver
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.memory_confirmation import MemoryConfirmation
from popmq.broker.ha.replication_client import ReplicationClient
from popmq.broker.ha.replication_server import ReplicationServer
from popmq.broker.ha.role import BrokerRole, RoleOrder
from popmq.broker.ha.sync_state import AlterSyncStateSet, SyncState
from popmq.broker.handlers.server import BrokerServer
from popmq.broker.log.log_tail import LogTail
from popmq.broker.node import master_role as leadership
from popmq.broker.node.broker_node import BrokerNode
from popmq.broker.node.master_role import MasterRole
from popmq.broker.persistence.log_time import LogTime
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_state import TimerState
from popmq.common.errors import PopmqError
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.protocol.replication_payloads import EpochEntry, HandshakeReply
from popmq.common.wire.controller_pb2 import HandOverReply
from popmq.controller import election, replica_group
from popmq.testing.cluster_world.broker import DATA, ClusterBroker
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.cluster_world.sim_metadata_store import SimMetadataStore

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class PlantedCluster:
    """Found in at most so many seeds, from `first` on."""

    name: str
    plant: Callable[[Patch], None]
    seeds: int = 40
    first: int = 1


# -- rules of replication


def smaller_set_before_it_is_known(patch: Patch) -> None:
    """{A,B}: A has r, proposes -B, confirms r; B is elected, the shrink loses: r is gone."""
    shrink = SyncState.shrink

    def wrong(self: SyncState, store_id: str) -> AlterSyncStateSet | None:
        asked = shrink(self, store_id)
        if asked is not None:
            self.members -= {store_id}
        return asked

    patch.setattr(SyncState, "shrink", wrong)


def _expand(self: SyncState, store_id: str, *, waits: bool) -> AlterSyncStateSet:
    if waits:
        self.pending |= {store_id}
    return self._propose(self.members | {store_id})


def expand_waits_only_when_known(patch: Patch) -> None:
    """B at confirmed = 0 is proposed; A confirms r alone; the set becomes {A,B}; B is elected."""

    def wrong(self: SyncState, store_id: str) -> AlterSyncStateSet | None:
        joins = store_id not in self.maximal_set and self.may_join(store_id)
        return _expand(self, store_id, waits=False) if joins else None

    patch.setattr(SyncState, "expand", wrong)


def expand_from_any_position(patch: Patch) -> None:
    """A confirmed r; B at 0 is added; B is elected: r is gone."""

    def wrong(self: SyncState, store_id: str) -> AlterSyncStateSet | None:
        return _expand(self, store_id, waits=True) if store_id not in self.maximal_set else None

    patch.setattr(SyncState, "expand", wrong)


def majority_confirms(patch: Patch) -> None:
    """{A,B,C}: A and B have r, which is confirmed; C is elected: r is gone."""

    def wrong(self: SyncState) -> bool:
        positions = sorted(self.acked.get(name, 0) for name in self.maximal_set)
        position = positions[(len(positions) - 1) // 2]
        if not self.has_quorum or position <= self.confirmed:
            return False
        self.confirmed = position
        return True

    patch.setattr(SyncState, "_confirm", wrong)


def elected_outside_the_set(patch: Patch) -> None:
    """Set {A}: A confirms r; B is elected: r is gone."""
    patch.setattr(replica_group, "candidates", lambda record, living: list(living))

    def wrong(record: GroupRecord, leader: Any, living: Any, *, min_in_sync: int) -> GroupRecord:
        kept = tuple(sorted({*record.sync_state_set, leader.store_id}))
        return GroupRecord(leader.store_id, record.epoch + 1, kept, record.version + 1)

    patch.setattr(replica_group, "record_after_election", wrong)


def election_adds_living_brokers(patch: Patch) -> None:
    """Set {A}, r confirmed; epoch 2 begins with {A,B}; B is elected in epoch 3: r is gone."""

    def wrong(record: GroupRecord, leader: Any, living: Any, *, min_in_sync: int) -> GroupRecord:
        kept = tuple(sorted({leader.store_id, *(item.store_id for item in living)}))
        return GroupRecord(leader.store_id, record.epoch + 1, kept, record.version + 1)

    patch.setattr(replica_group, "record_after_election", wrong)


def election_leaves_the_leader_alone(patch: Patch) -> None:
    """{A,C} hold r; epoch 2 begins with {A}; A's disk is lost: C has r and is not electable."""
    patch.setattr(election, "_kept", lambda record, leader, living, min_in_sync: (leader.store_id,))


def controllers_without_compare_and_set(patch: Patch) -> None:
    """{A,B} shrank to {A}, A confirms r; a controller that read {A,B} elects B."""
    patch.setattr(SimMetadataStore, "fits", lambda self, result, expected_version: True)


def entry_less_durable_than_its_records(patch: Patch) -> None:
    """A restarts, r2 of epoch 2 counts as epoch 1; B, where r2 is visible, cuts it."""

    def wrong(self: EpochFile, epoch: int, start: int) -> None:
        kept = [entry for entry in self.entries if entry.start < start]
        self.entries = [*kept, EpochEntry(epoch, start)]

    patch.setattr(EpochFile, "append", wrong)


def no_refusal_of_old_epochs(patch: Patch) -> None:
    def accept(self: Identity, epoch: int) -> None:
        self._write(self.store_id, epoch, self.copying)

    def wrong(record: GroupRecord, *, own_id: str, accepted: int, role: BrokerRole) -> RoleOrder:
        if record.leader != own_id:
            return RoleOrder.FOLLOW
        return RoleOrder.LEAD if record.epoch > accepted else RoleOrder.LEARN

    patch.setattr("popmq.broker.node.broker_node.order", wrong)
    patch.setattr(Identity, "accept", accept)


def goes_on_in_its_epoch_after_a_restart(patch: Patch) -> None:
    order = role.order

    def wrong(record: GroupRecord, *, own_id: str, accepted: int, role: BrokerRole) -> RoleOrder:
        role_order = order(record, own_id=own_id, accepted=accepted, role=role)
        return RoleOrder.LEAD if role_order is RoleOrder.WAIT else role_order

    append = EpochFile.append

    def again(self: Any, epoch: int, start: int) -> None:
        if self.last_epoch < epoch:
            append(self, epoch, start)

    patch.setattr("popmq.broker.node.broker_node.order", wrong)
    patch.setattr(EpochFile, "append", again)


def new_disk_with_the_old_identity(patch: Patch) -> None:
    wipe = ClusterBroker.wipe

    def wrong(self: ClusterBroker) -> None:
        path = f"{DATA}/identity"
        identity = self.disk.durable(path) if self.disk.exists(path) else b""
        wipe(self)
        if identity:
            file = self.disk.open(path, create=True)
            file.write(identity, 0)
            file.sync()
            self.disk.sync_folder(DATA)

    patch.setattr(ClusterBroker, "wipe", wrong)


def new_master_cuts_to_known_confirmed(patch: Patch) -> None:
    begin = BrokerNode._begin_to_lead

    def wrong(self: BrokerNode, record: GroupRecord) -> None:
        store = self.broker.store
        if store.slave is None or store.confirmed == store.end or not store.confirmed:
            begin(self, record)
            return
        epochs, position = self.epochs, store.confirmed
        self._pending_promotion = None

        def cut() -> None:
            epochs.cut_suffix(position)
            begin(self, record)

        store.slave.truncate(position, cut)

    patch.setattr(BrokerNode, "_begin_to_lead", wrong)


def slave_cuts_to_known_confirmed(patch: Patch) -> None:
    def wrong(self: ReplicationClient, reply: HandshakeReply) -> int:
        return min(max(self._store.confirmed, self._store.start), reply.end)

    patch.setattr(ReplicationClient, "_point", wrong)


def slave_does_not_truncate(patch: Patch) -> None:
    """It goes on from its own end, or from the master's where that comes first."""
    point = ReplicationClient._point

    def wrong(self: ReplicationClient, reply: HandshakeReply) -> int:
        point(self, reply)
        return min(self._store.end, reply.end)

    patch.setattr(ReplicationClient, "_point", wrong)


def ack_before_fsync(patch: Patch) -> None:
    take = ReplicationClient._take_block

    def wrong(self: ReplicationClient, block: Any) -> None:
        take(self, block)
        acked = replication.Acked(
            self._epoch, self._identity.store_id, self._session, self._store.end
        )
        body = replication.encode_acked(acked)
        self._link.request(Kind.ACKED, body, 2_000, lambda answer: None)

    patch.setattr(ReplicationClient, "_take_block", wrong)


def master_counts_what_is_not_synced(patch: Patch) -> None:
    grown = ReplicationServer.grown

    def wrong(self: ReplicationServer) -> None:
        grown(self)
        self.durable(self._store.end)

    patch.setattr(ReplicationServer, "grown", wrong)


def set_read_from_an_old_record(patch: Patch) -> None:
    """A stale read takes the master's set back to what it was."""

    def wrong(self: Any, *, epoch: int, version: int, members: frozenset[str]) -> bool:
        if epoch != self.epoch:
            return False
        self.version, self.members = version, frozenset(members)
        self.pending, self.proposal = frozenset(), None
        return bool(self._confirm())

    patch.setattr(SyncState, "on_record", wrong)


# -- what stands on replication


def reply_before_it_is_confirmed(patch: Patch) -> None:
    def wrong(self: MessageStore, *callbacks: Callable[[], None]) -> None:
        for callback in callbacks:
            callback()

    patch.setattr(MessageStore, "when_log_confirmed", wrong)


def replied_when_durable_here(patch: Patch) -> None:
    """A master calls its own disk enough, as one without replicas does."""
    confirmed = ReplicationServer.durable

    def wrong(self: ReplicationServer, position: int) -> None:
        confirmed(self, position)
        self._store.confirm(position)

    patch.setattr(ReplicationServer, "durable", wrong)


def slave_applies_what_is_not_confirmed(patch: Patch) -> None:
    def wrong(self: ReplicationClient, confirmed: int) -> None:
        self._store.confirm(self._store.end)

    patch.setattr(ReplicationClient, "_take_confirmed", wrong)


def clients_let_in_before_the_epoch_start_is_confirmed(patch: Patch) -> None:
    begin = MasterRole.start

    def wrong(self: MasterRole) -> None:
        begin(self)
        self._gate.clients.open(self.server)

    patch.setattr(leadership.MasterRole, "start", wrong)


def slaves_serve_clients(patch: Patch) -> None:
    """What arrives at a slave that led before is served by what it was."""
    end = MasterRole.resign

    def wrong(self: MasterRole, why: str) -> None:
        server = self.server
        end(self, why)
        self._gate.clients.open(server)

    patch.setattr(MasterRole, "resign", wrong)


def hand_over_waits_for_nobody(patch: Patch) -> None:
    """The one that takes over is said to have everything; it need not be in the set for that."""

    def wrong(self: MasterHandOver, now_ms: int) -> bool:
        if self._on_reply is not None:
            self._answer(HandOverReply(end=self._store.end).SerializeToString())
        return now_ms >= self._until_ms

    patch.setattr(MasterHandOver, "step", wrong)
    patch.setattr("popmq.controller.failover.candidates", lambda record, living: list(living))
    elected_outside_the_set(patch)


def master_never_gives_way(patch: Patch) -> None:
    """A master that is deposed goes on as what it was."""
    on_record = BrokerNode.on_record

    def wrong(self: BrokerNode, record: GroupRecord) -> None:
        if self.master_role is None or record.leader == self.identity.store_id:
            on_record(self, record)

    patch.setattr(BrokerNode, "on_record", wrong)


def fired_timers_fire_again_after_a_switch(patch: Patch) -> None:
    """A promoted slave forgets which timers fired since its snapshot."""
    lead = following.SlaveLifecycle.promote

    def wrong(self: following.SlaveLifecycle, epoch: int, *on_opened: Callable[[], None]) -> None:
        lead(self, epoch, *on_opened)
        state: TimerState = self._timers.state
        state.cursor = (0, 0)

    patch.setattr(following.SlaveLifecycle, "promote", wrong)


def timers_begin_anew_at_each_master(patch: Patch) -> None:
    """What was enqueued before the switch is never fired."""

    def wrong(self: following.SlaveLifecycle, epoch: int, *on_opened: Callable[[], None]) -> None:
        promote(self, epoch, *on_opened)
        self._timers.state.pending.clear()

    promote = following.SlaveLifecycle.promote
    patch.setattr(following.SlaveLifecycle, "promote", wrong)


def sends_stored_by_each_try(patch: Patch) -> None:
    """A proxy that tries again makes up another message id."""
    request = SimPort.request
    numbers = iter(range(1, 1 << 30))

    def wrong(self: SimPort, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        if kind is Kind.PUT:
            at = body.rfind(b"m", 0, body.find(b"|"))
            name = b"n%06d" % (next(numbers) % 1_000_000)
            body = body[:at] + name + body[at + 7 :] if at > 0 else body
        return request(self, kind, body, timeout_ms, on_reply)

    patch.setattr(SimPort, "request", wrong)


def promoted_without_its_last_records(patch: Patch) -> None:
    """A promoted slave serves before it applied its tail."""

    def wrong(self: following.SlaveLifecycle) -> int:
        if self.promoted and self._store.slave is not None:
            self._store.opened()
            self._on_promoted()
            self._on_opened()
            return 1
        return int(step(self))

    step = following.SlaveLifecycle.step
    patch.setattr(following.SlaveLifecycle, "step", wrong)


def memory_waits_for_nobody(patch: Patch) -> None:
    """A send in memory is OK once this broker holds it, whoever else there is (rule 7)."""
    patch.setattr(MemoryConfirmation, "when_in_memory", lambda self, then: then())


def buffered_receives_wait_for_nobody(patch: Patch) -> None:
    """A receive that writes nothing is answered by who thinks that it leads (rule 7)."""
    patch.setattr(MemoryConfirmation, "when_leadership_confirmed", lambda self, then: then())


def refusals_rest_on_what_is_not_confirmed(patch: Patch) -> None:
    def wrong(self: BrokerServer, error: PopmqError, on_reply: OnReply) -> None:
        on_reply(error)

    patch.setattr(BrokerServer, "_refuse", wrong)


def nobody_is_taken_for_alive_after_a_switch(patch: Patch) -> None:
    """A new master takes clients for gone that it has not heard yet (D6: 30 s)."""
    patch.setattr(ClientLiveness, "start_grace", lambda self, now_ms: None)


def renewed_for_ever(patch: Patch) -> None:
    """A push consumer's good-bye changes nothing."""
    patch.setattr(ClientLiveness, "on_client_closed", lambda self, client: None)
    patch.setattr(ClientLiveness, "is_alive", lambda self, client, now_ms: True)


def newest_bytes_kept_after_a_cut(patch: Patch) -> None:
    """What a slave cut stays in the memory that it serves others from, when it leads."""
    patch.setattr(LogTail, "cut", lambda self, position: None)


def skew_is_downtime(patch: Patch) -> None:
    go_on = LogTime.go_on

    def wrong(self: LogTime, newest: Any, created: Any, *, epoch: int) -> None:
        go_on(self, newest, created, epoch=epoch)
        if newest.log_ms:
            passed_ms = max(0, self._clock.wall_ms() - newest.wall_ms)
            self.clock.start(newest.log_ms + passed_ms, epoch=epoch)

    patch.setattr(LogTime, "go_on", wrong)


PLANTED = [
    PlantedCluster("skew is downtime", skew_is_downtime),
    PlantedCluster("smaller set before it is known", smaller_set_before_it_is_known, 30),
    PlantedCluster("expand waits only when known", expand_waits_only_when_known),
    PlantedCluster("expand from any position", expand_from_any_position),
    PlantedCluster("majority confirms", majority_confirms),
    PlantedCluster("set read from an old record", set_read_from_an_old_record, 80),
    PlantedCluster("elected outside the set", elected_outside_the_set),
    PlantedCluster("election adds living brokers", election_adds_living_brokers),
    PlantedCluster("leader left alone", election_leaves_the_leader_alone, 20, first=81),
    PlantedCluster("no compare-and-set", controllers_without_compare_and_set),
    PlantedCluster("no refusal of old epochs", no_refusal_of_old_epochs),
    PlantedCluster("goes on in its epoch", goes_on_in_its_epoch_after_a_restart),
    PlantedCluster("new disk with the old identity", new_disk_with_the_old_identity, 20, first=81),
    PlantedCluster("entry less durable", entry_less_durable_than_its_records),
    PlantedCluster("new master cuts", new_master_cuts_to_known_confirmed),
    PlantedCluster("slave cuts to known confirmed", slave_cuts_to_known_confirmed),
    PlantedCluster("slave does not truncate", slave_does_not_truncate),
    PlantedCluster("ack before fsync", ack_before_fsync),
    PlantedCluster("master counts what is not synced", master_counts_what_is_not_synced),
    PlantedCluster("reply before it is confirmed", reply_before_it_is_confirmed),
    PlantedCluster("replied when durable here", replied_when_durable_here),
    PlantedCluster("slave applies what is not confirmed", slave_applies_what_is_not_confirmed),
    PlantedCluster("clients let in early", clients_let_in_before_the_epoch_start_is_confirmed),
    PlantedCluster("slaves serve clients", slaves_serve_clients),
    PlantedCluster("hand-over waits for nobody", hand_over_waits_for_nobody),
    PlantedCluster("master never gives way", master_never_gives_way),
    PlantedCluster("fired timers fire again", fired_timers_fire_again_after_a_switch),
    PlantedCluster("timers begin anew", timers_begin_anew_at_each_master),
    PlantedCluster("sends stored by each try", sends_stored_by_each_try),
    PlantedCluster("promoted without its last records", promoted_without_its_last_records),
    PlantedCluster("memory waits for nobody", memory_waits_for_nobody, seeds=80),
    PlantedCluster("buffered receives wait for nobody", buffered_receives_wait_for_nobody),
    PlantedCluster("refusals rest on nothing", refusals_rest_on_what_is_not_confirmed),
    PlantedCluster("newest bytes kept after a cut", newest_bytes_kept_after_a_cut),
    PlantedCluster("nobody alive after a switch", nobody_is_taken_for_alive_after_a_switch),
    PlantedCluster("renewed for ever", renewed_for_ever),
]
