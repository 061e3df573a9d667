"""The asking end over real sockets: answers, deadlines, cancelling, losing the connection."""

import asyncio
import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from common.frame_peers import (
    BROKER,
    LONG_MS,
    PROXY,
    Handler,
    TurnedClock,
    asking,
    frame,
    serving,
)

from popmq.common.errors import (
    DeadlineExceeded,
    PopmqError,
    TooManyRequests,
    Unavailable,
)
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import (
    FrameSettings,
    encode_hello,
)
from popmq.common.protocol.messaging_payloads import Kind


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/frames.sock"


async def test_a_request_is_answered_over_tcp_and_unix_sockets(address: str) -> None:
    handler = Handler()
    async with serving(handler, address) as bound, asking(bound) as port:
        assert await call(port, Kind.PUT, b"hello", LONG_MS) == b"hello"
        kind, body, timeout_ms = handler.asked.get_nowait()
        assert (kind, body) == (Kind.PUT, b"hello")
        assert LONG_MS - 5_000 < timeout_ms <= LONG_MS
        assert port.connected
        assert port.peer == BROKER


async def test_eight_mebibytes_and_nothing_travel_both_ways(address: str) -> None:
    async with serving(Handler(), address) as bound, asking(bound) as port:
        large = os.urandom(8 << 20)
        assert await call(port, Kind.PUT, large, LONG_MS) == large
        assert await call(port, Kind.PUT, b"", LONG_MS) == b""


async def test_many_requests_at_once_each_get_their_own_answer() -> None:
    async with serving(Handler()) as bound, asking(bound) as port:
        bodies = [b"%d" % number for number in range(3_000)]
        calls = [call(port, Kind.PUT, body, LONG_MS) for body in bodies]
        assert await asyncio.gather(*calls) == bodies


async def test_an_asker_that_fails_on_its_answer_does_not_harm_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(answer: bytes | PopmqError) -> None:
        raise ZeroDivisionError

    async with serving(Handler()) as bound, asking(bound) as port:
        port.request(Kind.PUT, b"", LONG_MS, fail)
        assert await call(port, Kind.PUT, b"still here", LONG_MS) == b"still here"

    assert "ZeroDivisionError" in caplog.text


async def test_a_port_of_another_cluster_learns_why_it_is_not_connected() -> None:
    async with (
        serving(Handler()) as bound,
        asking(bound, replace(PROXY, cluster="red")) as port,
    ):
        with pytest.raises(Unavailable, match=r"broker b0 .* not connected.*'red'.*'blue'"):
            await call(port, Kind.PUT, b"", LONG_MS)
        assert not port.connected


async def test_an_expired_request_is_answered_once_and_cancelled_at_the_server() -> None:
    handler, clock = Handler(), TurnedClock()
    answers: list[bytes | PopmqError] = []
    async with serving(handler) as bound, asking(bound, clock=clock) as port:
        port.request(Kind.POP, b"", 500, answers.append)
        await handler.asked.get()
        (late_reply,) = handler.waiting.values()
        clock.ms += 499
        assert await call(port, Kind.PUT, b"", LONG_MS) == b""
        assert answers == []
        clock.ms += 1
        assert await handler.cancelled.get() == 101
        late_reply(b"too late")
        assert await call(port, Kind.PUT, b"", LONG_MS) == b""
        (answer,) = answers
        assert isinstance(answer, DeadlineExceeded)
        assert "broker b0 at" in str(answer)
        assert "POP within 500 ms" in str(answer)


async def test_requests_expire_in_the_order_of_their_deadlines() -> None:
    handler, clock = Handler(), TurnedClock()
    async with serving(handler) as bound, asking(bound, clock=clock) as port:
        expired: asyncio.Queue[int] = asyncio.Queue()
        for timeout_ms in (300, 100, 200):
            on_reply = partial(lambda ms, _: expired.put_nowait(ms), timeout_ms)
            port.request(Kind.POP, b"", timeout_ms, on_reply)
        for expected in (100, 200, 300):
            clock.ms += 100
            assert await expired.get() == expected
            assert expired.empty()


async def test_a_request_without_any_time_is_refused_before_it_leaves() -> None:
    handler = Handler()
    async with serving(handler) as bound, asking(bound) as port:
        with pytest.raises(DeadlineExceeded, match="nothing was done"):
            await call(port, Kind.PUT, b"", 0)
        assert handler.asked.empty()


async def test_cancelling_a_call_cancels_it_at_the_handler_and_nowhere_else() -> None:
    handler = Handler()
    async with serving(handler) as bound, asking(bound) as port:
        gone = asyncio.create_task(call(port, Kind.POP, b"gone", LONG_MS))
        stays = asyncio.create_task(call(port, Kind.POP, b"stays", LONG_MS))
        await handler.asked.get()
        await handler.asked.get()
        gone.cancel()
        assert await handler.cancelled.get() == 101
        with pytest.raises(asyncio.CancelledError):
            await gone
        handler.waiting[102](b"message")
        assert await stays == b"message"
        assert handler.cancelled.empty()


