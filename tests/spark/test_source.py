"""The data source against real processes: what it reads is what lies there, whatever is killed."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.processes import Cluster
from report.recount import rows_of

from popmq.cli.client import Client
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.reports.records.endpoint import ReportEndpoint
from popmq.reports.records.record_layout import RecordLayout

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

MESSAGES = 60
FOUND_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For tests that only read."""
    yield from running(tmp_path_factory.mktemp("quiet"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    yield from running(tmp_path)


def running(folder: Path) -> Iterator[Cluster]:
    # So slow that a test can kill something while a report reads.
    settings = {"POPMQ_REPORTS_READ_BYTES_PER_SECOND": "100000"}
    with Cluster(folder, settings=settings) as cluster:
        with Client(cluster.endpoints[0]) as client:
            topic = admin.Topic(name="orders", type="normal", queues=2)
            client.topic(admin.CreateTopicRequest(topic=topic))
            group = admin.Group(name="g", type="normal")
            client.group(admin.CreateGroupRequest(group=group))
        work(cluster, MESSAGES)
        yield cluster


def work(cluster: Cluster, count: int, size: int = 10) -> None:
    """So many messages, each received and acked."""
    with Client(cluster.endpoints[0]) as client:
        for number in range(count):
            properties = api.SystemProperties(
                message_id=f"m{time.monotonic_ns()}-{number}",
                body_encoding=api.IDENTITY,
                message_type=api.NORMAL,
            )
            topic = api.Resource(name="orders")
            client.send(api.Message(topic=topic, body=b"b" * size, system_properties=properties))
        left = count
        while left:
            got = client.receive(
                "g", api.MessageQueue(topic=topic), limit=32, wait_ms=500, invisible_ms=60_000
            )
            if got:
                client.ack("g", "orders", got)
            left -= len(got)


def load(spark: Any, cluster: Cluster, table: str, **options: object) -> Any:
    reader = spark.read.format("popmq").option("endpoint", cluster.endpoints[0])
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load(table)


def acked(frame: Any) -> int:
    rows = frame.where("kind = 'ACK'").selectExpr("sum(messages) AS n").collect()
    return int(rows[0]["n"] or 0)


def test_every_table_is_read_as_it_lies_there(spark: Any, quiet: Cluster) -> None:
    """In Spark by columns, in small tasks, and in plain Python by rows: the same."""
    frame = load(spark, quiet, "revive", rowsPerPartition=7)
    positions = sorted(
        (row["position"], row["kind"], row["epoch"], row["sequence"], row["messages"])
        for row in frame.collect()
    )
    plain = []
    with ReportEndpoint(quiet.endpoints[0]) as endpoint:
        ((tables,), _) = endpoint.describe(["revive"])
        layout = RecordLayout.from_wire(
            next(layout for layout in tables.layouts if layout.name == "revive")
        )
        for partition in tables.partitions:
            if partition.layout == "revive":
                for piece in endpoint.read(tables.broker, partition):
                    plain += list(rows_of(layout, piece.data))
    kinds = {1: "CHECK_POINT", 2: "ACK"}
    assert positions == sorted(
        (
            row["position"],
            kinds[row["kind"]],
            row["epoch"],
            row["sequence"],
            row["members"].bit_count(),
        )
        for row in plain
    )
    assert acked(frame) == MESSAGES
    pops = frame.where("kind = 'CHECK_POINT'").select("group", "topic").distinct().collect()
    assert [tuple(row) for row in pops] == [("g", "orders")]
    messages = load(spark, quiet, "messages", topics="orders", columns="queue,offset,body")
    rows = messages.collect()
    assert messages.columns == ["queue", "offset", "body"]
    assert len(rows) == MESSAGES
    assert {bytes(row["body"]) for row in rows} == {b"b" * 10}
    assert len({(row["queue"], row["offset"]) for row in rows}) == MESSAGES
    assert load(spark, quiet, "fired").count() == 0, "nothing to read is no error"


def test_sql_and_pushed_filters_find_the_same(spark: Any, quiet: Cluster) -> None:
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW records USING popmq OPTIONS "
        f"(endpoint '{quiet.endpoints[0]}', path 'revive', pushdown 'true')"
    )
    plain = load(spark, quiet, "revive")
    times = sorted(row["log_ms"] for row in plain.select("log_ms").collect())
    middle = times[len(times) // 2]
    for where in (
        "kind = 'ACK'",
        "kind IN ('DEAD', 'RETRY')",
        f"log_ms >= {middle}",
        f"log_ms > {middle} AND kind = 'CHECK_POINT'",
        f"log_ms < {middle} AND broker = 'broker-a'",
        "broker = 'broker-z'",
    ):
        (row,) = spark.sql(f"SELECT count(*) AS n FROM records WHERE {where}").collect()
        assert row["n"] == plain.where(where).count(), where


def test_a_broker_that_dies_while_a_batch_reads_is_waited_for(spark: Any, cluster: Cluster) -> None:
    work(cluster, 40, size=20_000)  # 800 kB at 100 kB a second
    counted: list[int] = []

    def read() -> None:
        counted.append(load(spark, cluster, "messages", topics="orders").count())

    reader = threading.Thread(target=read)
    reader.start()
    wait_for_reads(cluster)
    cluster.broker.kill9()
    cluster.broker.restart()
    reader.join()
    assert counted == [MESSAGES + 40]


def test_a_broker_that_stays_away_fails_the_batch_by_name(spark: Any, cluster: Cluster) -> None:
    cluster.broker.kill9()
    with pytest.raises(Exception, match="broker-a"):
        load(spark, cluster, "revive", patienceSeconds=1).count()


def test_a_stream_outlives_its_broker_and_counts_everything_once(
    spark: Any, cluster: Cluster, tmp_path: Path
) -> None:
    total = 0
    batches: dict[int, int] = {}  # Spark may repeat the last one after a stop

    def take(frame: Any, number: int) -> None:
        batches[number] = acked(frame)

    reader = spark.readStream.format("popmq").option("endpoint", cluster.endpoints[0])
    stream = reader.option("maxRows", "4").option("patienceSeconds", "60").load("revive")

    def start() -> Any:
        writer = stream.writeStream.foreachBatch(take).trigger(processingTime="200 milliseconds")
        return writer.option("checkpointLocation", str(tmp_path / "check")).start()

    query = start()
    try:
        total = MESSAGES
        wait_until(lambda: sum(batches.values()) == total, query)
        assert len(batches) > 1, "no more than 4 records a batch"
        cluster.broker.kill9()
        wait_until(lambda: query.status["isTriggerActive"], query)  # and nobody answers it
        cluster.broker.restart()
        work(cluster, 20)
        total += 20
        wait_until(lambda: sum(batches.values()) == total, query)
        query.stop()
        work(cluster, 10)
        query = start()  # goes on behind its checkpoint
        wait_until(lambda: sum(batches.values()) == total + 10, query)
    finally:
        query.stop()


def wait_for_reads(cluster: Cluster) -> None:
    until_s = time.monotonic() + FOUND_WITHIN_S
    while cluster.broker.metric("popmq_sampler_read_bytes_total") < 100_000:
        assert time.monotonic() < until_s, "nothing was read"
        time.sleep(0.02)


def wait_until(done: Any, query: Any) -> None:
    until_s = time.monotonic() + FOUND_WITHIN_S
    while not done():
        assert query.isActive, query.exception()
        assert time.monotonic() < until_s, "the stream did not come that far"
        time.sleep(0.05)
