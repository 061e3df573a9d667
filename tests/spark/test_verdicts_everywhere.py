"""Five consumers and four that pull, under traffic: every place that tells a verdict tells the
same one, and it is right. Twenty minutes of a broker whose clock the test moves.

`POPMQ_PICTURES=docs/pictures` writes the pictures of both reports anew.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from broker.test_group_verdicts import CONSUMERS, commit, metric_verdicts
from e2e.panels import MONITORING
from e2e.prometheus import binaries
from programs import run_program
from spark.browser import Browser
from spark.reports_server import ReportsServer

from popmq.broker.node.metrics import broker_metrics
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire.pull_pb2 import SendBackRequest
from popmq.operator.model.lag_reports import read_report, report_status
from popmq.reports.report import Report
from popmq.testing.harness.core_broker import CoreBroker

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

SECONDS, SCRAPES_S = 1_200, 15
EXPECTED = {
    ("healthy", "orders"): "OK",
    ("slow", "orders"): "BEHIND",
    ("stopped", "orders"): "STOPPED",
    ("failing", "orders"): "FAILING",
    ("stuck", "steps"): "STUCK",
    ("pulls", "orders"): "OK",
    ("pulled", "orders"): "STOPPED",
    ("pulls-slowly", "orders"): "BEHIND",
    ("sends-back", "orders"): "FAILING",
}
# The alerts on consumers, and the groups for which they fire.
ALERTS = {
    "PopmqConsumerFailing": {"failing", "sends-back"},
    "PopmqConsumerStuck": {"stuck"},
    "PopmqConsumerStopped": {"stopped"},
}
DESK = 1_280

Verdicts = dict[tuple[str, str], str]


@dataclass(slots=True)
class Site:
    core: CoreBroker
    endpoint: str
    scrapes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    core = CoreBroker()
    core.topic("orders", queues=1)
    core.topic("steps", queues=1, type=MessageType.FIFO)
    for name in (*CONSUMERS, "pulls", "pulled", "pulls-slowly", "sends-back"):
        kind = GroupType.FIFO if name == "stuck" else GroupType.NORMAL
        core.group(name, type=kind, max_attempts=3)
    with ReportsServer(core) as server:
        site = Site(core, server.endpoint)
        for second in range(SECONDS):
            _pass_a_second(site, second)
        yield site


def _pass_a_second(site: Site, second: int) -> None:
    core = site.core
    for number in range(2):
        core.send("orders", b"%d" % number)
    core.send("steps", b"x", message_group=f"key-{second % 7}")
    if second < 3:
        core.send("steps", b"hangs", message_group="poison")
    for consume in CONSUMERS.values():
        consume(core, second)
    commit(core, "pulls", 2 * second)
    if second < 60:
        commit(core, "pulled", 2 * second)
    commit(core, "pulls-slowly", second)
    for offset in (2 * second, 2 * second + 1):
        send_back(core, "sends-back", offset)
    commit(core, "sends-back", 2 * second + 2)
    if second % SCRAPES_S == 0:
        for metric in broker_metrics(core.broker):
            if metric.name.startswith(("consumer_", "group_messages_out")):
                labels = ",".join(f'{key}="{value}"' for key, value in metric.labels.items())
                end = "_total" if metric.name == "group_messages_out" else ""
                series = f'popmq_{metric.name}{end}{{namespace="n",cluster="c",{labels}}}'
                site.scrapes[series] += [float("nan")] * (
                    second // SCRAPES_S - len(site.scrapes[series])
                )
                site.scrapes[series].append(float(metric.value))
    core.advance(1_000)


def send_back(core: CoreBroker, group: str, offset: int) -> None:
    """As a push consumer over Remoting does that fails; its retry is an hour away."""
    asked = SendBackRequest(
        group=group, topic="orders", queue_offset=offset, attempt=1, delay_ms=3_600_000
    )
    core.reply(Kind.SEND_BACK, asked.SerializeToString())


def of_command_line(site: Site) -> Verdicts:
    command = [sys.executable, "-m", "popmq.cli", "lag", "--json", "--endpoint", site.endpoint]
    rows = map(json.loads, run_program(command, timeout=60).stdout.splitlines())
    return {(row["group"], row["topic"]): row["verdict"] for row in rows if "lag" in row}


def made(spark: Any, site: Site, name: str) -> Report:
    from popmq.reports.inputs import LiveInputs
    from popmq.reports.report_builder import TABLES, ReportOptions, make_report

    return make_report(name, LiveInputs(spark, site.endpoint, TABLES[name]), ReportOptions())


def of_report(report: Report) -> Verdicts:
    return {(row["group"], row["topic"]): row["status"] for row in report.first.rows}


def status_of(report: Report) -> dict[str, Any]:
    """Of the LagReport whose run made it."""
    manifest = {
        "metadata": {"name": "hourly", "namespace": "apps", "uid": "u"},
        "spec": {"cluster": "demo"},
    }
    end = {"exitCode": 0, "finishedAt": "now", "message": json.dumps(report.summary())}
    container = {"name": "report", "state": {"terminated": end}}
    item = read_report(manifest, default_image="x")
    pods = [{"status": {"containerStatuses": [container]}}]
    now = datetime(2030, 1, 1, tzinfo=UTC)
    return report_status(item, {"metadata": {"name": "j", "namespace": "apps"}}, now, pods)


def test_every_place_tells_the_same_verdict_and_it_is_right(spark: Any, site: Site) -> None:
    lag, revive = made(spark, site, "lag"), made(spark, site, "revive")
    places: dict[str, Verdicts] = {
        "popmq lag": of_command_line(site),
        "metric": metric_verdicts(site.core),
        "lag report": of_report(lag),
        "revive report": of_report(revive),
    }
    status = status_of(lag)
    for pair, verdict in EXPECTED.items():
        print(f"{pair[0]:13}{verdict:9}", {name: place.get(pair) for name, place in places.items()})
    print("LagReport status:", {key: status[key] for key in status if key != "conditions"})
    for name, verdicts in places.items():
        assert verdicts == EXPECTED, name
    assert (status["verdict"], status["groups"]) == ("FAILING", len(EXPECTED))
    assert (status["failing"], status["stopped"]) == (2, 2)
    assert [row["verdict"] for row in status["worst"]] == ["FAILING", "FAILING", "STOPPED"]
    assert {row["group"] for row in status["worst"]} == {"failing", "sends-back", "stopped"}
    assert status["lag"] == sum(row["lag"] for row in lag.first.rows)


def test_the_alerts_fire_for_the_groups_whose_verdicts_they_are(site: Site, tmp_path: Path) -> None:
    series = [
        {"series": name, "values": " ".join("_" if v != v else f"{v:g}" for v in values)}
        for name, values in site.scrapes.items()
    ]
    samples = [
        {"labels": f'{{alertname="{alert}",group="{group}"}}', "value": 1}
        for alert, groups in ALERTS.items()
        for group in groups
    ]
    expression = (
        'count by (alertname, group) (ALERTS{alertstate="firing",'
        f'alertname=~"{"|".join(ALERTS)}"}})'
    )
    query = {"expr": expression, "eval_time": f"{SECONDS - SCRAPES_S}s", "exp_samples": samples}
    test = {"interval": f"{SCRAPES_S}s", "input_series": series, "promql_expr_test": [query]}
    rules = {
        "rule_files": [str((MONITORING / "alerts.yml").resolve())],
        "evaluation_interval": f"{SCRAPES_S}s",
        "tests": [test],
    }
    path = tmp_path / "verdicts.yml"
    path.write_text(json.dumps(rules), encoding="utf-8")  # JSON is YAML
    done = run_program([str(binaries() / "promtool"), "test", "rules", str(path)], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["lag", "revive"])
def test_every_column_of_a_page_is_seen_at_1280_pixels(
    name: str, spark: Any, site: Site, tmp_path: Path
) -> None:
    from popmq.reports.output.page import to_html

    page = tmp_path / f"{name}.html"
    page.write_text(to_html(made(spark, site, name)), encoding="utf-8")
    asked = os.environ.get("POPMQ_PICTURES")
    browser = Browser(tmp_path)
    for dark in (False, True):
        look = browser.look(page, wide=DESK, dark=dark)
        assert (look.overflow, look.scrolled, look.outside) == (0, 0, 0)
        shade = "-dark" if dark else ""
        folder = Path(asked) if asked and not dark else tmp_path
        picture = folder / f"report-{name}{shade}.png"
        browser.picture(page, picture, wide=DESK, high=min(look.high, 1_250), dark=dark)
