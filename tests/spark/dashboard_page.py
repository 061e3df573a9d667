"""A dashboard drawn from its own JSON and a live Prometheus, for a picture of it without Grafana.

Panels stand where the dashboard puts them, with its titles, queries, legends, units, thresholds
and sorting. Grafana draws the same numbers nicer.
"""

import json
import math
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from e2e.prometheus import Prometheus

Concrete = Callable[[str], str]
Points = list[tuple[int, float]]
Series = dict[str, Points]
Config = dict[str, Any]  # a panel's or a column's: unit, thresholds, mappings
Cell = float | str
_UNITS = {"s": (" s", 1.0), "bytes": (" KiB", 1 / 1024), "Bps": (" KiB/s", 1 / 1024)}
_UNITS |= dict.fromkeys(("mps", "reqps", "ops"), ("/s", 1.0)) | {"percentunit": (" %", 100.0)}
_UNITS |= {"percent": (" %", 1.0), "short": ("", 1.0)}
_COLOURS = {"green": "#73bf69", "yellow": "#fade2a", "red": "#f2495c"}
_LINES = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#c0d8ff")
_WIDTH, _HEIGHT, _LEFT = 500, 210, 56
_STYLE = """
body { margin: 16px; background: #111317; color: #d8d9da; font: 13px system-ui, sans-serif }
h1 { font-size: 18px; font-weight: 500; margin: 0 0 12px 4px }
main { display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: 30px; gap: 8px }
section { background: #181b1f; border: 1px solid #25282d; border-radius: 3px; padding: 8px 10px;
  overflow: hidden; min-width: 0 }
h2 { font-size: 13px; font-weight: 500; margin: 0 0 6px; white-space: nowrap }
.stat { display: flex; justify-content: center; align-items: center; height: 100px }
.stat span { font-size: 34px }
table { border-collapse: collapse; width: 100% }
th { text-align: left; color: #8ab8ff; font-weight: 500 }
th, td { padding: 3px 10px 3px 0; border-bottom: 1px solid #25282d; white-space: nowrap }
svg { width: 100%; height: auto } svg text { font-size: 11px; fill: #9fa3a8 }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 11px }
"""


def dashboard_page(
    path: Path, prometheus: Prometheus, concrete: Concrete, *, seconds: int
) -> tuple[str, list[str]]:
    """The page, and the titles of panels that nothing was found for."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    parts, empty = [], []
    for panel in dashboard["panels"]:
        if panel["type"] == "table":
            drawn = _table(panel, prometheus, concrete)
        else:
            series = _series(panel, prometheus, concrete, seconds)
            defaults = panel["fieldConfig"]["defaults"]
            draw = _stat if panel["type"] == "stat" else _lines
            drawn = draw(series, defaults) if series else ""
        if not drawn:
            empty.append(panel["title"])
        at = panel["gridPos"]
        place = f"grid-column:{at['x'] + 1}/span {at['w']};grid-row:{at['y'] + 1}/span {at['h']}"
        title = escape(panel["title"])
        parts.append(f'<section style="{place}"><h2>{title}</h2>{drawn}</section>')
    title = escape(dashboard["title"])
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"<h1>{title}</h1><main>{''.join(parts)}</main>"
    ), empty


def _series(
    panel: dict[str, Any], prometheus: Prometheus, concrete: Concrete, seconds: int
) -> Series:
    series: Series = {}
    for target in panel["targets"]:
        for manifest in prometheus.query_range(concrete(target["expr"]), seconds=seconds, step=2):
            values = [(int(at) * 1000, float(value)) for at, value in manifest["values"]]
            known = [(at, value) for at, value in values if math.isfinite(value)]
            if known:
                series[_legend(target["legendFormat"], manifest["metric"])] = known
    return series


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), form).strip()


def _stat(series: Series, config: Config) -> str:
    value = max(points[-1][1] for points in series.values())
    return f'<div class="stat">{_shown(value, config)}</div>'


def _shown(value: float, config: Config) -> str:
    """With its unit, in the colour of its threshold."""
    steps = config["thresholds"]["steps"]
    colour = next(
        step["color"] for step in reversed(steps) if step["value"] is None or value >= step["value"]
    )
    words = {
        key: word["text"]
        for item in config.get("mappings", ())
        for key, word in item["options"].items()
    }
    unit, factor = _UNITS[config["unit"]]
    number = "∞" if math.isinf(value) else f"{value * factor:,.3g}"
    if value * factor >= 1_000 and not math.isinf(value):
        number = f"{value * factor:,.0f}"
    text = words.get(f"{value:.0f}", f"{number}{unit}")
    return f'<span style="color:{_COLOURS[colour]}">{escape(text)}</span>'


def _table(panel: dict[str, Any], prometheus: Prometheus, concrete: Concrete) -> str:
    (organized,) = (
        item["options"] for item in panel["transformations"] if item["id"] == "organize"
    )
    columns: dict[str, Config] = {
        item["matcher"]["options"]: {entry["id"]: entry["value"] for entry in item["properties"]}
        for item in panel["fieldConfig"]["overrides"]
    }
    rows: dict[tuple[tuple[str, str], ...], dict[str, Cell]] = {}
    for target, column in zip(panel["targets"], columns, strict=True):
        for sample in prometheus.query(concrete(target["expr"])):
            hidden = organized["excludeByName"]
            labels = {name: text for name, text in sample["metric"].items() if name not in hidden}
            row = rows.setdefault(tuple(sorted(labels.items())), dict(labels))
            if not math.isnan(float(sample["value"][1])):
                row[column] = float(sample["value"][1])
    if not rows:
        return ""
    ordered = list(rows.values())
    for order in reversed(panel["options"]["sortBy"]):
        name = order["displayName"]
        ordered.sort(key=lambda row: row.get(name, 0.0), reverse=order["desc"])
    names = [*dict(next(iter(rows))), *columns]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = ""
    for row in ordered:
        cells = [f"<td>{_cell(row.get(name), columns.get(name))}</td>" for name in names]
        body += f"<tr>{''.join(cells)}</tr>"
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Cell | None, config: Config | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str) or config is None:
        return escape(str(value))
    return _shown(value, config)


def _lines(series: Series, config: Config) -> str:
    unit, factor = _UNITS[config["unit"]]
    moments = [at for points in series.values() for at, _ in points]
    first, span = min(moments), max(max(moments) - min(moments), 1)
    top = max(value for points in series.values() for _, value in points) * factor or 1.0
    parts = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#25282d"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:,.3g}{unit}</text>'
        for y, value in ((10, top), (_HEIGHT / 2, top / 2), (_HEIGHT - 10, 0.0))
    ]
    legend = []
    for number, (name, points) in enumerate(series.items()):
        colour = _LINES[number % len(_LINES)]
        path = " ".join(
            f"{_LEFT + (_WIDTH - _LEFT) * (at - first) / span:.1f},"
            f"{_HEIGHT - 10 - (_HEIGHT - 20) * value * factor / top:.1f}"
            for at, value in points
        )
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>'
        )
        legend.append(f'<span style="color:{colour}">— {escape(name)}</span>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(parts)}</svg>'
        f'<div class="legend">{"".join(legend)}</div>'
    )
