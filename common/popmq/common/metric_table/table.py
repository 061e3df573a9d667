"""The table of every metric, from which the metrics, their page, dashboards and alerts are made.

`reading` is the only way to make one, so a metric that is not in the table cannot be shown, and
one that is taken out breaks whoever shows it.
"""

import tomllib
from pathlib import Path

from popmq.common.metric_table.row import Kind, MetricRow
from popmq.common.observability import Histogram, Metric, MetricKind


def _read_sections() -> dict[str, tuple[MetricRow, ...]]:
    text = Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    bounds: dict[str, str] = data["bounds"]
    sections = {}
    for section in data["sections"]:
        rows = []
        for kind, name, what, *rest in section["metrics"]:
            labels, bound = rest or ((), "")
            bound = bounds.get(bound, bound)
            rows.append(MetricRow(section["role"], Kind(kind), name, what, tuple(labels), bound))
        sections[section["title"]] = tuple(rows)
    return sections


SECTIONS = _read_sections()
TABLE = {row.name: row for section in SECTIONS.values() for row in section}
assert len(TABLE) == sum(map(len, SECTIONS.values())), "a metric is in the table twice"
_KINDS = {kind: MetricKind[kind.name] for kind in Kind}


def reading(name: str, value: float | Histogram, *labels: str) -> Metric:
    """What a metric of the table says now; `labels` in the table's order.

    KeyError for a name that is not in the table.
    """
    row = TABLE[name]
    named = dict(zip(row.labels, labels, strict=True))
    if isinstance(value, Histogram):
        return Metric(row.name, row.help, value.sum, _KINDS[row.kind], named, value.buckets)
    return Metric(row.name, row.help, float(value), _KINDS[row.kind], named)
