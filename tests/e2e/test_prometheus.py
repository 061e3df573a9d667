"""A real Prometheus over a real cluster: every query of every dashboard and alert finds data."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.many import Many
from e2e.prometheus import Prometheus, binaries
from e2e.watched_load import Load, create
from programs import run_program

from popmq.cli.client import Client
from popmq.cli.monitoring.alert import all_alerts

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "monitoring"
FOUND_WITHIN_S = 45.0
# At rest these rules do not fire, whatever the load was.
NEVER = ("PopmqDown", "PopmqMessagesUnaccounted", "PopmqGroupWithoutLeader", "PopmqTimersLost")

pytestmark = pytest.mark.heavy


OPERATORS = "popmq_operator_"
CHOSEN = tuple((f"${name}", ".*") for name in ("group", "topic", "namespace", "cluster"))


def queries() -> dict[str, str]:
    """Of every committed dashboard and every alert, by what asks it."""
    found_queries: dict[str, str] = {}
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                name = f"{path.stem} / {panel['title']} / {target['refId']}"
                found_queries[name] = concrete(target["expr"])
    found_queries |= dict(scaler_queries())
    found_queries |= {alert.name: concrete(alert.value) for alert in all_alerts()}
    # Of `popmq up` no process is an operator (tests/kube/test_operator_process.py has its metrics).
    return {name: query for name, query in found_queries.items() if OPERATORS not in query}


def scaler_queries() -> list[tuple[str, str]]:
    """Of the ScaledObject that docs/how-to/keda.md shows, for the group of this load."""
    page = (ROOT / "docs/how-to/keda.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    triggers = yaml.safe_load(example)["spec"]["triggers"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    # Without an operator no series has a namespace and a cluster.
    return [
        ("KEDA", re.sub(r'namespace="\w+", cluster="\w+", group="\w+"', 'group="forgets"', query))
        for query in queries
    ]


def concrete(expression: str) -> str:
    """As Grafana would ask it with everything chosen, over less time."""
    for variable, value in (("$__rate_interval", "15s"), *CHOSEN):
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def has_data(result: list[dict[str, Any]]) -> bool:
    """A quantile of nothing is no number, and shows nothing."""
    return any(not math.isnan(float(manifest["value"][1])) for manifest in result)


@pytest.mark.timeout(180)
def test_every_query_of_the_dashboards_and_alerts_finds_data_in_a_real_prometheus(
    tmp_path: Path,
) -> None:
    binaries()  # before anything is started
    with Many(tmp_path, "--groups", "2", "--replicas", "2") as many:
        targets = [process["listens"]["http.listen"] for process in many.state["processes"]]
        assert len(targets) == 6
        rule_file = MONITORING / "alerts.yml"
        with (
            Prometheus(tmp_path, targets, rule_file) as prometheus,
            Client(many.ready.endpoint) as client,
        ):
            create(client)
            with Load(many.ready.endpoint) as load:
                missing = queries()
                deadline_s = time.monotonic() + FOUND_WITHIN_S
                while missing and time.monotonic() < deadline_s:
                    time.sleep(1)
                    missing = {
                        name: expression
                        for name, expression in missing.items()
                        if not has_data(prometheus.query(expression))
                    }
                assert missing == {}
            assert load.failures == []
            rules = prometheus.alerts()
            assert {name for name, rule in rules.items() if rule["health"] != "ok"} == set()
            assert set(rules) == {alert.name for alert in all_alerts()}
            assert [name for name in NEVER if rules[name]["state"] != "inactive"] == []
            for _, query in scaler_queries():
                # KEDA takes one number, and refuses several.
                assert len(prometheus.query(query)) == 1, query
            audited = prometheus.query("popmq_audit_unaccounted_messages")
            assert [item["value"][1] for item in audited] == ["0", "0"], "both masters"
            assert float(prometheus.query("sum(popmq_audit_messages)")[0]["value"][1]) > 0


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool = binaries() / "promtool"
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = run_program([str(promtool), *arguments], cwd=MONITORING, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
