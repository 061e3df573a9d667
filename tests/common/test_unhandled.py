"""What ends a process, what does not, and which failures harm one connection only."""

import asyncio
import gc
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from common.frame_peers import (
    LONG_MS,
    PROXY,
    Handler,
    TurnedClock,
    frame,
    raw_peer,
    serving,
)

from popmq.common.errors import PopmqError
from popmq.common.observability import HttpEndpoint, new_registry
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.step_loop import FlusherThread
from popmq.common.unhandled import MAX_LOGGED, UnhandledExceptions


@pytest.fixture(autouse=True)
def own_thread_hook() -> Iterator[None]:
    before = threading.excepthook
    yield
    threading.excepthook = before


class Ends:
    """The exceptions that would end the process, on a loop of the test's own."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.ended = asyncio.Event()
        self.unhandled = UnhandledExceptions(self._end)
        self.unhandled.install(asyncio.get_running_loop())

    def _end(self, error: BaseException) -> None:
        self.errors.append(error)
        self.ended.set()

    async def text(self) -> str:
        await self.ended.wait()
        return str(self.errors[0])


def fail(*arguments: object) -> None:
    raise RuntimeError("a planted failure")


async def test_a_failure_is_logged_with_its_traceback_and_ends_the_process_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends = Ends()
    loop = asyncio.get_running_loop()
    for _ in range(2 * MAX_LOGGED):
        loop.call_soon(fail)
    assert await ends.text() == "a planted failure"
    await asyncio.sleep(0)
    assert len(ends.errors) == 1

    critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(critical) == MAX_LOGGED
    assert critical[0].exc_info is not None


@pytest.mark.parametrize("in_work", [False, True])
async def test_a_failure_on_a_flusher_or_at_its_completion_ends_the_process(in_work: bool) -> None:
    ends = Ends()
    flusher = FlusherThread(asyncio.get_running_loop())
    answer: list[BaseException | None] = []
    if in_work:
        flusher.submit(fail, answer.append)
    else:
        flusher.submit(lambda: None, fail)
    assert await ends.text() == "a planted failure"
    assert bool(answer) is in_work
    flusher.stop()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), PopmqError("refused")])
async def test_an_error_of_the_disk_is_for_the_one_who_gave_the_work(error: Exception) -> None:
    ends = Ends()
    loop = asyncio.get_running_loop()
    flusher = FlusherThread(loop)
    future: asyncio.Future[BaseException | None] = loop.create_future()

    def work() -> None:
        raise error

    flusher.submit(work, future.set_result)
    assert await future is error
    flusher.stop()
    assert not ends.errors


async def test_what_the_world_does_to_a_connection_does_not_end_the_process() -> None:
    ends = Ends()
    loop = asyncio.get_running_loop()
    reset, full = ConnectionResetError(104, "reset"), OSError(24, "Too many open files")
    for context in (
        {"message": "Fatal read error on pipe transport", "exception": reset, "transport": 1},
        {"message": "socket.accept() out of system resource", "exception": full, "socket": 1},
        {"message": "Future exception was never retrieved", "exception": reset, "future": 1},
        {"message": "Task was destroyed but it is pending!", "task": 1},
        {"message": "Unclosed client session", "client_session": 1},
        {"message": "Exception in callback", "exception": BlockingIOError(), "handle": 1},
    ):
        loop.call_exception_handler(context)
    assert not ends.errors


@pytest.mark.parametrize("error", [AssertionError("broken"), OSError(28, "No space left")])
@pytest.mark.parametrize("where", ["handle", "task"])
async def test_an_exception_of_a_callback_or_of_a_task_ends_the_process_whatever_its_kind(
    error: Exception, where: str
) -> None:
    ends = Ends()
    context = {"message": "a failure", "exception": error, where: 1}
    asyncio.get_running_loop().call_exception_handler(context)
    assert ends.errors == [error]


def test_a_kind_that_a_library_leaves_in_its_futures_can_be_tolerated() -> None:
    class AwayError(Exception):
        pass

    async def test(tolerated: bool) -> bool:
        ends = Ends()
        if tolerated:
            ends.unhandled.tolerate(AwayError)
        asyncio.get_running_loop().create_future().set_exception(AwayError())
        gc.collect()
        return not ends.errors

    assert asyncio.run(test(True))
    assert not asyncio.run(test(False))


async def test_a_thread_that_fails_ends_the_process() -> None:
    ends = Ends()
    threading.Thread(target=fail).start()
    assert await ends.text() == "a planted failure"


# -- protocol callbacks


async def test_peers_that_reset_their_connections_do_not_end_the_process() -> None:
    ends = Ends()
    async with serving(Handler()) as address:
        host, port = address.rsplit(":", 1)
        for _ in range(20):
            peer = socket.create_connection((host, int(port)))
            peer.sendall(b"\0\0")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()  # with a reset
            await asyncio.sleep(0)
        async with raw_peer(address) as peer_after:
            await peer_after.greet()
    assert not ends.errors


async def test_a_failure_in_connection_made_ends_the_process() -> None:
    class Broken(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.close()
            fail()

    ends = Ends()
    server = await asyncio.get_running_loop().create_server(Broken, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()):
        assert await ends.text() == "a planted failure"
    server.close()


async def test_a_failure_behind_a_lost_peer_of_a_frame_server_ends_the_process() -> None:
    ends = Ends()
    async with serving(Handler(), on_lost=fail) as address:
        async with raw_peer(address) as peer:
            await peer.greet()
        assert await ends.text() == "a planted failure"


async def test_a_failure_on_what_one_peer_sends_closes_the_connection_of_that_peer_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailingClock(TurnedClock):
        fails = False

        def boot_ms(self) -> int:
            if self.fails:
                fail()
            return super().boot_ms()

    clock = FailingClock()

    ends = Ends()
    async with (
        serving(Handler(), clock=clock) as address,
        raw_peer(address) as harmed,
        raw_peer(address) as other,
    ):
        await harmed.greet()
        await other.greet()
        clock.fails = True
        harmed.writer.write(frame(Kind.PUT, 1, b"x", timeout_ms=LONG_MS))
        assert await harmed.reader.read() == b""
        clock.fails = False
        other.writer.write(frame(Kind.PUT, 1, b"x", timeout_ms=LONG_MS))
        assert await other.read() == (Kind.REPLY, 1, b"x")
    assert not ends.errors

    assert "RuntimeError: a planted failure" in caplog.text


@pytest.mark.parametrize("fails_at", [True, False])
async def test_a_failure_when_a_frame_port_is_connected_or_lost_ends_the_process(
    fails_at: bool,
) -> None:
    def on_state(connected: bool) -> None:
        if connected is fails_at:
            fail()

    ends = Ends()
    port = None
    async with serving(Handler()) as address:
        port = FramePort(address, PROXY, on_state=on_state)
        port.start()
        if fails_at:
            await ends.ended.wait()
        else:
            assert await call(port, Kind.PUT, b"x", LONG_MS) == b"x"
    assert await ends.text() == "a planted failure"
    await port.close()


@pytest.mark.parametrize("critical", [True, False])
async def test_a_reply_that_the_asker_fails_on_ends_the_process_where_replies_are_critical(
    critical: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ends = Ends()
    async with serving(Handler()) as address:
        port = FramePort(address, PROXY, critical_replies=critical)
        port.start()
        port.request(Kind.PUT, b"x", LONG_MS, fail)
        assert await call(port, Kind.PUT, b"y", LONG_MS) == b"y"
        assert bool(ends.errors) is critical
        await port.close()

    assert "RuntimeError: a planted failure" in caplog.text


async def test_a_frame_port_that_cannot_go_on_connecting_ends_the_process() -> None:
    class Broken(FramePort):
        async def _open(self, connection: object) -> None:
            fail()

    ends = Ends()
    port = Broken("127.0.0.1:1", PROXY)
    port.start()
    assert await ends.text() == "a planted failure"
    await port.close()


async def test_a_page_over_http_that_fails_harms_no_other_page(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def ready() -> tuple[bool, dict[str, object]]:
        raise RuntimeError("a planted failure")

    ends = Ends()
    endpoint = HttpEndpoint("127.0.0.1", 0, new_registry(), ready, "broker")
    where = f"http://127.0.0.1:{await endpoint.start()}"

    def look() -> tuple[int, int]:
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{where}/readyz", timeout=10)
        refused.value.close()
        with urlopen(f"{where}/livez", timeout=10) as reply:
            return refused.value.code, reply.status

    assert await asyncio.to_thread(look) == (500, 200)
    await endpoint.stop()
    assert not ends.errors

    assert "RuntimeError: a planted failure" in caplog.text
