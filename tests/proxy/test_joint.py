"""Sends and acks of one turn of the loop: one frame for a broker, to each call its own answer."""

from collections.abc import Callable
from typing import Any

import pytest

from popmq.common.errors import Code, TopicNotFound, Unavailable
from popmq.common.protocol.messaging_payloads import (
    AckResult,
    Kind,
    PutResult,
    decode_ack,
    decode_put,
    encode_ack_reply,
    encode_put_reply,
)
from popmq.common.record.receipt import ReceiptHandle
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service


class Turn:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.left: list[Callable[[], None]] = []

    def __call__(self, callback: Callable[[], None]) -> None:
        self.left.append(callback)

    def end(self) -> None:
        for callback in self.left:  # those that are left meanwhile are met too
            callback()
        self.left.clear()


class Scene:
    def __init__(self, make_bench: Any, *names: str) -> None:
        self.turn = Turn()
        self.bench = make_bench(names or ("broker-a",), soon=self.turn)
        self.broker = self.bench.broker
        self.send("warm")  # the topic is known from now on
        self.turn.end()
        for broker in self.bench.brokers.values():
            broker.asked.clear()

    def send(self, name: str, *, topic: str = "orders", body: bytes = b"x", **more: Any) -> Any:
        remaining = more.pop("remaining", None)
        message = pb.Message(
            topic=pb.Resource(name=topic),
            body=body,
            system_properties=pb.SystemProperties(message_id=name, **more),
        )
        request = service.SendMessageRequest(messages=[message])
        return self.bench.start("SendMessage", request, remaining=remaining)

    def ack(self, number: int, *, group: str = "g", broker: str = "broker-a") -> Any:
        handle = ReceiptHandle(broker, 64, 9, 1, number, 1, 1, number, 0).encode(b"k" * 32)
        entry = service.AckMessageEntry(message_id=f"m{number}", receipt_handle=handle.decode())
        request = service.AckMessageRequest(
            group=pb.Resource(name=group), topic=pb.Resource(name="orders"), entries=[entry]
        )
        return self.bench.start("AckMessage", request)

    def frames(self) -> list[list[str]]:
        """The ids of the messages of every put."""
        return [[entry.message_id for entry in put.entries] for put in self.broker.puts()]


@pytest.fixture
def scene(make_bench: Any) -> Scene:
    return Scene(make_bench)


def sent(call: Any) -> Any:
    (answer,) = call.sent
    return service.SendMessageResponse.FromString(answer)


def acked(call: Any) -> Any:
    (answer,) = call.sent
    return service.AckMessageResponse.FromString(answer)


def test_sends_of_one_turn_are_one_frame_and_each_gets_its_own_answer(scene: Scene) -> None:
    put_results = [
        PutResult(queue_offset=7),
        PutResult(Code.TOO_MANY_REQUESTS, "full"),
        PutResult(),
    ]
    scene.broker.tells[Kind.PUT] = lambda _: encode_put_reply(put_results)
    calls = [scene.send(name) for name in ("a", "b", "c")]
    assert scene.frames() == []
    scene.turn.end()
    assert scene.frames() == [["a", "b", "c"]]
    assert [sent(call).status.code for call in calls] == [Code.OK, Code.TOO_MANY_REQUESTS, Code.OK]
    assert [sent(call).entries[0].message_id for call in calls] == ["a", "b", "c"]
    assert sent(calls[0]).entries[0].offset == 7
    assert sent(calls[1]).status.message == "full"


def test_the_next_turn_has_a_frame_of_its_own(scene: Scene) -> None:
    scene.send("a")
    scene.turn.end()
    scene.send("b")
    scene.turn.end()
    assert scene.frames() == [["a"], ["b"]]


def test_messages_of_a_group_keep_their_order_whichever_way_they_go(make_bench: Any) -> None:
    scene = Scene(make_bench)
    scene.bench.topic("fifo", "fifo")
    scene.send("warm", topic="fifo", message_group="g")
    scene.turn.end()
    scene.broker.asked.clear()
    for number in range(6):
        # A digest is nothing for the short way.
        more: dict[str, Any] = (
            {"body_digest": pb.Digest(type=pb.DigestType.MD5)} if number % 2 else {}
        )
        scene.send(f"m{number}", topic="fifo", message_group="g", **more)
    scene.turn.end()
    assert [name for frame in scene.frames() for name in frame] == [f"m{n}" for n in range(6)]
    assert len({entry.queue_id for put in scene.broker.puts() for entry in put.entries}) == 1


