"""Dashboard: rows of panels as Grafana's JSON. A query may only name metrics of the table.

The tables of panels and alerts say nothing of clusters.  What is made of them keeps the labels
`namespace` and `cluster` in each result, so that one Prometheus can watch several clusters.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from popmq.common.metric_table.row import PREFIX
from popmq.common.metric_table.table import TABLE

_COLUMNS = 3
_WIDTH = 24 // _COLUMNS  # of Grafana's grid
_HEIGHT = 8
_SCHEMA = 39
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_NAMED = re.compile(rf"\b{PREFIX}[a-z0-9_]+")
CLUSTER_LABELS = ("namespace", "cluster")
_CHOSEN = 'namespace=~"$namespace",cluster=~"$cluster"'
_GROUPING = re.compile(r"\b(by|on) \(([a-z_, ]*)\)")
_UNGROUPED = re.compile(r"\b(sum|max|min|count)\(")
_SELECTOR = re.compile(r"\b(?:(?:popmq|process)_[a-z0-9_]+|up)\b(?:\{([^}]*)\})?")
_KNOWN = {series for row in TABLE.values() for series in row.series}


class UnknownMetric(KeyError):
    """A query names a metric that is not in the table."""


@dataclass(frozen=True, slots=True)
class Panel:
    """`queries` are PromQL and legend; `unit` is one of Grafana's."""

    title: str
    what: str
    unit: str
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"  # or stat
    stacked: bool = False
    low: float | None = None  # red below it
    high: float | None = None  # red from it on

    def __post_init__(self) -> None:
        for expression, _ in self.queries:
            check(expression)


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str  # of the file, and what Grafana knows it by
    title: str
    panels: Sequence[Panel]
    variables: Sequence[tuple[str, str]] = ()  # name, and the query of its values


def check(expression: str) -> None:
    """Raise UnknownMetric unless every metric of ours in it is in the table."""
    for name in _NAMED.findall(expression):
        if name not in _KNOWN:
            raise UnknownMetric(f"{name} in {expression!r} is not in the table of metrics")


def by_cluster(expression: str) -> str:
    """With the labels of the cluster in each grouping, those that it lacks included."""

    def extended(match: re.Match[str]) -> str:
        own = [label for label in match[2].split(", ") if label and label not in CLUSTER_LABELS]
        return f"{match[1]} ({', '.join([*CLUSTER_LABELS, *own])})"

    return _GROUPING.sub(extended, _UNGROUPED.sub(r"\1 by () (", expression))


def of_chosen_clusters(expression: str) -> str:
    """Of the clusters that the dashboard's variables name, and grouped by them."""

    def chosen(match: re.Match[str]) -> str:
        name = match[0].partition("{")[0]
        if name.startswith(f"{PREFIX}operator_"):
            return match[0]  # an operator belongs to no cluster
        return f"{name}{{{', '.join(filter(None, (match[1], _CHOSEN)))}}}".replace(", ", ",")

    return _SELECTOR.sub(chosen, by_cluster(expression))


def dashboards() -> list[Dashboard]:
    """Those of dashboards.toml."""
    text = Path(__file__).with_name("dashboards.toml").read_text(encoding="utf-8")
    return [
        Dashboard(**{**data, "panels": [Panel(**panel) for panel in data["panels"]]})
        for data in tomllib.loads(text)["dashboards"]
    ]


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
        "panels": [_panel(dashboard, at) for at in range(len(dashboard.panels))],
    }
    return json.dumps(shown, indent=1) + "\n"


def _panel(dashboard: Dashboard, at: int) -> dict[str, object]:
    panel = dashboard.panels[at]
    row, column = divmod(at, _COLUMNS)
    drawn = {"stacking": {"mode": "normal"}, "fillOpacity": 30} if panel.stacked else {}
    return {
        "id": at + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.what,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": drawn, "thresholds": _thresholds(panel)},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}}
        if panel.kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"]}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": of_chosen_clusters(expression),
                "legendFormat": " ".join(filter(None, ("{{cluster}}", legend))),
            }
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _thresholds(panel: Panel) -> dict[str, object]:
    steps: list[dict[str, object]] = [
        {"color": "green" if panel.low is None else "red", "value": None}
    ]
    if panel.low is not None:
        steps.append({"color": "green", "value": panel.low})
    if panel.high is not None:
        steps.append({"color": "red", "value": panel.high})
    return {"mode": "absolute", "steps": steps}


# Of no cluster: the labels are empty where Prometheus is given none.
_CLUSTER_VARIABLES = (
    ("namespace", "label_values(popmq_build_info, namespace)"),
    ("cluster", 'label_values(popmq_build_info{namespace=~"$namespace"}, cluster)'),
)


def _source_variable() -> dict[str, object]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _variable(variable: tuple[str, str]) -> dict[str, object]:
    name, query = variable
    check(query)
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
