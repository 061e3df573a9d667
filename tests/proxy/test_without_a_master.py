"""What clients see while a broker group has no master: two groups, scripted, under their ports."""

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from popmq.common.errors import Code, NotMaster, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import (
    Kind,
    OnReply,
    PopReply,
    PopRequest,
    Port,
    encode_pop,
    encode_pop_reply,
)
from popmq.common.record.receipt import ReceiptHandle
from popmq.common.settings.settings import Settings
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.master_port import MasterPort
from popmq.proxy.proxy import Proxy

NAMES = ("broker-a", "broker-b")


class Slave:
    """Says that it leads no more."""

    usable = True

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        on_reply(NotMaster("this broker is a slave"))
        return 1

    def cancel(self, request_id: int) -> None: ...


class Masters:
    """`Brokers` as the proxy has them, with ports that the test turns to other brokers."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()
        self.ports = {name: MasterPort(name, clock, later=self._later) for name in NAMES}

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        due_ms = self._clock.boot_ms() + round(seconds * 1000)
        heapq.heappush(self._timers, (due_ms, next(self._numbers), then))

    def run(self, ms: int) -> None:
        end_ms = self._clock.ms + ms
        while self._timers and self._timers[0][0] <= end_ms:
            self._clock.ms, _, then = heapq.heappop(self._timers)
            then()
        self._clock.ms = end_ms

    def names(self) -> Sequence[str]:
        return NAMES

    def port(self, name: str) -> Port:
        return self.ports[name]

    def absent(self) -> Sequence[str]:
        return ()

    def owner(self) -> str:
        return NAMES[0]

    def when_owner_known(self, then: Callable[[], None]) -> Callable[[], None]:
        then()
        return lambda: None

    def awaited_port(self, name: str) -> Port:
        return self.port(name)

    def accepts_sends(self, name: str) -> bool:
        return True

    def has_master(self, name: str) -> bool:
        return self.ports[name].has_master


@pytest.fixture
def bench(make_bench: Any) -> Any:
    """Both groups have masters; `masters` turns their ports."""
    new_bench = make_bench(NAMES)
    new_bench.masters = Masters(new_bench.clock)
    for name, broker in new_bench.brokers.items():
        broker.usable = True
        new_bench.masters.ports[name].use(broker)
    new_bench.proxy = Proxy(Settings(), new_bench.masters, new_bench.clock)
    new_bench.methods = {
        method.path.rpartition("/")[2]: method for method in new_bench.proxy.methods()
    }
    new_bench.topic("orders")
    new_bench.topic("fifo", "fifo")
    return new_bench


def send(bench: Any, name: str, *, remaining: int = 3_000, topic: str = "orders") -> Any:
    properties = pb.SystemProperties(message_id=name)
    if topic == "fifo":
        properties.message_group = name
    message = pb.Message(topic=pb.Resource(name=topic), body=b"x", system_properties=properties)
    request = service.SendMessageRequest(messages=[message])
    return bench.start("SendMessage", request, remaining=remaining)


def code(call: Any) -> int | None:
    """Of the reply, if there is one."""
    if not call.sent:
        return None
    reply: Any = service.SendMessageResponse.FromString(call.sent[0])
    return int(reply.status.code)


def stored(bench: Any, name: str) -> list[str]:
    return [entry.message_id for put in bench.brokers[name].puts() for entry in put.entries]


def lose_master(bench: Any, name: str) -> None:
    """Its broker is a slave now, and says so at the next request."""
    port = bench.masters.ports[name]
    port.use(Slave())
    port.request(Kind.LAG, b"", 1, lambda answer: None)
    bench.masters.run(1)
    assert not port.has_master


def test_a_fifo_message_waits_for_the_next_master_of_its_own_group(bench: Any) -> None:
    lose_master(bench, "broker-a")
    calls = [send(bench, f"g-{n}", topic="fifo") for n in range(20)]
    waiting = [call for call in calls if code(call) is None]
    assert 0 < len(waiting) < 20
    assert len(stored(bench, "broker-b")) == 20 - len(waiting)
    bench.masters.run(2_000)
    assert [code(call) for call in waiting] == [None] * len(waiting)
    bench.masters.ports["broker-a"].use(bench.brokers["broker-a"])
    assert {code(call) for call in calls} == {Code.OK}
    assert len(stored(bench, "broker-a")) == len(waiting)
    assert len(stored(bench, "broker-b")) == 20 - len(waiting)


def test_a_normal_message_goes_to_another_group_at_once(bench: Any) -> None:
    lose_master(bench, "broker-a")
    calls = [send(bench, f"m-{n}") for n in range(20)]
    assert {code(call) for call in calls} == {Code.OK}
    assert len(stored(bench, "broker-b")) == 20


def test_without_any_master_messages_wait_and_go_where_they_belong(bench: Any) -> None:
    for n in range(20):
        send(bench, f"m-{n}")
    usual = [sorted(stored(bench, name)) for name in NAMES]
    for name in NAMES:
        bench.brokers[name].asked.clear()
        lose_master(bench, name)
    calls = [send(bench, f"m-{n}") for n in range(20)]
    for name in NAMES:
        bench.masters.ports[name].use(bench.brokers[name])
    bench.masters.run(200)
    assert {code(call) for call in calls} == {Code.OK}
    assert [sorted(stored(bench, name)) for name in NAMES] == usual


def test_a_client_is_told_in_time_that_there_was_no_master(bench: Any) -> None:
    send(bench, "first")
    for name in NAMES:
        lose_master(bench, name)
    bench.masters.run(60_000)  # the topic is known still
    call = send(bench, "m", remaining=1_000)
    bench.masters.run(800)
    assert code(call) is None
    bench.masters.run(100)
    assert code(call) == Code.HA_NOT_AVAILABLE
    (entry,) = service.SendMessageResponse.FromString(call.sent[0]).entries
    assert "broker group broker-" in entry.status.message
    assert entry.status.message.endswith("nothing was done")


def test_an_ack_is_answered_by_the_next_master(bench: Any) -> None:
    lose_master(bench, "broker-b")
    handle = ReceiptHandle("broker-b", 64, 9, 1, 0, 1, 1, 1, 0).encode(b"key").decode()
    request = service.AckMessageRequest(
        topic=pb.Resource(name="orders"),
        group=pb.Resource(name="workers"),
        entries=[service.AckMessageEntry(message_id="m", receipt_handle=handle)],
    )
    call = bench.start("AckMessage", request)
    assert call.sent == []
    bench.masters.ports["broker-b"].use(bench.brokers["broker-b"])
    reply: Any = service.AckMessageResponse.FromString(call.sent[0])
    assert reply.status.code == Code.OK


def test_a_receive_goes_to_a_group_with_a_master(bench: Any) -> None:
    lose_master(bench, "broker-a")
    bench.brokers["broker-b"].tells[Kind.POP] = lambda _: encode_pop_reply(PopReply())
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name="workers"),
        message_queue=pb.MessageQueue(topic=pb.Resource(name="orders")),
        invisible_duration=Duration(seconds=10),
    )
    for _ in range(4):
        assert bench.start("ReceiveMessage", request).sent
    assert bench.brokers["broker-a"].bodies(Kind.POP) == []


def test_no_client_ever_sees_the_code_of_our_own(bench: Any) -> None:
    answers: list[bytes | PopmqError] = []
    port = bench.masters.ports["broker-a"]
    port.use(Slave())
    for kind in Kind:
        if Kind.PUT <= kind < Kind.REGISTER:
            body = encode_pop(PopRequest("t", "g", "c", 1, 0, 400)) if kind is Kind.POP else b""
            port.request(kind, body, 500, answers.append)
    bench.masters.run(500)
    codes = {answer.code for answer in answers if isinstance(answer, PopmqError)}
    assert codes == {Code.HA_NOT_AVAILABLE}


def test_while_the_owner_is_silent_the_topic_is_learned_from_a_follower(bench: Any) -> None:
    owner = bench.brokers["broker-a"]
    owner.tells[Kind.DESCRIBE_TOPIC] = lambda _: None
    call = send(bench, "m", remaining=10_000)
    (on_reply,) = owner.open.values()
    on_reply(Unavailable("connection lost", unknown=True))
    owner.usable = False
    bench.masters.run(1_100)
    assert code(call) == Code.OK
    assert stored(bench, "broker-b") == ["m"]


def test_what_a_follower_does_not_know_is_not_said_to_be_missing_while_the_owner_is_away(
    bench: Any,
) -> None:
    lose_master(bench, "broker-a")
    del bench.brokers["broker-b"].topics["orders"]
    call = send(bench, "m", remaining=10_000)
    bench.masters.run(3_000)
    assert code(call) == Code.HA_NOT_AVAILABLE


@pytest.mark.parametrize("lost", NAMES)
def test_an_administrator_is_told_what_the_others_know_before_he_gives_up(
    bench: Any, lost: str
) -> None:
    lose_master(bench, lost)
    (here,) = (name for name in NAMES if name != lost)
    status = admin.Status(code=Code.OK)
    lag = admin.LagReply(status=status, lags=[admin.Lag(broker=here, ready=3)], brokers=[here])
    bench.brokers[here].tells[Kind.LAG] = lambda _: lag.SerializeToString()
    call = bench.start("Lag", admin.LagRequest(), remaining=10_000)
    bench.masters.run(1_100)
    answer: Any = admin.LagReply.FromString(call.sent[0])
    assert [lag.ready for lag in answer.lags] == [3]
    assert answer.incomplete.startswith(f"broker group {lost} has no master")


def test_a_change_waits_two_and_a_half_seconds_for_the_next_master_of_the_owner(bench: Any) -> None:
    lose_master(bench, "broker-a")
    request = admin.CreateTopicRequest(topic=admin.Topic(name="new"))
    call = bench.start("CreateTopic", request, remaining=10_000)
    bench.masters.run(2_400)
    assert call.sent == []
    bench.masters.run(200)
    answer = admin.TopicReply.FromString(call.sent[0])
    assert answer.status.code == Code.HA_NOT_AVAILABLE
    assert "broker-a" in answer.status.message


def test_a_broker_group_that_does_not_answer_leaves_time_to_say_so(bench: Any) -> None:
    status = admin.Status(code=Code.OK)
    reply = admin.LagReply(status=status, lags=[admin.Lag(broker="broker-a", ready=3)])
    bench.brokers["broker-a"].tells[Kind.LAG] = lambda _: reply.SerializeToString()
    bench.start("Lag", admin.LagRequest(), remaining=10_000)
    asked = bench.brokers["broker-b"].asked
    # The other half is for what it knows of the pairs that broker-a told of.
    assert [timeout_ms for kind, _, timeout_ms in asked if kind is Kind.LAG] == [4_950]


def test_what_is_asked_of_one_broker_group_does_not_wait_for_another(bench: Any) -> None:
    lose_master(bench, "broker-a")
    status = admin.Status(code=Code.OK)
    done = admin.RedriveReply(status=status, progress=[admin.Redriven(broker="broker-b")])
    bench.brokers["broker-b"].tells[Kind.REDRIVE] = lambda _: done.SerializeToString()
    call = bench.start("Redrive", admin.RedriveRequest(group="g", broker="broker-b"))
    answer: Any = admin.RedriveReply.FromString(call.sent[0])
    assert (answer.incomplete, len(answer.progress)) == ("", 1)
