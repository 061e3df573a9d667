"""The serving end: peers that break the protocol, bounds, and socket files."""

import asyncio
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from common.frame_peers import (
    BROKER,
    LONG_MS,
    PROXY,
    Handler,
    RecordingTransport,
    TurnedClock,
    asking,
    frame,
    raw_peer,
    serving,
)

from popmq.common.errors import (
    Code,
    DeadlineExceeded,
    GroupNotFound,
    PopmqError,
)
from popmq.common.protocol import frame_server, frames
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import (
    FrameSettings,
    encode_hello,
)
from popmq.common.protocol.messaging_payloads import Kind


async def test_a_failing_handler_is_logged_and_the_server_lives_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = Handler()

    def fail(body: bytes) -> bytes:
        raise ZeroDivisionError("a detail for the log only")

    handler.on_put = fail
    async with serving(handler) as bound, asking(bound) as port:
        with pytest.raises(PopmqError) as caught:
            await call(port, Kind.PUT, b"", LONG_MS)
        assert (caught.value.code, str(caught.value)) == (Code.INTERNAL_ERROR, "internal error")
        handler.on_put = bytes
        assert await call(port, Kind.PUT, b"again", LONG_MS) == b"again"

    assert "a detail for the log only" in caplog.text


async def test_an_unknown_kind_is_refused_and_the_connection_stays_usable() -> None:
    async with serving(Handler()) as bound, raw_peer(bound) as peer:
        await peer.greet()
        for kind in (9, 250):
            peer.writer.write(frame(kind, 5, b"", timeout_ms=50))
            got, request_id, body = await peer.read()
            assert (got, request_id) == (Kind.ERROR, 5)
            assert int.from_bytes(body[:4], "big") == Code.UNSUPPORTED
            assert str(kind).encode() in body[4:]
        peer.writer.write(frame(Kind.PUT, 6, b"x", timeout_ms=LONG_MS))
        assert await peer.read() == (Kind.REPLY, 6, b"x")


@pytest.mark.parametrize(
    ("first", "code", "reason"),
    [
        (b"\0\0\0\x0a\x07", Code.VERSION_UNSUPPORTED, "version 7 .* version 1"),
        (b"GET / HTTP/1.1\r\n", Code.VERSION_UNSUPPORTED, "version 47"),
        (frame(Kind.PUT, 1, b"", timeout_ms=5), Code.BAD_REQUEST, "must be HELLO, not kind 16"),
        (frame(Kind.HELLO, 0, b"{}"), Code.BAD_REQUEST, "cannot be read"),
        ((70_000).to_bytes(4, "big") + b"\1", Code.PAYLOAD_TOO_LARGE, "70000 .* 65536"),
        (
            frame(Kind.HELLO, 0, encode_hello(replace(PROXY, cluster="red"))),
            Code.FORBIDDEN,
            "proxy 'p0' belongs to cluster 'red', but broker 'b0' to cluster 'blue'",
        ),
    ],
    ids=["version", "http", "no hello", "empty hello", "oversize hello", "cluster"],
)
async def test_a_wrong_first_frame_is_refused_with_the_reason_and_closed(
    first: bytes, code: Code, reason: str
) -> None:
    async with serving(Handler()) as bound, raw_peer(bound) as peer:
        peer.writer.write(first)
        got, text = await peer.read_refusal()
        assert got == code
        assert re.search(reason, text), text


async def test_a_frame_over_the_limit_is_refused_although_more_of_it_is_on_its_way() -> None:
    settings = FrameSettings(max_frame_bytes=100_000)
    async with serving(Handler(), settings=settings) as bound, raw_peer(bound) as peer:
        await peer.greet()
        peer.writer.write(frame(Kind.PUT, 1, bytes(1 << 20), timeout_ms=LONG_MS))
        code, text = await peer.read_refusal()
        assert code == Code.PAYLOAD_TOO_LARGE
        assert "100000 bytes (frames.max_frame_bytes" in text


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.PUT])
async def test_a_second_hello_or_a_request_id_in_flight_closes_and_cancels(kind: Kind) -> None:
    handler = Handler()
    async with serving(handler) as bound, raw_peer(bound) as peer:
        await peer.greet()
        peer.writer.write(frame(Kind.POP, 1, b"", timeout_ms=LONG_MS))
        peer.writer.write(frame(kind, 1, encode_hello(PROXY)))
        code, _ = await peer.read_refusal()
        assert code == Code.BAD_REQUEST
        assert await handler.cancelled.get() == 101


