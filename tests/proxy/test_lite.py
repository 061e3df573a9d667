"""Lite topics through the proxy: sends, subscriptions at every broker group, receives, refusals."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from proxy.houses import AwaitedCall, House, house

from popmq.broker.node.broker_process import BrokerProcess
from popmq.common.errors import Code
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.client_settings import consumer_settings, unknown_group
from popmq.testing.harness.core_broker import SMALL

CHATS = admin_pb2.Topic(name="chats", type="lite")
GROUP = pb.Resource(name="workers")
TOPIC = pb.Resource(name="chats")
ADD, REMOVE = pb.LiteSubscriptionAction.PARTIAL_ADD, pb.LiteSubscriptionAction.PARTIAL_REMOVE


async def send(at: House, lite_topic: str, name: str, **properties: Any) -> Any:
    message = pb.Message(topic=TOPIC, body=name.encode())
    system_property = pb.SystemProperties(message_id=name, message_type=pb.LITE, **properties)
    message.system_properties.MergeFrom(system_property)
    message.system_properties.lite_topic = lite_topic
    request = service.SendMessageRequest(messages=[message])
    return (await at.ask("SendMessage", request, service.SendMessageResponse)).entries[0].status


async def sync(at: House, *names: str, action: Any = ADD, **option: Any) -> Any:
    request = service.SyncLiteSubscriptionRequest(
        action=action, topic=TOPIC, group=GROUP, lite_topic_set=names
    )
    if option:
        request.offset_option.CopyFrom(pb.OffsetOption(**option))
    answer = await at.ask("SyncLiteSubscription", request, service.SyncLiteSubscriptionResponse)
    return answer.status


async def receive(at: House, wait_s: int = 0) -> list[pb.Message]:
    request = service.ReceiveMessageRequest(
        group=GROUP,
        message_queue=pb.MessageQueue(topic=TOPIC),
        batch_size=32,
        invisible_duration=Duration(seconds=60),
        long_polling_timeout=Duration(seconds=wait_s),
    )
    return await at.receive(request)


async def ack(at: House, *messages: pb.Message) -> int:
    entries = [
        service.AckMessageEntry(
            message_id=message.system_properties.message_id,
            receipt_handle=message.system_properties.receipt_handle,
            lite_topic=message.system_properties.lite_topic,
        )
        for message in messages
    ]
    request = service.AckMessageRequest(group=GROUP, topic=TOPIC, entries=entries)
    code: int = (await at.ask("AckMessage", request, service.AckMessageResponse)).status.code
    return code


def over(brokers: str) -> admin_pb2.Topic:
    """CHATS, whose lite topics are placed over these broker groups."""
    topic = admin_pb2.Topic(brokers=brokers)
    topic.MergeFrom(CHATS)
    return topic


def named(messages: list[pb.Message]) -> dict[str, str]:
    return {message.body.decode(): message.system_properties.lite_topic for message in messages}


@pytest.mark.parametrize("brokers", ["a", "ab"])
async def test_messages_come_from_the_lite_topics_that_were_subscribed_to(
    tmp_path: Path, brokers: str
) -> None:
    async with house(tmp_path, *brokers) as at:
        for broker in brokers:
            await at.create_at(broker, over(brokers))
        names = [f"l{number}" for number in range(12)]
        for name in names:
            assert (await send(at, name, f"m-{name}")).code == Code.OK
        assert (await sync(at, *names[:8])).code == Code.OK
        got: dict[str, str] = {}
        for _ in range(len(brokers)):
            messages = await receive(at, 1)
            assert {message.system_properties.message_type for message in messages} == {pb.LITE}
            assert await ack(at, *messages) == Code.OK
            got |= named(messages)
        assert got == {f"m-{name}": name for name in names[:8]}
        assert (await sync(at, names[0], action=REMOVE)).code == Code.OK
        await send(at, names[0], "late")
        assert await receive(at) == []


@pytest.mark.parametrize("brokers", ["a", "ab"])
async def test_a_receive_that_waits_is_answered_when_a_message_comes(
    tmp_path: Path, brokers: str
) -> None:
    async with house(tmp_path, *brokers) as at:
        for broker in brokers:
            await at.create_at(broker, over(brokers))
        names = [f"l{number}" for number in range(6)]
        await sync(at, *names)
        for name in names:
            waiting = asyncio.ensure_future(receive(at, 20))
            await asyncio.sleep(0)
            await send(at, "other", f"other-{name}")
            await send(at, name, f"m-{name}")
            got = await asyncio.wait_for(waiting, 5)
            assert named(got) == {f"m-{name}": name}
            await ack(at, *got)


async def test_a_name_a_type_and_a_combination_that_cannot_be_are_refused(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        assert (await at.change_topic("CreateTopic", CHATS))[0] == Code.OK
        plain = admin_pb2.Topic(name="plain", queues=2)
        assert (await at.change_topic("CreateTopic", plain))[0] == Code.OK
        for name in ("", " ", "x" * 65, "a b"):
            assert (await send(at, name, "m")).code == Code.ILLEGAL_LITE_TOPIC
        for name in ("", "x" * 65):
            assert (await sync(at, name)).code == Code.ILLEGAL_LITE_TOPIC
        conflict = Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        refused = await send(at, "l", "m", message_group="g")
        assert (refused.code, "a message group" in refused.message) == (conflict, True)
        refused = await send(at, "l", "m", priority=3)
        assert (refused.code, "a priority" in refused.message) == (conflict, True)
        refused = await send(at, "l", "m", delivery_timestamp=Timestamp(seconds=1 << 32))
        assert (refused.code, "a delivery time" in refused.message) == (conflict, True)
        many = admin_pb2.Topic(name="many", type="lite", queues=8)
        code, text = await at.change_topic("CreateTopic", many)
        assert (code, "it takes 1 to 1" in text) == (Code.BAD_REQUEST, True)
        brief = admin_pb2.Topic(name="brief", type="lite", lite_ttl_ms=10)
        assert (await at.change_topic("CreateTopic", brief))[0] == Code.BAD_REQUEST


async def test_a_name_that_the_python_client_spells_is_read_as_a_word(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path, "a") as at:
            await at.change_topic("CreateTopic", CHATS)
            for name in ("hello", "h", "l"):
                await send(at, name, f"m-{name}")
            AwaitedCall.metadata = {**plain, "x-mq-language": "PYTHON"}
            assert (await sync(at, *"hello")).code == Code.OK
            assert named(await receive(at)) == {"m-hello": "hello"}
            AwaitedCall.metadata = {**plain, "x-mq-language": "JAVA"}
            assert (await sync(at, *"hl")).code == Code.OK
            assert named(await receive(at)) == {"m-h": "h", "m-l": "l"}

    plain = AwaitedCall.metadata
    try:
        await test()
    finally:
        AwaitedCall.metadata = plain


async def test_lite_topics_of_two_namespaces_have_the_same_names_and_not_the_same_messages(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with house(tmp_path, "a") as at:
            for name in ("eu", "us"):
                topic = admin_pb2.Topic(name=f"{name}%chats", type="lite")
                assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
                AwaitedCall.metadata = {"x-mq-client-id": name, "x-mq-namespace": name}
                assert (await sync(at, "one")).code == Code.OK
                assert (await send(at, "one", f"m-{name}")).code == Code.OK
                AwaitedCall.metadata = plain
            for name in ("us", "eu"):
                AwaitedCall.metadata = {"x-mq-client-id": name, "x-mq-namespace": name}
                assert named(await receive(at)) == {f"m-{name}": "one"}

    plain = AwaitedCall.metadata
    try:
        await test()
    finally:
        AwaitedCall.metadata = plain


async def test_a_subscription_may_begin_at_the_newest(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await at.change_topic("CreateTopic", CHATS)
        await send(at, "l", "old")
        assert (await sync(at, "l", policy=pb.OffsetOption.Policy.MAX)).code == Code.OK
        await send(at, "l", "new")
        assert named(await receive(at)) == {"new": "l"}


async def test_a_subscription_may_begin_at_a_time(tmp_path: Path) -> None:
    async with house(tmp_path, "a") as at:
        await at.change_topic("CreateTopic", CHATS)
        await send(at, "l", "old")
        between_ms = time.time_ns() // 1_000_000 + 1
        await asyncio.sleep(0.002)  # real time, which brokers of this house measure
        await send(at, "l", "new")
        assert (await sync(at, "l", timestamp=between_ms)).code == Code.OK
        assert named(await receive(at)) == {"new": "l"}


@pytest.mark.parametrize("namespace", ["", "eu"])
async def test_a_client_is_told_over_telemetry_what_it_is_subscribed_to_no_more(
    tmp_path: Path, namespace: str
) -> None:
    async def test() -> None:
        async with house(tmp_path, "a", "b") as at:
            name = f"{namespace}%chats" if namespace else "chats"
            for broker in "ab":
                await at.create_at(broker, admin_pb2.Topic(name=name, type="lite"))
            stream = Stream()
            open_ = at.methods["Telemetry"].open
            assert open_ is not None
            subscription = pb.Subscription(group=GROUP)
            settings = pb.Settings(client_type=pb.LITE_PUSH_CONSUMER, subscription=subscription)
            open_(stream).message(service.TelemetryCommand(settings=settings).SerializeToString())
            assert (await sync(at, "one", "two")).code == Code.OK
            at.proxy.clients.stop()  # reports at once
            assert await stream.notices(0) == []
            body = admin_pb2.DeleteTopicRequest(name=name).SerializeToString()
            await call(at.ports["a"], Kind.DELETE_TOPIC, body, 5_000)
            at.proxy.clients.mark_seen("me@1")
            at.proxy.clients.stop()
            assert await stream.notices(2) == ["one", "two"]
            assert at.proxy.metrics.lite_notices == 2

    plain = AwaitedCall.metadata
    try:
        if namespace:
            AwaitedCall.metadata = {**plain, "x-mq-namespace": namespace}
        await test()
    finally:
        AwaitedCall.metadata = plain


class Stream(AwaitedCall):
    """A Telemetry call that says when something came."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def send(self, message: bytes) -> None:
        super().send(message)
        self.came.set()

    async def notices(self, count: int) -> list[str]:
        """Lite topics that it was told to forget, when there are so many."""
        while len(notices := self.found()) < count:
            self.came.clear()
            await asyncio.wait_for(self.came.wait(), 5)
        return notices

    def found(self) -> list[str]:
        commands = map(service.TelemetryCommand.FromString, self.sent)
        return [
            command.notify_unsubscribe_lite_command.lite_topic
            for command in commands
            if command.WhichOneof("command") == "notify_unsubscribe_lite_command"
        ]


