"""The unsafe variants of replication, planted into the product's cores and the light replicas.

Each is a row of the table that a model checker made, and its docstring is the shortest way in
which it loses something.  The light replicas' world has to see every one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.sync_state import AlterSyncStateSet, SyncState
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.replication_payloads import (
    Block,
    EpochEntry,
    HandshakeReply,
    decode_handshake_reply,
)
from popmq.common.wire import controller_pb2 as pb
from popmq.controller import election, replica_group
from popmq.testing.cluster_world.port import SimConnection, SimPort
from popmq.testing.cluster_world.sim_metadata_store import SimMetadataStore
from popmq.testing.model import world as model_world
from popmq.testing.model.log import ModelLog
from popmq.testing.model.node import ModelNode, ModelSlave

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class PlantedModel:
    """Found in at most so many seeds, from 1 on."""

    name: str
    plant: Callable[[Patch], None]
    seeds: int = 200


# -- the SyncStateSet


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


def expand_at_log_end_without_waiting(patch: Patch) -> None:
    """B is at the log's end 0 when it is proposed; A appends and confirms r; B is elected."""

    def wrong(self: SyncState, store_id: str) -> AlterSyncStateSet | None:
        at_end = self.acked.get(store_id, 0) >= self.acked.get(self.own_id, 0)
        joins = store_id not in self.maximal_set and at_end
        return _expand(self, store_id, waits=False) if joins else None

    patch.setattr(SyncState, "expand", wrong)


def expand_from_any_position(patch: Patch) -> None:
    """A confirmed r; B at 0 is added; B is elected: r is gone."""

    def wrong(self: SyncState, store_id: str) -> AlterSyncStateSet | None:
        return _expand(self, store_id, waits=True) if store_id not in self.maximal_set else None

    patch.setattr(SyncState, "expand", wrong)


def expand_without_the_epoch_start(patch: Patch) -> None:
    """A confirmed r and restarted, so that confirmed is 0 in epoch 2: B at 0 has "reached" it."""

    def wrong(self: SyncState, store_id: str) -> bool:
        return self.acked.get(store_id, -1) >= self.confirmed

    patch.setattr(SyncState, "may_join", wrong)


def timeout_taken_for_failure(patch: Patch) -> None:
    """+B is given up and r confirmed alone; the delayed write lands; B is elected."""

    def wrong(self: ModelNode, expected: AlterSyncStateSet) -> None:
        if self.sync is not None and self.sync.proposal == expected:
            self.sync.pending, self.sync.proposal = frozenset(), None

    patch.setattr(ModelNode, "alter_failed", wrong)


def alter_without_expected_version(patch: Patch) -> None:
    """+B is proposed and cancelled, A confirms r with {A}; the delayed +B lands; B is elected."""
    alter = replica_group.ReplicaGroup.alter

    def wrong(self: Any, request: pb.AlterSyncStateSetRequest, then: Any) -> None:
        newest = self.records._store._shared.newest(self.name)
        if newest is not None and newest.epoch == request.epoch:
            self.records.record = newest
            request.expected_version = newest.version
        alter(self, request, then)

    patch.setattr(replica_group.ReplicaGroup, "alter", wrong)


def pending_counts_for_min_in_sync(patch: Patch) -> None:
    """{A}, +B on its way, r confirmed by "two"; A's disk is lost: B cannot be elected."""
    patch.setattr(
        SyncState, "has_quorum", property(lambda self: len(self.maximal_set) >= self.min_in_sync)
    )


def shrink_below_min_in_sync(patch: Patch) -> None:
    """{A,B}, min 2, r confirmed; -B lands; A's disk is lost: B has r and cannot be elected."""
    patch.setattr(SyncState, "can_shrink", lambda self: len(self.members) > 1)


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


def no_cancel_of_an_expansion(patch: Patch) -> None:
    """+B is proposed, the request is lost, B dies: A never confirms again."""

    def asked_once(self: ModelNode) -> None:
        if self.sync is not None and self.sync.pending:
            return
        change(self)

    change = ModelNode._change_set
    patch.setattr(ModelNode, "_change_set", asked_once)


# -- elections


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


def same_epoch_twice(patch: Patch) -> None:
    """Epoch 2 is A's, which confirms r; the other controller writes epoch 2 for B."""

    def wrong(self: SimMetadataStore, record: GroupRecord | None, expected_version: int) -> bool:
        return record is None or expected_version in (record.version, record.version - 1)

    patch.setattr(SimMetadataStore, "fits", wrong)


# -- epochs and identity


def no_refusal_of_old_epochs(patch: Patch) -> None:
    """B is master of epoch 2 and confirms r; a late order of epoch 1: B follows A and cuts r."""

    def accept(self: Identity, epoch: int) -> None:
        self._write(self.store_id, epoch, self.copying)

    patch.setattr(ModelNode, "is_old", lambda self, epoch: False)
    patch.setattr(Identity, "accept", accept)


