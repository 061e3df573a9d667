"""Delayed messages: what a sender may say, and what the broker is told."""

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutResult, encode_put_reply
from popmq.common.quantities import iso_time
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.settings.settings import Settings, TimerSettings
from popmq.common.topics import MessageType
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.delay import CLOCKS_APART_MS, MAX_SPREAD_MS, NO_DELAY, Delay, delay_of
from popmq.proxy.rpc.validate import MessageFacts

NOW_MS = 1_700_000_000_000
LIMIT, LIMIT_MS = "1d", 86_400_000
LIMITS = TimerSettings(max_delay_ms=LIMIT_MS)


def facts(deliver_at_ms: int | None = None, **properties: str) -> MessageFacts:
    return MessageFacts(deliver_at_ms=deliver_at_ms, user_properties=properties)


def delay(deliver_at_ms: int | None = None, **properties: str) -> Delay:
    return delay_of(facts(deliver_at_ms, **properties), LIMITS, now_ms=NOW_MS)


def later(name: str = "m", due_ms: int | None = None, **properties: str) -> pb.Message:
    message = pb.Message(
        topic=pb.Resource(name="later"),
        body=b"x",
        user_properties=properties,
        system_properties=pb.SystemProperties(message_id=name),
    )
    if due_ms is not None:
        seconds, rest = divmod(due_ms, 1000)
        due = Timestamp(seconds=seconds, nanos=rest * 1_000_000)
        message.system_properties.delivery_timestamp.CopyFrom(due)
    return message


def send(bench: Any, *messages: pb.Message) -> Any:
    request = service.SendMessageRequest(messages=messages)
    return bench.unary("SendMessage", request, service.SendMessageResponse)


def entries(bench: Any) -> list[PutEntry]:
    return [entry for broker in bench.brokers.values() for put in broker.puts() for entry in put[1]]


@pytest.fixture
def delays(bench: Any) -> Any:
    bench.topic("later", kind="delay")
    return bench


@pytest.mark.parametrize(
    ("delay_given", "expected"),
    [
        (delay(), NO_DELAY),
        (delay(colour="red"), NO_DELAY),
        (delay(DELAY="3"), NO_DELAY),  # RocketMQ's delay level
        (delay(NOW_MS + 1), Delay(NOW_MS + 1)),
        (delay(NOW_MS - 1), Delay(NOW_MS - 1)),
        (delay(NOW_MS - CLOCKS_APART_MS - 1), NO_DELAY),
        (delay(0), NO_DELAY),
        (delay(-(1 << 60)), NO_DELAY),
        (delay(NOW_MS + 5, TIMER_SPREAD_MS="60000"), Delay(NOW_MS + 5, 60_000)),
        (delay(TIMER_DELAY_MS="90000"), Delay(-90_000)),
        (delay(TIMER_DELAY_SEC="90"), Delay(-90_000)),
        (delay(TIMER_DELAY_MS="0"), NO_DELAY),
        (delay(TIMER_DELAY_MS=str(LIMIT_MS)), Delay(-LIMIT_MS)),
        (delay(TIMER_DELAY_SEC="5", TIMER_SPREAD_MS="7"), Delay(-5_000, 7)),
        (delay(NOW_MS + LIMIT_MS + CLOCKS_APART_MS), Delay(NOW_MS + LIMIT_MS + CLOCKS_APART_MS)),
    ],
)
def test_a_time_or_a_duration_becomes_a_due_time(delay_given: Delay, expected: Delay) -> None:
    assert delay_given == expected


