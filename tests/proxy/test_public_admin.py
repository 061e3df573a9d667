"""The Admin service of the public API: each call is answered, and what it tells is so."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from proxy.houses import AwaitedCall, House, house

from popmq.common.errors import Code
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.admin.public_admin import INSTEAD
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

ORDERS, WORKERS = pb.Resource(name="orders"), pb.Resource(name="workers")
SERVICES = {
    "MessagingService": service.DESCRIPTOR.services_by_name["MessagingService"],
    "Admin": api.DESCRIPTOR.services_by_name["Admin"],
}


async def send(at: House, body: bytes, **properties: Any) -> str:
    system_property = pb.SystemProperties(
        message_id=body.decode(), message_type=pb.NORMAL, **properties
    )
    message = pb.Message(topic=ORDERS, body=body, system_properties=system_property)
    request = service.SendMessageRequest(messages=[message])
    reply = await at.ask("SendMessage", request, service.SendMessageResponse)
    assert reply.status.code == Code.OK
    return str(reply.entries[0].message_id)


async def receive(at: House, limit: int = 32) -> list[str]:
    request = service.ReceiveMessageRequest(
        group=WORKERS,
        message_queue=pb.MessageQueue(topic=ORDERS),
        batch_size=limit,
        invisible_duration=Duration(seconds=60),
        long_polling_timeout=Duration(seconds=0),
    )
    return [message.body.decode() for message in await at.receive(request)]


async def prepared(at: House) -> None:
    assert (await at.change_topic("CreateTopic", own.Topic(name="orders", queues=2)))[0] == Code.OK
    group = own.CreateGroupRequest(group=own.Group(name="workers"))
    assert (await at.ask("CreateGroup", group, own.GroupReply)).status.code == Code.OK


async def tells(at: House, name: str, /, **fields: Any) -> Any:
    method = SERVICES["Admin"].methods_by_name[name]
    request, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    return await at.ask(name, request(**fields), reply)


def consumer(
    at: House,
    client_id: str,
    expression: str,
    kind: Any = pb.PUSH_CONSUMER,
    language: Any = pb.JAVA,
) -> Any:
    """Opens its telemetry stream; it is there until it is half closed."""
    call = AwaitedCall()
    call.metadata = {"x-mq-client-id": client_id}
    entry = pb.SubscriptionEntry(
        topic=ORDERS, expression=pb.FilterExpression(type=pb.TAG, expression=expression)
    )
    settings = pb.Settings(
        client_type=kind,
        subscription=pb.Subscription(group=WORKERS, subscriptions=[entry]),
        user_agent=pb.UA(language=language, version="5.2.0", hostname="h"),
    )
    open_ = at.methods["Telemetry"].open
    assert open_ is not None
    inbound = open_(call)
    inbound.message(service.TelemetryCommand(settings=settings).SerializeToString())
    return inbound


@pytest.fixture
def log_level() -> Iterator[logging.Logger]:
    ours = logging.getLogger("popmq")
    before = ours.level
    yield ours
    ours.setLevel(before)


@pytest.mark.parametrize("name", SERVICES)
async def test_every_call_of_the_public_services_has_an_answer(
    tmp_path: Path, name: str, log_level: logging.Logger
) -> None:
    async with house(tmp_path, "a") as at:
        for method in SERVICES[name].methods:
            path = at.methods[method.name].path
            assert path == f"/apache.rocketmq.v2.{name}/{method.name}"
            if method.client_streaming:
                continue  # Telemetry: others show what it answers
            request = GetMessageClass(method.input_type)().SerializeToString()
            sent = await at.raw(method.name, request)
            answer = [GetMessageClass(method.output_type).FromString(item) for item in sent]
            first: Any = answer[0]
            if method.name == "ChangeLogLevel":
                assert first.remark
                continue
            assert first.status.code, f"{method.name} says neither OK nor why not"
            unserved = first.status.code == Code.UNSUPPORTED
            assert unserved == (method.name in INSTEAD), first.status.message


async def test_the_log_level_of_the_process_is_changed_and_a_level_that_is_none_is_not(
    tmp_path: Path, log_level: logging.Logger
) -> None:
    async with house(tmp_path, "a") as at:
        assert "WARNING" in (await tells(at, "ChangeLogLevel", level=3)).remark
        assert log_level.level == logging.WARNING
        assert "nothing was changed" in (await tells(at, "ChangeLogLevel", level=9)).remark
        assert log_level.level == logging.WARNING
        await tells(at, "ChangeLogLevel", level=0)
        assert log_level.level == logging.DEBUG


async def test_a_topic_tells_its_type_and_an_unknown_one_is_not_found(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        fifo = own.Topic(name="orders", queues=3, type="fifo", retention_ms=3_600_000)
        assert (await at.change_topic("CreateTopic", fifo))[0] == Code.OK
        answer = await tells(at, "DescribeTopicStatus", topic=ORDERS)
        assert (answer.status.code, answer.topic_message_type) == (Code.OK, pb.FIFO)
        tags = {"queues": "3", "permission": "rw", "retention_ms": "3600000"}
        assert dict(answer.tags) == tags
        nowhere = await tells(at, "DescribeTopicStatus", topic=pb.Resource(name="nowhere"))
        assert nowhere.status.code == Code.TOPIC_NOT_FOUND


async def test_subscriptions_are_those_of_connected_clients_and_what_was_read_without(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        nothing = await tells(at, "ListSubscription", group=WORKERS)
        assert (nothing.status.code, len(nothing.subscription_info)) == (Code.OK, 0)
        await send(at, b"1")
        await receive(at)
        (offline,) = (await tells(at, "ListSubscription", topic=ORDERS)).subscription_info
        assert (offline.group.name, offline.topic.name) == ("workers", "orders")
        assert offline.online is False
        first = consumer(at, "c1", "red")
        consumer(at, "c2", "blue", pb.LITE_PUSH_CONSUMER)
        (online,) = (await tells(at, "ListSubscription")).subscription_info
        assert (online.online, online.subscription_consistency) == (True, False)
        assert online.expression.expression == "blue"
        described = await tells(at, "DescribeSubscription", group=WORKERS)
        client_subscription_info, other = described.client_subscription_info
        assert client_subscription_info.client_info == api.ClientInfo(
            client_id="c1",
            version="5.2.0",
            language="JAVA",
            hostname="h",
            egress_ip="10.0.0.9",
            message_model=api.CLUSTERING,
        )
        assert client_subscription_info.subscription_info.expression.expression == "red"
        assert other.subscription_info.message_model == api.LITE_SELECTIVE
        connected = await tells(at, "ListConsumerConnection", group=WORKERS, topic=ORDERS)
        assert [item.client_id for item in connected.client_info] == ["c1", "c2"]
        first.half_closed()
        connected = await tells(at, "ListConsumerConnection", group=WORKERS)
        assert [item.client_id for item in connected.client_info] == ["c2"]
        other_group = pb.Resource(name="nobody")
        connected = await tells(at, "ListConsumerConnection", group=other_group)
        assert len(connected.client_info) == 0


async def test_a_language_that_is_newer_than_this_proxy_is_told_by_its_number(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        consumer(at, "c1", "*", language=99)
        connected = await tells(at, "ListConsumerConnection", group=WORKERS)
        assert [item.language for item in connected.client_info] == ["99"]


async def test_connections_are_told_by_lite_topic(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        assert (await at.change_topic("CreateTopic", own.Topic(name="orders", type="lite")))[
            0
        ] == Code.OK
        consumer(at, "me@1", "*", pb.LITE_PUSH_CONSUMER)
        consumer(at, "other", "*", pb.LITE_PUSH_CONSUMER)
        request = service.SyncLiteSubscriptionRequest(
            topic=ORDERS, group=WORKERS, lite_topic_set=["one"]
        )
        reply = service.SyncLiteSubscriptionResponse
        assert (await at.ask("SyncLiteSubscription", request, reply)).status.code == Code.OK
        for name, expected in (("one", ["me@1"]), ("two", [])):
            answer = await tells(at, "ListConsumerConnection", group=WORKERS, liteTopic=name)
            assert [item.client_id for item in answer.client_info] == expected


@pytest.mark.parametrize("brokers", ["a", "ab"])
async def test_the_accumulation_is_what_waits_and_what_is_in_flight(
    tmp_path: Path, brokers: str
) -> None:
    async with house(tmp_path, *brokers) as at:
        group = own.CreateGroupRequest(group=own.Group(name="workers")).SerializeToString()
        for broker in brokers:
            await at.create_at(broker, own.Topic(name="orders", queues=2))
            await call(at.ports[broker], Kind.CREATE_GROUP, group, 5_000)
        for number in range(6):
            await send(at, b"%d" % number)
        got = len(await receive(at))
        assert got > 0
        for number in range(6, 9):
            await send(at, b"%d" % number)
        answer = await tells(at, "DescribeGroupAccumulation", group=WORKERS)
        assert answer.status.code == Code.OK
        for accumulation in (answer.accumulation, answer.topic_accumulation["orders"]):
            counts = (
                accumulation.inflight_messages,
                accumulation.ready_messages,
                accumulation.accumulation,
            )
            assert counts == (got, 9 - got, 9)
            assert 0 <= accumulation.deliver_delay_time.ToMilliseconds() < 60_000
        other = pb.Resource(name="other")
        answer = await tells(at, "DescribeGroupAccumulation", group=WORKERS, topics=[other])
        assert (answer.accumulation.accumulation, len(answer.topic_accumulation)) == (0, 0)
        lite = await tells(at, "DescribeGroupAccumulation", group=WORKERS, lite_topic="l")
        assert lite.status.code == Code.UNSUPPORTED


async def test_what_a_broker_group_that_is_away_would_add_is_not_left_out_in_silence(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a", away=("b",)) as at:
        await at.create_at("a", own.Topic(name="orders", queues=2))
        group = own.CreateGroupRequest(group=own.Group(name="workers")).SerializeToString()
        await call(at.ports["a"], Kind.CREATE_GROUP, group, 5_000)
        answer = await tells(at, "DescribeGroupAccumulation", group=WORKERS)
        assert answer.status.code == Code.HA_NOT_AVAILABLE
        assert "broker b" in answer.status.message
        now = Timestamp(seconds=1)
        fields = {"group": WORKERS, "topic": ORDERS, "reset_timestamp": now}
        assert (await tells(at, "ResetGroupOffset", **fields)).status.code == answer.status.code


async def test_a_reset_to_a_time_gives_the_group_again_what_came_since(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        await send(at, b"old")
        await asyncio.sleep(0.002)  # real time, which brokers of this house measure
        between = Timestamp()
        between.GetCurrentTime()
        await asyncio.sleep(0.002)
        await send(at, b"new")
        assert sorted(await receive(at) + await receive(at)) == ["new", "old"]
        fields = {"group": WORKERS, "topic": ORDERS}
        timeless = await tells(at, "ResetGroupOffset", **fields)
        assert timeless.status.code == Code.BAD_REQUEST
        never = Timestamp(seconds=1 << 62)
        refused = await tells(at, "ResetGroupOffset", **fields, reset_timestamp=never)
        assert refused.status.code == Code.BAD_REQUEST
        done = await tells(at, "ResetGroupOffset", **fields, reset_timestamp=between)
        assert done.status.code == Code.OK
        assert await receive(at) + await receive(at) == ["new"]


async def test_messages_are_found_by_id_by_key_and_in_a_queue(tmp_path: Path) -> None:
    async with house(tmp_path, "a", "b") as at:
        for broker in "ab":
            await at.create_at(broker, own.Topic(name="orders", queues=1))
        for number in range(8):
            await send(at, b"%d" % number, keys=[f"key-{number % 2}"])

        async def found(**fields: Any) -> list[pb.Message]:
            reply = await tells(at, "QueryMessage", topic=ORDERS, **fields)
            assert reply.status.code == Code.OK, reply.status.message
            return list(reply.messages)

        (message,) = await found(message_id="3")
        assert (message.body, list(message.system_properties.keys)) == (b"3", ["key-1"])
        assert not message.system_properties.HasField("receipt_handle")
        by_key = await found(message_key="key-0")
        assert sorted(item.body for item in by_key) == [b"0", b"2", b"4", b"6"]
        here, there = [
            await found(queue_id=0, broker_name=name, max_message_nums=32) for name in "ab"
        ]
        assert sorted(item.body for item in here + there) == [b"%d" % n for n in range(8)]
        assert {item.system_properties.store_host for item in here} <= {"a"}
        for fields in ({"subscription": "s"}, {"lite_topic": "l"}, {"scroll_id": "1"}):
            answer = await tells(at, "QueryMessage", topic=ORDERS, **fields)
            assert answer.status.code == Code.UNSUPPORTED
        nothing = await tells(at, "QueryMessage", topic=ORDERS)
        assert nothing.status.code == Code.BAD_REQUEST


async def test_queues_tell_from_when_to_when_and_how_far_a_group_has_come(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        topic = own.Topic(name="orders", queues=1)
        assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
        group = own.CreateGroupRequest(group=own.Group(name="workers"))
        assert (await at.ask("CreateGroup", group, own.GroupReply)).status.code == Code.OK
        nothing = await tells(at, "QueryTimeSpan", group=WORKERS)
        assert (nothing.status.code, len(nothing.queue_time_span_list)) == (Code.OK, 0)
        (span,) = (
            await tells(at, "QueryTimeSpan", group=WORKERS, topics=[ORDERS])
        ).queue_time_span_list
        assert (span.min_timestamp, span.max_timestamp, span.delay_time_ms) == (0, 0, 0)
        stored = []
        for number in range(3):
            await send(at, b"%d" % number)
            request = own.FindMessagesRequest(topic="orders", queue_id=0, queue_offset=number)
            result = await at.ask("FindMessages", request, own.FindMessagesReply)
            stored.append(result.messages[0].stored_ms)
            await asyncio.sleep(0.003)  # real time, which brokers of this house measure
        assert stored[0] < stored[1] < stored[2]

        async def told() -> Any:
            reply = await tells(at, "QueryTimeSpan", group=WORKERS, topics=[ORDERS])
            (span,) = reply.queue_time_span_list
            assert (span.message_queue.topic.name, span.message_queue.id) == ("orders", 0)
            assert span.message_queue.broker.name == "a"
            assert (span.min_timestamp, span.max_timestamp) == (stored[0], stored[2])
            return span

        span = await told()
        assert span.consume_timestamp == stored[0]
        assert span.delay_time_ms >= stored[2] - stored[0]
        assert await receive(at, limit=2) == ["0", "1"]
        span = await told()
        assert span.consume_timestamp == stored[1]
        assert 0 < span.delay_time_ms < 60_000
        assert await receive(at) == ["2"]
        span = await told()
        assert (span.consume_timestamp, span.delay_time_ms) == (stored[2], 0)
        by_itself = await tells(at, "QueryTimeSpan", group=WORKERS)
        assert len(by_itself.queue_time_span_list) == 1


async def test_the_proxy_tells_its_name_its_clients_and_how_much_goes_through(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        await prepared(at)
        at.proxy.listening_on("127.0.0.1", 8081)
        consumer(at, "c1", "*")
        before = await tells(at, "GetProxyRuntimeStats")
        assert (before.proxy_name, before.connections) == ("127.0.0.1:8081", 1)
        assert (before.producers, before.consumers) == (0, 1)
        await send(at, b"1")
        await receive(at)
        after = await tells(at, "GetProxyRuntimeStats")
        assert after.in_tps > 0
        assert after.out_tps > 0


async def test_an_administrator_of_a_namespace_uses_and_reads_short_names(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with house(tmp_path, "a") as at:
            topic = own.Topic(name="eu%orders", queues=1)
            assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
            AwaitedCall.metadata = {**plain, "x-mq-namespace": "eu"}
            consumer_call = await tells(at, "DescribeTopicStatus", topic=ORDERS)
            assert consumer_call.status.code == Code.OK
            await send(at, b"1")
            (messages,) = (await tells(at, "QueryMessage", topic=ORDERS, message_id="1")).messages
            assert (messages.topic.resource_namespace, messages.topic.name) == ("eu", "orders")

    plain = AwaitedCall.metadata
    try:
        await test()
    finally:
        AwaitedCall.metadata = plain
