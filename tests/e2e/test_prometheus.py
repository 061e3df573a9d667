"""A real Prometheus over a real cluster: every query of every dashboard and alert finds data."""

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from e2e.many import Many
from e2e.prometheus import Prometheus, binaries
from e2e.watched_load import Load, create

from popmq.cli.client import Client
from popmq.cli.monitoring.alert import all_alerts

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "monitoring"
FOUND_WITHIN_S = 45.0
# At rest these rules do not fire, whatever the load was.
NEVER = ("PopmqDown", "PopmqMessagesUnaccounted", "PopmqGroupWithoutLeader", "PopmqTimersLost")

pytestmark = pytest.mark.heavy


def queries() -> dict[str, str]:
    """Of every committed dashboard and every alert, by what asks it."""
    found: dict[str, str] = {}
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                name = f"{path.stem} / {panel['title']} / {target['refId']}"
                found[name] = concrete(target["expr"])
    found |= {alert.name: concrete(alert.value) for alert in all_alerts()}
    return found


def concrete(expression: str) -> str:
    """As Grafana would ask it with everything chosen, over less time."""
    for variable, value in (("$__rate_interval", "15s"), ("$group", ".*"), ("$topic", ".*")):
        expression = expression.replace(variable, value)
    assert "$" not in expression, expression
    return expression


def has_data(result: list[dict[str, Any]]) -> bool:
    """A quantile of nothing is no number, and shows nothing."""
    return any(not math.isnan(float(one["value"][1])) for one in result)


@pytest.mark.timeout(180)
def test_every_query_of_the_dashboards_and_alerts_finds_data_in_a_real_prometheus(
    tmp_path: Path,
) -> None:
    binaries()  # before anything is started
    with Many(tmp_path, "--groups", "2", "--replicas", "2") as many:
        targets = [one["listens"]["http.listen"] for one in many.state["processes"]]
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
            audited = prometheus.query("popmq_audit_unaccounted_messages")
            assert [one["value"][1] for one in audited] == ["0", "0"], "both masters"
            assert float(prometheus.query("sum(popmq_audit_messages)")[0]["value"][1]) > 0


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool = binaries() / "promtool"
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        done = subprocess.run(
            [str(promtool), *arguments],
            cwd=MONITORING,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
