"""Commands about timers: every broker is asked, and their answers are one."""

from typing import Any

import pytest
from google.protobuf.message import Message

from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb

Pending, Bucket = pb.ForecastTimersReply.Pending, pb.ForecastTimersReply.Bucket


def ask(bench: Any, kind: Kind, request: Message, *answers: Message) -> Any:
    for broker, answer in zip(bench.brokers.values(), answers, strict=True):
        broker.tells[kind] = lambda body, answer=answer: answer.SerializeToString()
    name = type(request).__name__.removesuffix("Request")
    reply = bench.unary(name, request, getattr(pb, f"{name}Reply"))
    for broker in bench.brokers.values():
        assert broker.bodies(kind) == [request.SerializeToString()]
    return reply


@pytest.mark.parametrize(
    ("outcomes", "joined"),
    [
        (("DONE", "NOT_FOUND"), "DONE"),
        (("NOT_FOUND", "DONE"), "DONE"),
        (("ALREADY_VISIBLE", "DONE"), "DONE"),
        (("NOT_FOUND", "ALREADY_VISIBLE"), "ALREADY_VISIBLE"),
        (("NOT_FOUND", "NOT_FOUND"), "NOT_FOUND"),
    ],
)
def test_one_broker_that_has_the_timer_is_enough(
    two_brokers: Any, outcomes: tuple[str, str], joined: str
) -> None:
    request = pb.RecallRequest(topic="later", message_id="m")
    answers = [pb.RecallReply(outcome=outcome) for outcome in outcomes]
    reply = ask(two_brokers, Kind.RECALL, request, *answers)
    assert (reply.status.code, reply.outcome, reply.incomplete) == (Code.OK, joined, "")
    moves = [
        pb.RescheduleReply(outcome=outcome, due_ms=77 if outcome == "DONE" else 0)
        for outcome in outcomes
    ]
    change = pb.RescheduleRequest(topic="later", message_id="m", new_due_ms=-5)
    moved = ask(two_brokers, Kind.RESCHEDULE, change, *moves)
    assert (moved.outcome, moved.due_ms) == (joined, 77 if joined == "DONE" else 0)


def test_a_timer_that_a_broker_could_not_be_asked_for_is_not_called_missing(
    two_brokers: Any,
) -> None:
    first, second = two_brokers.brokers.values()
    first.tells[Kind.RECALL] = lambda body: pb.RecallReply(outcome="NOT_FOUND").SerializeToString()
    second.away = True
    request = pb.RecallRequest(topic="later", message_id="m")
    reply = two_brokers.unary("Recall", request, pb.RecallReply)
    assert (reply.outcome, reply.incomplete) == (
        "NOT_FOUND",
        "broker broker-b: the broker is away",
    )
    first.tells[Kind.RECALL] = lambda body: Refused(Code.TOPIC_NOT_FOUND, "no topic later")
    reply = two_brokers.unary("Recall", request, pb.RecallReply)
    assert (reply.status.code, reply.outcome) == (Code.TOPIC_NOT_FOUND, "")


def test_timers_are_listed_in_the_order_of_their_due_times(two_brokers: Any) -> None:
    reply = ask(
        two_brokers,
        Kind.LIST_TIMERS,
        pb.ListTimersRequest(topic="later", limit=2),
        pb.ListTimersReply(timers=[pb.Timer(due_ms=1, broker="a"), pb.Timer(due_ms=5, broker="a")]),
        pb.ListTimersReply(
            timers=[pb.Timer(due_ms=1, position=9, broker="b"), pb.Timer(due_ms=3, broker="b")],
            incomplete="the newest 2",
        ),
    )
    assert [(timer.due_ms, timer.broker) for timer in reply.timers] == [
        (1, "a"),
        (1, "b"),
        (3, "b"),
        (5, "a"),
    ]
    assert reply.incomplete == "broker broker-b: the newest 2"


def test_forecasts_are_added_up(two_brokers: Any) -> None:
    first = pb.ForecastTimersReply(
        pending=[Pending(topic="b", count=3)],
        buckets=[Bucket(within_ms=60_000, count=2), Bucket(within_ms=-1, count=1)],
        next_due_ms=500,
    )
    second = pb.ForecastTimersReply(
        pending=[Pending(topic="a", count=1), Pending(topic="b", count=4)],
        buckets=[
            Bucket(within_ms=5_000, count=1),
            Bucket(within_ms=60_000, count=3),
            Bucket(within_ms=-1, count=1),
        ],
        next_due_ms=400,
    )
    request = pb.ForecastTimersRequest()
    reply = ask(two_brokers, Kind.FORECAST_TIMERS, request, first, second)
    assert {item.topic: item.count for item in reply.pending} == {"a": 1, "b": 7}
    assert [item.topic for item in reply.pending] == ["a", "b"]
    counts = [(bucket.within_ms, bucket.count) for bucket in reply.buckets]
    assert counts == [(5_000, 1), (60_000, 5), (-1, 2)]
    assert (reply.status.code, reply.next_due_ms) == (Code.OK, 400)


def test_the_next_timer_is_that_of_the_broker_that_has_any(two_brokers: Any) -> None:
    some, none = pb.ForecastTimersReply(next_due_ms=400), pb.ForecastTimersReply()
    request = pb.ForecastTimersRequest(topic="later")
    assert ask(two_brokers, Kind.FORECAST_TIMERS, request, some, none).next_due_ms == 400