def accepted_epoch_not_kept(patch: Patch) -> None:
    """A, master of epoch 3, confirms r, crashes, and obeys a late order of epoch 2."""

    def wrong(self: Identity, epoch: int) -> None:
        self.epoch = epoch

    patch.setattr(Identity, "accept", wrong)


def goes_on_in_its_epoch_after_a_restart(patch: Patch) -> None:
    """A sends r to B, loses it in a crash, writes r' at its place in the same epoch: B acks r."""
    become = ModelNode.become_master

    def wrong(self: ModelNode, record: pb.GroupRecord) -> None:
        if record.epoch == self.identity.epoch:
            self.epochs.cut_suffix(self.log.end)
            self.epochs.entries = [
                entry_ for entry_ in self.epochs.entries if entry_.epoch < record.epoch
            ]
        become(self, record)

    patch.setattr(ModelNode, "may_lead", lambda self, record: record.epoch >= self.identity.epoch)
    patch.setattr(ModelNode, "become_master", wrong)


def new_disk_with_the_old_identity(patch: Patch) -> None:
    """A confirms r, loses its disk, and is elected again as what it was: a master without r."""
    wipe = model_world.ModelReplica.wipe

    def wrong(self: model_world.ModelReplica) -> None:
        identity = self.disk.durable("identity") if self.disk.exists("identity") else b""
        wipe(self)
        if identity:
            file = self.disk.open("identity", create=True)
            file.write(identity, 0)
            file.sync()
            self.disk.sync_folder("")

    patch.setattr(model_world.ModelReplica, "wipe", wrong)


def entry_with_equal_start_refused(patch: Patch) -> None:
    """As RocketMQ: an epoch that begins where the last one did is not recorded."""
    append = EpochFile.append

    def wrong(self: EpochFile, epoch: int, start: int) -> None:
        if not self.entries or self.entries[-1].start < start:
            append(self, epoch, start)

    patch.setattr(EpochFile, "append", wrong)


def entry_less_durable_than_its_records(patch: Patch) -> None:
    """A restarts, r2 of epoch 2 counts as epoch 1; B, where r2 is visible, cuts it."""

    def wrong(self: EpochFile, epoch: int, start: int) -> None:
        kept = [entry for entry in self.entries if entry.start < start]
        self.entries = [*kept, EpochEntry(epoch, start)]

    patch.setattr(EpochFile, "append", wrong)


# -- tails


def new_master_cuts_to_known_confirmed(patch: Patch) -> None:
    """A and B have r, A confirms, B was not told; B is elected and cuts r."""
    become = ModelNode.become_master

    def wrong(self: ModelNode, record: pb.GroupRecord) -> None:
        self.cut_to(self.confirmed)
        become(self, record)

    patch.setattr(ModelNode, "become_master", wrong)


def slave_cuts_to_known_confirmed(patch: Patch) -> None:
    """A confirms r; B restarts, cuts to 0 at the handshake, and is elected."""

    def wrong(self: ModelSlave, reply: HandshakeReply) -> int:
        return min(self._node.confirmed, reply.end)

    patch.setattr(ModelSlave, "agreed_position", wrong)


def ack_before_fsync(patch: Patch) -> None:
    """B acks r, A confirms, B crashes without r and is elected."""
    store_block = ModelNode.store_block

    def wrong(self: ModelNode, block: Block) -> None:
        store_block(self, block)
        if self.slave is not None:
            self.slave.ack(self.log.end)

    patch.setattr(ModelNode, "store_block", wrong)


def master_counts_what_is_not_synced(patch: Patch) -> None:
    """A confirms r with {A}, crashes, and is elected again without r."""
    patch.setattr(ModelNode, "own_position", lambda self: self.log.end)


def survived_bytes_not_synced(patch: Patch) -> None:
    """What a dead process left in the page cache is counted, and the power goes."""

    def wrong(self: ModelLog, *, power: bool) -> None:
        crash(self, power=power)
        self.durable = self.end

    crash = ModelLog.crash
    patch.setattr(ModelLog, "crash", wrong)


def new_epoch_acked_without_truncation(patch: Patch) -> None:
    """A has stale r of epoch 1 where B, of epoch 2, confirms r': A acks, and shows r."""
    patch.setattr(ModelSlave, "agreed_position", lambda self, reply: self._node.log.end)
    patch.setattr(ModelSlave, "position_fits", lambda self, block: True)


def data_taken_without_a_handshake(patch: Patch) -> None:
    """A has stale r of epoch 1, follows B of epoch 2, and puts what comes behind r."""

    def wrong(self: ModelSlave, up: bool) -> None:
        self.agreed = False
        self._attempt += 1
        if up and not self._over:
            self.agreed = True
            self._fetch()

    patch.setattr(ModelSlave, "_connected", wrong)
    patch.setattr(ModelNode, "is_session", lambda self, store_id, session: True)


