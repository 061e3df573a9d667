"""The proxy's handlers over real brokers in this process, and calls whose end can be awaited."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from popmq.broker.node.broker_process import BrokerProcess
from popmq.common.clock import SystemClock
from popmq.common.errors import Unavailable
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.settings.settings import Settings
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.transport.interface import GrpcStatus, Method, OneByOne
from popmq.testing.harness.core_broker import SMALL


class AwaitedCall(OneByOne):
    """A call whose end can be awaited."""

    peer = "10.0.0.9:999"
    metadata: Mapping[str, str] = {"x-mq-client-id": "me@1"}

    def __init__(self, remaining_ms: int | None = None) -> None:
        self._remaining_ms = remaining_ms
        self.sent: list[bytes] = []
        self.status: GrpcStatus | None = None
        self.ended = asyncio.Event()
        self.gone: list[Callable[[], None]] = []

    def leave(self) -> None:
        """The client goes away."""
        for callback in self.gone:
            callback()

    encrypted = False

    def remaining_ms(self) -> int | None:
        return self._remaining_ms

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        self.status = status
        self.ended.set()

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        self.gone.append(callback)

    def on_unread(self, callback: Callable[[], None]) -> None: ...


class Away:
    """The way to a broker that cannot be reached."""

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        on_reply(Unavailable("it is not connected"))
        return 1

    def cancel(self, request_id: int) -> None: ...


class House:
    """A proxy and the ports of its brokers, by name."""

    def __init__(self, ports: Mapping[str, Port], settings: Settings = SMALL) -> None:
        self.ports = ports
        self.proxy = Proxy(settings, StaticBrokers(ports), SystemClock())
        self.methods: dict[str, Method] = {
            method.path.rpartition("/")[2]: method for method in self.proxy.methods()
        }

    async def raw(self, name: str, request: bytes) -> list[bytes]:
        waited = AwaitedCall()
        start = self.methods[name].start
        assert start is not None
        start(waited, request)
        await waited.ended.wait()
        assert waited.status is GrpcStatus.OK
        return waited.sent

    async def receive(self, request: service.ReceiveMessageRequest) -> list[pb.Message]:
        parts = await self.raw("ReceiveMessage", request.SerializeToString())
        replies = [service.ReceiveMessageResponse.FromString(part) for part in parts]
        return [reply.message for reply in replies if reply.HasField("message")]

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
        return [topic.queues for topic in admin_pb2.ListTopicsReply.FromString(reply).topics]


async def until_read(inbound: Any) -> None:
    """Until no long command of this stream waits."""
    async with asyncio.timeout(10):
        while inbound._waiting:  # noqa: ASYNC110 (there is no event for a turn of the loop)
            await asyncio.sleep(0)


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