async def test_a_peer_that_never_says_hello_is_closed() -> None:
    settings = FrameSettings(connect_timeout_ms=20)
    async with serving(Handler(), settings=settings) as bound, raw_peer(bound) as peer:
        code, text = await peer.read_refusal()
        assert (code, text) == (Code.REQUEST_TIMEOUT, "no HELLO came within 20 ms")


async def test_a_connection_over_the_bound_is_refused_and_a_freed_place_can_be_taken() -> None:
    settings = FrameSettings(max_connections=1)
    async with serving(Handler(), settings=settings) as bound:
        async with raw_peer(bound) as first:
            await first.greet()
            async with raw_peer(bound) as second:
                code, text = await second.read_refusal()
                assert code == Code.TOO_MANY_REQUESTS
                assert text == "all 1 connections are taken, the fixed limit"
            first.writer.write_eof()
            assert await first.reader.read() == b""
        async with raw_peer(bound) as third:
            await third.greet()


async def test_a_request_whose_time_passed_before_it_was_handled_is_not_handled() -> None:
    handler, clock = Handler(), TurnedClock()

    def be_slow(body: bytes) -> bytes:
        clock.ms += 100
        return body

    handler.on_put = be_slow
    async with serving(handler, clock=clock) as bound, raw_peer(bound) as peer:
        await peer.greet()
        peer.writer.write(
            frame(Kind.PUT, 1, b"slow", timeout_ms=50)
            + frame(Kind.PUT, 2, b"late", timeout_ms=100)
            + frame(Kind.PUT, 3, b"good", timeout_ms=101)
        )
        assert await peer.read() == (Kind.REPLY, 1, b"slow")
        kind, request_id, body = await peer.read()
        assert (kind, request_id) == (Kind.ERROR, 2)
        assert int.from_bytes(body[:4], "big") == DeadlineExceeded.code
        assert await peer.read() == (Kind.REPLY, 3, b"good")
        handled = [handler.asked.get_nowait() for _ in range(handler.asked.qsize())]
        assert handled == [(Kind.PUT, b"slow", 50), (Kind.PUT, b"good", 1)]


async def test_a_peer_that_vanishes_cancels_what_it_waited_for() -> None:
    handler = Handler()
    async with serving(handler) as bound, raw_peer(bound) as peer:
        await peer.greet()
        peer.writer.write(frame(Kind.POP, 1, b"", timeout_ms=LONG_MS))
        await handler.asked.get()
        peer.writer.transport.abort()
        assert await handler.cancelled.get() == 101


async def test_whose_connection_ended_is_told_though_it_waited_for_nothing() -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()
    handler = Handler()
    async with serving(handler, on_lost=lambda peer, _: lost.put_nowait(peer.name)) as bound:
        async with raw_peer(bound) as silent:
            silent.writer.transport.abort()
        async with raw_peer(bound) as peer:
            await peer.greet()
            peer.writer.transport.abort()
            name = await lost.get()
    assert name == PROXY.name
    assert lost.empty()


async def test_the_receives_that_a_lost_peer_may_not_have_the_answers_of_are_named() -> None:
    lost: asyncio.Queue[list[int]] = asyncio.Queue()
    handler = Handler()
    reported_serving = serving(handler, on_lost=lambda _, answered: lost.put_nowait(list(answered)))
    async with reported_serving as bound, raw_peer(bound) as peer:
        await peer.greet()
        for number in (1, 2, 3):
            peer.writer.write(frame(Kind.POP, number, b"", timeout_ms=LONG_MS))
            await handler.asked.get()
        handler.waiting[101](b"message")
        handler.waiting[103](b"message")
        assert await peer.read() == (Kind.REPLY, 1, b"message")
        peer.writer.transport.abort()
        assert await lost.get() == [101, 103]
        assert await handler.cancelled.get() == 102


