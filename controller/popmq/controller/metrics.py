"""The controller's metrics, read from the parts that count."""

from collections.abc import Iterable

from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.controller.replica_group import ReplicaGroup
from popmq.controller.routes import Routes


def controller_metrics(
    routes: Routes, groups: Iterable[ReplicaGroup], *, now_ms: int
) -> list[Metric]:
    known, groups = routes.all(), list(groups)
    alive = sum(_is_served(groups, routes, one.broker, now_ms) for one in known)
    found = [
        reading("controller_brokers", len(known)),
        reading("controller_brokers_alive", alive),
        reading("controller_routes_version", routes.version),
    ]
    for group in groups:
        found += _group_metrics(group, now_ms)
    return found


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
    found = [reading(f"controller_{name}", value, group.name) for name, value in values.items()]
    if timers is not None:
        age_s = max(0, now_ms - timers.taken_ms) / 1_000
        found.append(reading("controller_timer_check_point_age_seconds", age_s, group.name))
    return found
