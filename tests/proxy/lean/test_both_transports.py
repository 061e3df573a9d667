"""The same requests to both transports: handlers, clients and broken ones must not tell which."""

import asyncio
import gzip
import random
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from hpack import Decoder, Encoder
from proxy.lean.peer import END, WHOLE, Answer, decoded, prefixed, request_headers, zipped

from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.transport.grpcio_server import GrpcioTransport
from popmq.proxy.transport.interface import (
    Call,
    GrpcStatus,
    Method,
    MethodType,
    StreamListener,
    Transport,
)
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.server import LeanTransport

LOCAL = "127.0.0.1"
PREFIX = "/apache.rocketmq.v2.MessagingService/"
REQUESTS = {
    "QueryRoute": service.QueryRouteRequest,
    "SendMessage": service.SendMessageRequest,
    "ReceiveMessage": service.ReceiveMessageRequest,
    "AckMessage": service.AckMessageRequest,
    "Heartbeat": service.HeartbeatRequest,
    "ChangeInvisibleDuration": service.ChangeInvisibleDurationRequest,
    "QueryAssignment": service.QueryAssignmentRequest,
    "EndTransaction": service.EndTransactionRequest,
    "NotifyClientTermination": service.NotifyClientTerminationRequest,
}


@asynccontextmanager
async def both(make: Callable[[], list[Method]]) -> AsyncIterator[list[int]]:
    """Ports of a grpcio and of a lean transport, each with methods of its own."""
    transports: list[Transport] = [
        GrpcioTransport(make(), LOCAL, 0),
        LeanTransport(make(), LOCAL, 0),
    ]
    ports = [await item.start() for item in transports]
    try:
        yield ports
    finally:
        for transport in transports:
            await transport.stop(0)


# -- the proxy's own handlers


def sent_message(chance: random.Random) -> pb.Message:
    message = pb.Message(body=chance.randbytes(chance.choice([0, 10, 5_000])))
    message.topic.name = chance.choice(["orders", "orders", "nowhere", "", "bad.name"])
    message.system_properties.message_id = chance.choice(["", "01" * 17, "x"])
    message.system_properties.message_type = pb.MessageType.ValueType(chance.choice([0, 1, 2, 9]))
    message.user_properties["k"] = "v" * chance.choice([1, 20_000])
    return message


def valid_requests(chance: random.Random) -> Iterator[tuple[str, bytes]]:
    for _ in range(20):
        many = [sent_message(chance) for _ in range(chance.choice([0, 1, 1, 3]))]
        yield "SendMessage", service.SendMessageRequest(messages=many).SerializeToString()
    for topic in ("orders", "nowhere", ""):
        route = service.QueryRouteRequest(topic=pb.Resource(name=topic))
        route.endpoints.addresses.add(host="127.0.0.1", port=1)
        yield "QueryRoute", route.SerializeToString()
    for kind in (0, 1, 77):
        yield (
            "Heartbeat",
            service.HeartbeatRequest(client_type=pb.ClientType.ValueType(kind)).SerializeToString(),
        )
    ack = service.AckMessageRequest(group=pb.Resource(name="workers"))
    ack.entries.add(message_id="m", receipt_handle="nonsense")
    yield "AckMessage", ack.SerializeToString()


def requests(seed: int) -> list[tuple[str, bytes, bool]]:
    """(method, bytes, whether the client names itself): valid, empty, damaged and random ones."""
    chance = random.Random(seed)
    results = list(valid_requests(chance))
    for name, data in list(results):
        damaged = bytearray(data or b"\0")
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randint(0, 7)
        results += [(name, bytes(damaged)), (name, data[: chance.randint(0, len(data))])]
    for name in (*REQUESTS, "Unheard", "PullMessage"):
        results += [(name, b""), (name, chance.randbytes(chance.randint(1, 60)))]
    return [(name, data, chance.random() < 0.9) for name, data in results]


