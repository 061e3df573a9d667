"""The proxy's handlers over real brokers in this process: what only both together can show."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from popmq.broker.process import BrokerProcess
from popmq.common.clock import SystemClock
from popmq.common.errors import Code, Unavailable
from popmq.common.frame_port import call
from popmq.common.hop import Kind, OnReply, Port
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.transport.seam import GrpcStatus, Method
from popmq.testing.core import SMALL

ORDERS = admin_pb2.Topic(name="orders", queues=4, type="fifo", permission="rw")
WORKERS = admin_pb2.Group(name="workers", max_attempts=3, back_off_ms=[1_000, 5_000])


class AwaitedCall:
    """A call whose end can be awaited."""

    peer = "10.0.0.9:999"
    metadata: Mapping[str, str] = {"x-mq-client-id": "me@1"}

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.status: GrpcStatus | None = None
        self.ended = asyncio.Event()
        self.gone: list[Callable[[], None]] = []

    def leave(self) -> None:
        """The client goes away."""
        for callback in self.gone:
            callback()

    def remaining_ms(self) -> int | None:
        return None

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        self.status = status
        self.ended.set()

    def on_gone(self, callback: Callable[[], None]) -> None:
        self.gone.append(callback)


class Away:
    """The way to a broker that cannot be reached."""

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        on_reply(Unavailable("it is not connected"))
        return 1

    def cancel(self, request_id: int) -> None: ...


class House:
    """A proxy and the ports of its brokers, by name."""

    def __init__(self, ports: Mapping[str, Port]) -> None:
        self.ports = ports
        self.proxy = Proxy(SMALL, StaticBrokers(ports), SystemClock())
        self.methods: dict[str, Method] = {
            one.path.rpartition("/")[2]: one for one in self.proxy.methods()
        }

    async def raw(self, name: str, request: bytes) -> list[bytes]:
        waited = AwaitedCall()
        start = self.methods[name].start
        assert start is not None
        start(waited, request)
        await waited.ended.wait()
        assert waited.status is GrpcStatus.OK
        return waited.sent

    async def ask(self, name: str, request: Any, reply: type[Any]) -> Any:
        (sent,) = await self.raw(name, request.SerializeToString())
        return reply.FromString(sent)

    async def change_topic(self, command: str, topic: admin_pb2.Topic) -> tuple[int, str]:
        request: Any
        match command:
            case "DeleteTopic":
                request = admin_pb2.DeleteTopicRequest(name=topic.name)
            case "CreateTopic":
                request = admin_pb2.CreateTopicRequest(topic=topic)
            case _:
                request = admin_pb2.AlterTopicRequest(topic=topic)
        status = (await self.ask(command, request, admin_pb2.TopicReply)).status
        return status.code, status.message

    async def create_at(self, broker: str, topic: admin_pb2.Topic) -> None:
        """At that broker only, as when another was away or joined later."""
        body = admin_pb2.CreateTopicRequest(topic=topic).SerializeToString()
        await call(self.ports[broker], Kind.CREATE_TOPIC, body, 5_000)

    async def queues_at(self, broker: str) -> list[int]:
        body = admin_pb2.ListTopicsRequest().SerializeToString()
        reply = await call(self.ports[broker], Kind.LIST_TOPICS, body, 5_000)
        return [one.queues for one in admin_pb2.ListTopicsReply.FromString(reply).topics]


@asynccontextmanager
async def house(folder: Path, *names: str, away: tuple[str, ...] = ()) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        ports: dict[str, Port] = {name: Away() for name in away}
        for name in names:
            settings = replace(
                SMALL, broker=replace(SMALL.broker, name=name, data=f"{folder}/{name}")
            )
            broker = BrokerProcess(settings)
            stack.push_async_callback(broker.stop)
            await broker.start()
            ports[name] = broker.port
        yield House(ports)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_an_admins_bytes_that_are_no_request_are_a_bad_request_in_the_reply(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with house(tmp_path, "a") as at:
            for name in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name:
                (sent,) = await at.raw(name, b"\xff")
                status = admin_pb2.TopicReply.FromString(sent).status
                told = (Code.BAD_REQUEST, f"the request is no {name}Request")
                assert (status.code, status.message) == told

    run(test)
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


@pytest.mark.parametrize("kind", ["delay", "mixed"])
def test_a_delayed_message_whose_time_is_over_is_delivered_at_once(
    tmp_path: Path, kind: str
) -> None:
    async def test() -> None:
        async with house(tmp_path, "a") as at:
            topic = admin_pb2.Topic(name="later", queues=1, type=kind)
            assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
            sent = pb.Message(topic=pb.Resource(name="later"), body=b"x")
            sent.system_properties.message_id = "m-1"
            sent.system_properties.message_type = pb.MessageType.DELAY
            sent.system_properties.delivery_timestamp.CopyFrom(Timestamp(seconds=1))
            request = service.SendMessageRequest(messages=[sent])
            reply = await at.ask("SendMessage", request, service.SendMessageResponse)
            assert reply.entries[0].status.code == Code.OK
            receive = service.ReceiveMessageRequest(
                group=pb.Resource(name="workers"),
                message_queue=pb.MessageQueue(topic=pb.Resource(name="later")),
                invisible_duration=Duration(seconds=10),
                long_polling_timeout=Duration(),
            )
            parts = await at.raw("ReceiveMessage", receive.SerializeToString())
            found = [service.ReceiveMessageResponse.FromString(one).message for one in parts]
            ids = [one.system_properties.message_id for one in found if one.body]
            assert ids == ["m-1"]

    run(test)


def test_what_a_client_that_left_before_the_reply_popped_is_delivered_as_the_same_attempt(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with house(tmp_path, "a") as at:
            topic = admin_pb2.Topic(name="jobs", queues=1)
            assert (await at.change_topic("CreateTopic", topic))[0] == Code.OK
            sent = pb.Message(topic=pb.Resource(name="jobs"), body=b"x")
            sent.system_properties.message_id = "m-1"
            request = service.SendMessageRequest(messages=[sent])
            await at.ask("SendMessage", request, service.SendMessageResponse)
            receive = service.ReceiveMessageRequest(
                group=pb.Resource(name="workers"),
                message_queue=pb.MessageQueue(topic=pb.Resource(name="jobs")),
                invisible_duration=Duration(seconds=600),
                long_polling_timeout=Duration(seconds=10),
            )
            left = AwaitedCall()
            start = at.methods["ReceiveMessage"].start
            assert start is not None
            start(left, receive.SerializeToString())  # it popped, and waits for the disk
            left.leave()
            parts = await at.raw("ReceiveMessage", receive.SerializeToString())
            replies = [service.ReceiveMessageResponse.FromString(one) for one in parts]
            (got,) = [one.message for one in replies if one.HasField("message")]
            assert (got.body, got.system_properties.delivery_attempt) == (b"x", 1)
            assert not left.sent

    run(test)


async def receive_in_order(at: House, *, batch: int, attempt_id: str = "") -> list[pb.Message]:
    request = service.ReceiveMessageRequest(
        group=pb.Resource(name="in-order"),
        message_queue=pb.MessageQueue(topic=pb.Resource(name="orders")),
        batch_size=batch,
        invisible_duration=Duration(seconds=10),
        long_polling_timeout=Duration(),
        attempt_id=attempt_id,
    )
    parts = await at.raw("ReceiveMessage", request.SerializeToString())
    replies = [service.ReceiveMessageResponse.FromString(one) for one in parts]
    return [one.message for one in replies if one.HasField("message")]


def test_a_fifo_group_receives_each_message_group_in_order_and_the_same_attempt_again(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with house(tmp_path, "a") as at:
            assert (await at.change_topic("CreateTopic", ORDERS))[0] == Code.OK
            group = admin_pb2.Group(name="in-order", type="fifo")
            made = admin_pb2.CreateGroupRequest(group=group)
            await at.ask("CreateGroup", made, admin_pb2.GroupReply)

            sent = service.SendMessageRequest()
            for name in ("x1", "x2", "y1", "x3"):
                message = sent.messages.add(topic=pb.Resource(name="orders"), body=name.encode())
                message.system_properties.message_id = name
                message.system_properties.message_group = name[0]
                message.system_properties.message_type = pb.MessageType.FIFO
            await at.ask("SendMessage", sent, service.SendMessageResponse)

            first = await receive_in_order(at, batch=1, attempt_id="once")
            (again,) = await receive_in_order(at, batch=1, attempt_id="once")
            one = first[0].system_properties
            assert again.system_properties.receipt_handle == one.receipt_handle
            assert (again.body, again.system_properties.delivery_attempt) == (first[0].body, 1)

            key = one.message_group
            others = await receive_in_order(at, batch=32, attempt_id="twice")
            assert key not in {message.system_properties.message_group for message in others}
            entry = service.AckMessageEntry(
                message_id=one.message_id, receipt_handle=one.receipt_handle
            )
            ack = service.AckMessageRequest(
                group=pb.Resource(name="in-order"),
                topic=pb.Resource(name="orders"),
                entries=[entry],
            )
            assert (
                await at.ask("AckMessage", ack, service.AckMessageResponse)
            ).status.code == Code.OK
            rest = await receive_in_order(at, batch=32)
            bodies = [message.body for message in (*first, *others, *rest)]
            assert [body for body in bodies if body[:1] == b"x"] == [b"x1", b"x2", b"x3"]
            assert sorted(bodies) == [b"x1", b"x2", b"x3", b"y1"]

    run(test)


def test_a_fifo_group_is_assigned_every_queue_of_every_broker(tmp_path: Path) -> None:
    async def test() -> None:
        async with house(tmp_path, "a", "b") as at:
            assert (await at.change_topic("CreateTopic", ORDERS))[0] == Code.OK
            group = admin_pb2.Group(name="in-order", type="fifo")
            made = admin_pb2.CreateGroupRequest(group=group)
            await at.ask("CreateGroup", made, admin_pb2.GroupReply)
            request = service.QueryAssignmentRequest(
                topic=pb.Resource(name="orders"), group=pb.Resource(name="in-order")
            )
            reply = await at.ask("QueryAssignment", request, service.QueryAssignmentResponse)
            queues = [one.message_queue for one in reply.assignments]
            found = sorted((queue.broker.name, queue.id) for queue in queues)
            assert found == [(broker, queue) for broker in "ab" for queue in range(4)]

    run(test)