async def test_a_cancel_that_crossed_with_the_answer_of_a_pop_is_told_once_and_of_others_not() -> (
    None
):
    handler = Handler()
    async with serving(handler) as bound, raw_peer(bound) as peer:
        await peer.greet()
        peer.writer.write(frame(Kind.POP, 1, b"", timeout_ms=LONG_MS))
        await handler.asked.get()
        handler.waiting[101](b"message")
        assert await peer.read() == (Kind.REPLY, 1, b"message")
        peer.writer.write(frame(Kind.PUT, 2, b"x", timeout_ms=LONG_MS))
        assert await peer.read() == (Kind.REPLY, 2, b"x")
        for request_id in (1, 2, 1):
            peer.writer.write(frame(Kind.CANCEL, request_id, b""))
        peer.writer.write(frame(Kind.PUT, 3, b"y", timeout_ms=LONG_MS))
        assert await peer.read() == (Kind.REPLY, 3, b"y")
        assert handler.cancelled.get_nowait() == 101
        assert handler.cancelled.empty()


async def test_answered_pops_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_server, "_ANSWERED_LIMIT", 2)

    handler = Handler()
    handler.on_pop = lambda: handler.waiting[handler.last_id](b"message")  # at once
    async with serving(handler) as bound, raw_peer(bound) as peer:
        await peer.greet()
        for request_id in (1, 2, 3):
            peer.writer.write(frame(Kind.POP, request_id, b"", timeout_ms=LONG_MS))
            await peer.read()
        for request_id in (1, 2, 3):
            peer.writer.write(frame(Kind.CANCEL, request_id, b""))
        assert await handler.cancelled.get() == 102
        assert await handler.cancelled.get() == 103


async def test_requests_over_the_in_flight_limit_are_refused_naming_the_setting() -> None:
    handler = Handler(Kind.ACK)
    settings = FrameSettings(max_in_flight=2)
    async with serving(handler, settings=settings) as bound, asking(bound) as port:
        waiting = [asyncio.create_task(call(port, Kind.ACK, b"", LONG_MS)) for _ in range(2)]
        await handler.asked.get()
        await handler.asked.get()
        with pytest.raises(PopmqError, match=r"\b2 requests .*frames\.max_in_flight") as caught:
            await call(port, Kind.PUT, b"", LONG_MS)
        assert caught.value.code == Code.TOO_MANY_REQUESTS
        handler.waiting[101](b"done")
        assert await waiting[0] == b"done"
        assert await call(port, Kind.PUT, b"room again", LONG_MS) == b"room again"
        handler.waiting[102](b"done")
        assert await waiting[1] == b"done"


async def test_waiting_pops_have_a_bound_of_their_own_and_leave_room_for_the_rest() -> None:
    handler = Handler()
    settings = FrameSettings(max_in_flight=1, max_waiting=2)
    async with serving(handler, settings=settings) as bound, asking(bound) as port:
        pops = [asyncio.create_task(call(port, Kind.POP, b"", LONG_MS)) for _ in range(2)]
        await handler.asked.get()
        await handler.asked.get()
        assert await call(port, Kind.PUT, b"room", LONG_MS) == b"room"
        with pytest.raises(
            PopmqError, match=r"\b2 receives .*and more may not \(fixed\)"
        ) as caught:
            await call(port, Kind.POP, b"", LONG_MS)
        assert caught.value.code == Code.TOO_MANY_REQUESTS
        pops[0].cancel()
        await handler.cancelled.get()
        handler.waiting[102](b"done")
        assert await pops[1] == b"done"
        handler.on_pop = lambda: handler.waiting.pop(handler.last_id)(b"at once")
        assert await call(port, Kind.POP, b"", LONG_MS) == b"at once"


