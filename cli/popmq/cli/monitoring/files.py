"""Every file that is made from the table of metrics, by its path from the root of the tree.

`python -m popmq.cli.monitoring.files` (make metrics) writes them.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from popmq.cli.monitoring.alert import PAGE as ALERT_PAGE
from popmq.cli.monitoring.alert import alert_page, all_alerts, rule_tests, rules
from popmq.cli.monitoring.dashboard import dashboards, to_json
from popmq.common.metric_table.row import Kind, MetricRow
from popmq.common.metric_table.table import SECTIONS

FOLDER = "monitoring"
CHART = "charts/popmq/monitoring"  # helm reads nothing that is outside of a chart
PAGE = "docs/reference/metrics.md"
RULES = "alerts.yml"
RULE_TESTS = "alerts_test.yml"
SHOWCASE = "deploy/showcase-monitoring.yaml"

_HEAD = """# Metrics

Made from the table in code (`common/metric_table/`) by `make metrics`; do not edit. Every role
serves its metrics on `/metrics` ([ports](../reference/ports.md)); in `popmq up` with one process
one page has those of all roles. Those of the role `report` come from
`popmq report lag --prometheus`, and no other metric begins with `popmq_report_`. The usual
`process_` and `python_gc_` metrics are there, too.
What to watch: [monitoring](../concepts/monitoring.md).

Counters count from the start of their process. Lags, dead letters, pending timers, half messages
and the audit come from masters alone: slaves have the same tables, and sums would be too large.
Units are in the names: seconds, bytes, messages.
"""
# The word popmq in the names of monitors makes the label `job` that alerts look for.
_SHOWCASE = """# Made by `make metrics`; do not edit. It needs the definitions of the Prometheus
# operator, and scrapes the cluster of deploy/showcase.yaml and the operator of popmq.
# A Prometheus that selects monitors and rules by a label, as `release`, needs that label here.
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: popmq-demo
spec:
  selector:
    matchLabels:
      popmq.io/cluster: demo
  podMetricsEndpoints:
    - port: http
      path: /metrics
      interval: 15s
      relabelings:
        - targetLabel: cluster
          replacement: demo
---
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: popmq-operator
spec:
  namespaceSelector:
    matchNames: [popmq-system]
  selector:
    matchLabels:
      app.kubernetes.io/name: popmq-operator
  podMetricsEndpoints:
    - port: http
      path: /metrics
      interval: 15s
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: popmq-alerts
spec:
"""
_TABLE = "| metric | type | role | labels | what |\n|---|---|---|---|---|\n"


def generated_files() -> dict[str, str]:
    shown = {f"dashboards/{board.name}.json": to_json(board) for board in dashboards()}
    shown[RULES] = rules(all_alerts())
    return {
        PAGE: reference_page(),
        ALERT_PAGE: alert_page(all_alerts()),
        SHOWCASE: showcase(),
        f"{FOLDER}/{RULE_TESTS}": rule_tests(all_alerts(), RULES),
        **{f"{folder}/{name}": text for folder in (FOLDER, CHART) for name, text in shown.items()},
    }


def showcase() -> str:
    """For the Prometheus operator: what scrapes deploy/showcase.yaml, and every alert."""
    return _SHOWCASE + indent(rules(all_alerts()).partition("\n")[2], "  ")


def reference_page() -> str:
    parts = [_HEAD]
    for title, rows in SECTIONS.items():
        parts.append(f"## {title}\n\n{_example(rows)}{_TABLE}" + "".join(map(_line, rows)))
    return "\n".join(parts)


def _example(rows: Sequence[MetricRow]) -> str:
    """The shortest sum or rate of the dashboards that reads one of the metrics; "" for none."""
    named = re.compile("|".join(rf"\b{name}\b" for row in rows for name in row.series))
    queries = [
        (expression, panel.title)
        for board in dashboards()
        for panel in board.panels
        for expression in (query.expression for query in panel.queries)
        if named.search(expression) and "(" in expression
    ]
    if not queries:
        return ""
    expression, title = min(queries, key=lambda query: len(query[0]))
    for variable, value in (
        ("$__rate_interval", "5m"),
        ("$group", "billing"),
        ("$topic", "orders"),
    ):
        expression = expression.replace(variable, value)
    return f"Example, from the panel *{title}*: `{expression}`\n\n"


def _line(row: MetricRow) -> str:
    labels = ", ".join(f"`{label}`" for label in row.labels)
    if row.bound:
        labels += f" ({row.bound})"
    name = f"`{row.exposed}`"
    if row.kind is Kind.HISTOGRAM:
        name += " (`_bucket`, `_sum`, `_count`)"
    return f"| {name} | {row.kind.value} | {row.role} | {labels} | {row.help} |\n"


if __name__ == "__main__":
    for path, text in generated_files().items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
        sys.stdout.write(f"written: {path}\n")
