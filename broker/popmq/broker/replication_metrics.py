"""Metrics of replication: plain numbers of the node, read at each scrape."""

from collections.abc import Iterable

from popmq.broker.broker_node import BrokerNode
from popmq.broker.ha.role import Role
from popmq.common.observe import Metric, MetricKind


def replication_metrics(node: BrokerNode) -> Iterable[Metric]:
    """Names without the prefix `popmq_`. A broker alone has only its role and epoch."""
    status = node.status()
    for role in Role:
        yield _gauge(
            "replication_role", "1 for what it is.", role is status.role, {"role": role.name}
        )
    yield _gauge("replication_epoch", "Accepted.", status.epoch)
    if node.solo:
        return
    settings = node.settings.replication
    yield _gauge("replication_in_sync_replicas", "In the SyncStateSet.", len(status.members))
    yield _gauge("replication_min_in_sync_replicas", "Needed.", settings.least_in_sync)
    yield _gauge("replication_confirmed_bytes", "Confirmed position.", status.confirmed)
    yield _gauge("replication_lag_bytes", "Behind the master, at most.", status.lag_bytes)
    for slave in status.slaves:
        lag = max(0, status.end - slave.acked)
        yield _gauge("replication_slave_lag_bytes", "Of a slave.", lag, {"node": slave.node})
    yield Metric("replication_elections", "Epochs accepted.", node.elections)
    yield Metric("replication_truncations", "Of the log's end.", node.following.truncations)
    yield Metric("replication_truncated_bytes", "Cut off.", node.following.truncated_bytes)
    yield Metric("replication_rebuilds", "Of the whole store.", node.rebuilds)
    yield Metric("replication_diverged", "Not the master's tables.", node.following.diverged)
    yield _gauge("replication_copying", "1 while far behind.", status.role is Role.COPYING)
    yield _gauge("replication_copied_percent", "Of what is copied.", node.following.copying.percent)
    yield _gauge(
        "replication_copying_bytes", "Position of a copy.", node.following.copying.position
    )
    if status.timers is not None:
        age_ms = max(0, status.now_ms - status.timers.taken_ms)
        yield _gauge("timer_checkpoint_age_seconds", "Of the master's newest.", age_ms / 1000)


def _gauge(name: str, help_text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    return Metric(name, help_text, float(value), MetricKind.GAUGE, labels or {})
