"""The controller's metrics, read from the parts that count."""

from collections.abc import Iterable

from popmq.common.observe import Metric, MetricKind
from popmq.controller.replica_group import ReplicaGroup
from popmq.controller.routes import Routes

_GAUGE = MetricKind.GAUGE


def controller_metrics(
    routes: Routes, groups: Iterable[ReplicaGroup], *, now_ms: int
) -> list[Metric]:
    known, groups = routes.all(), list(groups)
    alive = sum(_is_served(groups, routes, one.broker, now_ms) for one in known)
    found = [
        Metric("controller_brokers", "Broker groups known.", len(known), _GAUGE),
        Metric("controller_brokers_alive", "With a master heard of lately.", alive, _GAUGE),
        Metric("controller_routes_version", "Moves with the routes.", routes.version, _GAUGE),
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
    labels = {"broker": group.name}
    record, timers = group.record, group.replicas.timer_check_point

    def gauge(name: str, what: str, value: int) -> Metric:
        return Metric(f"controller_{name}", what, value, _GAUGE, labels=labels)

    found = [
        gauge("replicas", "Brokers of the group known.", len(group.replicas)),
        gauge("replicas_alive", "Heard of lately.", len(group.living)),
        gauge("epoch", "Of the record.", record.epoch if record else 0),
        gauge("in_sync", "Size of the SyncStateSet.", len(record.sync_state_set) if record else 0),
        gauge("without_leader", "1: nobody leads, and nobody can.", int(bool(group.trouble))),
        Metric("controller_elections", "Won by this controller.", group.elections, labels=labels),
        Metric(
            "controller_lost_writes",
            "Compare-and-sets that somebody else won, or that got no answer.",
            group.lost_writes,
            labels=labels,
        ),
    ]
    if timers is not None:
        age_ms = max(0, now_ms - timers.taken_ms)
        found.append(gauge("timer_check_point_age_ms", "Of the newest one known.", age_ms))
    return found
