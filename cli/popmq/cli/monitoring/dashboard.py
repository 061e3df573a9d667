"""Dashboard: rows of panels as Grafana's JSON. A query may only name metrics of the table.

The queries in the tables of panels and alerts are written for one cluster.  The generated queries
keep the labels `namespace` and `cluster`, so that one Prometheus can watch several clusters.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from popmq.common.metric_table.row import PREFIX
from popmq.common.metric_table.table import TABLE
from popmq.common.metric_table.verdicts import Verdict

_SPAN = 24  # columns of Grafana's grid
_SIZES = {"stat": (4, 4), "table": (24, 8), "timeseries": (8, 8)}  # width and height
_SCHEMA = 39
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_METRIC_NAME = re.compile(rf"\b{PREFIX}[a-z0-9_]+")
CLUSTER_LABELS = ("namespace", "cluster")
_CLUSTER_SELECTOR = 'namespace=~"$namespace",cluster=~"$cluster"'
_GROUPING = re.compile(r"\b(by|on) \(([a-z_, ]*)\)")
_UNGROUPED = re.compile(r"\b(sum|max|min|count)\(")
_SELECTOR = re.compile(r"\b(?:(?:popmq|process)_[a-z0-9_]+|up|ALERTS)\b(?:\{([^}]*)\})?")
# An operator serves many clusters: its metrics of a cluster have the label cluster_namespace.
_OPERATOR_PREFIX = f"{PREFIX}operator_"
_OPERATOR_SELECTOR = 'namespace=~"$operator"'
_REPORTED_CLUSTER_SELECTOR = 'cluster_namespace=~"$namespace",cluster=~"$cluster"'
_REPORTED_CLUSTER_SERIES = {
    series for row in TABLE.values() if "cluster_namespace" in row.labels for series in row.series
}
_VERDICT = "verdict"  # unit of a number that is shown as the name of a verdict
# Labels of the scrape, which tables do not show.
_HIDDEN = ("Time", "__name__", "alertstate", "job", "endpoint", "container", "prometheus")
_KNOWN = {series for row in TABLE.values() for series in row.series}


class UnknownMetric(KeyError):
    """A query names a metric that is not in the table."""


class Query(NamedTuple):
    """PromQL and its legend, which is the title of its column in a table.

    A column has a unit of its own, is yellow from `warn` on and red from `high` on.
    """

    expression: str
    legend: str
    unit: str = ""
    warn: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is one of Grafana's, or "verdict"."""

    title: str
    what: str  # the panel's description
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"  # or stat, table
    stacked: bool = False
    low: float | None = None  # red below it
    warn: float | None = None  # yellow from it on
    high: float | None = None  # red from it on
    width: int = 0  # 0: that of its kind
    worst_first: Sequence[str] = ()  # columns of a table by which it is sorted

    def __post_init__(self) -> None:
        for query in self.queries:
            check(query.expression)

    @property
    def size(self) -> tuple[int, int]:
        width, height = _SIZES[self.kind]
        return self.width or width, height


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str  # of the file, and the end of Grafana's uid
    title: str
    panels: Sequence[Panel]
    variables: Sequence[tuple[str, str]] = ()  # name, and the query of its values


def check(expression: str) -> None:
    """Raise UnknownMetric unless every metric of ours in it is in the table."""
    for name in _METRIC_NAME.findall(expression):
        if name not in _KNOWN:
            raise UnknownMetric(f"{name} in {expression!r} is not in the table of metrics")


def by_cluster(expression: str) -> str:
    """Group by CLUSTER_LABELS too, also in aggregations that have no grouping."""

    def extended(match: re.Match[str]) -> str:
        own = [label for label in match[2].split(", ") if label and label not in CLUSTER_LABELS]
        return f"{match[1]} ({', '.join([*CLUSTER_LABELS, *own])})"

    return _GROUPING.sub(extended, _UNGROUPED.sub(r"\1 by () (", expression))


def of_chosen_clusters(expression: str) -> str:
    """Select the clusters that the dashboard's variables name, and group by cluster."""

    def chosen(match: re.Match[str]) -> str:
        name = match[0].partition("{")[0]
        selector = _CLUSTER_SELECTOR
        if name in _REPORTED_CLUSTER_SERIES:
            selector = _REPORTED_CLUSTER_SELECTOR
        elif name.startswith(_OPERATOR_PREFIX):
            selector = _OPERATOR_SELECTOR
        return f"{name}{{{', '.join(filter(None, (match[1], selector)))}}}".replace(", ", ",")

    return _SELECTOR.sub(chosen, by_cluster(expression))


def dashboards() -> list[Dashboard]:
    """Reads the dashboards of dashboards.toml."""
    text = Path(__file__).with_name("dashboards.toml").read_text(encoding="utf-8")
    return [
        Dashboard(**{**data, "panels": [_read_panel(panel) for panel in data["panels"]]})
        for data in tomllib.loads(text)["dashboards"]
    ]


