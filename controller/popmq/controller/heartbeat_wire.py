"""REGISTER requests as what the controller keeps of them, and back as what it shows."""

from popmq.common.protocol.group_record import TimerCheckPoint
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.replica_group import ReplicaGroup
from popmq.controller.replicas import ReplicaHeartbeat, Role
from popmq.controller.routes import Route

_SHORTAGE_CHARACTERS = 400


def route_from_wire(broker: pb.BrokerAddress) -> Route:
    return Route(
        broker.broker,
        broker.address,
        broker.epoch,
        broker.store_id,
        broker.node,
        broker.draining,
    )


def route_to_wire(route: Route) -> pb.BrokerAddress:
    return pb.BrokerAddress(
        broker=route.broker,
        address=route.address,
        epoch=route.epoch,
        store_id=route.store_id,
        node=route.node,
        draining=route.draining,
    )


def replica_from_wire(request: pb.RegisterRequest) -> ReplicaHeartbeat:
    broker = request.broker
    return ReplicaHeartbeat(
        node=broker.node or broker.broker,
        store_id=broker.store_id,
        address=broker.address,
        epoch=broker.epoch,
        end=request.end,
        confirmed=request.confirmed,
        role=request.role,
        priority=request.priority,
        replicas=max(1, request.replicas),
        min_in_sync=request.min_in_sync,
        catch_up_from=request.catch_up_from,
        catch_up_to=request.catch_up_to,
        meta_version=request.meta_version,
        draining=broker.draining,
        tables_equal_at=request.tables_equal_at,
        tables_differ_at=request.tables_differ_at,
        tables_hash_at=request.tables_hash_at or request.tables_differ_at,
        tables_hash=request.tables_hash,
        asks_rebuild=request.asks_rebuild,
        shortage=request.shortage[:_SHORTAGE_CHARACTERS],
    )


def timers_from_wire(request: pb.RegisterRequest, *, now_ms: int) -> TimerCheckPoint | None:
    if not request.HasField("timer_check_point"):
        return None
    return TimerCheckPoint.from_wire(request.timer_check_point, now_ms)


def route_of(group: ReplicaGroup) -> Route | None:
    """The way to the master; None keeps the one that is known.

    The record names it, also before it serves: whoever comes too early is told NOT_MASTER.
    While this controller knows no record (its store is away, or new), whoever says that it
    is the master of the newest epoch is believed: a wrong route does no harm.
    """
    leader = group.leader
    if group.record is not None:
        epoch = group.record.epoch
    else:
        serving = [replica for replica in group.alive_replicas if replica.role == Role.MASTER]
        leader = max(serving, key=lambda heartbeat: heartbeat.epoch, default=None)
        epoch = leader.epoch if leader else 0
    if leader is None:
        return None
    return Route(group.name, leader.address, epoch, leader.store_id, leader.node, leader.draining)


def single_state(
    name: str, single: ReplicaHeartbeat, *, silent_ms: int, alive: bool
) -> pb.GroupState:
    """A broker without replicas, which needs no record."""
    member = pb.Member(
        broker=pb.BrokerAddress(
            broker=name,
            address=single.address,
            epoch=single.epoch,
            store_id=single.store_id,
            node=single.node,
            draining=single.draining,
        ),
        role=Role.MASTER,
        end=single.end,
        confirmed=single.confirmed,
        alive=alive,
        silent_ms=silent_ms,
        replicas=1,
        min_in_sync=1,
        meta_version=single.meta_version,
    )
    return pb.GroupState(group=name, members=[member])
