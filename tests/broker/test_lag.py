"""Lag: ready and in flight by group and topic, exactly right at every moment."""

import random
from dataclasses import replace

import pytest

from popmq.broker.diagnostics.lag import Lag, top_lags
from popmq.broker.diagnostics.lag_monitor import NAME_BYTES, PAIRS_LIMIT
from popmq.broker.node import metrics
from popmq.broker.node.metrics import broker_metrics
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.topics import MessageType, StartAt, SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.core_broker import CoreBroker, pop


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", queues=2)
    broker.group("g", max_attempts=3)
    return broker


def ask(core: CoreBroker, group: str = "", topic: str = "") -> pb.LagReply:
    request = pb.LagRequest(group=group, topic=topic)
    return pb.LagReply.FromString(core.reply(Kind.LAG, request.SerializeToString()))


def only(core: CoreBroker, group: str = "g", topic: str = "orders") -> pb.Lag:
    (lag,) = ask(core, group, topic).lags
    return lag


def metric(core: CoreBroker, name: str, group: str = "g") -> float:
    (values,) = [
        item.value
        for item in broker_metrics(core.broker)
        if item.name == name and item.labels.get("group") == group
    ]
    return values


def test_lag_counts_what_was_stored_and_delivered_since_the_start(core: CoreBroker) -> None:
    core.topic("unread")
    for number in range(5):
        core.send("orders", b"%d" % number)
    core.send("unread", b"x")
    core.receive("orders", "g", limit=3)
    assert only(core).delivered == 3
    stored = {(row.topic, row.stored) for row in ask(core).stored}
    assert stored == {("orders", 5), ("unread", 1)}
    assert [row.topic for row in ask(core, topic="unread").stored] == ["unread"]


def test_lag_is_what_was_not_popped_and_what_is_in_flight(core: CoreBroker) -> None:
    for number in range(10):
        core.send("orders", b"%d" % number)
    taken = core.receive("orders", "g", limit=4)
    lag = only(core)
    assert (lag.ready, lag.in_flight, lag.retries) == (6, 4, 0)
    core.ack("orders", "g", *(delivery.handle for delivery in taken[:3]))
    lag = only(core)
    assert (lag.ready, lag.in_flight) == (6, 1)
    assert metric(core, "consumer_lag_messages") == 7
    assert metric(core, "consumer_ready_messages") == 6
    assert metric(core, "consumer_inflight_messages") == 1


def test_queues_that_the_group_has_not_visited_yet_are_counted(core: CoreBroker) -> None:
    for queue in (0, 0, 1, 1, 1):
        core.send("orders", b"x", queue_id=queue)
    core.reply(Kind.POP, pop("orders", "g", limit=1, queue_id=0))
    lag = only(core)
    assert (lag.ready, lag.in_flight) == (4, 1)


def test_what_waits_for_its_delivery_time_is_counted_beside_the_lag(core: CoreBroker) -> None:
    core.topic("later", type=MessageType.DELAY)
    core.receive("later", "g")
    entries = [hop.PutEntry(MessageType.DELAY, b"x", b"", due_ms=-60_000) for _ in range(3)]
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("later", entries)))
    lag = only(core, topic="later")
    assert (lag.delayed, lag.ready, lag.in_flight) == (3, 0, 0)
    assert only(core, group="g", topic="orders").delayed == 0
    assert metric(core, "consumer_delayed_messages") == 3
    assert metric(core, "consumer_lag_messages") == 0
    core.advance(61_000)
    assert (only(core, topic="later").delayed, only(core, topic="later").ready) == (0, 3)
    assert metric(core, "consumer_delayed_messages") == 0


def test_retries_are_folded_under_the_base_topic(core: CoreBroker) -> None:
    for number in range(3):
        core.send("orders", b"%d" % number)
    core.receive("orders", "g", limit=2, invisible_ms=1_000)
    core.advance(2_000)
    lag = only(core)
    assert (lag.ready, lag.retries, lag.in_flight) == (3, 2, 0)
    # Its two retries and what was left: all in flight now.
    assert len(core.receive("orders", "g", invisible_ms=1_000)) == 3
    lag = only(core)
    assert (lag.ready, lag.retries, lag.in_flight) == (0, 0, 3)
    assert [lag.topic for lag in ask(core).lags] == ["orders"]


def test_dead_letters_are_counted_by_group(core: CoreBroker) -> None:
    for number in range(2):
        core.send("orders", b"%d" % number)
    for delivery in core.receive("orders", "g"):
        core.reject("orders", "g", delivery.handle)
    reply = ask(core)
    (dead,) = reply.dead_letters
    assert (dead.group, dead.stored, dead.redriven) == ("g", 2, 0)
    (lag,) = reply.lags
    assert (lag.ready, lag.in_flight) == (0, 0)


