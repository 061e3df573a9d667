"""RecallMessage: the handle's broker is asked, and every refusal is an error to the clients."""

from base64 import urlsafe_b64encode
from typing import Any

import pytest

from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

HANDLE = RecallHandle("later", "broker-a", 1_700_000_005_000, "m-1")
# Official clients take these for a success.
TAKEN_FOR_DONE = (Code.OK, Code.MULTIPLE_RESULTS, Code.MESSAGE_NOT_FOUND)


def recall(bench: Any, handle: str = HANDLE.encode(), topic: str = "later", **call: Any) -> Any:
    request = service.RecallMessageRequest(topic=pb.Resource(name=topic), recall_handle=handle)
    return bench.unary("RecallMessage", request, service.RecallMessageResponse, **call)


def told(bench: Any, outcome: str) -> None:
    reply = admin_pb2.RecallReply(outcome=outcome).SerializeToString()
    for broker in bench.brokers.values():
        broker.tells[Kind.RECALL] = lambda body: reply


@pytest.fixture
def delays(two_brokers: Any) -> Any:
    two_brokers.topic("later", kind="delay")
    return two_brokers


def test_a_recall_asks_the_handles_broker_and_answers_with_the_message_id(delays: Any) -> None:
    told(delays, "DONE")
    for _ in range(2):
        reply = recall(delays)
        assert (reply.status.code, reply.message_id) == (Code.OK, "m-1")
    asked = admin_pb2.RecallRequest(topic="later", message_id="m-1", due_ms=HANDLE.due_ms)
    bodies = [asked.SerializeToString()] * 2
    assert delays.brokers["broker-a"].bodies(Kind.RECALL) == bodies
    assert delays.brokers["broker-b"].bodies(Kind.RECALL) == []


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        ("ALREADY_VISIBLE", Code.ILLEGAL_DELIVERY_TIME, "is visible already"),
        ("NOT_FOUND", Code.NOT_FOUND, "broker broker-a has no message m-1 of topic later"),
        ("", Code.INTERNAL_ERROR, "answered ''"),
    ],
)
def test_what_cannot_be_recalled_any_more_is_an_error_that_says_why(
    delays: Any, outcome: str, code: Code, words: str
) -> None:
    told(delays, outcome)
    reply = recall(delays)
    assert reply.status.code == code
    assert words in reply.status.message
    assert reply.message_id == ""
    assert code not in TAKEN_FOR_DONE


def coded(text: str) -> str:
    return urlsafe_b64encode(text.encode()).decode()


def test_a_bad_handle_is_refused_and_each_is_told_why(delays: Any) -> None:
    told(delays, "DONE")
    bad = [
        "",
        "nonsense!",
        coded("v1 later broker-a"),
        coded("v9 later broker-a 5 m"),
        coded("v1 later broker-a soon m"),
        RecallHandle("other", "broker-a", 5, "m").encode(),
        "A" * 5_000,
    ]
    replies = [recall(delays, handle) for handle in bad]
    assert {reply.status.code for reply in replies} == {Code.BAD_REQUEST}
    assert len({reply.status.message for reply in replies}) == len(bad)
    for broker in delays.brokers.values():
        assert broker.bodies(Kind.RECALL) == []


def says(bench: Any, name: str, outcome: str, *moved_to: str) -> None:
    reply = admin_pb2.RecallReply(outcome=outcome, moved_to=moved_to).SerializeToString()
    bench.brokers[name].tells[Kind.RECALL] = lambda body: reply


def test_a_recall_follows_a_timer_that_moved_from_group_to_group(make_bench: Any) -> None:
    bench = make_bench(("broker-a", "broker-b", "broker-c", "broker-d"))
    bench.topic("later", kind="delay")
    says(bench, "broker-a", "NOT_FOUND", "broker-b")
    says(bench, "broker-b", "NOT_FOUND", "broker-a", "broker-d")
    says(bench, "broker-d", "DONE")
    assert recall(bench).status.code == Code.OK
    asked = {name: len(broker.bodies(Kind.RECALL)) for name, broker in bench.brokers.items()}
    assert asked == {"broker-a": 1, "broker-b": 1, "broker-c": 0, "broker-d": 1}