def confirmed_used_before_truncation(patch: Patch) -> None:
    """A has stale r of epoch 1, hears from B that r' is confirmed, and shows r."""
    agree = ModelSlave._agree

    def wrong(self: ModelSlave, attempt: int, answer: Any) -> None:
        if isinstance(answer, bytes) and not self.is_stale(attempt):
            reply = decode_handshake_reply(answer)
            if reply.epoch == self._node.identity.epoch:
                self._node.know_confirmed(min(reply.confirmed, self._node.log.end))
        agree(self, attempt, answer)

    patch.setattr(ModelSlave, "_agree", wrong)


def answer_of_an_older_connection_used(patch: Patch) -> None:
    """B acked and confirmed r; an old reply to its handshake (end 0) comes: B cuts r.

    A port gives no answer of a connection that is lost: that is taken out, too.
    """
    down = SimPort._down

    def keeps(self: SimPort, why: str) -> None:
        pending, self._pending = self._pending, {}
        down(self, why)
        self._pending = pending

    patch.setattr(SimPort, "_down", keeps)
    patch.setattr(SimConnection, "client_open", property(lambda self: True))
    patch.setattr(ModelSlave, "is_stale", lambda self, attempt: self._over)


def acks_without_epoch(patch: Patch) -> None:
    """B, in epoch 1 with stale r, acks; A counts it in epoch 2 for r'; B is elected.

    B has to go on over a new connection without a handshake for that.
    """
    connected = ModelSlave._connected

    def wrong(self: ModelSlave, up: bool) -> None:
        agreed = self.agreed
        if not agreed:
            connected(self, up)
        elif up:
            self.fsynced()
            self._fetch()

    patch.setattr(ModelSlave, "_connected", wrong)
    patch.setattr(ModelNode, "is_of_this_epoch", lambda self, epoch: True)
    patch.setattr(ModelNode, "is_session", lambda self, store_id, session: True)


PLANTED = [
    PlantedModel("smaller set before it is known", smaller_set_before_it_is_known),
    PlantedModel("expand waits only when known", expand_waits_only_when_known),
    PlantedModel("expand at log end without waiting", expand_at_log_end_without_waiting),
    PlantedModel("expand from any position", expand_from_any_position),
    PlantedModel("expand without the epoch start", expand_without_the_epoch_start),
    PlantedModel("timeout taken for failure", timeout_taken_for_failure, seeds=1_000),
    PlantedModel("alter without expected version", alter_without_expected_version),
    PlantedModel("pending counts for min_in_sync", pending_counts_for_min_in_sync),
    PlantedModel("shrink below min_in_sync", shrink_below_min_in_sync),
    PlantedModel("majority confirms", majority_confirms, seeds=8),
    PlantedModel("no cancel of an expansion", no_cancel_of_an_expansion),
    PlantedModel("elected outside the set", elected_outside_the_set),
    PlantedModel("election adds living brokers", election_adds_living_brokers),
    PlantedModel("election leaves the leader alone", election_leaves_the_leader_alone),
    PlantedModel("controllers without compare-and-set", controllers_without_compare_and_set),
    PlantedModel("same epoch twice", same_epoch_twice),
    PlantedModel("no refusal of old epochs", no_refusal_of_old_epochs, seeds=8),
    PlantedModel("accepted epoch not kept", accepted_epoch_not_kept, seeds=8),
    PlantedModel("goes on in its epoch", goes_on_in_its_epoch_after_a_restart, seeds=8),
    PlantedModel("new disk with the old identity", new_disk_with_the_old_identity),
    PlantedModel("entry with equal start refused", entry_with_equal_start_refused, seeds=3_000),
    PlantedModel("entry less durable than its records", entry_less_durable_than_its_records),
    PlantedModel("new master cuts to known confirmed", new_master_cuts_to_known_confirmed, seeds=8),
    PlantedModel("slave cuts to known confirmed", slave_cuts_to_known_confirmed),
    PlantedModel("ack before fsync", ack_before_fsync),
    PlantedModel("master counts what is not synced", master_counts_what_is_not_synced),
    # Not seen in the 200 seeds of the others.
    PlantedModel("survived bytes not synced", survived_bytes_not_synced, 3_000),
    PlantedModel("new epoch acked without truncation", new_epoch_acked_without_truncation),
    PlantedModel("data taken without a handshake", data_taken_without_a_handshake),
    PlantedModel("confirmed used before truncation", confirmed_used_before_truncation),
    PlantedModel("answer of an older connection", answer_of_an_older_connection_used),
    PlantedModel("acks without epoch", acks_without_epoch),
]
