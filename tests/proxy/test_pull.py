"""PullMessage and the offsets of pull consumers, on the wire."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import pull_pb2 as wire
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service


def queue(number: int = 0, broker: str = "broker-a", topic: str = "orders") -> pb.MessageQueue:
    return pb.MessageQueue(topic=pb.Resource(name=topic), id=number, broker=pb.Broker(name=broker))


def pull_request(offset: int = 0, wait_s: int = 0, **more: Any) -> service.PullMessageRequest:
    return service.PullMessageRequest(
        group=pb.Resource(name="pullers"),
        message_queue=more.pop("message_queue", queue()),
        offset=offset,
        long_polling_timeout=Duration(seconds=wait_s),
        **more,
    )


def parts(sent: list[bytes]) -> list[Any]:
    return [service.PullMessageResponse.FromString(data) for data in sent]


def asked(bench: Any) -> wire.PullRequest:
    (body,) = bench.broker.bodies(Kind.PULL)
    return wire.PullRequest.FromString(body)


def test_a_pull_is_asked_of_the_broker_that_its_queue_names(make_bench: Any) -> None:
    bench = make_bench(names=("broker-a", "broker-b"))
    bench.start("PullMessage", pull_request(7, message_queue=queue(3, "broker-b"), batch_size=5))
    assert not bench.brokers["broker-a"].bodies(Kind.PULL)
    (body,) = bench.brokers["broker-b"].bodies(Kind.PULL)
    request = wire.PullRequest.FromString(body)
    assert (request.topic, request.group, request.queue_id) == ("orders", "pullers", 3)
    assert (request.offset, request.limit, request.poll_ms) == (7, 5, 0)


def test_a_pull_waits_no_longer_than_its_client(bench: Any) -> None:
    bench.start("PullMessage", pull_request(wait_s=25), remaining=3_000)
    assert asked(bench).poll_ms == 2_600


def test_status_messages_and_the_next_offset_come_in_this_order(bench: Any) -> None:
    call = bench.start("PullMessage", pull_request())
    sent = pb.Message(topic=pb.Resource(name="orders"), body=b"x")
    properties = pb.SystemProperties(message_id="m-1", tag="red").SerializeToString()
    reply = wire.PullReply(next_offset=8)
    reply.messages.add(
        queue_offset=7, stored_ms=1_234, head=sent.SerializeToString(), properties=properties
    )
    bench.broker.answer(reply.SerializeToString())
    status, message, end = parts(call.sent)
    assert (status.status.code, end.next_offset) == (Code.OK, 8)
    assert end.WhichOneof("content") == "next_offset"
    got, system = message.message, message.message.system_properties
    assert (got.body, system.message_id, system.tag) == (b"x", "m-1", "red")
    assert (system.queue_id, system.queue_offset, system.store_host) == (0, 7, "broker-a")
    assert system.store_timestamp == Timestamp(seconds=1, nanos=234_000_000)
    assert not system.HasField("receipt_handle")


def test_a_pull_that_found_nothing_says_where_to_go_on(bench: Any) -> None:
    call = bench.start("PullMessage", pull_request())
    bench.broker.answer(wire.PullReply().SerializeToString())
    status, end = parts(call.sent)
    assert status.status.code == Code.MESSAGE_NOT_FOUND
    assert (end.WhichOneof("content"), end.next_offset) == ("next_offset", 0)


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pull_request(-1), Code.ILLEGAL_OFFSET, "offset -1 is negative"),
        (pull_request(message_queue=queue(-1)), Code.BAD_REQUEST, "queue -1"),
        (pull_request(message_queue=queue(broker="no one")), Code.BAD_REQUEST, "broker 'no one'"),
        (
            pull_request(message_queue=queue(broker="broker-z")),
            Code.HA_NOT_AVAILABLE,
            "'broker-z' is not known now",
        ),
        (pull_request(batch_size=-1), Code.BAD_REQUEST, "batch_size -1"),
    ],
)
def test_what_a_pull_may_not_say_is_refused(
    bench: Any, request_: Any, code: Code, words: str
) -> None:
    call = bench.start("PullMessage", request_)
    (refused,) = parts(call.sent)
    assert refused.status.code == code
    assert words in refused.status.message
    assert not bench.broker.bodies(Kind.PULL)


def test_a_proxy_that_stops_answers_its_pulls_with_the_offset_they_came_with(bench: Any) -> None:
    call = bench.start("PullMessage", pull_request(5, wait_s=20))
    bench.proxy.drain()
    status, end = parts(call.sent)
    assert (status.status.code, end.next_offset) == (Code.MESSAGE_NOT_FOUND, 5)
    assert len(bench.broker.cancelled) == 1


def test_a_pull_whose_client_leaves_is_cancelled(bench: Any) -> None:
    call = bench.start("PullMessage", pull_request(wait_s=20))
    call.leave()
    assert len(bench.broker.cancelled) == 1
    bench.proxy.drain()
    assert not call.sent


@pytest.mark.parametrize("name", ["UpdateOffset", "GetOffset", "QueryOffset"])
def test_a_brokers_refusal_of_an_offset_reaches_the_client(bench: Any, name: str) -> None:
    call = bench.start(name, service.GetOffsetRequest(group=pb.Resource(name="g")))
    reply: Any = service.GetOffsetResponse.FromString(call.sent[0])
    assert reply.status.code == Code.ILLEGAL_TOPIC  # a blank name asks nobody
    request: Any = {
        "UpdateOffset": service.UpdateOffsetRequest(
            group=pb.Resource(name="g"), message_queue=queue(), offset=9
        ),
        "GetOffset": service.GetOffsetRequest(group=pb.Resource(name="g"), message_queue=queue()),
        "QueryOffset": service.QueryOffsetRequest(message_queue=queue()),
    }[name]
    call = bench.start(name, request)
    bench.broker.answer(Refused(Code.OFFSET_NOT_FOUND, "none"))
    reply = service.GetOffsetResponse.FromString(call.sent[0])
    assert reply.status.code == Code.OFFSET_NOT_FOUND


def test_a_query_by_time_needs_one(bench: Any) -> None:
    request = service.QueryOffsetRequest(
        message_queue=queue(), query_offset_policy=pb.QueryOffsetPolicy.TIMESTAMP
    )
    reply = bench.unary("QueryOffset", request, service.QueryOffsetResponse)
    assert reply.status.code == Code.BAD_REQUEST
    assert "timestamp is missing" in reply.status.message


def test_a_query_by_a_time_that_is_none_is_a_bad_request(bench: Any) -> None:
    request = service.QueryOffsetRequest(
        message_queue=queue(), query_offset_policy=pb.QueryOffsetPolicy.TIMESTAMP
    )
    request.timestamp.seconds = (1 << 63) - 1
    reply = bench.unary("QueryOffset", request, service.QueryOffsetResponse)
    assert reply.status.code == Code.BAD_REQUEST
    assert "a timestamp of 9223372036854775807 s" in reply.status.message
