"""The controller: which brokers live, and which of them lead (a `messaging_payloads.Port`).

Its memory is a cache; only the metadata store is durable, and brokers obey epochs
(docs/concepts/controller.md).  It never waits: answers come from `request`, from the store's
callbacks, and from `step`.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError, Refused, TooManyRequests
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.settings.settings import Settings
from popmq.common.settings.settings_reply import settings_reply
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.failover import Failover, FailoverPlan, OpenPeer, plan
from popmq.controller.heartbeat_wire import (
    replica_from_wire,
    route_from_wire,
    route_of,
    route_to_wire,
    single_state,
    timers_from_wire,
)
from popmq.controller.known_groups import KnownGroups
from popmq.controller.long_polls import LongPolls
from popmq.controller.metadata_ownership import MetadataOwnership, OwnershipClaim
from popmq.controller.metadata_store import MetadataStore
from popmq.controller.replica_group import ReplicaGroup
from popmq.controller.replicas import ReplicaHeartbeat
from popmq.controller.routes import BROKER_LIMIT, IN_PROCESS, Route, Routes, check_broker_name

logger = logging.getLogger(__name__)

MAX_WAIT_MS = 60_000
PROBE_MS = 500
FAILOVER_LIMIT = 16  # at once
REST_MS = 500  # at most


@dataclass(frozen=True, slots=True)
class ControllerTimeouts:
    heartbeat_ms: int = 500
    dead_after_ms: int = 2_000


class Controller:
    """`first_version` differs from one run to the next, so that whoever followed the last one
    notices.  `open_peer(address)` opens a way to a broker, which is closed after one question.
    `on_request` is called for each request, which may leave something to the next step;
    `settings` is only told to who asks for it."""

    def __init__(
        self,
        cluster: str,
        store: MetadataStore,
        clock: Clock,
        open_peer: OpenPeer,
        *,
        times: ControllerTimeouts,
        first_version: int = 1,
        on_request: Callable[[], None] = lambda: None,
        settings: Settings | None = None,
    ) -> None:
        self._on_request = on_request
        self._settings = settings or Settings()
        self.routes = Routes(
            cluster, dead_after_ms=times.dead_after_ms, first_version=first_version
        )
        self.groups: dict[str, ReplicaGroup] = {}
        self.polls = LongPolls()
        self.times = times
        self.clock = clock
        self._cluster = cluster
        self._store = store
        self._open_peer = open_peer
        self._number = 0
        self._stepped_ms = clock.boot_ms()
        self._singles: dict[str, ReplicaHeartbeat] = {}  # brokers without replicas
        self._refused: dict[str, int] = {}  # by broker name, what was refused last
        self._watchers: dict[int, tuple[str, str]] = {}  # request -> group and store id
        self._probing: set[str] = set()
        self._failovers = 0
        self.ownership = MetadataOwnership(
            store,
            patience_ms=times.dead_after_ms,
            on_owner=self._owner_known,
        )
        self.known_groups = KnownGroups(store, on_read=self._owner_known)

    # -- messaging_payloads.Port

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self._number += 1
        self._on_request()
        try:
            self._serve(kind, body, self._number, on_reply)
        except PopmqError as error:
            on_reply(error)
        except DecodeError:
            on_reply(Refused(Code.BAD_REQUEST, f"the request is no {kind.name}"))
        return self._number

    def cancel(self, request_id: int) -> None:
        """The asker is gone.  Of a broker that watched its group it is a hint: look at once."""
        self.polls.cancel(request_id)
        watcher = self._watchers.pop(request_id, None)
        if watcher is not None:
            self._probe(*watcher)

    def _serve(self, kind: Kind, body: bytes, number: int, on_reply: OnReply) -> None:
        match kind:
            case Kind.REGISTER:
                on_reply(self._register(pb.RegisterRequest.FromString(body)))
            case Kind.ROUTES:
                self._tell_routes(pb.RoutesRequest.FromString(body), number, on_reply)
            case Kind.ALTER_SYNC_STATE_SET:
                self._alter(pb.AlterSyncStateSetRequest.FromString(body), on_reply)
            case Kind.WATCH_GROUP:
                self._watch(pb.WatchGroupRequest.FromString(body), number, on_reply)
            case Kind.LIST_REPLICAS:
                on_reply(self._list(pb.ListReplicasRequest.FromString(body)))
            case Kind.FAILOVER:
                self._failover(pb.FailoverRequest.FromString(body), on_reply)
            case Kind.DESCRIBE_SETTINGS:
                where = self._settings.controller.listen
                on_reply(settings_reply("controller", where, self._settings))
            case _:
                raise Refused(
                    Code.UNSUPPORTED, f"a controller does not serve requests of kind {kind}"
                )

    # -- time

    def step(self, now_ms: int) -> int:
        """Do what is due; returns how much that was."""
        stood_ms = now_ms - self._stepped_ms
        self._stepped_ms = now_ms
        if stood_ms > self.times.dead_after_ms // 2:
            logger.warning("this controller stood still", extra={"ms": stood_ms})
            for group in self.groups.values():
                group.extend_deadlines(stood_ms)
        done = self.polls.due(now_ms)
        for group in self.groups.values():
            done += group.step(now_ms)
            self._replace_suspect(group)
        if self.routes.drained:
            self._hide_strangers()
        return done + self._step_known_groups(now_ms) + self._step_ownership(now_ms)

    def wait_ms(self, now_ms: int) -> int:
        """How long steps have nothing to do unless a request comes; 0: look often.

        Replicas may die, and their record is read; single brokers only answer.
        """
        unread = not (self.ownership.owner and self.known_groups.is_read)
        if self.groups or self.routes.drained or unread:
            return 0
        next_ms = self.polls.next_ms
        most_ms = min(REST_MS, self.times.dead_after_ms // 4)  # more is taken for a standstill
        return most_ms if next_ms is None else min(most_ms, max(0, next_ms - now_ms))

    def _step_known_groups(self, now_ms: int) -> int:
        removed = {name for name in self.routes.drained if not self._is_heard(name)}
        return self.known_groups.step(now_ms, self.routes.names, removed)

    def _step_ownership(self, now_ms: int) -> int:
        names = self.routes.names
        only = self.routes.get(names[0]) if len(names) == 1 else None
        at_once = only is not None and only.address == IN_PROCESS
        return self.ownership.step(now_ms, at_once=at_once)

    def stop(self) -> None:
        """Answer everybody who waits for a change."""
        self._watchers.clear()
        self.polls.wake_all()

    # -- brokers

    def _register(self, request: pb.RegisterRequest) -> bytes:
        now_ms = self.clock.boot_ms()
        route = route_from_wire(request.broker)
        reply = pb.RegisterReply(heartbeat_ms=self.times.heartbeat_ms, grants_rebuilds=True)
        try:
            if request.replicas > 1:
                group = self._register_replica(request, route, now_ms)
                reply.state.CopyFrom(group.state())
                if group.may_rebuild(request.broker.store_id):
                    reply.rebuild = request.broker.store_id
            else:
                self._register_single(request, route, now_ms)
        except PopmqError as error:
            self._log_refused(route, error)
            raise
        self._step_known_groups(now_ms)
        self._hear_claim(request)
        self._tell_cluster(reply)
        if request.moves_timers:
            reply.peers.extend(route_to_wire(route) for route in self.routes.all())
        return reply.SerializeToString()

    def _hear_claim(self, request: pb.RegisterRequest) -> None:
        """Of masters alone: a slave may be behind."""
        if request.replicas > 1 and request.role != pb.MASTER:
            return
        self.ownership.on_claim(
            request.broker.broker, OwnershipClaim(request.owner, request.meta_version)
        )
        self._step_ownership(self.clock.boot_ms())
        self._hide_strangers()

    def _owner_known(self) -> None:
        self.routes.version += 1
        self._hide_strangers()
        self.polls.wake("")

    def _hide_strangers(self) -> None:
        """From proxies: groups that do not have the cluster's topics yet, and drained ones that
        were taken away."""
        hidden = {broker for broker in self.routes.names if not self.ownership.has_joined(broker)}
        hidden |= {broker for broker in self.routes.drained if not self._is_heard(broker)}
        if self.routes.hide(frozenset(hidden)):
            self.polls.wake("")

    def _is_heard(self, name: str) -> bool:
        group = self.groups.get(name)
        living = group is not None and bool(group.alive_replicas)
        return living or self.routes.is_heard(name, now_ms=self.clock.boot_ms())

    def _tell_cluster(self, reply: pb.RegisterReply) -> None:
        reply.owner = self.ownership.owner
        owner = self.routes.get(self.ownership.owner)
        if owner is not None:
            reply.owner_address = owner.address
            reply.owner_epoch = owner.epoch
        reply.groups.extend(route.broker for route in self.routes.all() if not route.draining)

    def _register_single(self, request: pb.RegisterRequest, route: Route, now_ms: int) -> None:
        group = self.groups.get(route.broker)
        if group is not None and group.alive_replicas:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"broker group {route.broker} has replicas, of which "
                f"{group.alive_replicas[0].node} is alive: {route.address} registers without any "
                "(replication.replicas)",
            )
        if self.routes.register(request.cluster, route, now_ms=now_ms):
            self._routes_changed(route)
        self._singles[route.broker] = replica_from_wire(request)

    def _register_replica(
        self, request: pb.RegisterRequest, route: Route, now_ms: int
    ) -> ReplicaGroup:
        self.routes.check(request.cluster, route)
        if self.routes.is_heard(route.broker, now_ms=now_ms):
            known = self.routes.get(route.broker)
            if known is not None and known.address != route.address:
                raise Refused(
                    Code.PRECONDITION_FAILED,
                    f"broker {route.broker} at {known.address} registers without replicas, and "
                    f"{route.address} with {request.replicas} (replication.replicas)",
                )
        if not route.store_id:
            raise Refused(Code.BAD_REQUEST, f"broker {route.broker} registers without a store id")
        group = self._group(route.broker)
        timers = timers_from_wire(request, now_ms=now_ms)
        group.register(replica_from_wire(request), timers, now_ms=now_ms)
        self._singles.pop(route.broker, None)
        return group

    def _group(self, name: str) -> ReplicaGroup:
        group = self.groups.get(name)
        if group is not None:
            return group
        if len(self.groups) >= BROKER_LIMIT:
            raise TooManyRequests(f"{BROKER_LIMIT} broker groups are known, which is the limit")
        new_group = self.groups[name] = ReplicaGroup(
            name,
            self._store,
            dead_after_ms=self.times.dead_after_ms,
            first_view=self.routes.version,
            now_ms=self.clock.boot_ms(),
            on_change=self._group_changed,
        )
        return new_group

    def _group_changed(self, group: ReplicaGroup) -> None:
        route = route_of(group)
        if route is not None and self.routes.follow(route):
            self._routes_changed(route)
        self.polls.wake(group.name)

    def _routes_changed(self, route: Route) -> None:
        self._refused.pop(route.broker, None)
        logger.info(
            "route changed",
            extra={"broker": route.broker, "address": route.address, "epoch": route.epoch},
        )
        self.polls.wake("")

    def _log_refused(self, route: Route, error: PopmqError) -> None:
        """Once for each route: a broker that is refused tries again with every heartbeat."""
        name, seen = route.broker[:100], hash(route)
        if self._refused.get(name) == seen:
            return
        if len(self._refused) >= BROKER_LIMIT:
            self._refused.clear()
        self._refused[name] = seen
        logger.warning("registration refused", extra={"broker": name, "reason": str(error)})

    def _alter(self, request: pb.AlterSyncStateSetRequest, on_reply: OnReply) -> None:
        self._check_cluster(request.cluster, request.group)
        check_broker_name(request.group)
        group = self._group(request.group)
        group.alter(request, lambda reply: on_reply(reply.SerializeToString()))

    # -- long polls

    def _tell_routes(self, request: pb.RoutesRequest, number: int, on_reply: OnReply) -> None:
        def answer() -> None:
            on_reply(self._routes_reply())

        known = request.known_version == self.routes.version
        if not (known and self._park(number, "", answer, request.wait_ms)):
            answer()

    def _watch(self, request: pb.WatchGroupRequest, number: int, on_reply: OnReply) -> None:
        self._check_cluster(request.cluster, request.group)
        check_broker_name(request.group)
        group = self._group(request.group)

        def answer() -> None:
            self._watchers.pop(number, None)
            on_reply(pb.WatchGroupReply(state=group.state()).SerializeToString())

        known = request.known_view == group.view
        if not (known and self._park(number, group.name, answer, request.wait_ms)):
            answer()
        elif request.store_id:
            self._watchers[number] = (group.name, request.store_id)

    def _park(self, number: int, key: str, answer: Callable[[], None], wait_ms: int) -> bool:
        wait_ms = min(wait_ms, MAX_WAIT_MS)
        if wait_ms <= 0 or self.polls.full:
            return False
        self.polls.park(number, key, answer, due_ms=self.clock.boot_ms() + wait_ms)
        return True

    def _routes_reply(self) -> bytes:
        brokers = map(route_to_wire, self.routes.all())
        reply = pb.RoutesReply(version=self.routes.version, brokers=brokers)
        if self.known_groups.is_read:  # proxies that know the owner know the absent groups too
            reply.owner = self.ownership.owner
            reply.absent.extend(self.known_groups.absent(self.routes.names))
        return reply.SerializeToString()

    # -- a closed connection is a hint

    def _probe(self, group_name: str, store_id: str) -> None:
        """Knock at the broker's address: a closed door means that its process is gone."""
        group = self.groups.get(group_name)
        replica = group.replicas.get(store_id) if group else None
        if group is None or replica is None or store_id in self._probing:
            return
        self._probing.add(store_id)
        peer = self._open_peer(replica.address)

        def answered(answer: bytes | PopmqError) -> None:
            peer.close()
            self._probing.discard(store_id)
            closed = isinstance(answer, PopmqError) and answer.code is Code.HA_NOT_AVAILABLE
            if closed and group.replicas.get(store_id) == replica:
                logger.info("connection refused", extra={"broker": group_name, "at": store_id})
                group.mark_suspect(store_id)

        peer.request(Kind.DESCRIBE_ROLE, b"", PROBE_MS, answered)

    # -- operators

    def _list(self, request: pb.ListReplicasRequest) -> bytes:
        if request.cluster:
            self._check_cluster(request.cluster, request.group)
        now_ms = self.clock.boot_ms()
        states = [group.state() for group in self.groups.values() if len(group.replicas)]
        for name, single in self._singles.items():
            silent_ms = self.routes.silent_ms(name, now_ms=now_ms)
            alive = silent_ms <= self.times.dead_after_ms
            states.append(single_state(name, single, silent_ms=silent_ms, alive=alive))
        found_states = [state for state in states if request.group in ("", state.group)]
        if request.group and not found_states:
            raise Refused(Code.NOT_FOUND, f"broker group {request.group} is unknown here")
        found_states.sort(key=lambda group_state: group_state.group)
        return pb.ListReplicasReply(
            groups=found_states, owner=self.ownership.owner
        ).SerializeToString()

    def _failover(self, request: pb.FailoverRequest, on_reply: OnReply) -> None:
        if request.cluster:
            self._check_cluster(request.cluster, request.group)
        group = self.groups.get(request.group)
        if group is None or not len(group.replicas):
            if request.group in self._singles:
                raise Refused(
                    Code.PRECONDITION_FAILED,
                    f"broker group {request.group} has one broker: there is no other to take over",
                )
            raise Refused(Code.NOT_FOUND, f"broker group {request.group} is unknown here")
        if self._failovers >= FAILOVER_LIMIT:
            raise TooManyRequests(f"{FAILOVER_LIMIT} failovers are on their way")
        planned = plan(group, request.node, unclean=request.unclean)
        failover = self._planned(group, planned, on_reply)
        if request.dry_run:
            on_reply(failover.preview().SerializeToString())
            return
        self._failovers += 1
        failover.start()

    def _planned(self, group: ReplicaGroup, planned: FailoverPlan, on_reply: OnReply) -> Failover:
        def done(answer: pb.FailoverReply | PopmqError) -> None:
            self._failovers -= 1
            if isinstance(answer, PopmqError):
                logger.warning("failover", extra={"broker": group.name, "failed": str(answer)})
                on_reply(answer)
                return
            extra = {"broker": group.name, "to": answer.to_node, "unclean": planned.unclean}
            logger.warning("failover", extra=extra)
            on_reply(answer.SerializeToString())

        return Failover(group, planned, self._open_peer, done)

    def _replace_suspect(self, group: ReplicaGroup) -> None:
        """Most replicas agree on other tables than the master's: one of them is to lead."""
        successor, master = group.successor_of_suspect(), group.leader
        if successor is None or self._failovers >= FAILOVER_LIMIT:
            return
        logger.error(
            "the master's tables are not those of most replicas: handing over",
            extra={"broker": group.name, "to": successor.node},
        )
        self._failovers += 1
        self._planned(group, FailoverPlan(successor, master), lambda reply: None).start()

    def _check_cluster(self, cluster: str, group: str) -> None:
        if cluster != self._cluster:
            raise Refused(
                Code.BAD_REQUEST,
                f"broker group {group[:100]} is of cluster {cluster[:100]}, this controller of "
                f"{self._cluster} (cluster.name)",
            )

    def metrics(self) -> list[Metric]:
        now_ms = self.clock.boot_ms()
        return controller_metrics(self.routes, self.groups.values(), now_ms=now_ms)


