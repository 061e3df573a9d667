"""The age of the oldest ready message when its record is on the disk alone, or cannot be read."""

import pytest
from report.reports_rig import ColdTimes, CoreReports, newest_offsets, pb_lag

from popmq.broker.diagnostics import sampler
from popmq.broker.diagnostics.head_times import Head, HeadTimes
from popmq.broker.diagnostics.lag_monitor import APART_MS
from popmq.broker.diagnostics.sampler import UNKNOWN
from popmq.broker.node.metrics import broker_metrics
from popmq.cli.consumer_offsets import lag_lines, lag_rows
from popmq.common.record.report_layouts import OffsetFlag
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.admin.public_responses import summed
from popmq.testing.harness.core_broker import CoreBroker

INTERVAL_MS = 30_000


def ages(reports: CoreReports, sample: int) -> dict[int, int]:
    """Of a sample, by queue of the topic."""
    tables = reports.describe("offsets")
    return {
        row["queue_id"]: row["oldest_ready_ms"]
        for _, row in reports.rows(tables, "offsets")
        if row["sample"] == sample and not row["flags"] & OffsetFlag.RETRY
    }


def sampled(core: CoreBroker) -> int:
    """The number of the next regular sample, once it is there: its reads take steps."""
    core.clock.advance(INTERVAL_MS)
    for _ in range(20):
        core.run_steps()
    return core.broker.diagnostics.sampler.taken


def waiting(reports: CoreReports) -> int:
    """Two messages that nobody takes, one in each queue; when they were stored."""
    core = reports.core
    core.receive("orders", "g")
    core.send("orders", b"0", queue_id=0)
    core.send("orders", b"1", queue_id=1)
    return core.clock.wall_ms()


def metrics(core: CoreBroker) -> dict[str, float]:
    core.advance(APART_MS)
    list(broker_metrics(core.broker))
    core.advance(2 * APART_MS)
    return {
        metric.name: metric.value
        for metric in broker_metrics(core.broker)
        if metric.labels.get("group") == "g" and metric.name.startswith("consumer")
    }


def test_a_regular_sample_reads_an_age_from_the_disk(reports: CoreReports) -> None:
    stored_ms = waiting(reports)
    ColdTimes(reports.core)
    assert ages(reports, sampled(reports.core)) == {0: stored_ms, 1: stored_ms}


def test_an_age_that_was_known_once_is_known_while_the_message_waits(reports: CoreReports) -> None:
    core = reports.core
    stored_ms = waiting(reports)
    sampled(core)
    cold = ColdTimes(core, dark=True)
    core.advance(3_600_000)
    assert set(ages(reports, sampled(core)).values()) == {stored_ms}
    assert cold.warmings == 0, "it is remembered, not read again"
    core.receive("orders", "g", limit=1, queue_id=0)
    core.send("orders", b"2", queue_id=0)
    assert ages(reports, sampled(core)) == {0: UNKNOWN, 1: stored_ms}


def test_a_regular_sample_waits_for_so_many_reads_and_the_next_ones_for_the_others(
    reports: CoreReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "COLD_READS", 1)
    stored_ms = waiting(reports)
    cold = ColdTimes(reports.core)
    first = sampled(reports.core)
    assert cold.warmings == 1
    second = sampled(reports.core)
    assert cold.warmings == 2
    assert sorted(ages(reports, first).values()) == [stored_ms, UNKNOWN]
    assert set(ages(reports, second).values()) == {stored_ms}


def test_a_head_that_the_disk_cannot_read_harms_no_report(reports: CoreReports) -> None:
    waiting(reports)
    ColdTimes(reports.core, dark=True)
    tables = reports.describe("offsets")
    assert set(ages(reports, tables.sample).values()) == {UNKNOWN}
    assert newest_offsets(reports, tables) == {("g", "orders"): (2, 0, 0, 0, 0)}


