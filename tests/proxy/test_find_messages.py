"""A lookup through the proxy asks every broker and says whose answer is missing."""

from typing import Any

from popmq.common.errors import Code, DeadlineExceeded, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb
from popmq.proxy.rpc.rpc import REPLY_RESERVE_MS

REQUEST = pb.FindMessagesRequest(topic="orders", key="k")


def found(*heads: bytes, incomplete: str = "") -> bytes:
    return pb.FindMessagesReply(
        status=pb.Status(code=Code.OK, message="OK"),
        messages=[pb.FoundMessage(head=head) for head in heads],
        incomplete=incomplete,
    ).SerializeToString()


def ask(bench: Any, *answers: bytes | PopmqError) -> pb.FindMessagesReply:
    for broker, answer in zip(bench.brokers.values(), answers, strict=True):
        broker.tells[Kind.FIND_MESSAGES] = lambda body, answer=answer: answer
    reply: pb.FindMessagesReply = bench.unary("FindMessages", REQUEST, pb.FindMessagesReply)
    return reply


def test_the_answers_of_all_brokers_are_one_answer(two_brokers: Any) -> None:
    reply = ask(two_brokers, found(b"1", b"2"), found(b"3"))
    assert [message.head for message in reply.messages] == [b"1", b"2", b"3"]
    assert (reply.status.code, reply.incomplete) == (Code.OK, "")
    for broker in two_brokers.brokers.values():
        assert broker.bodies(Kind.FIND_MESSAGES) == [REQUEST.SerializeToString()]


def test_a_request_that_names_a_broker_group_is_for_that_one_alone(two_brokers: Any) -> None:
    first, second = two_brokers.brokers.values()
    first.away = True
    second.tells[Kind.FIND_MESSAGES] = lambda body: found(b"3")
    request = pb.FindMessagesRequest(topic="orders", queue_id=0, queue_offset=0, broker="broker-b")
    reply = two_brokers.unary("FindMessages", request, pb.FindMessagesReply)
    assert [message.head for message in reply.messages] == [b"3"]
    assert (reply.status.code, reply.incomplete) == (Code.OK, "")


def test_what_a_broker_kept_back_is_said_with_its_name(two_brokers: Any) -> None:
    reply = ask(two_brokers, found(b"1"), found(b"3", incomplete="the newest 1"))
    assert reply.incomplete == "broker broker-b: the newest 1"


def test_a_broker_that_is_away_makes_the_answer_incomplete(two_brokers: Any) -> None:
    two_brokers.brokers["broker-a"].away = True
    reply = ask(two_brokers, found(b"1"), found(b"3"))
    assert reply.status.code == Code.OK
    assert [message.head for message in reply.messages] == [b"3"]
    assert reply.incomplete == "broker broker-a: the broker is away"


def test_what_every_broker_refuses_is_refused(two_brokers: Any) -> None:
    refusal = Refused(Code.TOPIC_NOT_FOUND, "topic orders does not exist")
    reply = ask(two_brokers, refusal, refusal)
    assert reply.status.code == Code.TOPIC_NOT_FOUND
    assert not reply.messages


def test_an_answer_that_is_none_is_an_error_and_no_silence(two_brokers: Any) -> None:
    reply = ask(two_brokers, b"\xff\xff", found(b"3"))
    assert reply.status.code == Code.INTERNAL_ERROR


def test_a_silent_broker_leaves_time_to_ask_the_others_and_to_answer(two_brokers: Any) -> None:
    first, second = two_brokers.brokers.values()
    call = two_brokers.start("FindMessages", REQUEST, remaining=10_000)
    ((_, _, first_ms),) = first.asked
    assert (first_ms, second.asked) == (4_950, [])
    call.remaining -= first_ms
    first.answer(DeadlineExceeded("nobody answered"))
    ((_, _, second_ms),) = second.asked
    assert second_ms == call.remaining - REPLY_RESERVE_MS
    second.answer(found(b"3"))
    reply = pb.FindMessagesReply.FromString(call.sent[0])
    assert [message.head for message in reply.messages] == [b"3"]
    assert reply.incomplete == "broker broker-a: nobody answered"


def test_lag_keeps_time_for_what_is_asked_because_of_the_answers(two_brokers: Any) -> None:
    first, second = two_brokers.brokers.values()
    call = two_brokers.start("Lag", pb.LagRequest(), remaining=10_000)
    lag = pb.Lag(broker="broker-a", group="g", topic="orders", ready=1)
    status = pb.Status(code=Code.OK, message="OK")
    first.answer(pb.LagReply(status=status, lags=[lag]).SerializeToString())
    second.answer(DeadlineExceeded("nobody answered"))
    reply = pb.LagReply.FromString(call.sent[0])
    assert (reply.status.code, len(reply.lags)) == (Code.OK, 1)
    assert second.asked[0][2] == 4_950
    late = two_brokers.start("Lag", pb.LagRequest(), remaining=REPLY_RESERVE_MS)
    refused = pb.LagReply.FromString(late.sent[0])
    assert refused.status.message == "the deadline leaves 100 ms: nothing was done"