def test_other_topics_go_in_other_frames(scene: Scene) -> None:
    scene.bench.topic("bills")
    for topic in ("orders", "bills", "orders"):
        scene.send(f"to {topic}", topic=topic)
    scene.turn.end()
    assert scene.frames() == [["to orders", "to orders"], ["to bills"]]


def test_a_frame_that_fails_in_this_process_harms_no_other_of_its_turn(scene: Scene) -> None:
    scene.bench.topic("bills")
    reply = encode_put_reply([PutResult()])

    def tell(body: bytes) -> bytes:
        if b"bills" in body:
            raise ValueError("nobody foresaw this")
        return reply

    scene.broker.tells[Kind.PUT] = tell
    calls = [scene.send("a", topic="bills"), scene.send("b", topic="bills"), scene.send("c")]
    scene.turn.end()
    codes = [sent(call).status.code for call in calls]
    assert codes == [Code.INTERNAL_ERROR, Code.INTERNAL_ERROR, Code.OK]


def test_a_frame_is_waited_for_as_long_as_its_first_deadline_lets_it(scene: Scene) -> None:
    scene.send("a", remaining=3_100)
    scene.send("b", remaining=3_050)
    scene.send("c", remaining=900)
    scene.send("d", remaining=950)
    scene.turn.end()
    assert scene.frames() == [["a", "b"], ["c", "d"]]
    assert [timeout for kind, _, timeout in scene.broker.asked if kind is Kind.PUT] == [2_950, 800]


def test_what_is_too_long_for_one_frame_is_more_than_one(scene: Scene) -> None:
    for number in range(5):
        scene.send(str(number), body=b"x" * (4 << 20))
    scene.turn.end()
    assert scene.frames() == [["0", "1", "2"], ["3", "4"]]


def test_a_refusal_of_the_frame_is_everybodys(scene: Scene) -> None:
    scene.broker.tells[Kind.PUT] = lambda _: TopicNotFound("topic orders is gone")
    calls = [scene.send("a"), scene.send("b")]
    scene.turn.end()
    assert [sent(call).status.code for call in calls] == [Code.TOPIC_NOT_FOUND] * 2
    assert [sent(call).entries[0].message_id for call in calls] == ["a", "b"]
    scene.send("c")
    # What was known of the topic is forgotten: it is asked for again.
    assert scene.broker.bodies(Kind.DESCRIBE_TOPIC)


def test_a_frame_is_given_up_when_the_last_client_is_gone(scene: Scene) -> None:
    scene.broker.tells[Kind.PUT] = lambda _: None
    first, second = scene.send("a"), scene.send("b")
    scene.turn.end()
    first.leave()
    assert scene.broker.cancelled == []
    second.leave()
    assert len(scene.broker.cancelled) == 1


def test_nothing_is_asked_for_clients_that_went_away_within_the_turn(scene: Scene) -> None:
    first, second = scene.send("a"), scene.send("b")
    first.leave()
    second.leave()
    scene.turn.end()
    assert scene.frames() == []


def test_one_client_that_is_gone_takes_no_answer_from_the_others(scene: Scene) -> None:
    scene.broker.tells[Kind.PUT] = lambda _: None
    gone, there = scene.send("a"), scene.send("b")
    scene.turn.end()
    gone.leave()
    results = [PutResult(queue_offset=1), PutResult(queue_offset=2)]
    scene.broker.answer(encode_put_reply(results))
    assert sent(there).entries[0].offset == 2


def test_messages_whose_broker_refuses_at_once_go_to_another(make_bench: Any) -> None:
    scene = Scene(make_bench, "broker-a", "broker-b")
    first, second = scene.bench.brokers.values()
    for name in ("a", "b", "c", "d", "e", "f"):
        scene.send(name)
    first.away = True
    scene.turn.end()
    ids = [entry.message_id for put in second.puts() for entry in put.entries]
    assert sorted(ids) == ["a", "b", "c", "d", "e", "f"]


