"""A real Prometheus over a real cluster: every query of every dashboard and alert finds data."""

import re
import time
from pathlib import Path

import pytest
import yaml
from e2e.many import Many
from e2e.page_server import PageServer, recorded
from e2e.panels import (
    CHOSEN,
    CLUSTERS,
    MONITORING,
    PanelQuery,
    check_samples,
    differences_from_lag,
    panel_queries,
    print_table,
    wait_for_data,
)
from e2e.prometheus import Prometheus, binaries
from e2e.watched_load import Load, create
from programs import run_program

from popmq.cli.client import Client
from popmq.cli.monitoring.alert import all_alerts

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FOUND_WITHIN_S = 60.0
AGREE_WITHIN_S = 60.0
# At rest these rules do not fire, whatever the load was.
NEVER = ("PopmqDown", "PopmqMessagesUnaccounted", "PopmqGroupWithoutLeader", "PopmqTimersLost")
FINDS_NOTHING = "PopmqMetricsAbsent"  # while there is anything

pytestmark = pytest.mark.heavy


def queries() -> list[PanelQuery]:
    """Of every alert, and of every dashboard but that of reports, which tests/spark has."""
    panels = [query for query in panel_queries() if query.dashboard != "reports"]
    others = {alert.name: alert.value for alert in all_alerts() if alert.name != FINDS_NOTHING}
    return panels + [
        PanelQuery("", name, "", "", expression, "") for name, expression in others.items()
    ]


def scaler_queries() -> list[str]:
    """Of the ScaledObject that docs/how-to/keda.md shows, for a group of this load."""
    page = (ROOT / "docs/how-to/keda.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    triggers = yaml.safe_load(example)["spec"]["triggers"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    return [query.replace('group="billing"', 'group="forgets"') for query in queries]


@pytest.mark.timeout(300)
def test_every_query_of_the_dashboards_and_alerts_finds_data_in_a_real_prometheus(
    tmp_path: Path,
) -> None:
    """The cluster is scraped as three of the same names; the dashboards choose one of them."""
    binaries()  # before anything is started
    with Many(tmp_path, "--groups", "2", "--replicas", "2") as many:
        targets = [process["listens"]["http.listen"] for process in many.state["processes"]]
        assert len(targets) == 6
        with (
            PageServer(recorded(HERE / "operator_pages.txt")) as operator,
            Prometheus(
                tmp_path,
                targets,
                MONITORING / "alerts.yml",
                labels=CLUSTERS,
                others=[operator.job("popmq-system/popmq", namespace="popmq-system")],
            ) as prometheus,
            Client(many.ready.endpoint) as client,
        ):
            create(client)
            with Load(many.ready.endpoint) as load:
                results = wait_for_data(prometheus, queries(), limit_s=FOUND_WITHIN_S)
            assert load.failures == []
            print_table(results)
            for query, samples in results.items():
                if query.dashboard:
                    check_samples(query, samples)
            rules = prometheus.alerts()
            assert {name for name, rule in rules.items() if rule["health"] != "ok"} == set()
            assert set(rules) == {alert.name for alert in all_alerts()}
            assert [name for name in NEVER if rules[name]["state"] != "inactive"] == []
            assert prometheus.query("absent(popmq_build_info)") == []
            for expression in scaler_queries():
                # KEDA takes one number, and refuses several.
                assert len(prometheus.query(expression)) == 1, expression
            _wait_until_figures_agree(prometheus, many)
            of_one = ",".join(f'{name}="{value}"' for name, value in CHOSEN.items())
            audited = prometheus.query(f"popmq_audit_unaccounted_messages{{{of_one}}}")
            assert [sample["value"][1] for sample in audited] == ["0", "0"], "both masters"
            assert float(prometheus.query("sum(popmq_audit_messages)")[0]["value"][1]) > 0


def _wait_until_figures_agree(prometheus: Prometheus, many: Many) -> None:
    """At rest, for deliveries that were not acked come back first."""
    until_s = time.monotonic() + AGREE_WITHIN_S
    while differences := differences_from_lag(prometheus, lambda: many.popmq("lag", "--json")):
        assert time.monotonic() < until_s, differences
        time.sleep(1)  # between two scrapes


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool = binaries() / "promtool"
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = run_program([str(promtool), *arguments], cwd=MONITORING, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
