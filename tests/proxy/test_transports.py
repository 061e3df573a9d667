"""Both transports as a real client meets them over a real channel."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from popmq.proxy.transport.grpcio_server import MAX_UNSENT, GrpcioTransport
from popmq.proxy.transport.interface import (
    Call,
    GrpcStatus,
    Method,
    MethodType,
    StreamListener,
    Transport,
)
from popmq.proxy.transport.lean.server import LeanTransport

LOCAL = "127.0.0.1"


Make = Callable[[Sequence[Method]], Transport]
# A channel to a server with these methods; Any, as its stubs know no calls of raw bytes.
Served = Callable[..., AbstractAsyncContextManager[Any]]
MAKES: dict[str, Make] = {
    "grpcio": lambda methods: GrpcioTransport(methods, LOCAL, 0),
    "lean": lambda methods: LeanTransport(methods, LOCAL, 0),
}


@pytest.fixture(params=sorted(MAKES))
def make(request: pytest.FixtureRequest) -> Make:
    return MAKES[request.param]


@pytest.fixture
def served(make: Make) -> Served:
    return partial(serving, make)


@asynccontextmanager
async def serving(make: Make, *methods: Method) -> AsyncIterator[Any]:
    transport = make(methods)
    port = await transport.start()
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    try:
        async with grpc.aio.insecure_channel(f"{LOCAL}:{port}", options=options) as channel:
            yield channel
    finally:
        await transport.stop(0)


def unary(path: str, start: Callable[[Call, bytes], None]) -> Method:
    return Method(path, MethodType.UNARY, start=start)


def echo(call: Call, data: bytes) -> None:
    call.send(data)
    call.finish()


class Echo:
    """Answers each message with itself, and ends with the client."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def message(self, data: bytes) -> None:
        self.call.send(data)

    def half_closed(self) -> None:
        self.call.send(b"bye")
        self.call.finish()


async def test_a_unary_handler_answers_at_once(served: Served) -> None:
    async with served(unary("/s/echo", echo)) as channel:
        assert await channel.unary_unary("/s/echo")(b"hello") == b"hello"


async def test_a_unary_handler_may_answer_later(served: Served) -> None:
    def start(call: Call, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, echo, call, data)

    async with served(unary("/s/later", start)) as channel:
        assert await channel.unary_unary("/s/later")(b"hello") == b"hello"


async def test_a_message_of_five_mebibytes_goes_both_ways(served: Served) -> None:
    body = b"x" * (5 << 20)

    async with served(unary("/s/echo", echo)) as channel:
        assert await channel.unary_unary("/s/echo")(body) == body


async def test_a_server_stream_keeps_its_order_and_ends_with_ok(served: Served) -> None:
    def start(call: Call, data: bytes) -> None:
        for number in range(100):
            call.send(data + str(number).encode())
        call.finish()

    async with served(Method("/s/count", MethodType.SERVER_STREAM, start=start)) as channel:
        call = channel.unary_stream("/s/count")(b"n")
        assert [item async for item in call] == [f"n{n}".encode() for n in range(100)]
        assert await call.code() is grpc.StatusCode.OK


async def test_a_half_closed_stream_is_answered_to_its_end_and_ends_with_ok(served: Served) -> None:
    async with served(Method("/s/talk", MethodType.BIDI_STREAM, open=Echo)) as channel:
        call = channel.stream_stream("/s/talk")()
        await call.write(b"one")
        assert await call.read() == b"one"
        await call.write(b"two")
        assert await call.read() == b"two"
        await call.done_writing()
        assert await call.read() == b"bye"
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_server_may_end_a_stream_while_the_client_still_talks(served: Served) -> None:
    class Rude(Echo):
        def message(self, data: bytes) -> None:
            self.call.finish(GrpcStatus.INVALID_ARGUMENT, "no settings")

    async with served(Method("/s/talk", MethodType.BIDI_STREAM, open=Rude)) as channel:
        call = channel.stream_stream("/s/talk")()
        await call.write(b"one")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "no settings"


async def test_a_server_may_talk_before_the_client_does(served: Served) -> None:
    def open_(call: Call) -> StreamListener:
        call.send(b"welcome")
        return Echo(call)

    async with served(Method("/s/talk", MethodType.BIDI_STREAM, open=open_)) as channel:
        call = channel.stream_stream("/s/talk")()
        assert await call.read() == b"welcome"
        call.cancel()


@pytest.mark.parametrize("shape", [MethodType.UNARY, MethodType.SERVER_STREAM])
async def test_a_handler_hears_once_that_its_client_cancelled(
    served: Served, shape: MethodType
) -> None:
    waiting, gone = asyncio.Event(), asyncio.Event()
    connected: list[Call] = []

    def start(call: Call, data: bytes) -> None:
        call.on_cancelled(lambda: connected.append(call))
        call.on_cancelled(gone.set)
        waiting.set()

    async with served(Method("/s/wait", shape, start=start)) as channel:
        if shape is MethodType.UNARY:
            pending: Any = channel.unary_unary("/s/wait")(b"")
        else:
            pending = channel.unary_stream("/s/wait")(b"")
        await waiting.wait()
        pending.cancel()
        await gone.wait()
        connected[0].send(b"nobody listens")
        connected[0].finish()
        assert len(connected) == 1


