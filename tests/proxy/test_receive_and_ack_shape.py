"""ReceiveMessage, AckMessage and ChangeInvisibleDuration, as clients need to read them."""

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from popmq.common.errors import Code, InvalidReceiptHandle, TooManyRequests
from popmq.common.protocol.messaging_payloads import (
    AckResult,
    Delivery,
    FilterType,
    Kind,
    PopReply,
    PopRequest,
    decode_ack,
    decode_change,
    decode_pop,
    encode_ack_reply,
    encode_pop_reply,
)
from popmq.common.record.receipt import ReceiptHandle
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import MessageType
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.ack import HANDLE_LIMIT
from popmq.proxy.rpc.convert import sent_messages
from popmq.proxy.rpc.wire_scan import chunk
from popmq.proxy.transport.interface import GrpcStatus

NO_SQL = pb.FilterExpression(type=pb.FilterType.SQL, expression=" ")
TEN_SECONDS = Duration(seconds=10)


def handle(broker: str = "broker-a", offset: int = 0) -> str:
    return ReceiptHandle(broker, 64, 9, 1, offset, 1, 1, 1, 0).encode(b"key").decode()


def receive(bench: Any, *, broker: str = "", call: Any = None, **more: Any) -> Any:
    fields: dict[str, Any] = {"invisible_duration": TEN_SECONDS, **more}
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name=fields.pop("group", "workers")),
        message_queue=pb.MessageQueue(
            topic=pb.Resource(name=fields.pop("topic", "orders")),
            id=3,
            broker=pb.Broker(name=broker),
        ),
        **fields,
    )
    return bench.start("ReceiveMessage", request, **(call or {}))


def parts(call: Any) -> list[Any]:
    return [service.ReceiveMessageResponse.FromString(item) for item in call.sent]


POPPED_MS = 1_650_000_000_123


def pops(broker: Any) -> list[PopRequest]:
    return [decode_pop(body) for body in broker.bodies(Kind.POP)]


def deliveries(count: int) -> bytes:
    properties = pb.SystemProperties(message_id="m", tag="a")
    wire = pb.Message(body=b"x", system_properties=properties).SerializeToString()
    (sent,) = sent_messages(chunk(1, wire))
    head, content = sent.slices(MessageType.NORMAL, sender=1, peer="", now_ms=1)
    return encode_pop_reply(
        PopReply(
            [Delivery(2, at, 1, 5_000, b"h%d" % at, head, content) for at in range(count)],
            popped_ms=POPPED_MS,
        )
    )


def test_messages_come_between_the_status_and_the_delivery_time(bench: Any) -> None:
    call = receive(bench)
    bench.broker.answer(deliveries(2))
    got = parts(call)
    kinds = [item.WhichOneof("content") for item in got]
    assert kinds == ["status", "message", "message", "delivery_timestamp"]
    assert got[0].status.code == Code.OK
    assert [item.message.system_properties.receipt_handle for item in got[1:3]] == ["h0", "h1"]
    assert got[1].message.system_properties.tag == "a"
    popped = got[3].delivery_timestamp  # of the broker, not of this proxy
    assert popped.seconds * 1_000 + popped.nanos // 1_000_000 == POPPED_MS
    assert call.status is GrpcStatus.OK
    assert (bench.proxy.metrics.receives, bench.proxy.metrics.received) == (1, 2)


def test_an_empty_receive_says_so_and_when(bench: Any) -> None:
    call = receive(bench)
    bench.broker.answer(encode_pop_reply(PopReply()))
    status, when = parts(call)
    assert status.status.code == Code.MESSAGE_NOT_FOUND
    assert when.delivery_timestamp.seconds == 1_700_000_000


def test_a_refused_receive_is_parts_of_a_stream_that_ends_well(bench: Any) -> None:
    call = receive(bench)
    bench.broker.answer(TooManyRequests("polling full"))
    status, when = parts(call)
    assert (status.status.code, status.status.message) == (Code.TOO_MANY_REQUESTS, "polling full")
    assert when.WhichOneof("content") == "delivery_timestamp"
    assert call.status is GrpcStatus.OK


