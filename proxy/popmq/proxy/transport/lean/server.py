"""The lean transport: `LeanConnection` on asyncio's sockets, one write per tick of the loop.

Implements `seam.Transport`.  Callbacks only; no task per connection or call.
"""

import asyncio
import logging
from collections.abc import Iterable

from popmq.common.clock import Clock, SystemClock
from popmq.common.config import LeanSettings
from popmq.common.frames import notice_dead_peer
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode
from popmq.proxy.transport.seam import Method

logger = logging.getLogger(__name__)

TICK_S = 1.0
LINGER_S = 1.0  # how long a closed connection may take to hand over its last bytes
WRITE_BUFFER_BYTES = 256 << 10  # in the socket's transport; beyond it messages wait in streams
BACKLOG = 1_024
STALL_SLACK_MS = 5_000


class LeanTransport:
    """Serves `methods` on host:port; implements `seam.Transport`."""

    def __init__(
        self,
        methods: Iterable[Method],
        host: str,
        port: int,
        *,
        limits: LeanSettings | None = None,
        clock: Clock | None = None,
        reuse_port: bool = False,
    ) -> None:
        self.methods = {method.path: method for method in methods}
        self.limits = limits or LeanSettings()
        self.clock = clock or SystemClock()
        self.counters = LeanCounters()
        self.connections: set[_Socket] = set()
        self.stopping = False
        self._host = host
        self._port = port
        self._reuse_port = reuse_port
        self._listener: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    async def start(self) -> int:
        """Raises RuntimeError when the address cannot be taken."""
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: _Socket(self, loop),
                self._host,
                self._port,
                backlog=BACKLOG,
                reuse_port=self._reuse_port or None,
            )
        except (OSError, OverflowError) as error:
            raise RuntimeError(f"cannot listen on {self._host}:{self._port}") from error
        self._ticking = loop.call_later(TICK_S, self._tick, loop)
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        if self._listener is None:
            return
        self._listener.close()
        self.stopping = True
        self._emptied = asyncio.Event()
        for one in tuple(self.connections):
            one.core.drain()
            one.flush()
        if self.connections and grace_s > 0:
            await self._wait(grace_s)
        for one in tuple(self.connections):
            one.cut()
        if self.connections:
            await self._wait(LINGER_S)
        if self._ticking is not None:
            self._ticking.cancel()
        await self._listener.wait_closed()
        self._listener = None

    def gone(self, one: "_Socket") -> None:
        self.connections.discard(one)
        self.counters.connections = len(self.connections)
        if self._emptied is not None and not self.connections:
            self._emptied.set()

    async def _wait(self, limit_s: float) -> None:
        assert self._emptied is not None
        try:
            async with asyncio.timeout(limit_s):
                await self._emptied.wait()
        except TimeoutError:
            return

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = loop.call_later(TICK_S, self._tick, loop)
        now_ms = self.clock.boot_ms()
        for one in tuple(self.connections):
            one.core.tick(now_ms)


class _Socket(asyncio.Protocol):
    """One client's socket, and the core that reads from it."""

    def __init__(self, server: LeanTransport, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._clock_ms = server.clock.boot_ms
        self._transport: asyncio.Transport | None = None
        self._inside = False  # `receive` runs; what it leaves is written behind it
        self._closed = False
        self._linger: asyncio.TimerHandle | None = None
        self.core = LeanConnection(
            server.methods, server.limits, server.counters, self._clock_ms, self._woken
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.core.peer = _host_and_port(transport.get_extra_info("peername"))
        server = self._server
        server.connections.add(self)
        server.counters.connections = len(server.connections)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        # A client whose answers wait is given its time by the core, so no less here.
        give_up_ms = server.limits.stall_ms + STALL_SLACK_MS
        notice_dead_peer(transport, idle_s=30, interval_s=10, give_up_ms=give_up_ms)
        limit = server.limits.max_connections
        if server.stopping:
            transport.abort()
        elif len(server.connections) > limit:
            # The client reads SETTINGS before anything else.
            self.core.outbox.control(frames.settings({}))
            why = f"all {limit} connections are taken (lean.max_connections)"
            self.core.fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, why, "connections"))

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        core = self.core
        self._inside = True
        try:
            core.receive(data, self._clock_ms())
        except Exception:
            logger.exception("the lean transport failed", extra={"peer": core.peer})
            core.fail(ConnectionFault(ErrorCode.INTERNAL_ERROR, "internal error"))
        self._inside = False
        if core.outbox.has_output or core.done:
            self.flush()

    def eof_received(self) -> bool:
        return False  # closes; HTTP/2 has no half-closed connections

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._linger is not None:
            self._linger.cancel()
        self.core.lost()
        self._server.gone(self)

    def pause_writing(self) -> None:
        self.core.outbox.writable = False

    def resume_writing(self) -> None:
        outbox = self.core.outbox
        outbox.writable = True
        outbox.pump()

    def flush(self) -> None:
        """Write what there is; close when the core is done."""
        transport = self._transport
        if transport is None or self._closed:
            return
        if self.core.outbox.has_output:
            transport.write(self.core.outbox.take())
            unread = transport.get_write_buffer_size()
            if unread > self._server.limits.max_unsent_bytes:
                self._server.counters.cut_off["unread"] += 1
                self.cut()
                return
        if self.core.done and not self.core.outbox.has_output:
            self._close(transport)

    def cut(self) -> None:
        """End the connection now, whatever is in progress."""
        self._closed = True
        self.core.lost()
        if self._transport is not None:
            self._transport.abort()

    def _woken(self) -> None:
        if not self._inside:
            self._loop.call_soon(self.flush)

    def _close(self, transport: asyncio.Transport) -> None:
        """Only our half at first: closing with bytes unread resets the socket, and the GOAWAY
        would be lost."""
        self._closed = True
        try:
            transport.write_eof()
        except OSError:  # the client has gone meanwhile
            transport.abort()
        self._linger = self._loop.call_later(LINGER_S, transport.abort)


def _host_and_port(name: object) -> str:
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
