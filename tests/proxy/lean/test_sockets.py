"""The lean transport over real sockets: what only asyncio and a real client can show."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from hpack import Encoder
from proxy.lean.peer import END, WHOLE, Held, Talk, echo, prefixed, request_headers

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import Call, GrpcStatus, Method, MethodType
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.outbox import MAX_TICK_BYTES
from popmq.proxy.transport.lean.server import WRITE_BUFFER_BYTES, LeanTransport

LOCAL = "127.0.0.1"
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@asynccontextmanager
async def listening(*methods: Method, **limits: Any) -> AsyncIterator[tuple[LeanTransport, int]]:
    transport = LeanTransport(methods, LOCAL, 0, limits=replace(LeanSettings(), **limits))
    port = await transport.start()
    try:
        yield transport, port
    finally:
        await transport.stop(0)


def channel(port: int, **options: int) -> Any:
    named = [(f"grpc.{name}", value) for name, value in options.items()]
    return grpc.aio.insecure_channel(f"{LOCAL}:{port}", options=[*OPTIONS, *named])


async def until(met: Callable[[], bool]) -> None:
    while not met():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.005)


def repeat(call: Call, data: bytes) -> None:
    for _ in range(40):
        call.send(data)
    call.finish()


ECHO = Method("/s/echo", MethodType.UNARY, start=echo)
REPEAT = Method("/s/repeat", MethodType.SERVER_STREAM, start=repeat)
TALK = Method("/s/talk", MethodType.BIDI_STREAM, open=Talk)


async def test_forty_messages_of_a_mebibyte_go_through_the_windows_of_a_real_client() -> None:
    async with listening(REPEAT) as (transport, port), channel(port) as client:
        body = bytes(range(256)) * 4_096
        call = client.unary_stream("/s/repeat")(body)
        assert [item == body async for item in call] == [True] * 40
        assert transport.counters.incoming_bytes == 0
        assert not transport.counters.cut_off


async def test_large_messages_go_both_ways_on_several_streams_at_once() -> None:
    async with listening(ECHO, TALK) as (_, port), channel(port) as client:
        bodies = [bytes((number,)) * (3 << 20) for number in range(6)]
        answers = asyncio.gather(*(client.unary_unary("/s/echo")(body) for body in bodies))
        talk = client.stream_stream("/s/talk")()
        for body in bodies:
            await talk.write(body)
            assert await talk.read() == body
        await talk.done_writing()
        assert await talk.code() is grpc.StatusCode.OK
        assert await answers == bodies


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_real_client_may_compress(compression: grpc.Compression) -> None:
    async with listening(ECHO) as (_, port):
        client: Any = grpc.aio.insecure_channel(f"{LOCAL}:{port}", compression=compression)
        async with client:
            body = b"again and " * 10_000
            assert await client.unary_unary("/s/echo")(body) == body


async def test_a_real_client_reads_the_sentence_of_an_error() -> None:
    detail = "Größe 100 % — zu viel\n„Zeile“"

    def refuse(call: Call, data: bytes) -> None:
        call.finish(GrpcStatus.RESOURCE_EXHAUSTED, detail)

    refused = Method("/s/refuse", MethodType.UNARY, start=refuse)
    async with listening(refused) as (_, port), channel(port) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.unary_unary("/s/refuse")(b"")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == detail


async def test_a_thousand_long_polls_of_one_client_are_freed_when_it_leaves() -> None:
    held = Held()
    method = Method("/s/held", MethodType.UNARY, start=held.start)
    async with listening(method) as (transport, port), channel(port) as client:
        calls = [client.unary_unary("/s/held")(b"") for _ in range(1_000)]
        await until(lambda: len(held.calls) == 1_000)
        for call in calls[:500]:
            call.cancel()
        await until(lambda: len(held.gone) == 500)
        await client.close()
        await until(lambda: len(held.gone) == 1_000)
        await until(lambda: transport.counters.streams == 0)
        assert not transport.counters.cut_off


async def test_a_poll_is_freed_when_its_connection_is_cut() -> None:
    held = Held()
    async with listening(Method("/s/held", MethodType.UNARY, start=held.start)) as (
        server,
        port,
    ):
        _, writer = await asyncio.open_connection(LOCAL, port)
        asked = frames.frame(frames.HEADERS, WHOLE, 1, Encoder().encode(request_headers("/s/held")))
        asked += frames.frame(frames.DATA, END, 1, prefixed(b""))
        writer.write(frames.PREFACE + frames.settings({}) + asked)
        await until(lambda: len(held.calls) == 1)
        writer.transport.abort()
        await until(lambda: len(held.gone) == 1)
        assert server.counters.streams == server.counters.connections == 0


async def test_who_is_cut_off_reads_why_even_if_it_was_still_writing() -> None:
    async with listening(ECHO) as (_, port):
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(frames.PREFACE + frames.ping(b"12345678") + b"x" * (8 << 20))
        assert b"the first frame is not SETTINGS" in await reader.read()
        writer.close()


async def test_a_server_that_stops_lets_running_calls_finish_and_sends_later_ones_elsewhere() -> (
    None
):
    held = Held()
    method = Method("/s/held", MethodType.UNARY, start=held.start)
    async with listening(method, ECHO) as (transport, port), channel(port) as client:
        running = asyncio.ensure_future(client.unary_unary("/s/held")(b""))
        await until(lambda: len(held.calls) == 1)
        stopping = asyncio.create_task(transport.stop(5))
        await until(lambda: transport.stopping)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.unary_unary("/s/echo")(b"x")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        held.calls[0].send(b"done")
        held.calls[0].finish()
        assert await running == b"done"
        await stopping


async def test_a_connection_too_many_is_told_so_and_the_others_live() -> None:
    async with listening(ECHO, max_connections=1) as (transport, port), channel(port) as first:
        assert await first.unary_unary("/s/echo")(b"x") == b"x"
        reader, writer = await asyncio.open_connection(LOCAL, port)
        answer = await reader.read()
        assert b"lean.max_connections" in answer
        writer.close()
        assert dict(transport.counters.cut_off) == {"connections": 1}
        assert await first.unary_unary("/s/echo")(b"x") == b"x"


async def test_a_connection_that_has_said_nothing_yields_to_a_new_one() -> None:
    async with listening(ECHO, max_connections=2) as (transport, port):
        oldest, held = [await asyncio.open_connection(LOCAL, port) for _ in range(2)]
        await until(lambda: len(transport.connections) == 2)
        async with channel(port) as client:
            assert await client.unary_unary("/s/echo")(b"x") == b"x"
            assert await oldest[0].read() == b""
            assert len(transport.connections) == 2
            assert transport.counters.cut_off["connections"] == 1
        held[1].close()
        oldest[1].close()


async def test_a_client_among_hundreds_of_connections_of_one_moment_is_heard() -> None:
    """The loop finds them all at once; the client has spoken before most of them came."""
    async with listening(ECHO, max_connections=100) as (transport, port):
        client = socket.create_connection((LOCAL, port))
        client.sendall(frames.PREFACE + frames.settings({}))
        idle = [socket.create_connection((LOCAL, port)) for _ in range(300)]
        await until(lambda: transport.counters.cut_off["connections"] == 201)
        client.sendall(frames.ping(b"at once?"))
        client.setblocking(False)
        read = b""
        while b"at once?" not in read:
            part = await asyncio.get_running_loop().sock_recv(client, 4_096)
            assert part, "the connection was closed"
            read += part
        for sock in (client, *idle):
            sock.close()


async def test_a_client_that_reads_nothing_fills_no_memory() -> None:
    """Its socket is full, its windows are wide open: answers wait, up to the bound."""

    async with listening(REPEAT, max_unsent_bytes=1 << 20) as (transport, port):
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.setblocking(False)
        await loop.sock_connect(sock, (LOCAL, port))
        wide = frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW})
        more = frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
        await loop.sock_sendall(sock, frames.PREFACE + wide + more)
        await until(lambda: bool(transport.connections))
        (connection,) = transport.connections
        assert connection._transport is not None
        ours = connection._transport.get_extra_info("socket")
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        block = Encoder().encode([(n, v, True) for n, v in request_headers("/s/repeat")])
        content = prefixed(b"x" * 10_000)
        for stream in range(1, 101, 2):
            before = stream // 2
            await until(lambda: transport.counters.calls == before)  # noqa: B023 - awaited here
            asked = frames.frame(frames.HEADERS, WHOLE, stream, block)
            asked += frames.frame(frames.DATA, END, stream, content)
            await loop.sock_sendall(sock, asked)
        await until(lambda: transport.counters.cut_off["unsent"] > 10)
        assert isinstance(connection.core, LeanConnection)
        assert not connection.core.outbox.writable
        assert connection.core.outbox.unsent_bytes < 2 << 20
        assert (
            connection._transport.get_write_buffer_size() < WRITE_BUFFER_BYTES + MAX_TICK_BYTES * 2
        )
        assert dict(transport.counters.cut_off).keys() == {"unsent"}
        # Once it reads, every call comes to its end.
        cutter = frames.Http2FrameReader(frames.LARGEST_FRAME_BYTES)
        ended: set[int] = set()
        while len(ended) < 50:
            data = await loop.sock_recv(sock, 1 << 16)
            for kind, flags, stream, _ in cutter.feed(data):
                if kind == frames.RST_STREAM or (kind == frames.HEADERS and flags & END):
                    ended.add(stream)
        assert connection.core.outbox.unsent_bytes == 0
        sock.close()


async def test_the_kernel_gives_a_slow_reader_no_less_time_than_we_do() -> None:
    async with listening(ECHO, stall_ms=70_000) as (transport, port):
        _, writer = await asyncio.open_connection(LOCAL, port)
        await until(lambda: bool(transport.connections))
        (connection,) = transport.connections
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 70_000
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        writer.close()


async def test_control_frames_that_are_not_read_end_in_the_bound_of_the_socket() -> None:
    limits = {"max_unsent_bytes": 1 << 16, "max_control_per_s": 1_000_000}
    async with listening(ECHO, **limits) as (transport, port):
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.setblocking(False)
        await loop.sock_connect(sock, (LOCAL, port))
        await loop.sock_sendall(sock, frames.PREFACE + frames.settings({}))
        flood = frames.ping(b"12345678") * 1_000
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe, as the kernel likes
            await flooded(loop, sock, flood)
        assert transport.counters.cut_off["unread"] == 1
        sock.close()


async def flooded(loop: asyncio.AbstractEventLoop, sock: socket.socket, data: bytes) -> None:
    while True:
        await loop.sock_sendall(sock, data)


async def test_a_browser_gets_an_answer_that_it_can_show() -> None:
    async with listening(ECHO) as (_, port):
        reader, writer = await asyncio.open_connection(LOCAL, port)
        writer.write(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 505 ")
        assert answer.endswith(b"this port speaks gRPC over HTTP/2\n")
        writer.close()


async def test_a_taken_port_is_an_error_and_may_be_shared_on_request() -> None:
    async with listening(ECHO) as (_, port):
        with pytest.raises(RuntimeError):
            await LeanTransport([ECHO], LOCAL, port).start()
    first = LeanTransport([ECHO], LOCAL, 0, reuse_port=True)
    port = await first.start()
    second = LeanTransport([ECHO], LOCAL, port, reuse_port=True)
    assert await second.start() == port
    await first.stop(0)
    await second.stop(0)