async def test_cancelling_an_answered_request_does_nothing() -> None:
    handler = Handler()
    async with serving(handler) as bound, asking(bound) as port:
        answer: asyncio.Queue[bytes | PopmqError] = asyncio.Queue()
        request_id = port.request(Kind.PUT, b"x", LONG_MS, answer.put_nowait)
        assert await answer.get() == b"x"
        port.cancel(request_id)
        assert await call(port, Kind.PUT, b"y", LONG_MS) == b"y"
        assert handler.cancelled.empty()


async def test_connection_loss_answers_all_in_flight_and_cancels_what_waits_at_the_server() -> None:
    handler = Handler()
    states: list[bool] = []
    server = FrameServer(handler, BROKER)
    bound = await server.listen("127.0.0.1:0")
    async with asking(bound, on_state=states.append) as port:
        calls = [asyncio.create_task(call(port, Kind.POP, b"", LONG_MS)) for _ in range(3)]
        for _ in calls:
            await handler.asked.get()
        await server.stop()
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, Unavailable)
            assert "broker b0 at" in str(answer)
            assert "whether it was done is unknown" in str(answer)
        assert {await handler.cancelled.get() for _ in calls} == {101, 102, 103}
        assert states == [True, False]
        with pytest.raises(Unavailable, match="not connected"):
            await call(port, Kind.PUT, b"", LONG_MS)


async def test_closing_a_port_ends_what_is_pending_and_refuses_the_rest() -> None:
    handler = Handler()
    async with serving(handler) as bound, asking(bound) as port:
        waiting = asyncio.create_task(call(port, Kind.POP, b"", LONG_MS))
        await handler.asked.get()
        await port.close()
        for ended in (waiting, call(port, Kind.PUT, b"", LONG_MS)):
            with pytest.raises(Unavailable, match="the port was closed"):
                await ended
        assert await handler.cancelled.get() == 101


async def test_a_port_reconnects_after_its_server_restarts(address: str) -> None:
    states: asyncio.Queue[bool] = asyncio.Queue()
    async with serving(Handler(), address) as bound:
        port = FramePort(bound, PROXY, on_state=states.put_nowait)
        port.start()
        assert await states.get() is True
    assert await states.get() is False
    async with serving(Handler(), bound):
        assert await states.get() is True
        assert await call(port, Kind.PUT, b"back", LONG_MS) == b"back"
        await port.close()


async def test_requests_wait_for_the_first_attempt_only(tmp_path: Path) -> None:
    async with asking(f"unix:{tmp_path}/nobody.sock") as port:
        first = call(port, Kind.PUT, b"", LONG_MS)
        with pytest.raises(Unavailable, match=r"broker b0 at unix:.* is not connected: .+"):
            await first
        answers: list[bytes | PopmqError] = []
        port.request(Kind.PUT, b"", LONG_MS, answers.append)
        assert isinstance(answers[0], Unavailable)


async def test_a_request_cancelled_during_the_first_attempt_is_never_sent() -> None:
    handler = Handler()
    async with serving(handler) as bound, asking(bound) as port:
        port.cancel(port.request(Kind.PUT, b"gone", LONG_MS, lambda _: None))
        await call(port, Kind.PUT, b"stays", LONG_MS)
        assert handler.asked.get_nowait()[1] == b"stays"
        assert handler.asked.empty()


async def test_a_port_that_was_not_started_says_so() -> None:
    with pytest.raises(Unavailable, match="not started"):
        await call(FramePort("127.0.0.1:1", PROXY), Kind.PUT, b"", LONG_MS)


async def test_a_server_that_accepts_and_says_nothing_is_given_up() -> None:
    settings = FrameSettings(connect_timeout_ms=30)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        bound = f"127.0.0.1:{silent.getsockname()[1]}"
        async with asking(bound, settings=settings) as port:
            with pytest.raises(Unavailable, match="no HELLO within 30 ms"):
                await call(port, Kind.PUT, b"", LONG_MS)


async def test_requests_over_the_pending_limit_are_refused_by_the_port() -> None:
    handler = Handler(Kind.ACK)
    settings = FrameSettings(max_pending=1)
    async with serving(handler) as bound, asking(bound, settings=settings) as port:
        waiting = asyncio.create_task(call(port, Kind.ACK, b"", LONG_MS))
        await handler.asked.get()
        with pytest.raises(TooManyRequests, match=r"1 requests .*and more may not \(fixed\)"):
            await call(port, Kind.PUT, b"", LONG_MS)
        handler.waiting[101](b"done")
        assert await waiting == b"done"