def controller_metrics(
    routes: Routes, groups: Iterable[ReplicaGroup], *, now_ms: int
) -> list[Metric]:
    known, groups = routes.all(), list(groups)
    alive = sum(_is_served(groups, routes, route.broker, now_ms) for route in known)
    metrics = [
        reading("controller_brokers", len(known)),
        reading("controller_brokers_alive", alive),
        reading("controller_routes_version", routes.version),
    ]
    for group in groups:
        metrics += _group_metrics(group, now_ms)
    return metrics


def _is_served(groups: list[ReplicaGroup], routes: Routes, broker: str, now_ms: int) -> bool:
    for group in groups:
        if group.name == broker and len(group.replicas):
            return group.leader is not None and group.alive(group.leader.store_id)
    return routes.is_heard(broker, now_ms=now_ms)


def _group_metrics(group: ReplicaGroup, now_ms: int) -> list[Metric]:
    record, timers = group.record, group.replicas.timer_check_point
    values = {
        "replicas": len(group.replicas),
        "replicas_alive": len(group.alive_replicas),
        "epoch": record.epoch if record else 0,
        "in_sync": len(record.sync_state_set) if record else 0,
        "without_leader": bool(group.problem),
        "elections": group.elections,
        "lost_writes": group.lost_writes,
    }
    metrics = [reading(f"controller_{name}", value, group.name) for name, value in values.items()]
    if timers is not None:
        age_s = max(0, now_ms - timers.taken_ms) / 1_000
        metrics.append(reading("controller_timer_check_point_age_seconds", age_s, group.name))
    return metrics
