"""SendMessage: one entry a message, each with its own code, and where each message goes."""

from typing import Any

import pytest

from popmq.common.errors import Code, Refused, TopicNotFound, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, PutResult, encode_put_reply
from popmq.common.record.message import tag_hash
from popmq.common.topics import MessageType
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service


def message(
    name: str = "m", *, topic: str = "orders", body: bytes = b"x", **more: Any
) -> pb.Message:
    return pb.Message(
        topic=pb.Resource(name=topic),
        body=body,
        system_properties=pb.SystemProperties(message_id=name, **more),
    )


def send(bench: Any, *messages: pb.Message, **call: Any) -> Any:
    request = service.SendMessageRequest(messages=messages)
    return bench.unary("SendMessage", request, service.SendMessageResponse, **call)


def test_a_stored_message_is_answered_with_its_id_offset_and_transaction_id(bench: Any) -> None:
    reply = send(bench, message("m-1", tag="a"))
    (entry,) = reply.entries
    assert reply.status.code == entry.status.code == Code.OK
    assert (entry.message_id, entry.transaction_id, entry.offset) == ("m-1", "m-1", 0)
    assert entry.recall_handle == ""
    ((put,),) = [put.entries for put in bench.broker.puts()]
    assert (put.type, put.message_id, put.tag_hash) == (MessageType.NORMAL, "m-1", tag_hash("a"))
    assert 0 <= put.queue_id < 4
    assert bench.proxy.metrics.sends == 1


def test_a_request_without_messages_is_corrupted(bench: Any) -> None:
    assert send(bench).status.code == Code.MESSAGE_CORRUPTED


def test_two_topics_in_one_request_are_corrupted_and_every_entry_says_so(bench: Any) -> None:
    reply = send(bench, message("a"), message("b", topic="other"))
    assert reply.status.code == Code.MESSAGE_CORRUPTED
    assert [entry.status.code for entry in reply.entries] == [Code.MESSAGE_CORRUPTED] * 2
    assert bench.broker.puts() == []


def test_several_messages_have_an_entry_each_in_their_order(bench: Any) -> None:
    reply = send(bench, *(message(f"m-{n}") for n in range(5)))
    assert reply.status.code == Code.OK
    assert [entry.message_id for entry in reply.entries] == [f"m-{n}" for n in range(5)]


def test_one_bad_message_refuses_only_itself(bench: Any) -> None:
    big = message("big", body=b"x" * ((4 << 20) + 1))
    reply = send(bench, message("a"), big, message("b"))
    assert reply.status.code == Code.MULTIPLE_RESULTS
    assert [entry.status.code for entry in reply.entries] == [
        Code.OK,
        Code.MESSAGE_BODY_TOO_LARGE,
        Code.OK,
    ]
    assert [entry.message_id for entry in reply.entries] == ["a", "big", "b"]
    assert bench.proxy.metrics.refused[Code.MESSAGE_BODY_TOO_LARGE] == 1


def test_a_single_bad_message_gives_its_code_to_the_reply(bench: Any) -> None:
    reply = send(bench, message("m", body=b""))
    assert reply.status.code == reply.entries[0].status.code == Code.MESSAGE_BODY_EMPTY
    assert reply.status.message == reply.entries[0].status.message


def test_what_the_broker_refuses_is_refused_with_its_code(bench: Any) -> None:
    put_results = [PutResult(), PutResult(Code.TOO_MANY_REQUESTS, "the disk is full")]
    bench.broker.tells[Kind.PUT] = lambda _: encode_put_reply(put_results)
    reply = send(bench, message("a"), message("b"))
    assert reply.status.code == Code.MULTIPLE_RESULTS
    assert reply.entries[1].status.message == "the disk is full"
    assert reply.entries[1].transaction_id == ""


def test_an_unknown_topic_is_not_found(bench: Any) -> None:
    reply = send(bench, message(topic="nowhere"))
    assert reply.status.code == Code.TOPIC_NOT_FOUND
    assert [entry.status.code for entry in reply.entries] == [Code.TOPIC_NOT_FOUND]


@pytest.mark.parametrize("name", ["", "a.b", "rmq_sys_meta", "%DLQ%g", "%RETRY%g+t"])
def test_a_topic_that_nobody_may_send_to_is_illegal(bench: Any, name: str) -> None:
    assert send(bench, message(topic=name)).status.code == Code.ILLEGAL_TOPIC


def test_a_topic_that_is_not_writable_is_forbidden(bench: Any) -> None:
    bench.topic("frozen", permission="r")
    assert send(bench, message(topic="frozen")).status.code == Code.FORBIDDEN


def test_a_topic_that_was_altered_a_moment_ago_is_asked_again(bench: Any) -> None:
    send(bench, message("a"))
    bench.topic("orders", "fifo")
    reply = send(bench, message("b", message_group="g"))
    assert reply.status.code == Code.OK
    assert send(bench, message("c")).status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


def test_a_topic_that_was_deleted_is_forgotten(bench: Any) -> None:
    send(bench, message("a"))
    bench.broker.tells[Kind.PUT] = lambda _: TopicNotFound("gone")
    assert send(bench, message("b")).status.code == Code.TOPIC_NOT_FOUND
    del bench.broker.topics["orders"]
    bench.broker.asked.clear()
    send(bench, message("c"))
    assert bench.broker.bodies(Kind.PUT) == []


