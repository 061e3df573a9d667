"""Metrics of replication: plain numbers of the node, read at each scrape."""

from collections.abc import Iterable

from popmq.broker.ha.role import BrokerRole
from popmq.broker.node.broker_node import BrokerNode
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric


def replication_metrics(node: BrokerNode) -> Iterable[Metric]:
    """A broker alone has only its role and epoch."""
    status = node.status()
    for role in BrokerRole:
        yield reading("replication_role", role is status.role, role.name)
    yield reading("replication_epoch", status.epoch)
    if node.solo:
        return
    settings = node.settings.replication
    yield reading("replication_in_sync_replicas", len(status.members))
    yield reading("replication_min_in_sync_replicas", settings.effective_min_in_sync)
    yield reading("replication_confirmed_bytes", status.confirmed)
    yield reading("replication_lag_bytes", status.lag_bytes)
    for slave in status.slaves:
        lag = max(0, status.end - slave.acked)
        yield reading("replication_slave_lag_bytes", lag, slave.node)
    yield reading("replication_elections", node.elections)
    yield reading("replication_truncations", node.following.truncations)
    yield reading("replication_truncated_bytes", node.following.truncated_bytes)
    tables = node.following.tables
    yield reading("store_rebuilds", node.rebuilds)
    yield reading("replication_diverged", tables.diverged)
    yield reading("replication_differs", tables.differs)
    yield reading("replication_copying", status.role is BrokerRole.COPYING)
    yield reading("replication_copied_percent", node.following.copying.percent)
    yield reading("replication_copying_bytes", node.following.copying.position)
    if status.timers is not None:
        age_ms = max(0, status.now_ms - status.timers.taken_ms)
        yield reading("timer_checkpoint_age_seconds", age_ms / 1000)