@pytest.mark.parametrize("body_bytes", [99_986, 99_990])
async def test_a_request_or_an_answer_over_the_frame_limit_is_refused_and_nothing_is_closed(
    body_bytes: int,
) -> None:
    handler = Handler()
    handler.on_put = lambda body: body + b"12345"
    settings = FrameSettings(max_frame_bytes=100_000)
    async with (
        serving(handler, settings=settings) as bound,
        asking(bound, settings=settings) as port,
    ):
        with pytest.raises(PopmqError, match=r"frames\.max_frame_bytes") as caught:
            await call(port, Kind.PUT, bytes(body_bytes), LONG_MS)
        assert caught.value.code == Code.PAYLOAD_TOO_LARGE
        assert len(await call(port, Kind.PUT, bytes(99_985), LONG_MS)) == 99_990


async def test_a_stale_socket_file_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "frames.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(Handler(), f"unix:{path}") as bound, asking(bound) as port:
        assert await call(port, Kind.PUT, b"x", LONG_MS) == b"x"
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


async def test_a_socket_that_somebody_listens_on_is_left_alone(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/frames.sock"
    async with serving(Handler(), address) as bound:
        second = FrameServer(Handler(), BROKER)
        with pytest.raises(OSError, match="another process listens"):
            await second.listen(address)
        await second.stop()
        async with asking(bound) as port:
            assert await call(port, Kind.PUT, b"first", LONG_MS) == b"first"


async def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(OSError, match="not a socket"):
        await FrameServer(Handler(), BROKER).listen(f"unix:{path}")
    assert path.read_text() == "precious"


async def test_a_refused_peer_that_does_not_leave_is_thrown_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "LINGER_MS", 20)
    server = FrameServer(Handler(), BROKER)
    async with raw_peer(await server.listen("127.0.0.1:0")) as peer:
        peer.writer.write(frame(Kind.PUT, 1, b"", timeout_ms=LONG_MS))
        await peer.read_refusal()
        for connection in list(server.connections):
            await asyncio.wait([connection.lost])
        assert peer.writer.get_extra_info("socket") is not None
        await server.stop()


async def test_a_request_is_given_up_when_its_connection_ends_while_it_is_being_asked() -> None:
    handler = Handler()
    connection = FrameServer(handler, BROKER)._accept()
    connection.connection_made(RecordingTransport())
    connection.data_received(frame(Kind.HELLO, 0, encode_hello(PROXY)))
    connection.data_received(frame(Kind.POP, 1, b"", timeout_ms=LONG_MS))
    handler.on_pop = lambda: connection.abort("while the second pop is taken")
    connection.data_received(frame(Kind.POP, 2, b"", timeout_ms=LONG_MS))
    assert connection.closing
    assert handler.waiting == {}
    assert [handler.cancelled.get_nowait() for _ in range(2)] == [101, 102]


async def test_the_handler_answers_later_and_in_any_order() -> None:
    handler = Handler()
    async with serving(handler) as bound, asking(bound) as port:
        first = asyncio.create_task(call(port, Kind.POP, b"1", LONG_MS))
        second = asyncio.create_task(call(port, Kind.POP, b"2", LONG_MS))
        await handler.asked.get()
        await handler.asked.get()
        early, late = handler.waiting.values()
        late(b"two")
        assert await second == b"two"
        assert not first.done()
        early(b"one")
        assert await first == b"one"


async def test_a_refusal_arrives_with_its_code_and_sentence() -> None:
    handler = Handler()

    def refuse(body: bytes) -> bytes:
        raise GroupNotFound("group g is not known")

    handler.on_put = refuse
    async with serving(handler) as bound, asking(bound) as port:
        with pytest.raises(PopmqError, match="group g is not known") as caught:
            await call(port, Kind.PUT, b"", LONG_MS)
        assert caught.value.code == Code.CONSUMER_GROUP_NOT_FOUND
