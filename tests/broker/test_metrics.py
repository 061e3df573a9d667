"""What the broker counts for an operator, beside what its parts' own tests look at."""

from math import inf

import pytest

from popmq.broker.deliveries import group_topic_counts as pair_counts
from popmq.broker.deliveries.group_topic_counts import GroupTopicCounts
from popmq.broker.deliveries.pop_check_point import CheckPointRecord
from popmq.broker.deliveries.revive_buckets import ReviveBuckets
from popmq.broker.diagnostics.lag_monitor import APART_MS, ASKED_MS, UNASKED_MS
from popmq.broker.node import metrics
from popmq.broker.node.metrics import broker_metrics
from popmq.common.observability import Metric
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PutEntry,
    PutRequest,
    decode_pop_reply,
    encode_put,
)
from popmq.common.topics import MessageType
from popmq.testing.harness.core_broker import CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    core = CoreBroker()
    core.start()
    core.topic("orders", queues=2)
    return core


def readings(core: CoreBroker, name: str) -> list[Metric]:
    return [metric for metric in broker_metrics(core.broker) if metric.name == name]


def by_labels(core: CoreBroker, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(reading.labels.values()): reading.value for reading in readings(core, name)}


def value(core: CoreBroker, name: str) -> float:
    (metric,) = readings(core, name)
    return metric.value


def put(body: bytes) -> bytes:
    entry = PutEntry(MessageType.NORMAL, body, b"")
    return encode_put(PutRequest("orders", [entry]))