def test_the_broker_is_asked_for_every_queue_whatever_the_client_said(bench: Any) -> None:
    receive(bench, batch_size=99, attempt_id="try", auto_renew=True)
    (pop,) = pops(bench.broker)
    assert (pop.queue_id, pop.limit, pop.attempt_id, pop.auto_renew) == (-1, 32, "try", True)
    assert (pop.topic, pop.group, pop.client_id) == ("orders", "workers", "me@1")
    assert (pop.invisible_ms, pop.poll_ms, pop.filter_type) == (10_000, 20_000, FilterType.NONE)


def test_a_poll_and_its_frame_end_in_this_order(bench: Any) -> None:
    receive(bench, call={"remaining": 8_000}, long_polling_timeout=Duration(seconds=20))
    (pop,) = pops(bench.broker)
    assert pop.poll_ms == 7_600
    assert bench.broker.asked[-1][2] == 12_600


def test_a_push_consumer_gets_the_brokers_invisible_time(bench: Any) -> None:
    receive(bench, invisible_duration=None, auto_renew=True)
    (pop,) = pops(bench.broker)
    assert pop.invisible_ms == 0


def test_deliveries_that_a_push_consumer_did_not_read_end_by_their_invisible_time(
    bench: Any,
) -> None:
    later: list[tuple[float, Any]] = []
    bench.proxy._receive._later = lambda seconds, then: later.append((seconds, then))
    call = receive(bench, invisible_duration=None, auto_renew=True)
    bench.broker.answer(deliveries(2))
    (unread,) = call.unread_callbacks
    unread()
    assert bench.broker.bodies(Kind.CHANGE) == []
    ((seconds, then),) = later
    assert seconds == PopSettings().invisible_default_ms / 1_000
    then()
    changes = [decode_change(body) for body in bench.broker.bodies(Kind.CHANGE)]
    assert [
        (delivery.topic, delivery.group, delivery.handle, delivery.invisible_ms)
        for delivery in changes
    ] == [
        ("orders", "workers", b"h0", 0),
        ("orders", "workers", b"h1", 0),
    ]


@pytest.mark.parametrize("auto_renew", [False, True])
def test_only_deliveries_that_are_renewed_need_to_be_read(bench: Any, auto_renew: bool) -> None:
    call = receive(bench, auto_renew=auto_renew)
    bench.broker.answer(deliveries(0 if auto_renew else 2))
    assert call.unread_callbacks == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"invisible_duration": None}, Code.ILLEGAL_INVISIBLE_TIME),
        ({"batch_size": -1}, Code.BAD_REQUEST),
        ({"topic": "rmq_sys_meta"}, Code.ILLEGAL_TOPIC),
        ({"group": ""}, Code.ILLEGAL_CONSUMER_GROUP),
        ({"filter_expression": NO_SQL}, Code.ILLEGAL_FILTER_EXPRESSION),
        ({"call": {"metadata": {}}}, Code.CLIENT_ID_REQUIRED),
    ],
)
def test_a_receive_that_cannot_be_asked_for_is_refused(
    bench: Any, change: dict[str, Any], code: int
) -> None:
    call = receive(bench, **change)
    status, _ = parts(call)
    assert status.status.code == code
    assert bench.broker.asked == []
    assert bench.proxy.metrics.refused[code] == 1
    assert bench.proxy.metrics.waiting_receives == 0


def test_a_named_broker_is_asked_and_others_take_turns(two_brokers: Any) -> None:
    for _ in range(3):
        receive(two_brokers, broker="broker-b")
    first, second = two_brokers.brokers.values()
    assert (len(pops(first)), len(pops(second))) == (0, 3)
    for _ in range(4):
        receive(two_brokers, broker="unheard of")
    assert (len(pops(first)), len(pops(second))) == (2, 5)
    assert two_brokers.proxy.metrics.waiting_receives == 7


def test_a_receive_without_a_broker_finds_one_that_is_there(two_brokers: Any) -> None:
    two_brokers.brokers["broker-a"].away = True
    for _ in range(3):
        receive(two_brokers)
    assert len(pops(two_brokers.brokers["broker-b"])) == 3


def test_a_receive_that_finds_no_broker_is_refused(two_brokers: Any) -> None:
    for broker in two_brokers.brokers.values():
        broker.away = True
    status, _ = parts(receive(two_brokers))
    assert status.status.code == Code.HA_NOT_AVAILABLE


def test_a_client_that_left_gives_its_poll_up(bench: Any) -> None:
    call = receive(bench)
    assert bench.proxy.metrics.waiting_receives == 1
    call.leave()
    assert len(bench.broker.cancelled) == 1
    assert bench.proxy.metrics.waiting_receives == 0