BEYOND_MS = NOW_MS + LIMIT_MS + CLOCKS_APART_MS + 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            facts(TIMER_DELAY_MS="1", TIMER_DELAY_SEC="1"),
            "TIMER_DELAY_MS and TIMER_DELAY_SEC both say",
        ),
        (facts(0, TIMER_DELAY_MS="1"), "delivery_timestamp and TIMER_DELAY_MS both say"),
        (facts(TIMER_DELAY_MS=""), "TIMER_DELAY_MS = '' is no whole number"),
        (facts(TIMER_DELAY_SEC="-1"), "TIMER_DELAY_SEC = '-1' is no whole number"),
        (facts(TIMER_DELAY_SEC="1.5"), "TIMER_DELAY_SEC = '1.5' is no whole number"),
        (facts(TIMER_DELAY_MS="\u0663"), "is no whole number"),
        (facts(TIMER_DELAY_MS="9" * 5_000), "is no whole number from 0 of at most 18 digits"),
        (facts(5, TIMER_SPREAD_MS="1m"), "TIMER_SPREAD_MS = '1m' is no whole number"),
        (facts(TIMER_SPREAD_MS="5"), "TIMER_SPREAD_MS on a message without a delivery time"),
        (facts(5, TIMER_SPREAD_MS=str(MAX_SPREAD_MS + 1)), f"over the limit of {MAX_SPREAD_MS} ms"),
        (
            facts(TIMER_DELAY_MS=str(LIMIT_MS + 1)),
            f"{LIMIT}1s ahead, over the limit of {LIMIT} (timer.max_delay_ms)",
        ),
        (
            facts(TIMER_DELAY_MS=str(LIMIT_MS), TIMER_SPREAD_MS="1"),
            f"TIMER_DELAY_MS with TIMER_SPREAD_MS 1 lies {LIMIT}1s ahead",
        ),
        (
            facts(BEYOND_MS),
            f"delivery_timestamp {iso_time(BEYOND_MS)} lies {LIMIT}1m1s ahead, "
            f"over the limit of {LIMIT} (timer.max_delay_ms)",
        ),
        (facts(1 << 72), "over the limit"),
    ],
)
def test_a_delivery_time_that_makes_no_sense_is_refused_with_what_is_wrong(
    bad: MessageFacts, words: str
) -> None:
    with pytest.raises(PopmqError) as caught:
        delay_of(bad, LIMITS, now_ms=NOW_MS)
    assert caught.value.code is Code.ILLEGAL_DELIVERY_TIME
    assert words in str(caught.value)


def test_the_broker_is_told_the_due_time_and_the_message_stays_as_it_was_sent(delays: Any) -> None:
    due_ms = NOW_MS + 5_000
    sent = later("m-1", due_ms, colour="red", TIMER_SPREAD_MS="60000")
    sent.system_properties.message_type = pb.MessageType.DELAY
    assert send(delays, sent).status.code == Code.OK
    (entry,) = entries(delays)
    assert (entry.type, entry.due_ms, entry.spread_ms) == (MessageType.DELAY, due_ms, 60_000)
    stored = pb.Message.FromString(entry.head)
    assert stored.user_properties == sent.user_properties
    properties = pb.SystemProperties.FromString(entry.properties)
    assert properties.delivery_timestamp == sent.system_properties.delivery_timestamp


def test_a_duration_makes_a_message_delayed_whatever_it_claims(delays: Any) -> None:
    sent = later("m-1", TIMER_DELAY_SEC="5")
    sent.system_properties.message_type = pb.MessageType.NORMAL
    assert send(delays, sent).status.code == Code.OK
    (entry,) = entries(delays)
    assert (entry.type, entry.due_ms, entry.spread_ms) == (MessageType.DELAY, -5_000, 0)
    assert dict(pb.Message.FromString(entry.head).user_properties) == {"TIMER_DELAY_SEC": "5"}
    properties = pb.SystemProperties.FromString(entry.properties)
    assert properties.message_type == pb.MessageType.DELAY
    assert not properties.HasField("delivery_timestamp")


def test_a_topic_that_takes_no_delays_refuses_a_duration(bench: Any) -> None:
    sent = later(TIMER_DELAY_MS="5")
    sent.topic.name = "orders"
    assert send(bench, sent).status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


