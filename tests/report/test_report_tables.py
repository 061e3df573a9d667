"""DESCRIBE_TABLES, READ_RAW and NAMES: what brokers keep for reports, told as it lies there."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from report.recount import DeliveryCounts, Recount, rows_of
from report.reports_rig import CoreReports, lag_of, newest_offsets

from popmq.broker.diagnostics.read_budget import ReadBudget
from popmq.broker.diagnostics.sample_log import SampleLog
from popmq.common import topics
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.report_layouts import OFFSET_SAMPLE, OffsetFlag, TimerRow
from popmq.common.settings.report_settings import ReportsSettings
from popmq.common.topics import CheckPoints, GroupType, MessageType, StartAt
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import report_pb2 as pb
from popmq.reports.records.record_layout import RecordLayout
from popmq.testing.harness.core_broker import SMALL, CoreBroker, pop

_READY = 14  # of an OFFSET_SAMPLE


def worked(core: CoreBroker) -> None:
    """Deliveries with every kind of end, some in flight, some in the retry topic."""
    for number in range(40):
        core.send("orders", b"%d" % number)
    taken = core.receive("orders", "g", limit=20, invisible_ms=1_000)
    core.ack("orders", "g", *(delivery.handle for delivery in taken[:7]))
    core.reject("orders", "g", taken[7].handle)
    core.change("orders", "g", taken[8].handle, 600_000)
    core.advance(2_000)  # what was not acked is in the retry topic
    core.receive("orders", "g", limit=3, invisible_ms=1_000)
    core.advance(2_000)
    core.receive("orders", "g", limit=5, invisible_ms=600_000)


def test_a_sample_of_offsets_is_what_lag_says(reports: CoreReports) -> None:
    worked(reports.core)
    reports.core.group("other")
    reports.core.receive("orders", "other", limit=1)
    tables = reports.describe("offsets")
    assert newest_offsets(reports, tables) == lag_of(reports.core)


@pytest.mark.parametrize("patient", [True, False])
def test_what_a_report_asks_for_is_of_one_moment_and_a_regular_sample_comes_in_pieces(
    patient: bool,
) -> None:
    """A report leaves out what came behind the moment at which it asked."""
    core = CoreBroker()
    sampler = core.broker.diagnostics.sampler
    core.group("g")
    for name in ("a", "b", "c", "d"):
        core.topic(name, queues=200)
        core.send(name, b"x", queue_id=0)
        core.receive(name, "g", limit=1)
    core.send("a", b"whose age is looked up", queue_id=0)
    sample, stored = sampler.take(patient=patient), 0
    with suppress(StopIteration):
        while next(sample) is None:
            core.send("d", b"x", queue_id=1)
            stored += 1
    rows = sampler.logs["offsets"].raw(0, sampler.logs["offsets"].next)
    ready = [row[_READY] for row in OFFSET_SAMPLE.iter_unpack(rows)]
    assert stored > 0
    assert (sum(ready) == 1) is patient


def test_samples_tell_fifo_parked_and_newest_groups_apart(reports: CoreReports) -> None:
    core = reports.core
    core.topic("inorder", queues=1, type=MessageType.FIFO)
    core.group("f", type=GroupType.FIFO)
    core.group("late", start_at=StartAt.NEWEST)
    core.group("fast", check_points=CheckPoints.BUFFERED)
    for number in range(6):
        core.send("inorder", b"%d" % number, message_group="ab"[number % 2])
        core.send("orders", b"%d" % number)
    core.receive("inorder", "f", limit=1)
    core.receive("orders", "late", limit=1)
    core.receive("orders", "fast", limit=1)
    tables = reports.describe("offsets")
    assert newest_offsets(reports, tables) == lag_of(core)
    flags = {
        core.broker.registry.group_by_id(row["group_id"]).name: row["flags"]  # type: ignore[union-attr]
        for _, row in reports.rows(tables, "offsets")
    }
    assert flags["f"] & OffsetFlag.FIFO
    assert flags["late"] & OffsetFlag.NEWEST
    assert flags["fast"] & OffsetFlag.BUFFERED


def test_a_sample_has_the_age_of_the_oldest_ready_message(reports: CoreReports) -> None:
    core = reports.core
    first_ms = core.clock.wall_ms()
    core.send("orders", b"1", queue_id=1)
    core.clock.advance(5_000)
    core.send("orders", b"0", queue_id=0)
    core.receive("orders", "g", limit=1, queue_id=0, invisible_ms=1)
    ages = {
        row["queue_id"]: row["oldest_ready_ms"]
        for _, row in reports.rows(reports.describe("offsets"), "offsets")
        if not row["flags"] & OffsetFlag.RETRY
    }
    assert ages == {0: 0, 1: first_ms}


def test_the_counters_of_a_pair_stand_once(reports: CoreReports) -> None:
    worked(reports.core)
    tables = reports.describe("offsets")
    rows = [row for _, row in reports.rows(tables, "offsets") if row["sample"] == tables.sample]
    assert [bool(row["flags"] & OffsetFlag.FIRST) for row in rows].count(True) == 1
    assert sum(row["delivered"] for row in rows) == 28
    assert sum(row["acked"] for row in rows) == 7
    ends = tuple(sum(row[name] for row in rows) for name in ("returned", "dead"))
    assert ends == reports.core.broker.ends.of(("g", "orders"))[2:]
    assert ends >= (11, 1)


def test_regular_samples_come_by_the_clock_and_the_oldest_leave() -> None:
    log = SampleLog(4, limit_bytes=24)
    log.append(b"")
    assert (log.min, log.next) == (0, 0)
    for number in range(4):
        log.append(bytes((number,)) * 12)
    assert (log.min, log.next, log.held_bytes) == (6, 12, 24)
    assert log.raw(0, 100) == b"\2" * 12 + b"\3" * 12
    assert log.raw(8, 10) == b"\2" * 4 + b"\3" * 4
    assert log.raw(9, 9) == b""
    log.append(b"\4" * 40)
    assert (log.min, log.next) == (12, 22), "the newest stays, however large"


def test_a_broker_samples_each_interval_and_not_more_often(reports: CoreReports) -> None:
    core = reports.core
    core.send("orders", b"x")
    core.receive("orders", "g")
    before = core.broker.diagnostics.sampler.taken
    for _ in range(10):
        core.advance(30_000)
    assert 9 <= core.broker.diagnostics.sampler.taken - before <= 10
    samples = {row["sample"] for _, row in reports.rows(reports.describe("offsets"), "offsets")}
    assert len(samples) >= 10


def test_the_records_of_the_revive_topic_and_their_ends_recount_to_the_same(
    reports: CoreReports,
) -> None:
    worked(reports.core)
    tables = reports.describe("revive", "offsets")
    recount = Recount(tables.end_position)
    recount.take_revive(row for _, row in reports.rows(tables, "revive", layout="revive"))
    recount.take_heads(row for _, row in reports.rows(tables, "revive", layout="head"))
    counted = recount.finish()
    for _, row in reports.rows(tables, "offsets"):
        if row["sample"] != tables.sample:
            continue
        place = row["group_id"], row["read_topic_id"], row["queue_id"]
        ends = counted.get(place, DeliveryCounts())
        assert ends.in_flight == row["in_flight"], place
        assert max(ends.next_offset, row["min_offset"]) == row["next_offset"], place
        ready = row["max_offset"] - max(ends.next_offset, row["min_offset"])
        assert ready == row["ready"], place
    assert recount.unknown_ends == 0
    broker = reports.core.broker
    assert sum(item.acked for item in counted.values()) == broker.pop.acks.acked == 7
    assert sum(item.retried for item in counted.values()) == broker.pop.revive.retried
    assert sum(item.dead for item in counted.values()) == broker.pop.revive.dead_lettered
    assert sum(item.delivered for item in counted.values()) == broker.pop.service.metrics.delivered


@pytest.mark.parametrize("seed", range(6))
def test_a_recount_under_random_work_agrees_at_every_cut(seed: int) -> None:
    rng = random.Random(seed)
    core = CoreBroker(seed=seed)
    core.topic("orders", queues=3)
    for name in ("g", "h"):
        core.group(name, max_attempts=3)
    reports = CoreReports(core)
    held: list[tuple[str, bytes]] = []
    for _ in range(150):
        group = rng.choice("gh")
        action = rng.randrange(6)
        if action < 2:
            core.send("orders", b"x")
        elif action == 2:
            result = core.receive("orders", group, limit=4, invisible_ms=rng.choice((500, 60_000)))
            held += [(group, delivery.handle) for delivery in result]
        elif held and action == 3:
            group, handle = held.pop(rng.randrange(len(held)))
            core.ack("orders", group, handle)
        elif held and action == 4:
            group, handle = held.pop(rng.randrange(len(held)))
            with suppress(PopmqError):  # it was over already
                held.append((group, core.change("orders", group, handle, 2_000)))
        else:
            core.advance(700)
    tables = reports.describe("revive", "offsets")
    core.send("orders", b"later")  # behind the cut: no part of it
    core.receive("orders", "g", limit=4)
    recount = Recount(tables.end_position)
    recount.take_revive(row for _, row in reports.rows(tables, "revive", layout="revive"))
    recount.take_heads(row for _, row in reports.rows(tables, "revive", layout="head"))
    counted = recount.finish()
    newest = [row for _, row in reports.rows(tables, "offsets") if row["sample"] == tables.sample]
    assert newest, f"seed {seed}"
    for row in newest:
        place = row["group_id"], row["read_topic_id"], row["queue_id"]
        ends = counted.get(place)
        assert (ends.in_flight if ends else 0) == row["in_flight"], (seed, place)


def test_what_came_after_the_cut_is_not_recounted(reports: CoreReports) -> None:
    core = reports.core
    core.send("orders", b"a")
    tables = reports.describe("revive")
    core.receive("orders", "g")
    again = reports.describe("revive")
    recount = Recount(tables.end_position)
    recount.take_revive(row for _, row in reports.rows(again, "revive", layout="revive"))
    assert recount.finish() == {}


def test_timers_and_topics_are_sampled(reports: CoreReports) -> None:
    core = reports.core
    core.send("orders", b"x")
    tables = reports.describe("topics", "timers")
    topic = core.broker.registry.topic("orders")
    rows = [row for _, row in reports.rows(tables, "topics") if row["topic_id"] == topic.id]
    assert [(row["queue_id"], row["stored"]) for row in rows] == [(0, 1), (1, 0)]
    assert sum(row["max_offset"] - row["min_offset"] for row in rows) == 1
    kinds = {row["kind"] for _, row in reports.rows(tables, "timers")}
    assert {TimerRow.LATENESS, TimerRow.STATE} <= kinds


def test_messages_are_read_whole_and_as_heads(reports: CoreReports) -> None:
    core = reports.core
    for size in (10, 300_000, 20, 200_000):
        core.send("orders", b"b" * size, queue_id=0)
    tables = reports.describe("messages", topics=("orders",))
    partition = next(partition for partition in tables.partitions if partition.queue_id == 0)
    whole = reports.read(partition)
    layout = next(layout for layout in tables.layouts if layout.name == "record")
    rows = list(rows_of(RecordLayout.from_wire(layout), whole))
    assert [row["head_size"] for row in rows] == [10, 300_000, 20, 200_000]
    assert [row["log_offset"] for row in rows] == [0, 1, 2, 3]
    heads = pb.Partition()
    heads.CopyFrom(partition)
    heads.layout = "head"
    assert len(reports.read(heads)) == 4 * 128


def test_a_read_is_a_mebibyte_at_most_and_goes_on_where_it_ended(reports: CoreReports) -> None:
    core = reports.core
    for _ in range(30):
        core.send("orders", b"b" * 100_000, queue_id=0)
    tables = reports.describe("messages", topics=("orders",))
    partition = next(partition for partition in tables.partitions if partition.queue_id == 0)
    reply = reports.read_once(partition, 0)
    assert len(reply.data) <= 1 << 20
    assert 5 < reply.next < 30
    assert getattr(reports.read_once(partition, reply.next), "from") == reply.next


def test_reading_is_refused_for_a_while_when_the_budget_is_used_up() -> None:
    budget = ReadBudget(1_000)
    assert budget.wait_ms(0) == 0
    budget.charge(2_500)
    assert budget.wait_ms(0) == 1_501
    assert budget.wait_ms(1_400) > 0
    assert budget.wait_ms(1_502) == 0
    assert (budget.refused, budget.read_bytes) == (2, 2_500)
    budget.charge(1)
    assert budget.wait_ms(10_000_000) == 0
    budget.charge(1_000)
    assert budget.wait_ms(10_000_000) > 0, "what was not used does not add up"


def test_samples_of_an_earlier_start_are_not_mixed_up(reports: CoreReports) -> None:
    worked(reports.core)
    tables = reports.describe("offsets")
    (partition,) = tables.partitions
    reports.core.stop()
    reports.core.start()
    with pytest.raises(PopmqError, match="started anew") as refused:
        reports.read_once(partition, 0, epoch=tables.epoch)
    assert refused.value.code == Code.PRECONDITION_FAILED


@pytest.mark.parametrize("table", ["offset", ""])
def test_an_unknown_table_is_refused_by_name(reports: CoreReports, table: str) -> None:
    with pytest.raises(PopmqError, match="a table is one of revive, offsets"):
        reports.describe(table)


def test_what_is_not_there_is_refused(reports: CoreReports) -> None:
    for partition in (
        pb.Partition(layout="nothing", next=1),
        pb.Partition(layout="revive", queue_id=8, next=1),
        pb.Partition(layout="head", topic_id=9_999, next=1),
    ):
        with pytest.raises(PopmqError):
            reports.read_once(partition, 0)


def test_names_tell_groups_topics_and_clients(reports: CoreReports) -> None:
    worked(reports.core)
    names = reports.names()
    assert {"orders", "%RETRY%g+orders", "%DLQ%g"} <= {topic.name for topic in names.topics}
    assert [group.name for group in names.groups] == ["g"]
    assert "a-client" in [client.name for client in names.clients]


@pytest.mark.parametrize("fifo", [False, True])
def test_a_delivery_that_nobody_took_is_told_from_a_retry(reports: CoreReports, fifo: bool) -> None:
    core = reports.core
    core.topic("inorder", queues=1, type=MessageType.FIFO)
    core.group("f", type=GroupType.FIFO)
    topic, group = ("inorder", "f") if fifo else ("orders", "g")
    core.send(topic, b"x", message_group="k" if fifo else "")
    answer = core.ask(Kind.POP, pop(topic, group), settle=False)
    core.server.cancel(answer.id)
    core.advance(1_000)
    tables = reports.describe("revive")
    recount = Recount(tables.end_position)
    recount.take_revive(row for _, row in reports.rows(tables, "revive", layout="revive"))
    recount.take_heads(row for _, row in reports.rows(tables, "revive", layout="head"))
    (ends,) = recount.finish().values()
    assert (ends.delivered, ends.undone, ends.retried, ends.returned) == (1, 1, 0, 0)
    assert ends.in_flight == 0


def test_what_a_sample_knows_is_in_the_pinned_queues(reports: CoreReports) -> None:
    """The pop is in the tables at once and in the queues when the disk has it."""
    core = reports.core
    core.send("orders", b"x")
    core.ask(Kind.POP, pop("orders", "g"), settle=False)
    request = pb.DescribeRequest(tables=["revive", "offsets"], sample=True).SerializeToString()
    answer = core.ask(Kind.DESCRIBE_TABLES, request, settle=False)
    assert not answer.heard
    core.run_until_idle()
    assert answer.body is not None
    (tables,) = pb.DescribeReply.FromString(answer.body).brokers
    assert sum(row["in_flight"] for _, row in reports.rows(tables, "offsets")) == 1
    assert (
        sum(partition.next for partition in tables.partitions if partition.layout == "revive") == 1
    )


def test_a_broker_reads_no_more_than_its_bytes_a_second() -> None:
    settings = replace(SMALL, reports=ReportsSettings(read_bytes_per_second=100_000))
    core = CoreBroker(settings=settings)
    core.topic("orders", queues=1)
    for _ in range(4):
        core.send("orders", b"b" * 100_000)
    reports = CoreReports(core)
    tables = reports.describe("messages", topics=("orders",))
    (partition,) = tables.partitions
    assert reports.read_once(partition, 0).next == 4
    held_back = reports.read_once(partition, 0)
    assert (held_back.data, held_back.next) == (b"", 0)
    assert 3_000 <= held_back.retry_after_ms <= 3_100
    core.advance(held_back.retry_after_ms)
    assert reports.read_once(partition, 0).next == 4


def test_a_unit_that_leads_elsewhere_is_no_record(reports: CoreReports) -> None:
    core = reports.core
    core.send("orders", b"x" * 500, queue_id=0)
    store = core.broker.store
    (unit,) = store.queue(core.broker.registry.topic("orders").id, 0).units(0, 1)
    wrong = unit._replace(position=unit.position + 8, size=unit.size - 8)
    assert store.reader.raw([wrong], 128) == [bytes(128)]
    assert store.reader.raw([wrong]) == [b""]
    (head,) = store.reader.raw([unit], 128)
    assert store.reader.raw([unit])[0].startswith(head)


def test_a_changed_delivery_is_in_flight_once(reports: CoreReports) -> None:
    core = reports.core
    core.send("orders", b"x")
    (delivery,) = core.receive("orders", "g")
    core.change("orders", "g", delivery.handle, 600_000)
    tables = reports.describe("revive")
    recount = Recount(tables.end_position)
    recount.take_revive(row for _, row in reports.rows(tables, "revive", layout="revive"))
    (ends,) = recount.finish().values()
    assert (ends.delivered, ends.in_flight) == (1, 1)


def test_a_recount_ends_what_a_reset_ended(reports: CoreReports) -> None:
    core = reports.core
    for _ in range(5):
        core.send("orders", b"x", queue_id=0)
    before = core.receive("orders", "g", limit=4)
    core.ack("orders", "g", before[0].handle)
    core.change("orders", "g", before[1].handle, 600_000)
    again = admin.ResetOffsetRequest(group="g", topic="orders", queue_id=0, offset=3)
    core.reply(Kind.RESET_OFFSET, again.SerializeToString())
    core.receive("orders", "g", limit=1)
    tables = reports.describe("revive", "offsets")
    recount = Recount(tables.end_position)
    recount.take_revive(row for _, row in reports.rows(tables, "revive", layout="revive"))
    recount.take_heads(row for _, row in reports.rows(tables, "revive", layout="head"))
    recount.take_offsets(row for _, row in reports.rows(tables, "revive", layout="offset"))
    (ends,) = recount.finish().values()
    assert (ends.delivered, ends.acked, ends.reset, ends.in_flight) == (5, 1, 3, 1)
    assert newest_offsets(reports, tables)["g", "orders"][:2] == (1, 1)


def test_a_reader_of_an_earlier_version_is_told_of_no_layout_that_it_does_not_know(
    reports: CoreReports,
) -> None:
    request = pb.DescribeRequest(tables=["revive"], sample=True).SerializeToString()
    reply = reports.core.reply(Kind.DESCRIBE_TABLES, request)
    (tables,) = pb.DescribeReply.FromString(reply).brokers
    assert {partition.layout for partition in tables.partitions} == {"revive"}
    assert "offset" in {partition.layout for partition in reports.describe("revive").partitions}


@pytest.mark.parametrize(
    ("layout", "topic_id"),
    [
        ("offset", topics.META_TOPIC_ID),
        ("offset", topics.REVIVE_TOPIC_ID),
        ("record", topics.OFFSETS_TOPIC_ID),
        ("record", topics.META_TOPIC_ID),
        ("head", topics.OFFSETS_TOPIC_ID),
    ],
)
def test_of_system_topics_offset_records_alone_are_read(
    reports: CoreReports, layout: str, topic_id: int
) -> None:
    """rmq_sys_meta holds the key that receipt handles are signed with."""
    with pytest.raises(PopmqError, match="there is no queue 0 of topic #"):
        reports.read_once(pb.Partition(layout=layout, topic_id=topic_id, next=1), 0)