async def answer(client: Any, name: str, data: bytes, named: bool) -> tuple[Any, ...]:
    metadata = (("x-mq-client-id", "me@1"), ("x-mq-language", "PYTHON")) if named else ()
    if name in ("ReceiveMessage", "PullMessage"):
        call = client.unary_stream(PREFIX + name)(data, metadata=metadata, timeout=20)
    else:
        call = client.unary_unary(PREFIX + name)(data, metadata=metadata, timeout=20)
    got = []
    try:
        if name in ("ReceiveMessage", "PullMessage"):
            got = [item async for item in call]
        else:
            got = [await call]
    except grpc.aio.AioRpcError as error:
        detail = "" if error.code() is grpc.StatusCode.UNIMPLEMENTED else error.details()
        return (error.code(), detail, got)
    return (await call.code(), await call.details(), got)


@pytest.mark.parametrize("seed", range(3))
async def test_the_proxy_answers_alike_on_both(seed: int, make_bench: Any) -> None:
    print(f"seed {seed}")

    async with both(lambda: make_bench().proxy.methods()) as ports:
        clients = [grpc.aio.insecure_channel(f"{LOCAL}:{port}") for port in ports]
        seen = set()
        for name, data, named in requests(seed):
            grpcio, lean = [await answer(item, name, data, named) for item in clients]
            # The route names the port that the transport took.
            if name not in ("QueryRoute", "QueryAssignment"):
                assert lean == grpcio, f"{name} {data.hex()}"
            assert lean[:2] == grpcio[:2], f"{name} {data.hex()}"
            seen.add(lean[0])
        for client in clients:
            await client.close()
        assert {grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED} <= seen


# -- what a handler sees, and what a client gets from one


class Recorder:
    """Handlers that tell everything about their call, in the answer."""

    def tell(self, call: Call, data: bytes) -> None:
        hidden = ("user-agent", "x-mq-date-time")
        seen = sorted((k, v) for k, v in call.metadata.items() if k not in hidden)
        call.send(repr((seen, call.peer.rpartition(":")[0], data)).encode())
        call.finish()

    def fail(self, call: Call, data: bytes) -> None:
        number, _, detail = data.partition(b" ")
        call.send(b"dropped or not")
        call.finish(GrpcStatus(int(number)), detail.decode())

    def talk(self, call: Call) -> StreamListener:
        return Counting(call)

    def methods(self) -> list[Method]:
        return [
            Method("/s/tell", MethodType.UNARY, start=self.tell),
            Method("/s/fail", MethodType.UNARY, start=self.fail),
            Method("/s/fail_stream", MethodType.SERVER_STREAM, start=self.fail),
            Method("/s/talk", MethodType.BIDI_STREAM, open=self.talk),
        ]


class Counting:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.heard: list[bytes] = []

    def message(self, data: bytes) -> None:
        self.heard.append(data)

    def half_closed(self) -> None:
        self.call.send(b",".join(self.heard))
        self.call.finish()


async def test_a_handler_sees_the_same_headers_on_both() -> None:
    metadata = (
        ("x-mq-client-id", "me@1"),
        ("x-mq-namespace", ""),
        ("authorization", "MQv2-HMAC-SHA1 Credential=, Signature=00"),
        ("blob-bin", bytes(range(256))),
        ("twice", "one"),
        ("twice", "two"),
    )

    async with both(Recorder().methods) as ports:
        reporteds = []
        for port in ports:
            async with grpc.aio.insecure_channel(f"{LOCAL}:{port}") as client:
                ask: Any = client.unary_unary("/s/tell")
                reporteds.append(await ask(b"data", metadata=metadata, timeout=9))
        assert reporteds[0] == reporteds[1]
        assert b"client-id" in reporteds[0]


@pytest.mark.parametrize("path", ["/s/fail", "/s/fail_stream"])
async def test_an_end_with_an_error_looks_the_same_from_both(path: str) -> None:
    async with both(Recorder().methods) as ports:
        for status in GrpcStatus:
            for detail in ("", "plain", "100 % größer\n"):
                ends = []
                for port in ports:
                    async with grpc.aio.insecure_channel(f"{LOCAL}:{port}") as client:
                        ask: Any = client.unary_stream(path)
                        call = ask(f"{status:d} {detail}".encode())
                        got, end = [], None
                        try:
                            got = [item async for item in call]
                        except grpc.aio.AioRpcError as error:
                            end = error.details()
                        ends.append((await call.code(), end, len(got)))
                assert ends[0] == ends[1]