def test_a_refused_delay_is_refused_alone(delays: Any) -> None:
    reply = send(
        delays, later("a", NOW_MS + 5), later("b", 1 << 60), later("c", TIMER_DELAY_MS="1")
    )
    codes = [entry.status.code for entry in reply.entries]
    assert codes == [Code.OK, Code.ILLEGAL_DELIVERY_TIME, Code.OK]
    assert [entry.message_id for entry in entries(delays)] == ["a", "c"]


def test_the_limit_is_the_setting(make_bench: Any) -> None:
    bench = make_bench(settings=Settings(timer=LIMITS))
    bench.topic("later", kind="delay")
    reply = send(bench, later("a", TIMER_DELAY_MS=str(LIMIT_MS)))
    assert reply.status.code == Code.OK
    reply = send(bench, later("b", TIMER_DELAY_MS=str(LIMIT_MS + 1)))
    assert reply.status.code == Code.ILLEGAL_DELIVERY_TIME


@pytest.mark.parametrize("kind", ["delay", "mixed"])
def test_delayed_messages_of_one_message_group_share_a_queue(two_brokers: Any, kind: str) -> None:
    two_brokers.topic("later", kind=kind)
    for number in range(20):
        sent = later(f"m-{number}", NOW_MS + number)
        sent.system_properties.message_group = "g"
        assert send(two_brokers, sent).status.code == Code.OK
    assert {entry.type for entry in entries(two_brokers)} == {MessageType.DELAY}
    places = {
        (name, entry.queue_id)
        for name, broker in two_brokers.brokers.items()
        for put in broker.puts()
        for entry in put.entries
    }
    assert len(places) == 1


def test_a_timer_has_a_recall_handle_and_a_visible_message_none(two_brokers: Any) -> None:
    two_brokers.topic("later", kind="delay")
    for broker in two_brokers.brokers.values():
        broker.tells[Kind.PUT] = lambda body: encode_put_reply([PutResult(due_ms=NOW_MS + 123)])
    (entry,) = send(two_brokers, later("m-1", NOW_MS + 99)).entries
    (where,) = [name for name, broker in two_brokers.brokers.items() if broker.puts()]
    handle = RecallHandle.decode(entry.recall_handle)
    assert handle == RecallHandle("later", where, NOW_MS + 123, "m-1")
    for broker in two_brokers.brokers.values():
        broker.tells[Kind.PUT] = lambda body: encode_put_reply([PutResult()])
    (entry,) = send(two_brokers, later("m-2", NOW_MS - 99)).entries
    assert (entry.status.code, entry.recall_handle) == (Code.OK, "")


def test_a_timer_that_went_elsewhere_names_the_broker_that_has_it(two_brokers: Any) -> None:
    two_brokers.topic("later", kind="delay")
    two_brokers.brokers["broker-a"].away = True
    reply = encode_put_reply([PutResult(due_ms=NOW_MS + 5)])
    two_brokers.brokers["broker-b"].tells[Kind.PUT] = lambda body: reply
    for number in range(20):
        (entry,) = send(two_brokers, later(f"m-{number}", TIMER_DELAY_MS="5")).entries
        assert RecallHandle.decode(entry.recall_handle).broker == "broker-b"
    told_due = {(item.due_ms, item.type) for item in entries(two_brokers)}
    assert told_due == {(-5, MessageType.DELAY)}


def test_a_delay_that_the_broker_refuses_has_no_handle(delays: Any) -> None:
    reply = encode_put_reply([PutResult(Code.ILLEGAL_DELIVERY_TIME, "too late")])
    delays.broker.tells[Kind.PUT] = lambda body: reply
    (entry,) = send(delays, later("m", NOW_MS + 5)).entries
    assert (entry.status.code, entry.status.message) == (Code.ILLEGAL_DELIVERY_TIME, "too late")
    assert entry.recall_handle == ""
