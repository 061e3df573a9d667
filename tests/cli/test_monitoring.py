"""Dashboards and alerts: made from the table, committed, and of metrics that there are."""

import json
import re
from pathlib import Path

import pytest

from popmq.cli.monitoring import dashboard
from popmq.cli.monitoring.alert import Alert, all_alerts
from popmq.cli.monitoring.dashboard import (
    Panel,
    Query,
    UnknownMetric,
    check,
    dashboards,
    of_chosen_clusters,
)
from popmq.cli.monitoring.files import FOLDER, generated_files
from popmq.common.metric_table.table import TABLE

ROOT = Path(__file__).resolve().parents[2]
ALERTS = all_alerts()
_NAMED = re.compile(r"\bpopmq_[a-z0-9_]+")


def test_what_is_committed_is_what_the_table_makes() -> None:
    results = generated_files()
    stale = [path for path, text in results.items() if (ROOT / path).read_text() != text]
    assert stale == [], "run make metrics"
    kept = {path.relative_to(ROOT).as_posix() for path in (ROOT / FOLDER).rglob("*.*")}
    assert kept <= set(results)


def test_a_query_of_a_metric_that_was_taken_out_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Panel("a", "b", [Query("sum(popmq_messages_out_total)", "")])
    for wrong in ("popmq_messages_out", "popmq_store_flush_seconds", "rate(popmq_made_up[1m])"):
        with pytest.raises(UnknownMetric, match="not in the table"):
            Panel("a", "b", [Query(wrong, "")])
    left = {series for row in TABLE.values() if row.name != "check_points" for series in row.series}
    monkeypatch.setattr(dashboard, "_KNOWN", left)
    with pytest.raises(UnknownMetric, match="popmq_check_points"):
        check("popmq_check_points")


def test_panels_and_alerts_have_names_of_their_own() -> None:
    for item in dashboards():
        titles = [panel.title for panel in item.panels]
        assert len(set(titles)) == len(titles), item.name
        assert all(panel.what and panel.queries for panel in item.panels), item.name
        drawn = json.loads(generated_files()[f"{FOLDER}/dashboards/{item.name}.json"])["panels"]
        cells = [cell for panel in drawn for cell in _cells(**panel["gridPos"])]
        assert len(set(cells)) == len(cells), f"panels of {item.name} lie on each other"
        assert max(x for x, _ in cells) < 24
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)


def _cells(x: int, y: int, w: int, h: int) -> list[tuple[int, int]]:
    return [(x + right, y + down) for right in range(w) for down in range(h)]


def test_a_dashboard_opens_with_figures_that_have_thresholds_and_a_table() -> None:
    """Grafana sorts a table by columns that it has, the worst first."""
    boards = {item.name: item.panels for item in dashboards()}
    for name in ("overview", "lag", "operator", "reports"):
        kinds = [panel.kind for panel in boards[name]]
        assert kinds[:6] == ["stat"] * 6, name
        assert "table" in kinds, name
        stats = [panel for panel in boards[name] if panel.kind == "stat"]
        with_bounds = [panel for panel in stats if panel.unit == "verdict" or _bounds(panel)]
        assert len(with_bounds) * 2 > len(stats), name
    for panel in (panel for panels in boards.values() for panel in panels):
        if panel.kind == "table":
            columns = {query.legend for query in panel.queries}
            labels = {"severity", "alertname"}
            assert panel.worst_first, panel.title
            assert set(panel.worst_first) <= columns | labels, panel.title


def _bounds(panel: Panel) -> list[float]:
    return [bound for bound in (panel.low, panel.warn, panel.high) if bound is not None]


def test_the_unit_of_a_panel_is_that_of_its_queries() -> None:
    wrong = []
    for panel in (panel for item in dashboards() for panel in item.panels):
        for query in panel.queries:
            unit = (query.unit or "short") if panel.kind == "table" else panel.unit
            if unit not in units_of(query.expression):
                wrong.append(f"{panel.title}: {unit} for {query.expression}")
    assert wrong == []


def units_of(expression: str) -> set[str]:
    """Grafana's units that fit a query, by its metric, its rate and its division."""
    if expression.startswith("1 - ") or "changes(" in expression:
        return {"short"}
    if "time()" in expression:
        return {"s"}
    if "histogram_quantile" in expression:
        expression = expression.split("histogram_quantile")[1]
    elif " / " in expression:
        if "flush_records" in expression:
            return {"short"}
        return {"s"} if "_reconcile_seconds" in expression else {"percentunit"}
    elif "rate(" in expression:
        return {"short"} if "cpu_seconds" in expression else _RATES[_kind(expression)]
    if "verdict" in expression:
        return {"verdict"}
    return _PLAIN[_kind(expression)]


def _kind(expression: str) -> str:
    name = next(iter(re.findall(r"\b(?:popmq|process)_[a-z0-9_]+", expression)), "")
    for kind in ("messages_per_second", "seconds", "bytes", "ratio", "percent", "messages"):
        if re.search(rf"_{kind}(_bucket|_total)?$", name):
            return kind
    return ""


_PLAIN = {
    "messages_per_second": {"mps"},
    "seconds": {"s"},
    "bytes": {"bytes"},
    "ratio": {"percentunit"},
    "percent": {"percent"},
    "messages": {"short"},
    "": {"short"},
}
_RATES = {"bytes": {"Bps"}, "messages": {"mps"}, "": {"ops", "reqps", "mps"}, "seconds": {"reqps"}}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert.name))
def test_the_tests_of_an_alert_are_about_its_metrics(alert: Alert) -> None:
    for series in (alert.firing, alert.quiet):
        named = {name for series in series for name in _NAMED.findall(series)}
        assert named == set(_NAMED.findall(alert.value))
    assert alert.firing != alert.quiet


def test_the_runbook_of_every_alert_is_a_section_of_a_page() -> None:
    for alert in ALERTS:
        page, section = alert.annotations["runbook_url"].split("#")
        headings = re.findall(r"^## (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.M)
        assert section in [heading.lower() for heading in headings], alert.name


def test_every_query_and_rule_keeps_the_labels_of_the_cluster() -> None:
    panels = [panel for item in dashboards() for panel in item.panels]
    queries = [query.expression for panel in panels for query in panel.queries]
    for query in map(of_chosen_clusters, queries):
        for name in re.findall(r"\b(?:(?:popmq|process)_[a-z0-9_]+|up|ALERTS)\b(?={)", query):
            own = r'namespace=~"\$namespace",cluster=~"\$cluster"'
            if name.startswith("popmq_operator_"):
                own = r'namespace=~"\$operator"|cluster_namespace=~"\$namespace"'
            assert re.search(rf"\b{name}{{[^}}]*({own})", query), query
        assert not re.search(r"\bpopmq_[a-z0-9_]+(?![a-z0-9_{])", query), query
    for item in dashboards():
        text = generated_files()[f"{FOLDER}/dashboards/{item.name}.json"]
        variables = {
            variable["name"]: variable["query"]["query"]
            for variable in json.loads(text)["templating"]["list"]
            if variable["type"] == "query"
        }
        assert list(variables)[:2] == ["namespace", "cluster"]
        for name in set(variables) - {"namespace", "cluster", "operator"}:
            assert '{namespace=~"$namespace",cluster=~"$cluster"}' in variables[name]
    for query in [*map(of_chosen_clusters, queries), *(alert.expression for alert in ALERTS)]:
        for grouped in re.findall(
            r"\b(?:sum|max|min|count|on)\b( \([^)]*\)| by \([^)]*\)|)", query
        ):
            assert "(namespace, cluster" in grouped, query