def _read_panel(data: dict[str, Any]) -> Panel:
    return Panel(**{**data, "queries": [Query(*query) for query in data["queries"]]})


def to_json(dashboard: Dashboard) -> str:
    shown = {
        "uid": f"popmq-{dashboard.name}",
        "title": f"popmq / {dashboard.title}",
        "tags": ["popmq"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                _source_variable(),
                *map(_variable, (*_CLUSTER_VARIABLES, *dashboard.variables)),
            ]
        },
        "panels": [
            _panel(panel, number, place)
            for number, (panel, place) in enumerate(
                zip(dashboard.panels, _places(dashboard.panels), strict=True), 1
            )
        ],
    }
    return json.dumps(shown, indent=1) + "\n"


def _places(panels: Iterable[Panel]) -> Iterator[dict[str, int]]:
    """From left to right; the next row begins below the highest panel of the one before."""
    x = y = row_height = 0
    for panel in panels:
        width, height = panel.size
        if x + width > _SPAN:
            x, y, row_height = 0, y + row_height, 0
        yield {"x": x, "y": y, "w": width, "h": height}
        x, row_height = x + width, max(row_height, height)


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, object]:
    table = panel.kind == "table"
    drawn = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {}
    defaults: dict[str, object] = {
        **_unit(panel.unit),
        "custom": drawn,
        "thresholds": _thresholds(panel.unit, panel.low, panel.warn, panel.high),
    }
    overrides = [_column(query) for query in panel.queries] if table else []
    shown: dict[str, object] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.what,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": overrides},
        "options": _options(panel),
        "targets": [_target(query, at, table=table) for at, query in enumerate(panel.queries)],
    }
    if table:
        shown["transformations"] = _transformations(panel)
    return shown


def _target(query: Query, at: int, *, table: bool) -> dict[str, object]:
    target: dict[str, object] = {
        "refId": _letter(at),
        "datasource": _SOURCE,
        "expr": of_chosen_clusters(query.expression),
        "legendFormat": " ".join(filter(None, ("{{cluster}}", query.legend))),
    }
    return {**target, "format": "table", "instant": True} if table else target


def _letter(at: int) -> str:
    return chr(ord("A") + at)


def _options(panel: Panel) -> dict[str, object]:
    if panel.kind == "timeseries":
        return {"legend": {"displayMode": "list", "placement": "bottom"}}
    if panel.kind == "stat":
        color = {"colorMode": "background" if panel.unit == _VERDICT else "value"}
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, **color}
    columns = {query.legend for query in panel.queries}
    # Labels are sorted by the alphabet, values with the largest first.
    order = [{"displayName": name, "desc": name in columns} for name in panel.worst_first]
    return {"sortBy": order, "showHeader": True}


def _transformations(panel: Panel) -> list[dict[str, object]]:
    """One row for each set of labels, one column for each query."""
    names = {
        f"Value #{_letter(at)}" if len(panel.queries) > 1 else "Value": query.legend
        for at, query in enumerate(panel.queries)
    }
    organized = {"excludeByName": dict.fromkeys(_HIDDEN, True), "renameByName": names}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": organized}]


def _column(query: Query) -> dict[str, object]:
    properties: list[dict[str, object]] = [
        *({"id": key, "value": value} for key, value in _unit(query.unit or "short").items()),
        {"id": "thresholds", "value": _thresholds(query.unit, None, query.warn, query.high)},
    ]
    if query.unit == _VERDICT or query.warn is not None or query.high is not None:
        properties.append({"id": "custom.cellOptions", "value": {"type": "color-text"}})
    return {"matcher": {"id": "byName", "options": query.legend}, "properties": properties}


def _unit(unit: str) -> dict[str, object]:
    if unit != _VERDICT:
        return {"unit": unit}
    words = {str(verdict.value): {"text": verdict.name} for verdict in Verdict}
    return {"unit": "short", "mappings": [{"type": "value", "options": words}]}


def _thresholds(
    unit: str, low: float | None, warn: float | None, high: float | None
) -> dict[str, object]:
    if unit == _VERDICT:
        warn, high = Verdict.UNKNOWN, Verdict.STUCK
    steps: list[dict[str, object]] = [{"color": "green" if low is None else "red", "value": None}]
    for color, value in (("green", low), ("yellow", warn), ("red", high)):
        if value is not None:
            steps.append({"color": color, "value": value})
    return {"mode": "absolute", "steps": steps}


# They list the clusters, so they select none. Both are empty if Prometheus does not set them.
_CLUSTER_VARIABLES = (
    ("namespace", "label_values(popmq_build_info, namespace)"),
    ("cluster", 'label_values(popmq_build_info{namespace=~"$namespace"}, cluster)'),
)


def _source_variable() -> dict[str, object]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _variable(variable: tuple[str, str]) -> dict[str, object]:
    name, query = variable
    check(query)
    if variable not in _CLUSTER_VARIABLES and name != "operator":
        query = of_chosen_clusters(query)
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
