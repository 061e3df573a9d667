"""FIND_MESSAGES on system topics: records as JSON, without the key that signs handles."""

import json

import pytest
from transaction import rig as transactions

from popmq.common import topics
from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import CheckPoints
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.core_broker import CoreBroker

REVIVE = topics.revive_topic("popmq")


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", queues=1)
    broker.group("g")
    for number in range(3):
        broker.send("orders", b"%d" % number)
    return broker


def find(core: CoreBroker, topic: str, **expected: int | str) -> pb.FindMessagesReply:
    request = pb.FindMessagesRequest(topic=topic, **expected)  # type: ignore[arg-type]
    answer = core.ask(Kind.FIND_MESSAGES, request.SerializeToString())
    if answer.error is not None:
        raise answer.error
    assert answer.body is not None
    return pb.FindMessagesReply.FromString(answer.body)


def records(core: CoreBroker, topic: str, queue_id: int = 0) -> list[dict[str, object]]:
    reply = find(core, topic, queue_id=queue_id, stored_ms=0, limit=64)
    return [json.loads(message.record) for message in reply.messages]


def refusal(core: CoreBroker, topic: str, **expected: int | str) -> tuple[Code, str]:
    request = pb.FindMessagesRequest(topic=topic, **expected)  # type: ignore[arg-type]
    error = core.ask(Kind.FIND_MESSAGES, request.SerializeToString()).error
    assert error is not None
    return error.code, str(error)


def test_the_key_that_signs_handles_is_not_shown(core: CoreBroker) -> None:
    shown = records(core, topics.META_TOPIC)
    assert {"record": "META", "receipt_key": "not shown"} in shown
    assert core.broker.registry.signing_keys.newest.secret.hex() not in json.dumps(shown)


def test_topics_and_groups_are_shown_as_they_were_written(core: CoreBroker) -> None:
    shown = records(core, topics.META_TOPIC)
    assert any(manifest.get("topic", {}).get("name") == "orders" for manifest in shown)  # type: ignore[attr-defined]
    assert any(manifest.get("group", {}).get("name") == "g" for manifest in shown)  # type: ignore[attr-defined]


def test_check_points_and_acks_are_shown(core: CoreBroker) -> None:
    (first, *_) = core.receive("orders", "g")
    core.ack("orders", "g", first.handle)
    shown = [
        record
        for queue_id in range(topics.REVIVE_QUEUES)
        for record in records(core, REVIVE, queue_id)
    ]
    assert [manifest["kind"] for manifest in shown] == ["check_point", "ack"]
    assert shown[0]["topic_id"] == core.broker.registry.topic("orders").id


def test_offsets_are_shown(core: CoreBroker) -> None:
    core.group("buffered", check_points=CheckPoints.BUFFERED)
    got = core.receive("orders", "buffered")
    core.ack("orders", "buffered", *(delivery.handle for delivery in got))
    shown = records(core, topics.OFFSETS_TOPIC)
    assert shown[-1]["queue_offset"] == 3
    assert shown[-1]["group_id"] == core.broker.registry.group("buffered").id


def test_ends_and_checks_of_transactions_are_shown() -> None:
    core = transactions.broker()
    dropped = transactions.begin(core, "dropped")
    transactions.begin(core, "open")
    assert transactions.end(core, "dropped", dropped.message, commit=False) is None
    asked = transactions.wait(core)
    core.advance(transactions.FIRST_MS)
    assert transactions.names(asked) == ["open"]
    topic_id = core.broker.registry.topic("orders").id
    ended = {"ending": "rolled_back", "topic_id": topic_id, "half_offset": 0, "checks": 0}
    check = {
        "ending": "checked",
        "half_offset": 1,
        "checks": 1,
        "next_check_ms": transactions.INTERVAL_MS,
    }
    kind = {"record": "TRANSACTION"}
    assert records(core, topics.OP_TOPIC) == [kind | ended, kind | check]


@pytest.mark.parametrize(
    "topic",
    [
        topics.META_TOPIC,
        topics.OFFSETS_TOPIC,
        topics.TIMER_TOPIC,
        topics.HALF_TOPIC,
        topics.OP_TOPIC,
        REVIVE,
    ],
)
def test_reading_a_system_topic_changes_nothing(core: CoreBroker, topic: str) -> None:
    end = core.broker.store.end
    find(core, topic, queue_id=0, stored_ms=0, limit=64)
    assert core.broker.store.end == end


@pytest.mark.parametrize(
    ("topic", "wanted", "code", "words"),
    [
        ("rmq_sys_no", {"queue_id": 0, "queue_offset": 0}, Code.TOPIC_NOT_FOUND, topics.META_TOPIC),
        ("TBW102", {"queue_id": 0, "queue_offset": 0}, Code.TOPIC_NOT_FOUND, "does not exist"),
        (topics.META_TOPIC, {"key": "k"}, Code.BAD_REQUEST, "neither id nor key"),
        (topics.META_TOPIC, {"message_id": "i"}, Code.BAD_REQUEST, "neither id nor key"),
        (REVIVE, {"queue_id": 8, "queue_offset": 0}, Code.BAD_REQUEST, "name one of its 8"),
        (REVIVE, {"queue_id": 0, "queue_offset": 99}, Code.ILLEGAL_OFFSET, "holds nothing"),
        (REVIVE, {"queue_id": 0, "queue_offset": -1}, Code.ILLEGAL_OFFSET, "holds nothing"),
        (REVIVE, {"queue_id": 0, "stored_ms": 0, "limit": 65}, Code.BAD_REQUEST, "1 to 64"),
    ],
)
def test_what_a_system_topic_does_not_have_is_refused_in_words(
    core: CoreBroker, topic: str, wanted: dict[str, int | str], code: Code, words: str
) -> None:
    found_refusal, text = refusal(core, topic, **wanted)
    assert found_refusal is code
    assert words in text


@pytest.mark.parametrize(
    ("name", "suggested"), [("rmq_sys_no", False), ("%RETRY%g+orders", False), ("shoes", True)]
)
def test_only_a_name_that_clients_may_create_is_suggested_to_them(
    core: CoreBroker, name: str, suggested: bool
) -> None:
    code, text = refusal(core, name, message_id="i")
    assert code is Code.TOPIC_NOT_FOUND
    assert ("topic create" in text) is suggested