def look(core: CoreBroker, ms: int) -> None:
    """Let so much time pass, in looks at the lag."""
    list(broker_metrics(core.broker))
    for _ in range(ms // APART_MS):
        core.advance(APART_MS)


def test_deliveries_and_acks_are_counted_for_each_group_and_topic(core: CoreBroker) -> None:
    for number in range(6):
        core.send("orders", b"%d" % number)
    first = core.receive("orders", "g", limit=4, invisible_ms=1_000)
    core.receive("orders", "h", limit=6)
    core.ack("orders", "g", *(delivery.handle for delivery in first[:3]))
    core.ack("orders", "g", first[0].handle)  # again
    core.advance(2_000)
    core.receive("orders", "g", limit=1, queue_id=-1)
    out, acked = (by_labels(core, f"group_messages_{name}") for name in ("out", "acked"))
    assert out == {("g", "orders"): 5, ("h", "orders"): 6}
    assert acked == {("g", "orders"): 3}
    assert (value(core, "acks"), value(core, "messages_out")) == (3, 11)
    core.broker.registry.delete_topic("orders")
    assert by_labels(core, "group_messages_out") == {}
    assert by_labels(core, "group_messages_acked") == {}


def test_of_many_pairs_the_rest_is_counted_together(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_counts, "PAIRS_LIMIT", 2)
    counts = GroupTopicCounts()
    for group in ("a", "b", "c", "d", "a"):
        counts.add((group, "orders"), 2)
    assert counts.counts == {("a", "orders"): 4, ("b", "orders"): 2, ("_others", "_others"): 4}
    monkeypatch.setattr(metrics, "PAIRS_LIMIT", 1)
    core.broker.pop.service.delivered = counts
    assert by_labels(core, "group_messages_out") == {("a", "orders"): 4, ("_others", "_others"): 6}
    monkeypatch.setattr(metrics, "TOPICS_LIMIT", 1)
    core.broker.sends.stored_by_topic.update(orders=5, bills=2, letters=1)
    assert by_labels(core, "messages_in") == {("orders",): 5, ("_others",): 3}


def test_the_time_from_a_delivery_to_its_ack_is_a_histogram(core: CoreBroker) -> None:
    for number in range(3):
        core.send("orders", b"%d" % number)
    taken = core.receive("orders", "g", limit=3)
    core.clock.advance(400)
    core.ack("orders", "g", *(delivery.handle for delivery in taken[:2]))
    core.clock.advance(4_000)
    core.ack("orders", "g", taken[2].handle)
    (metric,) = readings(core, "ack_latency_seconds")
    buckets = dict(metric.buckets)
    assert (buckets["0.2"], buckets["0.5"], buckets["2"], buckets["5"]) == (0, 2, 2, 3)
    assert metric.value == pytest.approx(0.4 + 0.4 + 4.4)


def test_group_commits_are_counted_with_their_records_and_bytes(core: CoreBroker) -> None:
    before = {name: value(core, name) for name in ("store_flushes", "store_flush_records")}
    for number in range(3):
        core.ask(Kind.PUT, put(b"%d" % number), settle=False)
    core.run_until_idle()
    flushed = value(core, "store_flushes") - before["store_flushes"]
    assert flushed == 1
    assert value(core, "store_flush_records") - before["store_flush_records"] == 3
    assert value(core, "store_flush_bytes") == value(core, "store_appended_bytes")
    (seconds,) = readings(core, "store_flush_seconds")
    assert dict(seconds.buckets)["+Inf"] == value(core, "store_flushes")


def test_the_age_of_the_oldest_ready_message_is_found_more_often_while_it_is_scraped(
    core: CoreBroker,
) -> None:
    core.receive("orders", "g")
    core.send("orders", b"1", queue_id=1)
    core.advance(10_000)
    core.send("orders", b"0", queue_id=0)
    look(core, APART_MS)
    ages = by_labels(core, "consumer_queueing_latency_seconds")
    assert ages == {("g", "orders"): 10 + APART_MS / 1_000}
    core.receive("orders", "g", limit=10)
    assert by_labels(core, "consumer_queueing_latency_seconds") == {("g", "orders"): 0}
    core.advance(ASKED_MS + APART_MS)
    core.advance(1)
    looks = core.broker.diagnostics.lag_monitor.pairs["g", "orders"].samples
    for _ in range(UNASKED_MS // APART_MS):
        core.advance(APART_MS)
    assert looks[-1].at_ms - looks[-2].at_ms >= UNASKED_MS, "it looks often though nobody asks"


def test_how_long_the_lag_will_last_is_told_by_its_slope(core: CoreBroker) -> None:
    for number in range(30):
        core.send("orders", b"%d" % number)
    (first,) = core.receive("orders", "g", limit=1)
    look(core, 2 * APART_MS)
    assert by_labels(core, "consumer_eta_seconds") == {("g", "orders"): inf}
    for _ in range(4):
        taken = core.receive("orders", "g", limit=5)
        core.ack("orders", "g", *(delivery.handle for delivery in taken))
        core.advance(APART_MS)
    ((_, eta_s),) = by_labels(core, "consumer_eta_seconds").items()
    assert 5 < eta_s < 20, "10 are left, at less than 1 a second"
    while taken := core.receive("orders", "g", limit=32):
        core.ack("orders", "g", *(delivery.handle for delivery in taken))
    core.ack("orders", "g", first.handle)
    core.advance(60_000)
    look(core, APART_MS)
    assert by_labels(core, "consumer_eta_seconds") == {("g", "orders"): 0}


def test_check_points_that_are_overdue_are_counted_each_once() -> None:
    times = ReviveBuckets(16)
    for sequence, due_ms in enumerate((10, 10, 40, 900)):
        record = CheckPointRecord(1, sequence, 1, 0, 0, 0, 0, 0, 0, due_ms, 0)
        times.add(record.check_point(0))
    assert times.overdue(15) == (0, 0)
    assert times.overdue(100) == (3, 84)
    for bucket in list(times._buckets.values()):
        for ck in list(bucket.line):
            times.remove(ck)
            times.add(ck)  # buckets are in the heap for a second time now
    assert times.overdue(100) == (3, 84)
    assert times.overdue(912) == (4, 896)


def test_dead_letters_that_are_kept_are_counted_by_group(core: CoreBroker) -> None:
    for number in range(2):
        core.send("orders", b"%d" % number)
    for delivery in core.receive("orders", "g", limit=2):
        core.reject("orders", "g", delivery.handle)
    assert by_labels(core, "dlq_messages") == {("g",): 2}
    assert value(core, "send_to_dlq_messages") == 2


def test_a_waiting_receive_that_needs_no_wait_is_a_hit(core: CoreBroker) -> None:
    answers = [core.ask(Kind.POP, pop("orders", "g", poll_ms=1_000))]
    core.send("orders", b"wakes it")
    core.send("orders", b"is there")
    answers.append(core.ask(Kind.POP, pop("orders", "g", poll_ms=1_000)))
    answers.append(core.ask(Kind.POP, pop("orders", "g")))
    replies = [decode_pop_reply(answer.body or b"") for answer in answers]
    assert [reply.first_look for reply in replies] == [False, True, False]  # for the proxy
    assert (value(core, "receives_woken"), value(core, "is_short_polling_hit")) == (1, 1)


def test_refusals_by_a_bound_name_it(core: CoreBroker) -> None:
    core.broker.polling._limit = 1
    for _ in range(2):
        core.ask(Kind.POP, pop("orders", "g", poll_ms=1_000))
    limits = by_labels(core, "limits_hit")
    assert limits["poll.waiters",] == 1
    assert sum(limits.values()) == 1