def test_lag_says_that_an_age_is_unknown(reports: CoreReports) -> None:
    core = reports.core
    stored_ms = waiting(reports)
    cold = ColdTimes(core, dark=True)
    (lag,) = pb_lag(core).lags
    assert (lag.ready, lag.oldest_ready_ms, lag.unknown_ages) == (2, 0, 2)
    cold.dark = False
    (lag,) = pb_lag(core).lags
    assert (lag.ready, lag.oldest_ready_ms, lag.unknown_ages) == (2, stored_ms, 0)
    cold.dark = True
    core.advance(5_000)
    (lag,) = pb_lag(core).lags
    assert (lag.oldest_ready_ms, lag.unknown_ages) == (stored_ms, 0), "it was known before"


def test_the_command_shows_an_unknown_age_and_no_number() -> None:
    dark = admin.Lag(group="g", topic="t", ready=3, unknown_ages=1)
    reply = admin.LagReply(lags=[dark], now_ms=100_000)
    assert lag_lines(reply)[0].split()[-2] == "unknown"
    (row,) = lag_rows(reply)
    assert (row["oldest_ready_age_ms"], row["unknown_ages"]) == (None, 1)
    other = admin.Lag(broker="b", group="g", topic="t", ready=1, oldest_ready_ms=60_000)
    reply = admin.LagReply(lags=[dark, other], now_ms=100_000)
    assert lag_lines(reply)[0].split()[-2] == ">=40s"
    (row,) = lag_rows(reply)
    assert (row["oldest_ready_age_ms"], row["unknown_ages"]) == (40_000, 1)
    several = admin.LagReply(lags=[dark, admin.Lag(group="h", topic="t")], now_ms=1)
    assert lag_lines(several)[0].splitlines()[-1].split()[-2] == "-", "a total has no age"


def test_the_public_answer_has_no_delay_while_nobody_knows_it() -> None:
    dark = admin.Lag(group="g", topic="t", ready=3, unknown_ages=1)
    assert not summed([dark], 100_000).HasField("deliver_delay_time")
    known = admin.Lag(group="g", topic="t", ready=1, oldest_ready_ms=60_000)
    assert summed([dark, known], 100_000).deliver_delay_time.ToSeconds() == 40
    assert summed([], 100_000).deliver_delay_time.ToSeconds() == 0


def test_metrics_leave_out_an_age_that_nobody_knows(reports: CoreReports) -> None:
    core = reports.core
    waiting(reports)
    cold = ColdTimes(core, dark=True)
    shown = metrics(core)
    assert shown["consumer_ready_messages"] == 2
    assert shown["consumer_unknown_age_queues"] == 2
    assert "consumer_queueing_latency_seconds" not in shown
    cold.dark = False
    shown = metrics(core)
    assert shown["consumer_unknown_age_queues"] == 0
    assert shown["consumer_queueing_latency_seconds"] >= 6 * APART_MS / 1_000
    core.receive("orders", "g", limit=10)
    shown = metrics(core)
    assert shown["consumer_unknown_age_queues"] == 0
    assert shown["consumer_queueing_latency_seconds"] == 0


def test_times_of_heads_are_kept_up_to_a_bound(reports: CoreReports) -> None:
    core = reports.core
    for _ in range(3):
        core.send("orders", b"x", queue_id=0)
    topic = core.broker.registry.topic("orders")
    times = HeadTimes(core.broker.store, core.broker.registry)
    times.kept_limit = 2
    heads = [Head(topic.id, 0, offset) for offset in range(3)]
    assert [times.stored_ms(head) for head in heads] == [core.clock.wall_ms()] * 3
    assert len(times) == 2
    assert times.stored_ms(Head(topic.id, 0, 3)) is None
    assert times.stored_ms(Head(9_999, 0, 0)) is None
    cold = ColdTimes(core)
    assert times.stored_ms(heads[2]) == core.clock.wall_ms()
    assert cold.warmings == 0
