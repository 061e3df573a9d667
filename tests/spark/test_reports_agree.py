"""At rest every number of a report is what `popmq lag`, Prometheus, a recount in plain Python and
the test's own ledger say: over two broker groups, with retries, dead letters and a crashed
consumer."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from e2e.many import Many
from e2e.processes import role_environment
from programs import run_program
from prometheus_client.parser import text_string_to_metric_families
from report.recount import DeliveryCounts, Recount, rows_of
from spark.report_load import FAR, HELD, ORDERS, REMINDERS, Ledger, work

from popmq.common.errors import PopmqError
from popmq.reports.records.endpoint import ReportEndpoint
from popmq.reports.records.id_names import IdNames
from popmq.reports.records.record_layout import RecordLayout

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

COUNTS = ("ready", "in_flight", "blocked", "retries", "expired")


@dataclass(slots=True)
class Rest:
    """A cluster where nothing moves any more, and what clients saw of it."""

    many: Many
    ledger: Ledger

    @property
    def endpoint(self) -> str:
        return self.many.ready.endpoint

    def metrics(self, name: str, **labels: str) -> float:
        """Summed over every process."""
        total = 0.0
        for process in self.many.state["processes"]:
            with urlopen(f"http://{process['listens']['http.listen']}/metrics", timeout=10) as page:
                for family in text_string_to_metric_families(page.read().decode()):
                    total += sum(
                        sample.value
                        for sample in family.samples
                        if sample.name == name and labels.items() <= sample.labels.items()
                    )
        return total


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    folder = tmp_path_factory.mktemp("rest")
    many = Many(folder, "--groups", "2")
    many.settings["POPMQ_REPORTS_SAMPLE_INTERVAL_MS"] = "1000"
    with many:
        yield Rest(many, work(many.ready.endpoint, folder))


def made(spark: Any, rest: Rest, name: str, results: list[str] | None = None) -> Any:
    from popmq.reports.inputs import LiveInputs
    from popmq.reports.report_builder import TABLES, ReportOptions, make_report

    tell = ([] if results is None else results).append
    return make_report(name, LiveInputs(spark, rest.endpoint, TABLES[name]), ReportOptions(), tell)


def by_pair(rows: Any) -> dict[tuple[str, str], Any]:
    return {(row["group"], row["topic"]): row for row in rows}


def test_the_lag_report_says_what_everybody_else_says(spark: Any, rest: Rest) -> None:
    ledger = rest.ledger
    report = made(spark, rest, "lag")
    rows = by_pair(report.table("groups").rows)
    document = [json.loads(line) for line in rest.many.popmq("lag", "--json").splitlines()]
    lags = by_pair([item for item in document if "lag" in item])
    assert (
        rows.keys()
        == lags.keys()
        == {
            ("good", "orders"),
            ("good", "reminders"),
            ("forgets", "orders"),
            ("crashes", "orders"),
        }
    )
    names = {"ready": "ready", "in_flight": "inflight", "blocked": "blocked", "retries": "retry"}
    for pair, row in rows.items():
        for name in (*COUNTS, "lag"):
            assert row[name] == lags[pair][name], (pair, name)
        labels = dict(zip(("group", "topic"), pair, strict=True))
        for name, metric in names.items():
            shown = rest.metrics(f"popmq_consumer_{metric}_messages", **labels)
            # A page knows a pair where the group has been; the report looks everywhere.
            assert row[name] == shown or pair == ("crashes", "orders"), (pair, name)
    assert rows["good", "orders"]["lag"] == rows["good", "reminders"]["lag"] == 0
    assert rows["forgets", "orders"]["lag"] == 0
    held = rows["crashes", "orders"]
    assert (held["in_flight"], held["ready"]) == (HELD, ORDERS - HELD) == (ledger.held, ORDERS - 40)
    assert rows["good", "reminders"]["delayed"] == FAR
    assert rest.metrics("popmq_timer_timing_messages", topic="reminders") == FAR
    dead = {row["group"]: row["dead_letters"] for row in report.table("dead_letters").rows}
    assert dead == {"forgets": ORDERS // 2}
    assert rest.metrics("popmq_dlq_messages", group="forgets") == ORDERS // 2
    topics = {row["topic"]: row for row in report.table("topics").rows}
    assert (topics["orders"]["stored"], topics["reminders"]["stored"]) == (ORDERS, REMINDERS)
    assert report.incomplete == ""
    queues = [row for row in report.table("queues").rows if row["group"] == "crashes"]
    assert sum(row["lag"] for row in queues) == held["lag"]
    assert {row["broker"] for row in queues} == {moment.broker for moment in report.moments}


def test_the_revive_report_says_what_everybody_else_says(spark: Any, rest: Rest) -> None:
    ledger = rest.ledger
    report = made(spark, rest, "revive")
    rows = by_pair(report.table("groups").rows)
    for (group, topic), row in rows.items():
        if group == "crashes":
            assert row["delivered"] == ledger.held
            assert row["acked"] == row["retried"] == 0
            continue
        assert row["delivered"] == ledger.count(group, topic), (group, topic)
        assert row["acked"] == ledger.acks(group, topic), (group, topic)
        assert row["retried"] == ledger.retries(group, topic), (group, topic)
    forgets = rows["forgets", "orders"]
    assert forgets["retried"] >= ORDERS // 2
    assert forgets["dead_lettered"] == ORDERS // 2
    assert 0 <= forgets["revive_late_p50_ms"] <= forgets["revive_late_max_ms"]
    assert {group for (group, _), row in rows.items() if row["status"] == "FAILING"} == {"forgets"}
    assert {row["status"] for (group, _), row in rows.items() if group == "good"} == {"OK"}
    # The broker counts deliveries that nobody took, too: it cannot know when it makes them.
    for names, metric in (
        (("delivered", "undone"), "popmq_messages_out_total"),
        (("acked",), "popmq_acks_total"),
        (("retried", "undone"), "popmq_pop_revive_retry_messages_total"),
        (("dead_lettered",), "popmq_send_to_dlq_messages_total"),
        (("lost",), "popmq_pop_revive_lost_messages_total"),
    ):
        total = sum(row[name] for row in rows.values() for name in names)
        assert total == rest.metrics(metric), names
    attempts = {row["attempts"]: row["messages"] for row in report.table("attempts").rows}
    assert attempts == {2: forgets["retried"]}
    (stuck,) = [row for row in report.table("consumers").rows if row["group"] == "crashes"]
    assert (stuck["in_flight"], stuck["acked"], stuck["delivered"]) == (HELD, 0, HELD)
    assert len(report.table("dead_letters").rows) == 20


def test_the_delay_report_says_what_everybody_else_says(spark: Any, rest: Rest) -> None:
    answer: list[str] = []
    report = made(spark, rest, "delay", answer)
    assert answer == [table.title for table in report.tables]
    (row,) = report.table("topics").rows
    assert (row["topic"], row["fired"], row["early"]) == ("reminders", REMINDERS, 0)
    assert rest.metrics("popmq_timer_dequeue_total") == REMINDERS
    assert sum(row["fired"] for row in report.table("hours").rows) == REMINDERS
    late = rest.metrics("popmq_timer_lateness_seconds_sum")
    assert row["late_mean_ms"] * REMINDERS == pytest.approx(late * 1_000)


@pytest.mark.timeout(120)
def test_the_recount_in_plain_python_agrees(rest: Rest) -> None:
    ledger, sums = rest.ledger, DeliveryCounts()
    with ReportEndpoint(rest.endpoint) as endpoint:
        brokers, incomplete = endpoint.describe(["revive", "offsets"])
        names = endpoint.names()
        assert (len(brokers), incomplete) == (2, "")
        in_flight: dict[str, int] = {}
        for tables in brokers:
            layouts = {layout.name: RecordLayout.from_wire(layout) for layout in tables.layouts}
            recount = Recount(tables.end_position)
            for layout, take in (("revive", recount.take_revive), ("head", recount.take_heads)):
                for partition in tables.partitions:
                    if partition.layout == layout:
                        for piece in endpoint.read(tables.broker, partition):
                            take(rows_of(layouts[layout], piece.data))
            wire = IdNames.from_wire(names[tables.broker])
            assert recount.unknown_ends == 0
            for (group, _, _), ends in recount.finish().items():
                for name in ("delivered", "acked", "retried", "undone", "dead"):
                    setattr(sums, name, getattr(sums, name) + getattr(ends, name))
                name = wire.group(group)
                in_flight[name] = in_flight.get(name, 0) + ends.in_flight
    assert in_flight == {"good": 0, "forgets": 0, "crashes": ledger.held}
    assert sums.acked == sum(map(len, ledger.acked.values()))
    seen = sum(map(len, ledger.delivered.values())) + ledger.held
    assert sums.delivered - sums.undone == seen
    assert sums.dead == ORDERS // 2


def test_the_command_prints_the_same_and_writes_its_files(rest: Rest, tmp_path: Path) -> None:
    page, prom = tmp_path / "delay.html", tmp_path / "delay.prom"
    arguments = ("--json", "--html", str(page), "--prometheus", str(prom), "--csv", str(tmp_path))
    done = run_program(
        [sys.executable, "-m", "popmq.cli", "report", "delay", *arguments],
        env=role_environment({"POPMQ_ENDPOINT": rest.endpoint}),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["topics"]
    assert (row["topic"], row["fired"]) == ("reminders", REMINDERS)
    assert {broker["broker"] for broker in document["brokers"]} == {"broker-a", "broker-b"}
    assert "reminders" in page.read_text()
    (shown,) = [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(prom.read_text())
        for sample in family.samples
        if sample.name == "popmq_report_fired_messages"
    ]
    assert shown == ({"topic": "reminders"}, REMINDERS)
    assert (tmp_path / "delay-topics.csv").read_text().count("\n") == 2


def test_a_history_has_each_row_once_and_makes_the_same_report(
    spark: Any, rest: Rest, tmp_path: Path
) -> None:
    from popmq.reports.history import TableHistory, append, compact, read_history
    from popmq.reports.inputs import HistoryInputs
    from popmq.reports.report_builder import TABLES, ReportOptions, make_report

    tables = ("revive", "offsets", "topics", "timers")
    first = append(spark, rest.endpoint, tmp_path, patience_s=10, tables=tables)
    # Samples go on, so one table gets ahead of the others; nothing was written about deliveries.
    again = append(spark, rest.endpoint, tmp_path, patience_s=10, tables=("revive", "timers"))
    assert (first["revive"] > 0, again["revive"], again["timers"] > 0) == (True, 0, True)
    today = datetime.now(UTC).date().isoformat()
    for _ in range(2):  # a second time there is nothing to do
        compact(spark, tmp_path, keep_days=30, today=today)
        assert TableHistory.open(tmp_path / "revive").batches() == {}
        assert read_history(spark, tmp_path, "revive").count() == first["revive"]
    live, kept = made(spark, rest, "revive"), HistoryInputs(spark, str(tmp_path), TABLES["revive"])
    groups = make_report("revive", kept, ReportOptions()).table("groups").rows
    # Verdicts are of a later moment there.
    both = [[{**row, "status": ""} for row in rows] for rows in (groups, live.first.rows)]
    assert by_pair(both[0]) == by_pair(both[1])
    times = sorted(row["log_ms"] for row in kept.table("revive", ("log_ms",)).collect())
    middle = times[len(times) // 2]
    since = {moment.broker: middle for moment in kept.moments}
    assert kept.table("revive", ("log_ms",), since).count() == sum(ms >= middle for ms in times)
    lag = make_report("lag", HistoryInputs(spark, str(tmp_path), TABLES["lag"]), ReportOptions())
    rows = by_pair(lag.table("groups").rows)
    assert {pair: row["lag"] for pair, row in rows.items()} == {
        ("good", "orders"): 0,
        ("good", "reminders"): 0,
        ("forgets", "orders"): 0,
        ("crashes", "orders"): ORDERS,
    }
    compact(spark, tmp_path, keep_days=0, today="2999-01-01")
    with pytest.raises(PopmqError, match="has no history of revive"):
        read_history(spark, tmp_path, "revive")