def test_a_handle_of_a_group_that_is_gone_is_asked_of_all_others(delays: Any) -> None:
    handle = RecallHandle("later", "broker-x", 5, "m").encode()
    says(delays, "broker-a", "NOT_FOUND")
    says(delays, "broker-b", "DONE")
    assert recall(delays, handle).status.code == Code.OK
    says(delays, "broker-b", "ALREADY_VISIBLE")
    assert recall(delays, handle).status.code == Code.ILLEGAL_DELIVERY_TIME
    says(delays, "broker-b", "NOT_FOUND")
    status = recall(delays, handle).status
    assert status.code == Code.HA_NOT_AVAILABLE  # it may be absent, and have the message
    assert "'broker-x', which may have message m, is not" in status.message


def test_a_handle_of_a_group_that_cannot_exist_is_a_bad_request(delays: Any) -> None:
    status = recall(delays, RecallHandle("later", "broker/x", 5, "m").encode()).status
    assert status.code == Code.BAD_REQUEST
    assert "'broker/x', and no group can have that name" in status.message


def test_a_group_that_took_timers_and_is_gone_leaves_them_to_all_others(delays: Any) -> None:
    says(delays, "broker-a", "NOT_FOUND", "broker-x")
    says(delays, "broker-b", "DONE")
    assert recall(delays).status.code == Code.OK
    says(delays, "broker-b", "NOT_FOUND")
    assert recall(delays).status.code == Code.HA_NOT_AVAILABLE  # it may be absent only


def test_nobody_says_not_found_for_a_group_that_did_not_answer(delays: Any) -> None:
    says(delays, "broker-a", "NOT_FOUND", "broker-b")
    delays.brokers["broker-b"].away = True
    assert recall(delays).status.code == Code.HA_NOT_AVAILABLE
    handle = RecallHandle("later", "broker-x", 5, "m").encode()
    assert recall(delays, handle).status.code == Code.HA_NOT_AVAILABLE


def test_a_topic_without_delays_has_nothing_to_recall(delays: Any) -> None:
    told(delays, "DONE")
    handle = RecallHandle("orders", "broker-a", 5, "m").encode()
    status = recall(delays, handle, topic="orders").status
    assert status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    handle = RecallHandle("nowhere", "broker-a", 5, "m").encode()
    assert recall(delays, handle, topic="nowhere").status.code == Code.TOPIC_NOT_FOUND
    assert recall(delays, topic="rmq_sys_wheel_timer").status.code == Code.ILLEGAL_TOPIC


def test_a_mixed_topic_has_timers_to_recall(delays: Any) -> None:
    delays.topic("later", kind="mixed")
    told(delays, "DONE")
    assert recall(delays).status.code == Code.OK


def test_a_broker_that_is_away_or_refuses_is_told_as_such(delays: Any) -> None:
    delays.brokers["broker-a"].tells[Kind.RECALL] = lambda body: Refused(Code.FORBIDDEN, "no")
    status = recall(delays).status
    assert (status.code, status.message) == (Code.FORBIDDEN, "no")
    delays.brokers["broker-a"].away = True
    assert recall(delays).status.code == Code.HA_NOT_AVAILABLE


def test_a_client_without_a_name_recalls_nothing(delays: Any) -> None:
    assert recall(delays, metadata={}).status.code == Code.CLIENT_ID_REQUIRED


def test_an_answer_that_is_none_is_an_error_of_ours(delays: Any) -> None:
    delays.brokers["broker-a"].tells[Kind.RECALL] = lambda body: b"\xff"
    assert recall(delays).status.code == Code.INTERNAL_ERROR


def test_a_recall_has_no_more_time_than_its_client(delays: Any) -> None:
    told(delays, "DONE")
    assert recall(delays, remaining=90).status.code == Code.PROXY_TIMEOUT
    assert recall(delays, remaining=3_000).status.code == Code.OK
    assert delays.brokers["broker-a"].asked[-1][2] == 2_900