async def test_a_topic_tells_how_many_lite_topics_it_has_and_routes_say_its_type(
    tmp_path: Path,
) -> None:
    async with house(tmp_path, "a") as at:
        await at.change_topic("CreateTopic", CHATS)
        for name in ("l1", "l2"):
            await send(at, name, name)
        asked = admin_pb2.DescribeTopicRequest(name="chats")
        answer = await at.ask("DescribeTopic", asked, admin_pb2.TopicReply)
        assert (answer.topic.lite_topics, answer.topic.queues) == (2, 1)
        route = service.QueryRouteRequest(topic=TOPIC)
        reply = await at.ask("QueryRoute", route, service.QueryRouteResponse)
        (queue,) = reply.message_queues
        assert list(queue.accept_message_types) == [pb.LITE]


def test_settings_of_lite_clients_keep_each_lite_topic_in_its_line() -> None:
    for kind, fifo in ((pb.LITE_PUSH_CONSUMER, True), (pb.PUSH_CONSUMER, False)):
        asked = pb.Settings(client_type=kind, subscription=pb.Subscription(group=GROUP))
        settings = consumer_settings(asked, unknown_group("workers", SMALL, fifo=False), SMALL)
        assert settings.subscription.fifo is fifo
        assert settings.subscription.lite_subscription_quota == 2_000
        assert settings.subscription.max_lite_topic_size == 64