def test_a_proxy_that_stops_answers_its_polls_and_lets_nobody_wait(bench: Any) -> None:
    call = receive(bench)
    bench.proxy.drain()
    status, _ = parts(call)
    assert status.status.code == Code.MESSAGE_NOT_FOUND
    assert len(bench.broker.cancelled) == 1
    receive(bench)
    assert pops(bench.broker)[-1].poll_ms == 0


def ack(bench: Any, *handles: str, **call: Any) -> Any:
    request = service.AckMessageRequest(
        group=pb.Resource(name="workers"),
        topic=pb.Resource(name="orders"),
        entries=[
            service.AckMessageEntry(message_id=f"m-{n}", receipt_handle=name)
            for n, name in enumerate(handles)
        ],
    )
    return bench.unary("AckMessage", request, service.AckMessageResponse, **call)


def test_an_ack_is_answered_by_entry_and_goes_to_the_broker_of_its_handle(
    two_brokers: Any,
) -> None:
    handles = [handle("broker-b", 0), handle("broker-a", 1), handle("broker-b", 2)]
    reply = ack(two_brokers, *handles)
    assert reply.status.code == Code.OK
    assert [entry.receipt_handle for entry in reply.entries] == handles
    assert [entry.message_id for entry in reply.entries] == ["m-0", "m-1", "m-2"]
    (asked,) = two_brokers.brokers["broker-b"].bodies(Kind.ACK)
    request = decode_ack(asked)
    assert (request.topic, request.group) == ("orders", "workers")
    assert list(request.handles) == [handles[0].encode(), handles[2].encode()]
    assert two_brokers.proxy.metrics.acks == 3


def test_one_bad_handle_hides_no_good_one(bench: Any) -> None:
    bad = ("nonsense", handle("broker/z"), "härte")
    reply = ack(bench, handle(), *bad, handle("broker-z"))
    codes = [entry.status.code for entry in reply.entries]
    absent = Code.HA_NOT_AVAILABLE  # of a broker group that is not known now
    assert codes == [Code.OK, *[Code.INVALID_RECEIPT_HANDLE] * 3, absent]
    assert reply.status.code == Code.MULTIPLE_RESULTS


def test_a_handle_of_any_length_is_refused_by_itself(bench: Any) -> None:
    reply = ack(bench, "A" * 70_000, handle(), "A" * 513)
    codes = [entry.status.code for entry in reply.entries]
    assert codes == [Code.INVALID_RECEIPT_HANDLE, Code.OK, Code.INVALID_RECEIPT_HANDLE]
    assert "513 characters is over the limit of 512" in reply.entries[2].status.message


def test_a_handle_that_names_the_longest_broker_is_no_longer_than_the_limit() -> None:
    assert len(handle("b" * 255)) <= HANDLE_LIMIT


@pytest.mark.parametrize("bad", ["", "nonsense", handle("broker/z"), handle()[:-4]])
def test_a_single_bad_handle_is_told_in_both_places(bench: Any, bad: str) -> None:
    reply = ack(bench, bad)
    assert reply.status.code == Code.INVALID_RECEIPT_HANDLE
    assert reply.entries[0].status.code == Code.INVALID_RECEIPT_HANDLE
    assert reply.entries[0].receipt_handle == bad


def test_what_the_broker_says_of_a_handle_is_told_in_both_places(bench: Any) -> None:
    ack_results = [AckResult(Code.INVALID_RECEIPT_HANDLE, "it was revived as attempt 2")]
    bench.broker.tells[Kind.ACK] = lambda _: encode_ack_reply(ack_results)
    reply = ack(bench, handle())
    assert reply.status.code == reply.entries[0].status.code == Code.INVALID_RECEIPT_HANDLE
    assert reply.status.message == "it was revived as attempt 2"


def test_an_ack_without_entries_is_a_bad_request(bench: Any) -> None:
    assert ack(bench).status.code == Code.BAD_REQUEST


def test_a_broker_that_is_away_is_told_for_its_entries_only(two_brokers: Any) -> None:
    two_brokers.brokers["broker-a"].away = True
    reply = ack(two_brokers, handle("broker-a"), handle("broker-b"))
    assert [entry.status.code for entry in reply.entries] == [Code.HA_NOT_AVAILABLE, Code.OK]