async def test_waiting_pops_leave_room_for_other_requests_of_a_port() -> None:
    handler = Handler()
    settings = FrameSettings(max_pending=1, max_waiting=2)
    async with serving(handler) as bound, asking(bound, settings=settings) as port:
        pops = [asyncio.create_task(call(port, Kind.POP, b"", LONG_MS)) for _ in range(2)]
        await handler.asked.get()
        await handler.asked.get()
        assert await call(port, Kind.PUT, b"room", LONG_MS) == b"room"
        with pytest.raises(TooManyRequests, match=r"2 receives .*and more may not \(fixed\)"):
            await call(port, Kind.POP, b"", LONG_MS)
        pops[0].cancel()
        handler.waiting[102](b"done")
        assert await pops[1] == b"done"
        handler.on_pop = lambda: handler.waiting.pop(handler.last_id)(b"at once")
        assert await call(port, Kind.POP, b"", LONG_MS) == b"at once"


async def test_a_port_refuses_what_its_peer_has_no_room_to_read(tmp_path: Path) -> None:
    async with serving(Handler(), f"unix:{tmp_path}/frames.sock") as bound:
        settings = FrameSettings(max_buffered_bytes=1 << 20)
        async with asking(bound, settings=settings) as port:
            calls = [call(port, Kind.PUT, bytes(1 << 20), LONG_MS) for _ in range(16)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, TooManyRequests)]
            assert 0 < len(refused) < 16
            assert "frames.max_buffered_bytes" in str(refused[0])
            assert await call(port, Kind.PUT, b"room again", LONG_MS) == b"room again"


async def test_a_request_that_expired_during_the_first_attempt_is_never_sent() -> None:
    handler, clock = Handler(), TurnedClock()
    async with serving(handler) as bound, asking(bound, clock=clock) as port:
        late = asyncio.create_task(call(port, Kind.PUT, b"late", 500))
        await asyncio.sleep(0)
        clock.ms += 500
        with pytest.raises(DeadlineExceeded):
            await late
        await call(port, Kind.PUT, b"stays", LONG_MS)
        assert handler.asked.get_nowait()[1] == b"stays"
        assert handler.asked.empty()


async def test_a_port_refuses_more_while_its_peer_does_not_read(tmp_path: Path) -> None:
    peers: list[asyncio.StreamWriter] = []

    async def greet_only(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(writer.transport, asyncio.Transport)
        peers.append(writer)
        writer.transport.pause_reading()
        writer.write(frame(Kind.HELLO, 0, encode_hello(BROKER)))

    address = f"unix:{tmp_path}/frames.sock"
    states: asyncio.Queue[bool] = asyncio.Queue()
    settings = FrameSettings(max_buffered_bytes=1 << 20)
    async with (
        await asyncio.start_unix_server(greet_only, address.removeprefix("unix:")),
        asking(address, settings=settings, on_state=states.put_nowait) as port,
    ):
        assert await states.get() is True
        answers: list[bytes | PopmqError] = []
        for _ in range(16):
            port.request(Kind.PUT, bytes(1 << 20), LONG_MS, answers.append)
        assert answers
        assert all(isinstance(answer, TooManyRequests) for answer in answers)
        assert port.connected
        peers[0].transport.abort()
        assert await states.get() is False


async def test_answered_requests_do_not_pile_up_until_their_deadlines() -> None:
    handler, clock = Handler(), TurnedClock()
    async with serving(handler) as bound, asking(bound, clock=clock) as port:
        waiting = asyncio.create_task(call(port, Kind.POP, b"", LONG_MS))
        await asyncio.gather(*(call(port, Kind.PUT, b"", LONG_MS) for _ in range(5_000)))
        while len(port._deadlines) > 2_000:
            await call(port, Kind.PUT, b"", LONG_MS)
        clock.ms += LONG_MS
        with pytest.raises(DeadlineExceeded):
            await waiting


async def test_attempts_back_off_and_start_over_after_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: asyncio.Queue[float] = asyncio.Queue()
    go_on = asyncio.Event()
    address = f"unix:{tmp_path}/frames.sock"

    async def pause(seconds: float) -> None:
        pauses.put_nowait(seconds)
        go_on.clear()
        await go_on.wait()

    monkeypatch.setattr(asyncio, "sleep", pause)
    states: asyncio.Queue[bool] = asyncio.Queue()
    async with asking(address, on_state=states.put_nowait):
        for expected in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
            assert await pauses.get() == expected
            go_on.set()
        await pauses.get()
        async with serving(Handler(), address):
            go_on.set()
            assert await states.get() is True
        assert await pauses.get() == 0.05