class Restarted:
    """The way to a broker that is stopped and started on the same data."""

    def __init__(self, folder: Path) -> None:
        data = replace(SMALL.broker, name="a", data=str(folder))
        self._settings = replace(SMALL, broker=data)
        self._broker: BrokerProcess
        self.asked: list[Kind] = []

    async def start(self) -> None:
        self._broker = BrokerProcess(self._settings)
        await self._broker.start()

    async def stop(self) -> None:
        await self._broker.stop()

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self.asked.append(kind)
        return self._broker.port.request(kind, body, timeout_ms, on_reply)

    def cancel(self, request_id: int) -> None:
        self._broker.port.cancel(request_id)


async def test_a_broker_that_started_again_is_told_what_clients_said_before(tmp_path: Path) -> None:
    broker = Restarted(tmp_path)
    await broker.start()
    at = House({"a": broker})
    newest = admin_pb2.CreateGroupRequest(group=admin_pb2.Group(name="workers", start_at="newest"))
    await at.change_topic("CreateTopic", CHATS)
    await at.ask("CreateGroup", newest, admin_pb2.GroupReply)
    await sync(at, "one", "two")
    await sync(at, "two", action=REMOVE)
    await broker.stop()
    await broker.start()
    for name in ("one", "two"):
        await send(at, name, f"m-{name}")
    assert await receive(at) == []
    at.proxy.lites.resend_to("a")
    assert named(await receive(at, 5)) == {"m-one": "one"}
    await sync(at, "two")
    at.proxy.lites.ended("me@1", ["one"])
    broker.asked.clear()
    at.proxy.lites.resend_to("a")
    assert broker.asked == [Kind.SYNC_LITE]
    at.proxy.lites.ended("me@1", ["two"])
    broker.asked.clear()
    at.proxy.lites.resend_to("a")
    assert broker.asked == []
    await sync(at, "two")
    at.proxy.lites.on_client_closed("me@1")
    broker.asked.clear()
    at.proxy.lites.resend_to("a")
    assert broker.asked == []
    await broker.stop()
