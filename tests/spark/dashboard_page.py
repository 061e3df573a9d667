"""A dashboard drawn from its own JSON and a live Prometheus, for a picture of it without Grafana.

Panels stand where the dashboard puts them, with its titles, queries, legends and units; lines are
drawn by the charts of the reports. Grafana draws the same numbers nicer.
"""

import json
import math
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from e2e.prometheus import Prometheus

from popmq.reports.output.svg import lines

Concrete = Callable[[str], str]
Series = dict[str, list[tuple[int, float]]]
_UNITS = {"s": (" ms", 1e3), "bytes": (" KiB", 1 / 1024), "Bps": (" KiB/s", 1 / 1024)}
_UNITS |= {"mps": ("/s", 1.0), "percentunit": (" %", 100.0), "short": ("", 1.0)}
_STYLE = """
body { margin: 16px; background: #111317; color: #d8d9da; font-family: system-ui, sans-serif }
h1 { font-size: 18px; font-weight: 500; margin: 0 0 12px 4px }
main { display: grid; grid-template-columns: repeat(24, 1fr); gap: 8px }
section { background: #181b1f; border: 1px solid #25282d; border-radius: 3px; padding: 8px 10px }
h2 { font-size: 13px; font-weight: 500; margin: 0 0 6px }
.stat { display: flex; gap: 40px; justify-content: center; align-items: center; height: 130px }
.stat b { font-size: 46px; font-weight: 500; color: #73bf69; display: block; text-align: center }
.stat span { font-size: 12px; color: #9fa3a8; display: block; text-align: center }
svg.chart { width: 100%; height: auto }
"""


def dashboard_page(
    path: Path, prometheus: Prometheus, concrete: Concrete, *, seconds: int
) -> tuple[str, list[str]]:
    """The page, and the titles of panels that nothing was found for."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    parts, empty = [], []
    for panel in dashboard["panels"]:
        series = _series(panel, prometheus, concrete, seconds)
        if not series:
            empty.append(panel["title"])
        at = panel["gridPos"]
        place = f"grid-column: {at['x'] + 1} / span {at['w']}; grid-row: {at['y'] // at['h'] + 1}"
        drawn = _stat(series) if panel["type"] == "stat" else _lines(series, panel)
        parts.append(f'<section style="{place}"><h2>{escape(panel["title"])}</h2>{drawn}</section>')
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
    if form == "__auto":
        return ", ".join(labels.values()) or "value"
    return re.sub(r"\{\{(\w+)\}\}", lambda label: labels.get(label[1], ""), form)


def _stat(results: Series) -> str:
    named = {"" if name == "value" else escape(name): values for name, values in results.items()}
    cells = [
        f"<div><b>{values[-1][1]:,.0f}</b><span>{name}</span></div>"
        for name, values in named.items()
    ]
    return f'<div class="stat">{"".join(cells)}</div>'


def _lines(results: Series, panel: dict[str, Any]) -> str:
    unit, factor = _UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    scaled = {
        name: [(at, value * factor) for at, value in values] for name, values in results.items()
    }
    return lines(scaled, unit)
