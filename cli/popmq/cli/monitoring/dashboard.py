"""Dashboard: rows of panels as Grafana's JSON. A query may only name metrics of the table."""

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
        "templating": {"list": [_source_variable(), *map(_variable, dashboard.variables)]},
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
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": drawn}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}}
        if panel.kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"]}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend or "__auto",
            }
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }


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