async def test_a_stream_handler_hears_that_its_client_disconnected(served: Served) -> None:
    gone = asyncio.Event()

    def open_(call: Call) -> StreamListener:
        call.on_cancelled(gone.set)
        return Echo(call)

    async with served(Method("/s/talk", MethodType.BIDI_STREAM, open=open_)) as channel:
        call = channel.stream_stream("/s/talk")()
        await call.write(b"here")
        assert await call.read() == b"here"
        await channel.close()
        await gone.wait()


async def test_a_handler_hears_that_the_deadline_passed(served: Served) -> None:
    gone = asyncio.Event()

    def start(call: Call, data: bytes) -> None:
        call.on_cancelled(gone.set)

    async with served(unary("/s/wait", start)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/wait")(b"", timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await gone.wait()


async def test_nothing_is_heard_of_a_client_that_got_its_answer(served: Served) -> None:
    connected: list[str] = []

    def start(call: Call, data: bytes) -> None:
        call.on_cancelled(lambda: connected.append("gone"))
        echo(call, data)

    async with served(unary("/s/echo", start)) as channel:
        await channel.unary_unary("/s/echo")(b"x")
    assert connected == []


@pytest.mark.parametrize(
    ("timeout_s", "low", "high"),
    [(None, None, None), (5, 1_000, 5_500), (1_892_159_940, 10**9, None)],
)
async def test_the_time_that_remains_is_the_clients(
    served: Served, timeout_s: float | None, low: int | None, high: int | None
) -> None:
    seen: list[int | None] = []

    def start(call: Call, data: bytes) -> None:
        seen.append(call.remaining_ms())
        echo(call, data)

    async with served(unary("/s/time", start)) as channel:
        await channel.unary_unary("/s/time")(b"", timeout=timeout_s)
    (remaining,) = seen
    if low is None:
        assert remaining is None
    else:
        # A deadline of 60 years may reach the server as one, or as none.
        assert remaining is None or remaining >= low
        assert high is None or (remaining is not None and remaining <= high)


async def test_headers_are_lower_case_text_and_the_peer_an_address(served: Served) -> None:
    seen: list[tuple[dict[str, str], str]] = []

    def start(call: Call, data: bytes) -> None:
        seen.append((dict(call.metadata), call.peer))
        echo(call, data)

    async with served(unary("/s/echo", start)) as channel:
        headers = (("x-mq-client-id", "me@1"), ("blob-bin", b"\xff\x01"))
        await channel.unary_unary("/s/echo")(b"", metadata=headers)
    ((metadata, peer),) = seen
    assert metadata["x-mq-client-id"] == "me@1"
    assert metadata["blob-bin"] == "\xff\x01"
    host, _, port = peer.rpartition(":")
    assert host == LOCAL
    assert port.isdigit()


async def test_an_unknown_method_is_unimplemented(served: Served) -> None:
    async with served(unary("/s/echo", echo)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/other")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_handler_that_fails_ends_its_call_and_not_the_server(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(call: Call, data: bytes) -> None:
        raise RuntimeError("a secret of ours")

    async with served(unary("/s/bad", broken), unary("/s/echo", echo)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/s/bad")(b"")
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert caught.value.details() == "internal error"
        assert await channel.unary_unary("/s/echo")(b"x") == b"x"

    assert "a secret of ours" in caplog.text


async def test_a_stream_handler_that_fails_on_a_message_ends_its_call(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Echo):
        def message(self, data: bytes) -> None:
            raise RuntimeError("boom")

    async with served(Method("/s/talk", MethodType.BIDI_STREAM, open=Broken)) as channel:
        call = channel.stream_stream("/s/talk")()
        await call.write(b"x")
        assert await call.code() is grpc.StatusCode.INTERNAL

    assert "boom" in caplog.text


async def test_grpcio_cuts_off_a_client_that_does_not_read() -> None:
    gone = asyncio.Event()

    def start(call: Call, data: bytes) -> None:
        call.on_cancelled(gone.set)
        for _ in range(MAX_UNSENT + 1):
            call.send(b"x")

    async with serving(
        MAKES["grpcio"], Method("/s/flood", MethodType.SERVER_STREAM, start=start)
    ) as channel:
        call = channel.unary_stream("/s/flood")(b"")
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await gone.wait()


async def test_a_transport_that_stops_cuts_what_is_left_after_its_grace(make: Make) -> None:
    gone = asyncio.Event()

    def open_(call: Call) -> StreamListener:
        call.on_cancelled(gone.set)
        return Echo(call)

    transport = make([Method("/s/talk", MethodType.BIDI_STREAM, open=open_)])
    port = await transport.start()
    async with grpc.aio.insecure_channel(f"{LOCAL}:{port}") as channel:
        call: Any = channel.stream_stream("/s/talk")()
        await call.write(b"here")
        assert await call.read() == b"here"
        await transport.stop(0.05)
        assert await call.code() is not grpc.StatusCode.OK
        await gone.wait()


@pytest.mark.more
async def test_a_burst_of_new_calls_is_answered_in_full(served: Served) -> None:
    async with served(unary("/s/echo", echo)) as channel:
        ask = channel.unary_unary("/s/echo")
        bodies = [b"%d" % number for number in range(3_000)]
        answers = await asyncio.gather(*map(ask, bodies), return_exceptions=True)
        assert answers == bodies