# -- clients that break gRPC's rules, over plain HTTP/2


async def raw_status(port: int, path: str, content: bytes, encoding: str) -> str | None:
    """The grpc-status that one call ends with; "reset" or "http NNN" without one."""
    reader, writer = await asyncio.open_connection(LOCAL, port)
    fields = request_headers(path) + ([("grpc-encoding", encoding)] if encoding else [])
    block = Encoder().encode(fields)
    writer.write(
        frames.PREFACE
        + frames.settings({})
        + frames.frame(frames.HEADERS, WHOLE, 1, block)
        + frames.frame(frames.DATA, END, 1, content)
    )
    got, decoder, cutter = Answer(), Decoder(), frames.Http2FrameReader(1 << 24)
    while not got.ended and got.reset is None:
        data = await reader.read(65_536)
        if not data:
            break
        for kind, flags, stream, payload in cutter.feed(data):
            if kind == frames.SETTINGS and not flags & frames.ACK:
                writer.write(frames.SETTINGS_ACK)
            if kind == frames.HEADERS:
                got.headers.append(decoded(decoder, payload))
            if kind == frames.RST_STREAM and stream == 1:
                got.reset = struct.unpack(">I", payload)[0]
            got.ended |= stream == 1 and kind in (0, 1) and flags & END != 0
    writer.close()
    return got.status or ("reset" if got.reset is not None else None)


CUT = gzip.compress(b"message" * 99, mtime=0)[:20]
ALIKE = {
    "fine": ("/s/tell", prefixed(b"x"), ""),
    "compressed": ("/s/tell", zipped(b"x" * 99), "gzip"),
    "unknown method": ("/s/none", prefixed(b"x"), ""),
    "compressed without an encoding": ("/s/tell", zipped(b"x"), ""),
    "not what it says": ("/s/tell", b"\1\0\0\0\4nope", "gzip"),
    "compressed and cut off": ("/s/tell", b"\1" + struct.pack(">I", 20) + CUT, "gzip"),
    "messages of a stream": ("/s/talk", prefixed(b"a") + prefixed(b"b"), ""),
}
# docs/reference/grpc-answers.md, "Differences from grpcio": grpcio's status, and ours.
OTHERWISE = {
    "two messages": ("/s/tell", prefixed(b"x") * 2, "", "0", "12"),
    "unknown encoding": ("/s/tell", prefixed(b"x"), "br", "13", "12"),
    "half a message of a stream": ("/s/talk", prefixed(b"a") + b"\0\0\0\0\3x", "", "0", "13"),
}
# grpcio never answers these.
ONLY_OURS = {
    "no message": ("/s/tell", b"", "", "12"),
    "half a message": ("/s/tell", b"\0\0\0\0\3x", "", "13"),
}


@pytest.mark.parametrize("what", ALIKE)
async def test_a_broken_request_ends_alike_on_both(what: str) -> None:
    async with both(Recorder().methods) as ports:
        grpcio, lean = [await raw_status(port, *ALIKE[what]) for port in ports]
        assert lean == grpcio


@pytest.mark.parametrize("what", OTHERWISE)
async def test_a_request_on_which_they_differ_ends_as_documented(what: str) -> None:
    path, content, encoding, of_grpcio, of_lean = OTHERWISE[what]

    async with both(Recorder().methods) as ports:
        ends = [await raw_status(port, path, content, encoding) for port in ports]
        assert ends == [of_grpcio, of_lean]


@pytest.mark.parametrize("what", ONLY_OURS)
async def test_a_request_that_grpcio_leaves_open_is_ended(what: str) -> None:
    path, content, encoding, status = ONLY_OURS[what]

    async with both(Recorder().methods) as ports:
        assert await raw_status(ports[1], path, content, encoding) == status
