"""`popmq failover`: a planned hand-over, or the unclean election that an administrator orders.

A hand-over asks the master to stop, waits until the other has everything, and then writes the
record; whatever goes wrong before that, the master admits again by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.election import (
    best,
    candidates,
    record_after_election,
    record_after_unclean_election,
)
from popmq.controller.metadata_store import WriteOutcome, WriteResult
from popmq.controller.replica_group import ReplicaGroup
from popmq.controller.replicas import SERVING, ReplicaHeartbeat

HAND_OVER_MS = 1_000  # how long the master waits for us before it admits again
ANSWER_MS = 500  # beyond that, for its answer
WRITES = 3  # the master may change its set meanwhile


class ClosablePort(Port, Protocol):
    """A way to one broker that was opened for a question."""

    def close(self) -> None: ...


OpenPeer = Callable[[str], ClosablePort]
OnDone = Callable[[pb.FailoverReply | PopmqError], None]


@dataclass(frozen=True, slots=True)
class FailoverPlan:
    """`master` is the one that hands over; None: nobody serves, the record is written at once."""

    to: ReplicaHeartbeat
    master: ReplicaHeartbeat | None = None
    unclean: bool = False


def plan(group: ReplicaGroup, node: str, *, unclean: bool) -> FailoverPlan:
    """Who shall lead, and how. Raises a refusal that says what is in the way and what would do."""
    if not group.records.is_read:
        raise Refused(
            Code.HA_NOT_AVAILABLE,
            f"broker group {group.name}: the metadata store has not answered yet",
        )
    record, living = group.record, group.alive_replicas
    able = candidates(record, living) if record else []
    named = _named(group, node) if node else None
    if record is None or (named is not None and named not in able):
        return _outside_the_set(group, named, able, unclean=unclean)
    leader = group.leader
    master = leader if leader in able and leader is not None and leader.role in SERVING else None
    if named is not None and named == master:
        raise Refused(Code.PRECONDITION_FAILED, f"{node} is the master of {group.name} already")
    to = named or best([heartbeat for heartbeat in able if heartbeat != master])
    if to is None:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"broker group {group.name}: only the master of the SyncStateSet sends heartbeats, "
            "so no broker could take over without a loss",
        )
    return FailoverPlan(to, master)


def _named(group: ReplicaGroup, node: str) -> ReplicaHeartbeat:
    heartbeat = group.replicas.node(node)
    if heartbeat is None:
        known = ", ".join(replica.node for replica in group.replicas)
        raise Refused(
            Code.NOT_FOUND, f"broker group {group.name} has no node {node}; known are {known}"
        )
    if not group.alive(heartbeat.store_id):
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"node {node} of {group.name} sends no heartbeats: a broker that is away cannot lead",
        )
    return heartbeat


def _outside_the_set(
    group: ReplicaGroup,
    named: ReplicaHeartbeat | None,
    able: list[ReplicaHeartbeat],
    *,
    unclean: bool,
) -> FailoverPlan:
    """Only with --unclean, by name, and while no member of the set is heard: a living one may
    confirm still what the new one will not have (R5)."""
    if named is None:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"broker group {group.name} has no record: name its master with --to NODE --unclean; "
            "what only the others have is lost",
        )
    if able:
        names = ", ".join(heartbeat.node for heartbeat in able)
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"node {named.node} is not in the SyncStateSet of {group.name}, so it may lack "
            f"confirmed messages; {names} can take over without a loss. To lose them all the same, "
            "stop those first",
        )
    if not unclean:
        raise Refused(
            Code.PRECONDITION_FAILED,
            f"node {named.node} is not in the SyncStateSet of {group.name}, and no member "
            "sends heartbeats: start a member, or give up what only the members have with "
            "--unclean, after making sure that none of them runs",
        )
    return FailoverPlan(named, unclean=True)


class Failover:
    """One command on its way; `done` hears its end, once."""

    def __init__(
        self, group: ReplicaGroup, planned: FailoverPlan, open_peer: OpenPeer, done: OnDone
    ):
        self._group = group
        self._plan = planned
        self._open_peer = open_peer
        self._done = done
        self._writes = 0
        self._reply = pb.FailoverReply(to_node=planned.to.node, from_node=_leader_name(group))
        if group.record is not None:
            self._reply.before.CopyFrom(group.record.to_wire())

    def preview(self) -> pb.FailoverReply:
        """What `start` would do."""
        if self._plan.unclean:
            self._tell_loss()
        self._reply.handed_over = self._plan.master is not None
        self._reply.after.CopyFrom(self._next().to_wire())
        return self._reply

    def start(self) -> None:
        if self._plan.unclean:
            self._tell_loss()
            self._write()
        elif self._plan.master is None:
            self._step("nobody served: elected at once")
            self._write()
        else:
            self._ask(self._plan.master)

    def _ask(self, master: ReplicaHeartbeat) -> None:
        record = self._group.record
        assert record is not None, "a group with a master has a record"
        request = pb.HandOverRequest(
            group=self._group.name,
            epoch=record.epoch,
            leader=record.leader,
            to=self._plan.to.store_id,
            wait_ms=HAND_OVER_MS,
        )
        peer = self._open_peer(master.address)

        def answered(answer: bytes | PopmqError) -> None:
            peer.close()
            try:
                if isinstance(answer, PopmqError):
                    raise answer
                end = pb.HandOverReply.FromString(answer).end
            except (PopmqError, DecodeError) as error:
                text = f"{master.node} did not hand over, nothing changed: {error}"
                self._done(Refused(Code.PRECONDITION_FAILED, text))
                return
            self._reply.handed_over = True
            self._step(f"{master.node} stopped admitting at {end}, which {self._to} has")
            self._write()

        body = request.SerializeToString()
        peer.request(Kind.HAND_OVER, body, HAND_OVER_MS + ANSWER_MS, answered)

    def _next(self) -> GroupRecord:
        group, plan = self._group, self._plan
        if plan.unclean:
            highest = max(replica.epoch for replica in group.replicas)
            return record_after_unclean_election(group.record, plan.to, highest_epoch=highest)
        assert group.record is not None, "only an unclean election does without a record"
        minimum = group.replicas.min_in_sync
        # The old master has to begin again from its disk: nobody waits for that unless
        # min_in_sync needs it (R3). It is back in the set once it has caught up.
        others = [
            replica for replica in group.alive_replicas if replica.store_id != group.record.leader
        ]
        return record_after_election(group.record, plan.to, others, min_in_sync=minimum)

    def _write(self) -> None:
        if not self._plan.unclean and not self._still_fits(self._group.record):
            self._changed()
            return
        requested = self._next()
        self._writes += 1
        self._group.records.write(
            requested.version - 1, requested, lambda got: self._written(requested, got)
        )

    def _written(self, requested: GroupRecord, result: WriteResult) -> None:
        if result.outcome is WriteOutcome.WRITTEN:
            self._reply.after.CopyFrom(requested.to_wire())
            self._step(f"{self._to} leads in epoch {requested.epoch}")
            self._done(self._reply)
        elif result.outcome is WriteOutcome.UNKNOWN:
            text = f"the metadata store did not say whether it wrote: {result.reason}; look again"
            self._done(Refused(Code.HA_NOT_AVAILABLE, text))
        elif self._writes < WRITES and self._still_fits(result.record):
            self._write()
        else:
            self._changed()

    def _changed(self) -> None:
        text = f"broker group {self._group.name} changed meanwhile: look again, and repeat"
        self._done(Refused(Code.PRECONDITION_FAILED, text))

    def _still_fits(self, record: GroupRecord | None) -> bool:
        """The same master changed its set, and the successor is still in it."""
        before = self._reply.before
        same = record is not None and (record.leader, record.epoch) == (before.leader, before.epoch)
        return same and record is not None and self._plan.to.store_id in record.sync_state_set

    @property
    def _to(self) -> str:
        return self._plan.to.node

    def _step(self, text: str) -> None:
        self._reply.steps.append(text)

    def _tell_loss(self) -> None:
        replicas, record = self._group.replicas, self._group.record
        self._reply.lost_from = self._plan.to.end
        self._reply.lost_to = max(replicas.furthest_end, self._plan.to.end)
        members = record.sync_state_set if record else ()
        self._reply.lost_nodes.extend(
            replicas.name(member) for member in members if member != self._plan.to.store_id
        )


def _leader_name(group: ReplicaGroup) -> str:
    return group.replicas.name(group.record.leader) if group.record else ""
