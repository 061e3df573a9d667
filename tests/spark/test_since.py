"""`--since` reads what it needs: by the broker's own counter, and with the right figures."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from spark.reports_server import ReportsServer

from popmq.broker.node.metrics import broker_metrics
from popmq.testing.harness.core_broker import CoreBroker

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

RECORDS, HOURS = 500_000, 2
SECONDS = HOURS * 3_600
A_SECOND = -(-RECORDS // SECONDS // 2) + 1  # receives and acks, each a record
RECORD_BYTES = 128


@dataclass(slots=True)
class Written:
    core: CoreBroker
    records: int = 0
    last_minute: Counter[str] = field(default_factory=Counter)

    def read_bytes(self) -> int:
        return sum(
            int(metric.value)
            for metric in broker_metrics(self.core.broker)
            if metric.name == "sampler_read_bytes"
        )


@pytest.fixture(scope="module")
def written() -> Written:
    """A consumer that takes each message and acks it; each fiftieth it rejects."""
    core = CoreBroker()
    core.topic("orders", queues=4)
    core.group("g", max_attempts=1)
    written = Written(core)
    for second in range(SECONDS):
        counts = written.last_minute if second >= SECONDS - 60 else Counter()
        for number in range(A_SECOND):
            core.send("orders", b"x", queue_id=number % 4)
        for number in range(A_SECOND):
            (delivery,) = core.receive("orders", "g", limit=1)
            counts["delivered"] += 1
            if number % 50 == 0:
                core.reject("orders", "g", delivery.handle)
                counts["dead_lettered"] += 1
            else:
                core.ack("orders", "g", delivery.handle)
                counts["acked"] += 1
            written.records += 2
        core.advance(1_000)
    assert written.records >= RECORDS
    return written


@pytest.fixture
def endpoint(written: Written) -> Iterator[str]:
    with ReportsServer(written.core) as server:
        yield server.endpoint


def test_a_report_of_the_last_minute_reads_a_minute_of_two_hours(
    spark: Any, written: Written, endpoint: str
) -> None:
    from popmq.reports.inputs import LiveInputs
    from popmq.reports.report_builder import TABLES, ReportOptions, make_report

    before = written.read_bytes()
    inputs = LiveInputs(spark, endpoint, TABLES["revive"])
    report = make_report("revive", inputs, ReportOptions(since_ms=60_000))
    read, kept = written.read_bytes() - before, written.records * RECORD_BYTES
    print(f"{written.records} records of {HOURS} h, {read} of {kept} bytes: {read / kept:.2%}")
    (row,) = report.table("groups").rows
    assert {name: row[name] for name in written.last_minute} == written.last_minute
    assert (row["status"], row["in_flight"]) == ("OK", 0)
    (consumer,) = report.table("consumers").rows
    assert consumer["acked"] == written.last_minute["acked"]
    assert A_SECOND * 60 * 2 * RECORD_BYTES <= read <= 0.03 * kept


def test_acks_say_their_group_and_topic_without_their_check_point(
    spark: Any, endpoint: str
) -> None:
    frame = (
        spark.read.format("popmq").option("endpoint", endpoint).option("pushdown", "true")
    ).load("revive")
    end = frame.selectExpr("max(log_ms) AS end").collect()[0]["end"]
    rows = (
        frame.where(frame.log_ms > end - 5_000)
        .where("kind = 'ACK'")
        .groupBy("group", "topic", "queue")
        .count()
        .collect()
    )
    assert {(row["group"], row["topic"]) for row in rows} == {("g", "orders")}
    assert {row["queue"] for row in rows} == {0, 1, 2, 3}