def test_a_broker_that_answers_for_too_few_fails_every_call(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.broker.tells[Kind.PUT] = lambda _: encode_put_reply([PutResult()])
    calls = [scene.send("a"), scene.send("b")]
    scene.turn.end()
    assert [call.detail for call in calls] == ["internal error"] * 2
    assert "a handler failed" in caplog.text


def test_a_message_that_was_delayed_when_it_was_first_sent_gets_that_receipt(scene: Scene) -> None:
    scene.broker.tells[Kind.PUT] = lambda _: encode_put_reply([PutResult(due_ms=99)])
    call = scene.send("again")
    scene.turn.end()
    assert sent(call).entries[0].recall_handle


def test_acks_of_one_turn_are_one_frame_and_a_bad_one_hides_no_other(scene: Scene) -> None:
    ack_results = [AckResult(), AckResult(Code.INVALID_RECEIPT_HANDLE, "revived"), AckResult()]
    scene.broker.tells[Kind.ACK] = lambda _: encode_ack_reply(ack_results)
    calls = [scene.ack(number) for number in range(3)]
    scene.turn.end()
    (body,) = scene.broker.bodies(Kind.ACK)
    request = decode_ack(body)
    assert (request.topic, request.group) == ("orders", "g")
    assert len(request.handles) == 3
    codes = [acked(call).status.code for call in calls]
    assert codes == [Code.OK, Code.INVALID_RECEIPT_HANDLE, Code.OK]
    assert [acked(call).entries[0].message_id for call in calls] == ["m0", "m1", "m2"]
    assert acked(calls[1]).entries[0].status.message == "revived"
    assert scene.bench.proxy.metrics.acks == 2


def test_acks_of_other_groups_and_brokers_go_in_other_frames(make_bench: Any) -> None:
    scene = Scene(make_bench, "broker-a", "broker-b")
    scene.ack(1)
    scene.ack(2, group="h")
    scene.ack(3, broker="broker-b")
    scene.turn.end()
    groups = {
        name: [decode_ack(body).group for body in broker.bodies(Kind.ACK)]
        for name, broker in scene.bench.brokers.items()
    }
    assert groups == {"broker-a": ["g", "h"], "broker-b": ["g"]}


def test_the_acks_of_a_client_reach_the_broker_before_its_good_bye(scene: Scene) -> None:
    scene.ack(1)
    goodbye = service.NotifyClientTerminationRequest(group=pb.Resource(name="g"))
    scene.bench.start("NotifyClientTermination", goodbye)
    scene.ack(2)
    scene.turn.end()
    kinds = [kind for kind, _, _ in scene.broker.asked]
    assert kinds == [Kind.ACK, Kind.CLIENTS]


def test_an_ack_of_a_broker_that_is_away_says_so(scene: Scene) -> None:
    scene.broker.tells[Kind.ACK] = lambda _: Unavailable("broker-a is away")
    call = scene.ack(1)
    scene.turn.end()
    assert acked(call).status.code == acked(call).entries[0].status.code == Code.HA_NOT_AVAILABLE


def test_the_frame_of_one_turn_is_what_the_same_messages_in_one_request_would_be(
    scene: Scene,
) -> None:
    for name in ("a", "b"):
        scene.send(name, born_host="h", tag="t")
    scene.turn.end()
    (joint,) = scene.broker.puts()
    scene.broker.asked.clear()
    messages = [
        pb.Message(
            topic=pb.Resource(name="orders"),
            body=b"x",
            system_properties=pb.SystemProperties(message_id=name, born_host="h", tag="t"),
        )
        for name in ("a", "b")
    ]
    scene.bench.start("SendMessage", service.SendMessageRequest(messages=messages))
    scene.turn.end()
    (whole,) = scene.broker.bodies(Kind.PUT)
    assert decode_put(whole) == joint


def test_more_acks_than_one_request_may_have_are_more_than_one(scene: Scene) -> None:
    for number in range(1_025):
        scene.ack(number)
    scene.turn.end()
    sizes = [len(decode_ack(body).handles) for body in scene.broker.bodies(Kind.ACK)]
    assert sizes == [1_024, 1]
    assert scene.bench.proxy.metrics.acks == 1_025


@pytest.mark.parametrize(
    ("kind", "permission", "code"),
    [
        ("normal", "r", Code.FORBIDDEN),
        ("fifo", "rw", Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
    ],
)
def test_a_topic_that_takes_no_such_message_refuses_it_also_when_it_is_known(
    scene: Scene, kind: str, permission: str, code: Code
) -> None:
    scene.bench.topic("other", kind, permission)
    for _ in range(2):
        call = scene.send("m", topic="other")
        scene.turn.end()
        assert sent(call).status.code == sent(call).entries[0].status.code == code
    assert scene.broker.puts() == []
