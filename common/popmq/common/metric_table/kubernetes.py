"""Metrics of the operator."""

from popmq.common.metric_table.row import MetricRole, counter, gauge, rows

OPERATOR = rows(
    MetricRole.OPERATOR,
    gauge("operator_leader", "1 at the operator that acts."),
    gauge("operator_clusters", "BrokerClusters looked after."),
    gauge("operator_clusters_ready", "BrokerClusters that serve."),
    counter("operator_looks", "Looks at clusters."),
    counter("operator_looks_failed", "Looks that were broken off."),
    counter("operator_look_seconds", "Time spent in looks."),
    gauge("operator_longest_look_seconds", "How long the oldest look that goes on has taken."),
    counter(
        "operator_declared_changes", "Topics and groups made, changed or deleted for their objects."
    ),
    counter(
        "operator_declared_drifts",
        "Settings of topics and groups that somebody had changed and that were put right.",
    ),
    counter(
        "operator_declared_looks_failed",
        "Looks at Topics and ConsumerGroups that were broken off.",
    ),
)
