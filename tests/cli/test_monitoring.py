"""Dashboards and alerts: made from the table, committed, and of metrics that there are."""

import json
import re
from pathlib import Path

import pytest

from popmq.cli.monitoring import dashboard
from popmq.cli.monitoring.alert import Alert, all_alerts
from popmq.cli.monitoring.dashboard import Panel, UnknownMetric, check, dashboards
from popmq.cli.monitoring.files import FOLDER, generated_files
from popmq.common.metric_table.table import TABLE

ROOT = Path(__file__).resolve().parents[2]
ALERTS = all_alerts()
_NAMED = re.compile(r"\bpopmq_[a-z0-9_]+")


def test_what_is_committed_is_what_the_table_makes() -> None:
    made = generated_files()
    stale = [path for path, text in made.items() if (ROOT / path).read_text() != text]
    assert stale == [], "run make metrics"
    kept = {path.relative_to(ROOT).as_posix() for path in (ROOT / FOLDER).rglob("*.*")}
    assert kept <= set(made)


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
    for one in dashboards():
        titles = [panel.title for panel in one.panels]
        assert len(set(titles)) == len(titles), one.name
        assert all(panel.what and panel.queries for panel in one.panels), one.name
        drawn = json.loads(generated_files()[f"{FOLDER}/dashboards/{one.name}.json"])["panels"]
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in drawn}
        assert len(places) == len(titles), one.name
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert.name))
def test_the_tests_of_an_alert_are_about_its_metrics(alert: Alert) -> None:
    for series in (alert.firing, alert.quiet):
        named = {name for one in series for name in _NAMED.findall(one)}
        assert named == set(_NAMED.findall(alert.value))
    assert alert.firing != alert.quiet


def test_every_alert_is_on_the_page_of_monitoring() -> None:
    page = (ROOT / "docs/concepts/monitoring.md").read_text(encoding="utf-8")
    rows = [f"| `{one.name}` | {one.severity} | {one.summary} |" for one in ALERTS]
    assert [row for row in rows if row not in page] == []
