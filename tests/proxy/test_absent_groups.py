"""A broker group that the proxy does not know now: it may be absent, so nothing is final.

The proxy knows broker-a; the topic was made over broker-a and broker-b.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.receipt import ReceiptHandle
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.placement import choose_queue

BOTH = ("broker-a", "broker-b")
KEYS = [f"key-{number}" for number in range(40)]
HERE = [key for key in KEYS if choose_queue(key, BOTH, 4)[0] == "broker-a"]
ABSENT = [key for key in KEYS if key not in HERE]
HANDLE = ReceiptHandle("broker-b", 64, 9, 1, 5, 1, 1, 1, 0).encode(b"key").decode()
GROUP, ORDERS = pb.Resource(name="workers"), pb.Resource(name="orders")


@pytest.fixture
def proxy(make_bench: Any) -> Any:
    bench = make_bench(("broker-a",))
    for name, kind in (("fifo", "fifo"), ("mixed", "mixed"), ("chats", "lite")):
        described = admin.Topic(
            id=65, name=name, queues=4, type=kind, permission="rw", brokers=BOTH
        )
        bench.broker.topics[name] = described
    bench.broker.topics["chats"].queues = 1
    bench.group("workers")
    return bench


def message(key: str, topic: str = "fifo") -> pb.Message:
    properties = pb.SystemProperties(message_id=f"m-{key}", body_encoding=pb.IDENTITY)
    if topic == "chats":
        properties.lite_topic, properties.message_type = key, pb.LITE
    else:
        properties.message_group, properties.message_type = key, pb.FIFO
    return pb.Message(topic=pb.Resource(name=topic), body=b"x", system_properties=properties)


def send(bench: Any, *messages: pb.Message) -> list[int]:
    """The code of each message."""
    request = service.SendMessageRequest(messages=messages)
    reply = bench.unary("SendMessage", request, service.SendMessageResponse, remaining=3_000)
    return [entry.status.code for entry in reply.entries]


def stored(bench: Any) -> Iterator[tuple[str, int]]:
    """Message ids and queues."""
    for put in bench.broker.puts():
        yield from ((entry.message_id, entry.queue_id) for entry in put.entries)


@pytest.mark.parametrize("topic", ["fifo", "mixed", "chats"])
def test_a_key_of_an_absent_group_is_refused_and_the_other_keys_stay_where_they_belong(
    proxy: Any, topic: str
) -> None:
    assert HERE
    assert ABSENT
    codes = {key: send(proxy, message(key, topic)) for key in KEYS}
    again = {key: send(proxy, message(key, topic)) for key in KEYS}  # the topic is remembered now
    assert codes == again
    assert {key for key, code in codes.items() if code == [Code.OK]} == set(HERE)
    assert {tuple(codes[key]) for key in ABSENT} == {(Code.HA_NOT_AVAILABLE,)}
    queues = proxy.broker.topics[topic].queues
    assert set(stored(proxy)) == {(f"m-{key}", choose_queue(key, BOTH, queues)[1]) for key in HERE}


def test_in_one_request_the_messages_of_an_absent_group_are_refused_by_themselves(
    proxy: Any,
) -> None:
    codes = send(proxy, *map(message, KEYS))
    assert codes == [Code.OK if key in HERE else Code.HA_NOT_AVAILABLE for key in KEYS]


def test_a_message_without_a_fixed_place_goes_to_the_group_that_is_known(proxy: Any) -> None:
    proxy.topic("orders")
    for key in ABSENT:
        sent = pb.Message(topic=ORDERS, body=b"x")
        sent.system_properties.message_id = key
        sent.system_properties.body_encoding = pb.IDENTITY
        assert send(proxy, sent) == [Code.OK]
    assert [name for name, _ in stored(proxy)] == ABSENT


def test_a_new_broker_group_gets_no_key_of_a_topic_that_was_made_without_it(
    make_bench: Any,
) -> None:
    bench = make_bench((*BOTH, "broker-c"))
    for broker in bench.brokers.values():
        broker.topics["fifo"] = admin.Topic(
            id=65, name="fifo", queues=4, type="fifo", permission="rw", brokers=BOTH
        )
    for key in KEYS:
        assert send(bench, message(key)) == [Code.OK]
    assert bench.brokers["broker-c"].puts() == []


def test_a_receipt_handle_of_an_absent_group_may_be_tried_again(proxy: Any) -> None:
    entry = service.AckMessageEntry(message_id="m", receipt_handle=HANDLE)
    ack = service.AckMessageRequest(group=GROUP, topic=ORDERS, entries=[entry])
    reply = proxy.unary("AckMessage", ack, service.AckMessageResponse)
    assert reply.entries[0].status.code == reply.status.code == Code.HA_NOT_AVAILABLE
    change = service.ChangeInvisibleDurationRequest(
        group=GROUP, topic=ORDERS, receipt_handle=HANDLE, invisible_duration=Duration(seconds=30)
    )
    changed = proxy.unary(
        "ChangeInvisibleDuration", change, service.ChangeInvisibleDurationResponse
    )
    assert (changed.status.code, changed.receipt_handle) == (Code.HA_NOT_AVAILABLE, HANDLE)
    forward = service.ForwardMessageToDeadLetterQueueRequest(
        group=GROUP, topic=ORDERS, receipt_handle=HANDLE, message_id="m"
    )
    name = "ForwardMessageToDeadLetterQueue"
    forwarded = proxy.unary(name, forward, service.ForwardMessageToDeadLetterQueueResponse)
    assert forwarded.status.code == Code.HA_NOT_AVAILABLE


def test_a_command_that_names_an_absent_group_is_not_answered_by_the_others(proxy: Any) -> None:
    drain = admin.DrainRequest(group="broker-b", look=True)
    reply = proxy.unary("Drain", drain, admin.DrainReply)
    assert reply.status.code == Code.HA_NOT_AVAILABLE
    redrive = admin.RedriveRequest(group="workers", broker="broker-b", limit=1)
    reply = proxy.unary("Redrive", redrive, admin.RedriveReply)
    assert reply.status.code == Code.HA_NOT_AVAILABLE
    assert proxy.broker.bodies(Kind.REDRIVE) == []