def test_a_topic_is_described_once_a_second(bench: Any) -> None:
    for name in ("a", "b", "c"):
        send(bench, message(name))
    assert len(bench.broker.bodies(Kind.DESCRIBE_TOPIC)) == 1
    bench.clock.ms += 1_000
    send(bench, message("d"))
    assert len(bench.broker.bodies(Kind.DESCRIBE_TOPIC)) == 2


def test_messages_of_one_group_share_a_queue_and_others_spread(two_brokers: Any) -> None:
    two_brokers.topic("fifo", "fifo")
    for n in range(20):
        send(two_brokers, message(f"m-{n}", topic="fifo", message_group="g"))
    places = {
        (name, put.entries[0].queue_id)
        for name, broker in two_brokers.brokers.items()
        for put in broker.puts()
    }
    assert len(places) == 1
    for n in range(60):
        send(two_brokers, message(f"m-{n}", topic="orders"))
    normal = {
        (name, put.entries[0].queue_id)
        for name, broker in two_brokers.brokers.items()
        for put in broker.puts()
        if put.topic == "orders"
    }
    assert len(normal) == 8


def test_a_normal_message_goes_elsewhere_while_its_broker_is_away(two_brokers: Any) -> None:
    two_brokers.brokers["broker-a"].away = True
    reply = send(two_brokers, *(message(f"m-{n}") for n in range(20)))
    assert reply.status.code == Code.OK
    assert [entry.message_id for entry in reply.entries] == [f"m-{n}" for n in range(20)]
    stored = [entry for put in two_brokers.brokers["broker-b"].puts() for entry in put.entries]
    assert len(stored) == 20


def test_a_fifo_message_waits_for_its_broker(two_brokers: Any) -> None:
    two_brokers.topic("fifo", "fifo")
    two_brokers.brokers["broker-a"].away = True
    codes = {
        send(two_brokers, message(f"m-{n}", topic="fifo", message_group=f"g-{n}")).status.code
        for n in range(20)
    }
    assert codes == {Code.OK, Code.HA_NOT_AVAILABLE}


def test_a_broker_that_is_lost_after_the_send_may_have_stored_it(two_brokers: Any) -> None:
    for broker in two_brokers.brokers.values():
        broker.tells[Kind.PUT] = lambda _: None
    request = service.SendMessageRequest(messages=[message("m")])
    call = two_brokers.start("SendMessage", request)
    (asked,) = [broker for broker in two_brokers.brokers.values() if broker.open]
    asked.answer(Unavailable("connection lost"))
    reply: Any = service.SendMessageResponse.FromString(call.sent[0])
    assert reply.status.code == Code.HA_NOT_AVAILABLE
    assert sum(len(broker.puts()) for broker in two_brokers.brokers.values()) == 1


@pytest.mark.parametrize(
    ("remaining", "timeout"), [(None, 10_000), (3_000, 2_900), (60_000, 10_000)]
)
def test_the_broker_has_less_time_than_the_client(
    bench: Any, remaining: int | None, timeout: int
) -> None:
    send(bench, message(), remaining=remaining)
    assert bench.broker.asked[-1][2] == timeout


def test_nothing_is_sent_when_no_time_is_left(bench: Any) -> None:
    reply = send(bench, message(), remaining=90)
    assert reply.status.code == Code.PROXY_TIMEOUT
    assert bench.broker.puts() == []


def test_a_client_that_left_gives_its_send_up(bench: Any) -> None:
    bench.broker.tells[Kind.PUT] = lambda _: None
    call = bench.start("SendMessage", service.SendMessageRequest(messages=[message()]))
    call.leave()
    assert len(bench.broker.cancelled) == 1


def test_many_messages_go_to_a_broker_in_requests_that_fit(bench: Any) -> None:
    reply = send(bench, *(message(f"m-{n}", body=b"x" * (4 << 20)) for n in range(6)))
    assert reply.status.code == Code.OK
    sizes = [sum(len(entry.head) for entry in put.entries) for put in bench.broker.puts()]
    assert len(sizes) == 2
    assert max(sizes) <= 16 << 20
    names = [entry.message_id for put in bench.broker.puts() for entry in put.entries]
    assert names == [f"m-{n}" for n in range(6)]


def test_an_answer_of_ours_that_is_wrong_ends_the_call_and_nothing_else(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench.broker.tells[Kind.PUT] = lambda _: encode_put_reply([])
    call = bench.start("SendMessage", service.SendMessageRequest(messages=[message()]))
    assert call.detail == "internal error"
    assert "a handler failed" in caplog.text


def test_a_namespace_that_the_header_does_not_name_is_refused(bench: Any) -> None:
    named = message()
    named.topic.resource_namespace = "ns"
    assert send(bench, named).status.code == Code.BAD_REQUEST
    headers = {"x-mq-client-id": "me", "x-mq-namespace": "other"}
    refused = send(bench, named, metadata=headers).status
    assert refused.code == Code.BAD_REQUEST
    assert "'ns' of 'orders' is not 'other'" in refused.message


def test_a_topic_that_cannot_be_described_is_refused_as_the_broker_did(bench: Any) -> None:
    bench.broker.tells[Kind.DESCRIBE_TOPIC] = lambda _: Refused(Code.TOO_MANY_REQUESTS, "busy")
    assert send(bench, message()).status.code == Code.TOO_MANY_REQUESTS
