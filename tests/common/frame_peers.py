"""Two ends for the frame tests: a handler, a peer that speaks raw bytes, and a turned clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from popmq.common.errors import (
    Code,
)
from popmq.common.protocol.frame_port import FramePort
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import (
    DEFAULT_SETTINGS,
    Address,
    FrameConnection,
    FrameSettings,
    Hello,
    ProcessRole,
    encode_hello,
)
from popmq.common.protocol.messaging_payloads import Kind, OnReply

PROXY = Hello(role=ProcessRole.PROXY, name="p0", cluster="blue", features=("pop",), epoch=3)


BROKER = Hello(role=ProcessRole.BROKER, name="b0", cluster="blue", epoch=7)


SECONDS = 10  # a test that waits longer has failed


LONG_MS = 60_000


class TurnedClock:
    """Stands still until the test turns it."""

    def __init__(self) -> None:
        self.ms = 1_000

    def wall_ms(self) -> int:
        return self.ms

    def boot_ms(self) -> int:
        return self.ms


class Handler:
    """PUT is answered with its body at once; what `waits` does until it is cancelled."""

    def __init__(self, *waits: Kind) -> None:
        self.waits = {Kind.POP, *waits}
        self.asked: asyncio.Queue[tuple[Kind, bytes, int]] = asyncio.Queue()
        self.cancelled: asyncio.Queue[int] = asyncio.Queue()
        self.waiting: dict[int, OnReply] = {}
        self.on_put: Callable[[bytes], bytes] = bytes
        self.on_pop: Callable[[], None] = lambda: None
        self.last_id = 100

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self.last_id += 1
        self.asked.put_nowait((kind, body, timeout_ms))
        if kind in self.waits:
            self.waiting[self.last_id] = on_reply
            self.on_pop()
        else:
            on_reply(self.on_put(body))
        return self.last_id

    def cancel(self, request_id: int) -> None:
        self.waiting.pop(request_id, None)
        self.cancelled.put_nowait(request_id)


class RawPeer:
    """Speaks bytes, so that it can break the protocol; its encoding is written a second time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read(self) -> tuple[int, int, bytes]:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        rest = await self.reader.readexactly(size)
        assert rest[0] == 1
        return rest[1], int.from_bytes(rest[2:10], "big"), rest[10:]

    async def read_refusal(self) -> tuple[Code, str]:
        """The reason for closing, which must be the last the peer says."""
        kind, request_id, body = await self.read()
        assert (kind, request_id) == (Kind.ERROR, 0)
        assert await self.reader.read() == b""
        return Code(int.from_bytes(body[:4], "big")), body[4:].decode()

    async def greet(self, hello: Hello = PROXY) -> None:
        self.writer.write(frame(Kind.HELLO, 0, encode_hello(hello)))
        kind, request_id, _ = await self.read()
        assert (kind, request_id) == (Kind.HELLO, 0)


def frame(kind: int, request_id: int, body: bytes, *, timeout_ms: int | None = None) -> bytes:
    if timeout_ms is not None:
        body = timeout_ms.to_bytes(4, "big") + body
    rest = bytes([1, kind]) + request_id.to_bytes(8, "big") + body
    return len(rest).to_bytes(4, "big") + rest


@asynccontextmanager
async def serving(
    handler: Handler,
    address: str = "127.0.0.1:0",
    *,
    settings: FrameSettings = DEFAULT_SETTINGS,
    clock: TurnedClock | None = None,
    on_lost: Callable[[Hello, Sequence[int]], None] | None = None,
) -> AsyncIterator[str]:
    server = FrameServer(handler, BROKER, settings=settings, clock=clock, on_lost=on_lost)
    try:
        yield await server.listen(address)
    finally:
        await server.stop()


@asynccontextmanager
async def asking(
    address: str,
    hello: Hello = PROXY,
    *,
    settings: FrameSettings = DEFAULT_SETTINGS,
    clock: TurnedClock | None = None,
    on_state: Callable[[bool], None] | None = None,
) -> AsyncIterator[FramePort]:
    port = FramePort(
        address, hello, settings=settings, clock=clock, on_state=on_state, peer_name="broker b0"
    )
    port.start()
    try:
        yield port
    finally:
        await port.close()


@asynccontextmanager
async def raw_peer(address: str) -> AsyncIterator[RawPeer]:
    where = Address.parse(address)
    if where.path:
        reader, writer = await asyncio.open_unix_connection(where.path)
    else:
        reader, writer = await asyncio.open_connection(where.host, where.port)
    try:
        yield RawPeer(reader, writer)
    finally:
        writer.transport.abort()


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.reading = True
        self.aborted = asyncio.Event()
        self.unsent_sizes = iter(range(0))  # what the next looks at the buffer find

    def get_write_buffer_size(self) -> int:
        return next(self.unsent_sizes)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()


class PlainConnection(FrameConnection):
    def on_connection_lost(self, reason: str) -> None:
        pass