def test_an_ack_without_a_client_id_is_refused_with_its_entries(bench: Any) -> None:
    reply = ack(bench, handle(), metadata={"x-mq-client-id": " "})
    assert reply.status.code == Code.CLIENT_ID_REQUIRED
    assert reply.entries[0].status.code == Code.CLIENT_ID_REQUIRED


def change(bench: Any, receipt: str, seconds: int, **call: Any) -> Any:
    request = service.ChangeInvisibleDurationRequest(
        group=pb.Resource(name="workers"),
        topic=pb.Resource(name="orders"),
        receipt_handle=receipt,
        invisible_duration=Duration(seconds=seconds),
    )
    reply = service.ChangeInvisibleDurationResponse
    return bench.unary("ChangeInvisibleDuration", request, reply, **call)


def test_a_change_is_answered_with_the_new_handle(bench: Any) -> None:
    bench.broker.tells[Kind.CHANGE] = lambda _: b"new-handle"
    reply = change(bench, handle(), 30)
    assert (reply.status.code, reply.receipt_handle) == (Code.OK, "new-handle")
    (asked,) = bench.broker.bodies(Kind.CHANGE)
    assert decode_change(asked).invisible_ms == 30_000


def test_a_refused_change_leaves_the_client_its_handle(bench: Any) -> None:
    bench.broker.tells[Kind.CHANGE] = lambda _: InvalidReceiptHandle("it is acked")
    mine = handle()
    reply = change(bench, mine, 30)
    assert (reply.status.code, reply.receipt_handle) == (Code.INVALID_RECEIPT_HANDLE, mine)


@pytest.mark.parametrize(
    ("seconds", "call", "code"),
    [
        (-1, {}, Code.ILLEGAL_INVISIBLE_TIME),
        (43_201, {}, Code.ILLEGAL_INVISIBLE_TIME),
        (1, {"metadata": {}}, Code.CLIENT_ID_REQUIRED),
        (1, {"remaining": 50}, Code.PROXY_TIMEOUT),
    ],
)
def test_a_change_refused_by_the_proxy_leaves_the_client_its_handle(
    bench: Any, seconds: int, call: dict[str, Any], code: Code
) -> None:
    mine = handle()
    reply = change(bench, mine, seconds, **call)
    assert (reply.status.code, reply.receipt_handle) == (code, mine)
    assert bench.broker.asked == []


def popped(*offsets: int) -> bytes:
    """An answer to a pop."""
    found_deliveries = [
        Delivery(0, offset, 1, POPPED_MS, b"handle", b"", b"") for offset in offsets
    ]
    return encode_pop_reply(PopReply(found_deliveries, 0, POPPED_MS))


def test_the_broker_that_is_named_is_looked_at_first(two_brokers: Any) -> None:
    for broker in two_brokers.brokers.values():
        broker.tells[Kind.POP] = lambda _: popped(7)
    for _ in range(4):
        receive(two_brokers, broker="broker-b")
    assert [len(pops(broker)) for broker in two_brokers.brokers.values()] == [0, 4]


def test_a_receive_that_does_not_wait_looks_at_each_broker_once(two_brokers: Any) -> None:
    for broker in two_brokers.brokers.values():
        broker.tells[Kind.POP] = lambda _: popped()
    call = receive(two_brokers, long_polling_timeout=Duration(seconds=0))
    assert parts(call)[0].status.code == Code.MESSAGE_NOT_FOUND
    assert [len(pops(broker)) for broker in two_brokers.brokers.values()] == [1, 1]


def test_requests_are_timed_by_method_and_long_polls_are_counted(bench: Any) -> None:
    bench.proxy.metrics.now_s = lambda: bench.clock.ms / 1_000
    receive(bench, long_polling_timeout=TEN_SECONDS)
    bench.clock.ms += 700
    bench.broker.answer(deliveries(1))
    receive(bench, long_polling_timeout=Duration())
    bench.broker.answer(deliveries(0))
    counts = bench.proxy.metrics
    assert (counts.receives, counts.long_polling, counts.pops_with_notify) == (2, 1, 0)
    buckets = dict(counts.took["ReceiveMessage"].buckets)
    assert (buckets["0.001"], buckets["0.5"], buckets["1"], buckets["+Inf"]) == (1, 1, 2, 2)
    assert dict(counts.took["SendMessage"].buckets)["+Inf"] == 0
