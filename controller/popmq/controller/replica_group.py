"""One broker group under this controller: heartbeats in, records out, step by step.

It elects when the leader is dead or has lost its role, and never because of anything else.  Every
decision is one compare-and-set; whatever the store answers, the newest record that was read
counts (docs/concepts/controller.md).
"""

import logging
from collections.abc import Callable

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.group_record import GroupRecord, TimerCheckPoint
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.election import best, candidates, first_record, record_after_election
from popmq.controller.metadata_store import MetadataStore, WriteOutcome, WriteResult
from popmq.controller.rebuilds import Rebuilds, successor_of_suspect
from popmq.controller.record_follower import RECORD_AGE_MS, RecordFollower
from popmq.controller.replicas import SERVING, ReplicaHeartbeat, Replicas

logger = logging.getLogger(__name__)

SUSPECT_MS = 10_000  # between attempts to hand over from a master with tables of its own

OnAlter = Callable[[pb.AlterSyncStateSetReply], None]


class ReplicaGroup:
    """`on_change` is called when the record or a replica's address, role or incarnation changes."""

    def __init__(
        self,
        name: str,
        store: MetadataStore,
        *,
        dead_after_ms: int,
        first_view: int,
        now_ms: int,
        on_change: Callable[["ReplicaGroup"], None] = lambda group: None,
    ) -> None:
        self.name = name
        self.replicas = Replicas(name, dead_after_ms=dead_after_ms)
        self.rebuilds = Rebuilds(name)
        self.records = RecordFollower(name, store, now_ms=now_ms, on_news=self._look)
        self.view = first_view
        self.problem = ""
        self.elections = 0
        self.lost_writes = 0
        self._dead_after_ms = dead_after_ms
        self._on_change = on_change
        self._now_ms = now_ms
        self._patient_until_ms = now_ms + dead_after_ms
        self._contradicted_at: int | None = None  # how many were begun when a broker was ahead
        self._writing = False
        self._shown: object = None
        self._suspect_ms = now_ms  # from then on a master may be suspected again

    # -- what brokers say

    def register(
        self, replica: ReplicaHeartbeat, timers: TimerCheckPoint | None, *, now_ms: int
    ) -> None:
        """Raises PRECONDITION_FAILED for a second broker under a name that is taken."""
        self._now_ms = self.records.advance(now_ms)
        self.replicas.register(replica, now_ms=now_ms)
        if timers is not None:
            self.replicas.take_timers(timers)
        if replica.epoch > self.records.epoch:
            self.records.read_soon()
        self._look()

    def alter(self, request: pb.AlterSyncStateSetRequest, then: OnAlter) -> None:
        """The master's request, with its expected version, as it is (R4)."""
        try:
            requested = _wanted(request)
        except PopmqError:
            self.records.read_soon()
            raise
        known = self.record
        if known is not None and known.version == request.expected_version:
            same_master = (known.leader, known.epoch) == (requested.leader, requested.epoch)
            if not same_master:
                raise Refused(
                    Code.PRECONDITION_FAILED,
                    f"broker group {self.name}: {self.replicas.name(requested.leader)} is not the "
                    f"master of epoch {requested.epoch}",
                )

        def swapped(result: WriteResult) -> None:
            then(_alter_reply(result, request.expected_version))

        self.records.write(request.expected_version, requested, swapped, answer_first=True)

    # -- what time does

    def step(self, now_ms: int) -> int:
        """Read, and elect where that is due; returns how many elections began."""
        self._now_ms = self.records.advance(now_ms)
        self._look()
        self.records.read_if_due(now_ms)
        if not self.records.is_read or self._writing:
            return 0
        requested = self._wanted_record()
        if requested is None:
            return 0
        self._elect(requested)
        return 1

    def extend_deadlines(self, ms: int) -> None:
        """This controller stood still for `ms`: reports that came late are no silence."""
        self.replicas.extend_deadlines(ms)
        self.records.extend_deadlines(ms)
        self._patient_until_ms = self._now_ms + ms + self._dead_after_ms

    def mark_suspect(self, store_id: str) -> None:
        self.replicas.mark_suspect(store_id)
        self._look()

    @property
    def record(self) -> GroupRecord | None:
        return self.records.record

    @property
    def leader(self) -> ReplicaHeartbeat | None:
        return self.replicas.get(self.record.leader) if self.record else None

    @property
    def alive_replicas(self) -> list[ReplicaHeartbeat]:
        return self.replicas.alive_replicas(now_ms=self._now_ms)

    def alive(self, store_id: str) -> bool:
        return self.replicas.alive(store_id, now_ms=self._now_ms)

    def may_rebuild(self, store_id: str) -> bool:
        """Whether that replica, which has just been heard, may rebuild its store now."""
        asking = self.replicas.get(store_id)
        least = self.replicas.min_in_sync
        trouble = self.records.trouble
        if self._now_ms - self.records.known_ms > RECORD_AGE_MS:
            trouble = trouble or f"the metadata store has not answered for {RECORD_AGE_MS} ms"
        return asking is not None and self.rebuilds.ask(
            asking, self.record, self.alive_replicas, least, trouble=trouble
        )

    def successor_of_suspect(self) -> ReplicaHeartbeat | None:
        """To whom a master with wrong tables should hand over now."""
        if self._now_ms < self._suspect_ms:
            return None
        successor = successor_of_suspect(self.record, self.alive_replicas)
        if successor is not None:
            self._suspect_ms = self._now_ms + SUSPECT_MS
        return successor

    # -- elections

    def _wanted_record(self) -> GroupRecord | None:
        """The record that should be written now; also says what is in the way (`trouble`)."""
        if self.record is None:
            record = first_record(self.alive_replicas)
            if isinstance(record, GroupRecord):
                self._say("")
                return record
            if self._now_ms >= self._patient_until_ms:
                self._say(record)
            return None
        ahead = [replica for replica in self.replicas if replica.epoch > self.records.epoch]
        if ahead:
            if self._contradicted_at is None:
                self._contradicted_at = self.records.reads
            asked_since = self.records.read_number > self._contradicted_at
            self._say(
                f"{ahead[0].node} has accepted epoch {ahead[0].epoch}, the metadata store knows "
                f"{self.records.epoch}: it was restored from a backup, or serves stale reads"
                if asked_since
                else ""
            )
            self.records.read_soon()
            return None
        self._contradicted_at = None
        if not self._leader_is_lost():
            self._say("")
            return None
        return self._successor(self.record)

    def _successor(self, record: GroupRecord) -> GroupRecord | None:
        # One that was named and did not take its order is behind in epochs: another comes first.
        leader = best(candidates(record, self.alive_replicas))
        if leader is None:
            names = ", ".join(map(self.replicas.name, record.sync_state_set))
            self._say(
                f"no member of the SyncStateSet ({names}) sends heartbeats: any member that comes "
                "back with its data can lead"
            )
            return None
        self._say("")
        if self._now_ms < self._patient_until_ms:
            return None
        return record_after_election(
            record, leader, self.alive_replicas, min_in_sync=self.replicas.min_in_sync
        )

    def _leader_is_lost(self) -> bool:
        leader = self.leader
        assert self.record is not None, "asked only of a group with a record"
        if leader is None or not self.alive(leader.store_id):
            return True
        if leader.epoch < self.records.epoch:  # it has not taken its order
            return self._now_ms - self.records.seen_ms > 2 * self._dead_after_ms
        # A master that restarted is nobody until a new epoch names it (R8).
        idle_ms = self.replicas.idle_ms(leader.store_id, now_ms=self._now_ms)
        return leader.role not in SERVING and idle_ms >= self._dead_after_ms // 4

    def _elect(self, requested: GroupRecord) -> None:
        expected = requested.version - 1
        self._writing = True

        def written(result: WriteResult) -> None:
            self._writing = False
            if result.outcome is WriteOutcome.WRITTEN:
                self.elections += 1
                logger.warning(
                    "elected a master",
                    extra={
                        "broker": self.name,
                        "node": self.replicas.name(requested.leader),
                        "epoch": requested.epoch,
                        "sync_state_set": [self.replicas.name(i) for i in requested.sync_state_set],
                    },
                )
            else:
                self.lost_writes += 1

        self.records.write(expected, requested, written)

    # -- what is shown

    def _say(self, trouble: str) -> None:
        if trouble and trouble != self.problem:
            logger.error("no master", extra={"broker": self.name, "reason": trouble})
        self.problem = trouble

    def _look(self) -> None:
        """Move the view if anything did that somebody may wait for."""
        now = [
            (
                replica.store_id,
                replica.node,
                replica.address,
                replica.role,
                self.alive(replica.store_id),
            )
            for replica in self.replicas
        ]
        shown = (self.record, self.problem, now)
        if shown != self._shown:
            self._shown = shown
            self.view += 1
            self._on_change(self)

    def state(self) -> pb.GroupState:
        group_state = pb.GroupState(group=self.name, view=self.view)
        group_state.trouble = "; ".join(filter(None, (self.problem, self.records.trouble)))
        if self.record is not None:
            group_state.record.CopyFrom(self.record.to_wire())
        timers = self.replicas.timer_check_point
        if timers is not None:
            group_state.timer_check_point.CopyFrom(timers.to_wire(self._now_ms))
        group_state.members.extend(self._member(replica) for replica in self.replicas)
        return group_state

    def _member(self, heartbeat: ReplicaHeartbeat) -> pb.Member:
        return pb.Member(
            broker=pb.BrokerAddress(
                broker=self.name,
                address=heartbeat.address,
                epoch=heartbeat.epoch,
                store_id=heartbeat.store_id,
                node=heartbeat.node,
                draining=heartbeat.draining,
            ),
            role=pb.BrokerRole.ValueType(heartbeat.role),
            end=heartbeat.end,
            confirmed=heartbeat.confirmed,
            priority=heartbeat.priority,
            alive=self.alive(heartbeat.store_id),
            silent_ms=self.replicas.silent_ms(heartbeat.store_id, now_ms=self._now_ms),
            catch_up_from=heartbeat.catch_up_from,
            catch_up_to=heartbeat.catch_up_to,
            replicas=heartbeat.replicas,
            min_in_sync=heartbeat.min_in_sync,
            meta_version=heartbeat.meta_version,
            tables_differ_at=heartbeat.tables_differ_at,
            shortage=heartbeat.shortage,
        )


def _wanted(request: pb.AlterSyncStateSetRequest) -> GroupRecord:
    requested = tuple(sorted(set(request.sync_state_set)))
    if request.leader not in requested or not request.epoch or not request.expected_version:
        raise Refused(
            Code.BAD_REQUEST,
            f"broker group {request.group}: a SyncStateSet needs its leader, an epoch and the "
            "version that it replaces",
        )
    return GroupRecord(request.leader, request.epoch, requested, request.expected_version + 1)


def _alter_reply(result: WriteResult, expected_version: int) -> pb.AlterSyncStateSetReply:
    outcomes = pb.AlterSyncStateSetReply
    record = result.record
    if result.outcome is WriteOutcome.WRITTEN and record is not None:
        return pb.AlterSyncStateSetReply(outcome=outcomes.WRITTEN, record=record.to_wire())
    # A record that is older than what the master read says nothing about its request.
    if record is None or record.version <= expected_version:
        return pb.AlterSyncStateSetReply(outcome=outcomes.UNKNOWN)
    return pb.AlterSyncStateSetReply(outcome=outcomes.REFUSED, record=record.to_wire())
