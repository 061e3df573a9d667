"""The dashboard of reports on a real Prometheus: what Spark calculated of a live cluster."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e.many import Many
from e2e.page_server import PageServer
from e2e.panels import (
    CHOSEN,
    MONITORING,
    check_samples,
    panel_queries,
    print_table,
    value_of,
    wait_for_data,
)
from e2e.prometheus import Prometheus, binaries
from e2e.watched_load import Load, create
from programs import run_program

from popmq.cli.client import Client
from popmq.proxy.api import definition_pb2 as api

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
REPORTS = {"lag": ["--window", "3m"], "revive": [], "delay": []}
WITHIN_S = 60.0


# As the run of a LagReport names it: its addresses of the admin port and of the public one.
SOURCE = "demo-admin.{namespace}.svc:8082,{cluster}-proxy.{namespace}.svc:8081".format(**CHOSEN)


def gateway_job() -> dict[str, Any]:
    """The scrape configuration of a Pushgateway that docs/concepts/monitoring.md shows."""
    page = (ROOT / "docs" / "concepts" / "monitoring.md").read_text(encoding="utf-8")
    blocks = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)```", page, re.MULTILINE | re.DOTALL))
    jobs = [
        job
        for block in blocks
        if isinstance(block, dict)
        for job in block.get("scrape_configs", ())
    ]
    job: dict[str, Any] = next(job for job in jobs if job["job_name"] == "pushgateway")
    return job


def wait_until(done: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not done():
        assert time.monotonic() < until_s, what
        time.sleep(0.5)


def test_every_query_of_the_dashboard_of_reports_finds_what_reports_calculated(
    tmp_path: Path,
) -> None:
    """The lag report agrees with `popmq lag`, and the dashboard with both."""
    binaries()  # before anything is started
    settings = {"POPMQ_REPORTS_SAMPLE_INTERVAL_MS": "1000"}
    with (
        Many(tmp_path, "--groups", "2", "--replicas", "2", settings=settings) as many,
        Client(many.ready.endpoint) as client,
    ):

        def lag_rows() -> list[dict[str, object]]:
            return [json.loads(line) for line in many.popmq("lag", "--json").splitlines()]

        def dead_letters() -> int:
            return sum(int(str(row.get("dead_letters", 0))) for row in lag_rows())

        create(client)
        with Load(many.ready.endpoint) as load:
            wait_until(lambda: dead_letters() > 20, "dead letters")
        assert load.failures == []
        for topic in ("orders", "reminders"):
            _drain(client, "good", topic)
        wait_until(lambda: not any(row.get("in_flight") for row in lag_rows()), "rest")
        for name, options in REPORTS.items():
            _report(many.ready.endpoint, name, tmp_path, *options)
        expected = {
            (str(row["group"]), str(row["topic"])): row["lag"]
            for row in lag_rows()
            if "topic" in row
        }

        def pages() -> str:
            return "".join((tmp_path / f"{name}.prom").read_text() for name in REPORTS)

        with PageServer(pages) as server:
            job = gateway_job() | server.job("pushgateway", source=SOURCE)
            rules = MONITORING / "alerts.yml"
            with Prometheus(tmp_path, [], rules, others=[job]) as prometheus:
                queries = panel_queries(["reports"])
                results = wait_for_data(prometheus, queries, limit_s=WITHIN_S)
    print_table(results)
    for query, samples in results.items():
        check_samples(query, samples)
    tables = {
        query.legend: {
            (sample["metric"]["group"], sample["metric"]["topic"]): value_of(sample)
            for sample in samples
        }
        for query, samples in results.items()
        if query.panel == "Lag report, worst first"
    }
    assert tables["Lag"] == expected
    assert {name for (name, _), lag in tables["Lag"].items() if lag} >= {"slow"}


def _drain(client: Client, group: str, topic: str) -> None:
    """So that the lag report knows a group that has nothing left to do."""
    queue = api.MessageQueue(topic=api.Resource(name=topic))
    while got := client.receive(group, queue, limit=16, wait_ms=500, invisible_ms=10_000):
        client.ack(group, topic, got)


def _report(endpoint: str, name: str, folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "popmq.cli", "report", name, "--endpoint", endpoint, *options]
    done = run_program([*command, "--prometheus", str(folder / f"{name}.prom")], timeout=200)
    assert done.returncode == 0, done.stderr[-2_000:]
