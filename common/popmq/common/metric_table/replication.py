"""A broker group's replicas, and the controller that elects."""

from popmq.common.metric_table.row import MetricRole, counter, gauge, rows

_GROUPS = "the broker groups of the cluster"
_ROLES = "the roles of a broker, below 8"

REPLICATION = rows(
    MetricRole.BROKER,
    gauge("replication_role", "1 for what the broker is.", ["role"], _ROLES),
    gauge("replication_epoch", "The epoch that the broker accepted."),
    gauge("replication_in_sync_replicas", "Members of the SyncStateSet."),
    gauge("replication_min_in_sync_replicas", "With fewer sends are refused."),
    gauge("replication_confirmed_bytes", "The confirmed position."),
    gauge("replication_lag_bytes", "How far the slave furthest behind is."),
    gauge(
        "replication_slave_lag_bytes",
        "How far each slave is behind its master's end.",
        ["node"],
        "the brokers of the group",
    ),
    counter("replication_elections", "Epochs that the broker accepted."),
    counter("replication_truncations", "Cuts of what a new master did not have."),
    counter("replication_truncated_bytes", "Cut off so; never acknowledged."),
    counter("store_rebuilds", "Stores that were removed and copied again from the master."),
    counter(
        "replication_diverged",
        "Comparisons in which a slave's tables were not the master's: a fault of popmq.",
    ),
    gauge(
        "replication_differs",
        "1 while the newest comparison of this slave's tables was not equal: it stays out of the "
        "SyncStateSet where `min_in_sync` allows that.",
    ),
    gauge("replication_copying", "1 for a slave that is far behind."),
    gauge("replication_copied_percent", "Of what such a slave copies."),
    gauge("replication_copying_bytes", "Position of the copy."),
    gauge(
        "timer_checkpoint_age_seconds",
        "Of the newest TimerCheckPoint of a master that the broker knows.",
    ),
)

CONTROLLER = rows(
    MetricRole.CONTROLLER,
    gauge("controller_brokers", "Broker groups known."),
    gauge("controller_brokers_alive", "Those with a master that was heard of lately."),
    gauge("controller_routes_version", "Moves when a route changes."),
    gauge("controller_replicas", "Brokers of a group that are known.", ["broker"], _GROUPS),
    gauge("controller_replicas_alive", "Those heard of lately.", ["broker"], _GROUPS),
    gauge("controller_epoch", "Epoch of the group's record.", ["broker"], _GROUPS),
    gauge("controller_in_sync", "Size of the SyncStateSet.", ["broker"], _GROUPS),
    gauge(
        "controller_without_leader",
        "1: nobody leads, and nobody can; look at `popmq broker list`.",
        ["broker"],
        _GROUPS,
    ),
    counter("controller_elections", "Elections that this controller won.", ["broker"], _GROUPS),
    counter(
        "controller_lost_writes",
        "Compare-and-sets that somebody else won, or that got no answer.",
        ["broker"],
        _GROUPS,
    ),
    gauge(
        "controller_timer_check_point_age_seconds",
        "Of the newest one known.",
        ["broker"],
        _GROUPS,
    ),
)