def test_the_oldest_ready_message_tells_the_age(core: CoreBroker) -> None:
    first_ms = core.clock.wall_ms()
    core.send("orders", b"1", queue_id=1)
    core.clock.advance(5_000)
    core.send("orders", b"0", queue_id=0)
    core.clock.advance(5_000)
    assert only(core).oldest_ready_ms == first_ms
    core.reply(Kind.POP, pop("orders", "g", queue_id=1))
    reply = ask(core)
    assert reply.lags[0].oldest_ready_ms == first_ms + 5_000
    assert reply.now_ms == first_ms + 10_000
    core.receive("orders", "g")
    assert only(core).oldest_ready_ms == 0


def test_what_expired_unread_is_counted_and_no_lag(core: CoreBroker) -> None:
    core.broker.registry.alter_topic(
        replace(core.broker.registry.topic("orders"), retention_ms=60_000)
    )
    for number in range(4):
        core.send("orders", b"%d" % number)
    core.receive("orders", "g", limit=1)
    core.advance(120_000)
    core.advance(120_000)
    lag = only(core)
    assert (lag.ready - lag.retries, lag.expired) == (0, 3)
    core.receive("orders", "g")  # now the pop passes over them
    assert only(core).expired == 3


def test_a_group_that_never_read_a_topic_is_told_only_when_both_are_named(
    core: CoreBroker,
) -> None:
    core.group("late", start_at=StartAt.NEWEST)
    core.send("orders", b"one")
    assert ask(core).lags == []
    assert only(core).ready == 1
    assert only(core, "late").ready == 0


def test_a_filter_by_group_or_topic_leaves_the_others_out(core: CoreBroker) -> None:
    core.topic("bills")
    core.group("h")
    for group, topic in (("g", "orders"), ("g", "bills"), ("h", "bills")):
        core.receive(topic, group)
    groups = [(lag.group, lag.topic) for lag in ask(core).lags]
    assert groups == [("g", "bills"), ("g", "orders"), ("h", "bills")]
    assert [lag.topic for lag in ask(core, group="h").lags] == ["bills"]
    assert [lag.group for lag in ask(core, topic="bills").lags] == ["g", "h"]


def test_unknown_names_are_refused(core: CoreBroker) -> None:
    for group, topic, code in (
        ("nobody", "", Code.CONSUMER_GROUP_NOT_FOUND),
        ("", "nowhere", Code.TOPIC_NOT_FOUND),
        ("", "%RETRY%g+orders", Code.ILLEGAL_TOPIC),
    ):
        with pytest.raises(PopmqError) as caught:
            ask(core, group, topic)
        assert caught.value.code == code


@pytest.mark.more
def test_lag_is_exact_in_random_histories_and_after_restarts() -> None:
    """Messages sent less messages ended is what lag says, whatever happened."""
    for seed in range(15):
        rng = random.Random(seed)
        core = CoreBroker(seed=seed)
        core.topic("orders", queues=3)
        core.group("g", max_attempts=2)
        core.receive("orders", "g")
        held: list[Delivery] = []
        sent = acked = 0
        for number in range(120):
            match rng.randrange(5):
                case 0 | 1:
                    core.send("orders", b"%d" % number)
                    sent += 1
                case 2:
                    held += core.receive("orders", "g", limit=3, invisible_ms=5_000)
                case 3 if held:
                    delivery = held.pop(rng.randrange(len(held)))
                    acked += core.ack("orders", "g", delivery.handle)[0].code == Code.OK
                case _:
                    core.advance(3_000)
            if number % 40 == 39:
                core.stop()
                core.start()
            reply = ask(core, "g")
            (lag,) = reply.lags
            dead = sum(dead_letter.stored for dead_letter in reply.dead_letters)
            assert lag.ready + lag.in_flight == sent - acked - dead, (seed, number)


def test_of_many_pairs_the_metrics_name_those_with_the_most_to_do(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    core.topic("bills", queues=1)
    for count, topic in ((3, "orders"), (1, "bills")):
        core.receive(topic, "g")
        for _ in range(count):
            core.send(topic, b"x")
    monkeypatch.setattr(metrics, "PAIRS_LIMIT", 1)
    values = {
        (item.labels["group"], item.labels["topic"]): item.value
        for item in broker_metrics(core.broker)
        if item.name == "consumer_lag_messages"
    }
    assert values == {("g", "orders"): 3, ("_others", "_others"): 1}


def test_metrics_keep_a_bound_on_labels_and_lose_no_message() -> None:
    def lag(number: int) -> Lag:
        group = SubscriptionGroup(number, f"g{number}")
        return Lag(group, TopicConfig(number, "t"), ready=number % 7, in_flight=number)

    every = [lag(number) for number in range(PAIRS_LIMIT + 5)]
    kept, rest = top_lags(every, PAIRS_LIMIT, NAME_BYTES)
    assert (len(kept), len(rest)) == (PAIRS_LIMIT, 5)
    assert max(lag.total for lag in rest) <= min(lag.total for lag in kept)
    assert top_lags(every[:3], 3, NAME_BYTES) == (every[:3], [])
    assert top_lags(every[:3], 3, 6) == (
        every[1:3],
        every[:1],
    )
