"""A topic that is deleted and made again: what a proxy sends with the ids that it knows."""

from typing import Any

import pytest

from popmq.common.errors import Code, OtherIncarnation, PopmqError
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PutResult,
    decode_ack,
    decode_pop,
    decode_put,
    encode_put_reply,
)
from popmq.common.record.receipt import ReceiptHandle
from popmq.common.wire import admin_pb2
from popmq.common.wire.pull_pb2 import PullRequest, UpdateOffsetRequest
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

OLD, NEW = 64, 70


def recreated(bench: Any, *, queues: int = 4, kind: str = "normal", described: int = NEW) -> None:
    """Brokers have the new topic and refuse what was placed for another; they describe it as
    `described`."""
    topic = admin_pb2.Topic(id=described, name="orders", queues=queues, type=kind, permission="rw")

    def put(body: bytes) -> bytes | PopmqError:
        request = decode_put(body)
        if request.topic_id != NEW:
            return OtherIncarnation("placed for another topic orders")
        return encode_put_reply([PutResult(queue_id=entry.queue_id) for entry in request.entries])

    for broker in bench.brokers.values():
        broker.topics["orders"] = topic
        broker.tells[Kind.PUT] = put


def messages(*names: str, group: str = "", tag: str = "") -> Any:
    new_messages = []
    for name in names:
        properties = pb.SystemProperties(message_id=name, tag=tag)
        if group:
            properties.message_group, properties.message_type = group, pb.FIFO
        topic = pb.Resource(name="orders")
        new_messages.append(pb.Message(topic=topic, body=b"x", system_properties=properties))
    return service.SendMessageRequest(messages=new_messages)


def sent(bench: Any, request: Any) -> Any:
    call = bench.start("SendMessage", request)
    reply: Any = service.SendMessageResponse.FromString(call.sent[0])
    return reply


@pytest.fixture(params=[1, 2])
def bench(make_bench: Any, request: Any) -> Any:
    new_bench = make_bench([f"broker-{number}" for number in range(request.param)])
    sent(new_bench, messages("before"))  # the topic is known from here on
    return new_bench


def test_a_send_names_the_topic_that_it_was_placed_for(bench: Any) -> None:
    sent(bench, messages("one", "two"))
    puts = [put for broker in bench.brokers.values() for put in broker.puts()]
    assert {put.topic_id for put in puts} == {OLD}


@pytest.mark.parametrize("names", [("one",), ("one", "two", "three")])
def test_a_send_for_the_old_topic_is_placed_again_and_its_client_hears_ok(
    bench: Any, names: tuple[str, ...]
) -> None:
    recreated(bench, queues=1)
    reply = sent(bench, messages(*names))
    assert reply.status.code == Code.OK
    assert [entry.message_id for entry in reply.entries] == list(names)
    for broker in bench.brokers.values():
        for put in broker.puts():
            assert put.topic_id == OLD or {entry.queue_id for entry in put.entries} == {0}


def test_a_message_that_the_new_topic_does_not_take_is_refused_by_its_rules(bench: Any) -> None:
    recreated(bench, kind="fifo")
    reply = sent(bench, messages("one"))
    assert reply.status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE


def test_while_the_new_topic_cannot_be_described_a_client_is_told_to_try_again(bench: Any) -> None:
    recreated(bench, described=OLD)
    reply = sent(bench, messages("one", "two"))
    assert reply.status.code == Code.HA_NOT_AVAILABLE
    assert {entry.status.code for entry in reply.entries} == {Code.HA_NOT_AVAILABLE}


def test_pulls_and_offsets_name_what_is_known_where_a_broker_group_may_have_older_ones(
    make_bench: Any,
) -> None:
    bench = make_bench(["broker-a", "broker-b"])
    bench.group("g")
    group, topic = pb.Resource(name="g"), pb.Resource(name="orders")
    queue = pb.MessageQueue(topic=topic, id=0, broker=pb.Broker(name="broker-b"))
    bench.start("PullMessage", service.PullMessageRequest(group=group, message_queue=queue))
    update = service.UpdateOffsetRequest(group=group, message_queue=queue, offset=1)
    bench.start("UpdateOffset", update)
    (pulled,) = bench.brokers["broker-b"].bodies(Kind.PULL)
    (updated,) = bench.brokers["broker-b"].bodies(Kind.UPDATE_OFFSET)
    asked: Any
    for asked in (PullRequest.FromString(pulled), UpdateOffsetRequest.FromString(updated)):
        assert (asked.topic_id, asked.group_id) == (OLD, 9)


def test_receives_and_acks_name_what_is_known_where_a_broker_group_may_have_older_ones(
    make_bench: Any,
) -> None:
    bench = make_bench(["broker-a", "broker-b"])
    bench.group("g")
    queue = pb.MessageQueue(topic=pb.Resource(name="orders"))
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name="g"), message_queue=queue, batch_size=1
    )
    request.invisible_duration.seconds = 30
    bench.start("ReceiveMessage", request)
    pops = [
        decode_pop(body) for broker in bench.brokers.values() for body in broker.bodies(Kind.POP)
    ]
    assert {(pop.topic_id, pop.group_id) for pop in pops} == {(OLD, 9)}
    handle = ReceiptHandle("broker-b", 64, 9, 0, 0, 1, 1, 1, 0).encode(b"key").decode()
    entry = service.AckMessageEntry(message_id="m", receipt_handle=handle)
    for entries in ([entry], [entry, entry]):
        bench.start(
            "AckMessage",
            service.AckMessageRequest(
                group=pb.Resource(name="g"), topic=pb.Resource(name="orders"), entries=entries
            ),
        )
    acks = [decode_ack(body) for body in bench.brokers["broker-b"].bodies(Kind.ACK)]
    assert [(len(ack.handles), ack.group_id) for ack in acks] == [(1, 9), (2, 9)]
