"""Receives that wait at several broker groups: what is asked of which, and when."""

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from popmq.common.errors import Code, TooManyRequests
from popmq.common.protocol.messaging_payloads import (
    Delivery,
    Kind,
    PopReply,
    decode_pop,
    encode_pop_reply,
)
from popmq.common.settings.settings import PollSettings, Settings
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

A, B = "broker-a", "broker-b"
SOMETHING = encode_pop_reply(PopReply([], 1, 0))
NOTHING = encode_pop_reply(PopReply([], 0, 0))
FEW = 2


def popped(*offsets: int, first_look: bool = False) -> bytes:
    deliveries = [Delivery(0, offset, 1, 1, b"handle", b"", b"") for offset in offsets]
    return encode_pop_reply(PopReply(deliveries, 0, 1, first_look))


class Two:
    """A proxy with two broker groups whose answers the test gives, by what was asked."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench

    def receive(self, *, poll_s: int = 20, broker: str = A) -> Any:
        request = service.ReceiveMessageRequest(
            group=pb.Resource(name="workers"),
            message_queue=pb.MessageQueue(
                topic=pb.Resource(name="orders"), broker=pb.Broker(name=broker)
            ),
            invisible_duration=Duration(seconds=10),
            long_polling_timeout=Duration(seconds=poll_s),
        )
        return self.bench.start("ReceiveMessage", request, remaining=60_000)

    def open(self, broker: str) -> list[tuple[str, int]]:
        """What is asked of a broker and not answered: kind and wait."""
        brokers = self.bench.brokers[broker]
        asked = [brokers.asked[number - 1] for number in brokers.open]
        waiting = [decode_pop(body) for kind, body, _ in asked if kind is Kind.POP]
        return [("pop" if request.limit else "notify", request.poll_ms) for request in waiting]

    def answer(self, broker: str, reply: Any, *, newest: bool = False) -> None:
        """The oldest that is open, or the newest."""
        brokers = self.bench.brokers[broker]
        brokers.open.pop(max(brokers.open) if newest else min(brokers.open))(reply)

    @property
    def metrics(self) -> Any:
        return self.bench.proxy.metrics


@pytest.fixture
def two(make_bench: Any) -> Two:
    settings = replace(Settings(), poll=PollSettings(switch_poll_limit=FEW))
    return Two(make_bench((A, B), settings=settings))


def parts(call: Any) -> tuple[int, list[int]]:
    """The status, and the offsets of the messages."""
    replies = [service.ReceiveMessageResponse.FromString(item) for item in call.sent]
    queue_offsets = [
        reply.message.system_properties.queue_offset
        for reply in replies
        if reply.HasField("message")
    ]
    return replies[0].status.code, queue_offsets


def waits(two: Two, **more: Any) -> Any:
    """A receive whose first pop found nothing."""
    call = two.receive(**more)
    two.answer(more.get("broker", A), popped(), newest=True)
    return call


def test_one_pop_comes_first_and_a_hit_of_it_is_the_end(two: Two) -> None:
    call = two.receive()
    assert (two.open(A), two.open(B)) == ([("pop", 0)], [])
    two.answer(A, popped(5))
    assert parts(call) == (Code.OK, [5])
    counts = two.metrics
    assert (counts.long_polling, counts.short_polling_hits, counts.pops_with_notify) == (1, 1, 0)


def test_with_one_broker_group_a_hit_is_what_the_broker_calls_one(make_bench: Any) -> None:
    bench = Two(make_bench((A,)))
    for reply in (popped(5, first_look=True), popped(6)):
        call = bench.receive()
        bench.answer(A, reply)
        assert parts(call)[0] == Code.OK
    assert (bench.metrics.long_polling, bench.metrics.short_polling_hits) == (2, 1)


def test_after_a_miss_every_broker_group_is_to_say_when_something_comes(two: Two) -> None:
    call = waits(two)
    two_s = ("notify", 20_000)
    assert (two.open(A), two.open(B), call.sent) == ([two_s], [two_s], [])
    counts = two.metrics
    assert (counts.short_polling_hits, counts.pops_with_notify) == (0, 1)
    two.answer(B, SOMETHING)
    assert two.open(B) == [("pop", 0)]
    two.answer(B, popped(7))
    assert parts(call) == (Code.OK, [7])
    assert (two.open(A), two.open(B)) == ([], [])
    assert counts.waiting_receives == 0


def test_one_pop_at_a_time_and_a_miss_tries_the_next_that_spoke_and_waits_on(two: Two) -> None:
    call = waits(two)
    two.bench.clock.ms += 3_000
    two.answer(A, SOMETHING)
    two.answer(B, SOMETHING)
    assert (two.open(A), two.open(B)) == ([("pop", 0)], [])  # one consumption at a time
    two.answer(A, popped())
    assert (two.open(A), two.open(B)) == ([("notify", 17_000)], [("pop", 0)])
    two.answer(B, popped())
    assert (two.open(A), two.open(B)) == ([("notify", 17_000)], [("notify", 17_000)])
    two.answer(A, SOMETHING)
    two.answer(A, popped(1))
    assert parts(call) == (Code.OK, [1])


def test_a_receive_ends_with_nothing_when_every_broker_group_said_so(two: Two) -> None:
    call = waits(two)
    two.answer(A, NOTHING)
    assert call.sent == []
    two.answer(B, NOTHING)
    assert parts(call) == (Code.MESSAGE_NOT_FOUND, [])


def test_a_miss_when_the_time_is_over_is_the_end(two: Two) -> None:
    call = waits(two)
    two.answer(A, NOTHING)
    two.answer(B, SOMETHING)
    two.bench.clock.ms += 20_000
    two.answer(B, popped())
    assert parts(call) == (Code.MESSAGE_NOT_FOUND, [])


def test_a_group_that_refuses_is_not_asked_again_and_the_others_go_on(two: Two) -> None:
    call = waits(two)
    two.answer(A, SOMETHING)
    two.answer(A, TooManyRequests("full"))
    assert (two.open(A), two.open(B)) == ([], [("notify", 20_000)])
    two.answer(B, TooManyRequests("full"))
    # The first pop found nothing, and that is no refusal.
    assert parts(call) == (Code.MESSAGE_NOT_FOUND, [])


def test_a_receive_is_refused_when_every_group_refuses_it(two: Two) -> None:
    call = two.receive()
    two.answer(A, TooManyRequests("full"))
    for broker in (A, B):
        two.answer(broker, TooManyRequests("full"))
    assert parts(call) == (Code.TOO_MANY_REQUESTS, [])


def test_a_client_that_leaves_gives_up_what_is_asked_of_every_group(two: Two) -> None:
    waits(two).leave()
    assert (two.open(A), two.open(B)) == ([], [])
    assert two.metrics.waiting_receives == 0
    waits(two)  # and counts no more
    assert two.open(B) == [("notify", 20_000)]


def test_many_receives_wait_at_one_broker_group_each(two: Two) -> None:
    calls = [waits(two) for _ in range(FEW)]
    many = [two.receive(broker=A), two.receive(broker=B), two.receive(broker=B)]
    assert two.open(A) == [("notify", 20_000)] * FEW + [("pop", 20_000)]
    assert two.open(B) == [("notify", 20_000)] * FEW + [("pop", 20_000)] * 2
    assert two.metrics.plain_polls == 3
    assert [call.sent for call in (*calls, *many)] == [[]] * 5


def test_when_a_notified_one_is_over_one_that_waits_at_one_group_waits_everywhere(
    two: Two,
) -> None:
    few = [waits(two) for _ in range(FEW)]
    last = two.receive(broker=A)
    two.bench.clock.ms += 5_000
    few[0].leave()
    assert two.open(A)[-1] == two.open(B)[-1] == ("notify", 15_000)
    assert ("pop", 20_000) not in two.open(A)
    few[1].leave()
    two.answer(B, SOMETHING)
    two.answer(B, popped(9))
    assert parts(last) == (Code.OK, [9])


def test_a_plain_wait_that_is_refused_goes_on_at_the_other_groups(two: Two) -> None:
    few = [waits(two) for _ in range(FEW)]
    last = two.receive(broker=A)
    assert two.open(A)[-1] == ("pop", 20_000)
    two.answer(A, TooManyRequests("full"), newest=True)
    assert two.open(B)[-1] == ("notify", 20_000)
    assert [call.sent for call in (*few, last)] == [[]] * 3


def test_a_proxy_that_stops_answers_them_with_nothing_and_asks_no_more(two: Two) -> None:
    calls = [waits(two), waits(two), two.receive(broker=B)]
    two.bench.proxy.drain()
    assert [parts(call) for call in calls] == [(Code.MESSAGE_NOT_FOUND, [])] * 3
    assert (two.open(A), two.open(B)) == ([], [])
