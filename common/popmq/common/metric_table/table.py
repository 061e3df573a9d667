"""The table of every metric, from which the metrics, their page, dashboards and alerts are made.

`reading` is the only way to make one, so a metric that is not in the table cannot be shown, and
one that is taken out breaks whoever shows it.
"""

from popmq.common.metric_table.kubernetes import OPERATOR
from popmq.common.metric_table.pop import AUDIT, CONSUMER, POP
from popmq.common.metric_table.proxy import PROCESS, PROXY
from popmq.common.metric_table.replication import CONTROLLER, REPLICATION
from popmq.common.metric_table.report import REPORT
from popmq.common.metric_table.row import Kind, MetricRow
from popmq.common.metric_table.store import STORE
from popmq.common.metric_table.timer import TIMER
from popmq.common.observability import Histogram, Metric, MetricKind

SECTIONS: dict[str, tuple[MetricRow, ...]] = {
    "Store": STORE,
    "Pop": POP,
    "Consumer groups": CONSUMER,
    "Audit": AUDIT,
    "Timers": TIMER,
    "Reports": REPORT,
    "Replication": REPLICATION,
    "Controller": CONTROLLER,
    "Proxy": PROXY,
    "Operator": OPERATOR,
    "Processes": PROCESS,
}
TABLE = {row.name: row for section in SECTIONS.values() for row in section}
assert len(TABLE) == sum(map(len, SECTIONS.values())), "a metric is in the table twice"

_KINDS = {
    Kind.COUNTER: MetricKind.COUNTER,
    Kind.GAUGE: MetricKind.GAUGE,
    Kind.HISTOGRAM: MetricKind.HISTOGRAM,
}


def reading(name: str, value: float | Histogram, *labels: str) -> Metric:
    """What a metric of the table says now; `labels` in the table's order.

    KeyError for a name that is not in the table.
    """
    row = TABLE[name]
    named = dict(zip(row.labels, labels, strict=True))
    if isinstance(value, Histogram):
        return Metric(row.name, row.help, value.sum, _KINDS[row.kind], named, value.buckets)
    return Metric(row.name, row.help, float(value), _KINDS[row.kind], named)
