"""Doubles at the two seams of the proxy: a client's call, and a broker that answers as told.

They serve tests of what a reply looks like on the wire; what a broker does is tested with the
real one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from popmq.common.errors import PopmqError, TopicNotFound, Unavailable
from popmq.common.loop_iteration import CallSoon, at_once
from popmq.common.protocol.messaging_payloads import (
    AckResult,
    Kind,
    OnReply,
    PutRequest,
    PutResult,
    decode_ack,
    decode_put,
    encode_ack_reply,
    encode_put_reply,
)
from popmq.common.settings.settings import Settings
from popmq.common.wire import admin_pb2
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.transport.interface import GrpcStatus, Method, OneByOne

WALL_MS = 1_700_000_000_000


class TestClock:
    """Stands still until it is moved."""

    __test__ = False

    def __init__(self) -> None:
        self.ms = 0

    def wall_ms(self) -> int:
        return WALL_MS + self.ms

    def boot_ms(self) -> int:
        return self.ms


class RecordedCall(OneByOne):
    """A call that keeps what it was sent."""

    def __init__(
        self,
        metadata: Mapping[str, str] | None = None,
        remaining: int | None = None,
    ) -> None:
        self.metadata = {"x-mq-client-id": "me@1"} if metadata is None else metadata
        self.peer = "10.0.0.9:999"
        self.remaining = remaining
        self.sent: list[bytes] = []
        self.status: GrpcStatus | None = None
        self.detail = ""
        self.gone_callbacks: list[Callable[[], None]] = []
        self.unread_callbacks: list[Callable[[], None]] = []

    encrypted = False

    def remaining_ms(self) -> int | None:
        return self.remaining

    def send(self, message: bytes) -> None:
        assert self.status is None, "a message after the end"
        self.sent.append(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        assert self.status is None, "a second end"
        self.status, self.detail = status, detail

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        self.gone_callbacks.append(callback)

    def on_unread(self, callback: Callable[[], None]) -> None:
        assert self.status is None, "set behind the end"
        self.unread_callbacks.append(callback)

    def leave(self) -> None:
        for callback in self.gone_callbacks:
            callback()


Told = Callable[[bytes], bytes | PopmqError | None]  # None: no answer for now


@dataclass
class ToldBroker:
    """A `hop.Port` whose answers are set by kind; what was asked is kept."""

    topics: dict[str, admin_pb2.Topic] = field(default_factory=dict)
    groups: dict[str, admin_pb2.Group] = field(default_factory=dict)
    away: bool = False
    asked: list[tuple[Kind, bytes, int]] = field(default_factory=list)
    open: dict[int, OnReply] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ids = count(1)
        self.tells: dict[Kind, Told] = {
            Kind.DESCRIBE_TOPIC: self._describe_topic,
            Kind.DESCRIBE_GROUP: self._describe_group,
            Kind.PUT: self._put,
            Kind.ACK: self._ack,
        }

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        request_id = next(self._ids)
        if self.away:
            on_reply(Unavailable("the broker is away"))
            return request_id
        self.asked.append((kind, body, timeout_ms))
        reply = self.tells[kind](body) if kind in self.tells else None
        if reply is None:
            self.open[request_id] = on_reply
        else:
            on_reply(reply)
        return request_id

    def cancel(self, request_id: int) -> None:
        if self.open.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def answer(self, answer: bytes | PopmqError) -> None:
        """End the one request that waits."""
        ((request_id, on_reply),) = self.open.items()
        del self.open[request_id]
        on_reply(answer)

    def bodies(self, kind: Kind) -> list[bytes]:
        return [body for asked, body, _ in self.asked if asked is kind]

    def puts(self) -> list[PutRequest]:
        return [decode_put(body) for body in self.bodies(Kind.PUT)]

    def _describe_topic(self, body: bytes) -> bytes | PopmqError:
        name = admin_pb2.DescribeTopicRequest.FromString(body).name
        if name not in self.topics:
            return TopicNotFound(f"topic {name} does not exist")
        return admin_pb2.TopicReply(topic=self.topics[name]).SerializeToString()

    def _describe_group(self, body: bytes) -> bytes | PopmqError:
        name = admin_pb2.DescribeGroupRequest.FromString(body).name
        if name not in self.groups:
            return TopicNotFound(f"group {name} does not exist")
        return admin_pb2.GroupReply(group=self.groups[name]).SerializeToString()

    def _put(self, body: bytes) -> bytes:
        entries = decode_put(body).entries
        return encode_put_reply(
            [
                PutResult(queue_id=entry.queue_id, queue_offset=at)
                for at, entry in enumerate(entries)
            ]
        )

    def _ack(self, body: bytes) -> bytes:
        return encode_ack_reply([AckResult() for _ in decode_ack(body).handles])


class Bench:
    """A proxy over told brokers, and calls to it."""

    def __init__(
        self,
        names: Iterable[str] = ("broker-a",),
        settings: Settings | None = None,
        soon: CallSoon = at_once,
    ):
        self.clock = TestClock()
        self.brokers = {name: ToldBroker() for name in names}
        self.broker = next(iter(self.brokers.values()))
        ports = StaticBrokers(self.brokers)
        self.proxy = Proxy(settings or Settings(), ports, self.clock, soon=soon)
        self.methods: dict[str, Method] = {
            method.path.rpartition("/")[2]: method for method in self.proxy.methods()
        }
        self.topic("orders")

    def topic(self, name: str, kind: str = "normal", permission: str = "rw") -> None:
        described = admin_pb2.Topic(id=64, name=name, queues=4, type=kind, permission=permission)
        for broker in self.brokers.values():
            broker.topics[name] = described

    def group(self, name: str, kind: str = "normal", attempts: int = 17) -> None:
        described = admin_pb2.Group(id=9, name=name, type=kind, max_attempts=attempts)
        for broker in self.brokers.values():
            broker.groups[name] = described

    def start(self, name: str, request: Any, **call: Any) -> RecordedCall:
        recorded = RecordedCall(**call)
        start = self.methods[name].start
        assert start is not None
        start(recorded, request.SerializeToString())
        return recorded

    def unary(self, name: str, request: Any, reply: type[Any], **call: Any) -> Any:
        recorded = self.start(name, request, **call)
        assert recorded.status is GrpcStatus.OK
        (sent,) = recorded.sent
        return reply.FromString(sent)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def two_brokers() -> Bench:
    return Bench(("broker-a", "broker-b"))


@pytest.fixture
def make_bench() -> type[Bench]:
    return Bench


@pytest.fixture
def make_call() -> type[RecordedCall]:
    return RecordedCall
