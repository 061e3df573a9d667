"""Dashboards and alerts: made from the table, committed, and of metrics that there are."""

import json
import re
from pathlib import Path

import pytest

from popmq.cli.monitoring import dashboard
from popmq.cli.monitoring.alert import Alert, all_alerts
from popmq.cli.monitoring.dashboard import (
    Panel,
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
    Panel("a", "b", "short", [("sum(popmq_messages_out_total)", "")])
    for wrong in ("popmq_messages_out", "popmq_store_flush_seconds", "rate(popmq_made_up[1m])"):
        with pytest.raises(UnknownMetric, match="not in the table"):
            Panel("a", "b", "short", [(wrong, "")])
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
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in drawn}
        assert len(places) == len(titles), item.name
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)


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
    queries = [query for panel in panels for query, _ in panel.queries]
    for query in map(of_chosen_clusters, queries):
        for name in _NAMED.findall(query):
            operator = name.startswith("popmq_operator_")
            assert operator or re.search(rf'{name}{{[^}}]*cluster=~"\$cluster"', query), query
    for query in [*map(of_chosen_clusters, queries), *(alert.expression for alert in ALERTS)]:
        for grouped in re.findall(
            r"\b(?:sum|max|min|count|on)\b( \([^)]*\)| by \([^)]*\)|)", query
        ):
            assert "(namespace, cluster" in grouped, query
