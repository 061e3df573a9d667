"""The lean transport: a listener, its clients' sockets, and what only time tells.

The first byte of a client tells TLS from plain text, so one port takes both; the first byte
within TLS, or the same one, tells HTTP/2 from another protocol that the port may have.

Implements `interface.Transport`.  Callbacks only; no task per connection or call.
"""

import asyncio
import logging
import math
import random
import socket
from collections.abc import Callable, Iterable

from popmq.common.address import format_address
from popmq.common.clock import Clock, SystemClock
from popmq.common.disk import descriptor_limit
from popmq.common.errors import ConfigError
from popmq.common.listener_close import stop_listening
from popmq.common.loop_iteration import LoopIteration
from popmq.common.protocol.frames import notice_dead_peer
from popmq.common.settings.lean_settings import LeanSettings
from popmq.common.tls import session as tls
from popmq.common.tls.certificates import Certificates
from popmq.common.tls.session import TlsFault, TlsSession
from popmq.common.unix_socket import user_of_peer
from popmq.proxy.transport.interface import ConnectionCore, Method, Opening, OtherProtocol
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode
from popmq.proxy.transport.lean.inbox import SharedInflow
from popmq.proxy.transport.lean.messages import InflationTurns

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # how long a closed connection may take to hand over its last bytes
WRITE_BUFFER_BYTES = 256 << 10  # in the socket's transport; beyond it messages wait in streams
STALL_SLACK_MS = 5_000
_NO_PLAIN_TEXT = "this port takes TLS only (proxy.tls)"
_NO_ALPN = (
    f"over TLS this port speaks HTTP/2 only, which the client has to name by ALPN ({tls.ALPN})"
)
TICK_S = 1.0
BACKLOG = 4_096  # connections that the kernel holds until they are accepted
# asyncio accepts as many in one turn of the loop as its backlog says, and reads from none of them
# before: with more, clients that have sent SETTINGS count as silent, and descriptors run out.
ACCEPTS_PER_TURN = 32
AGE_JITTER = 0.1
STOPS = "the server stops"


class LeanTransport:
    """Serves `methods` on host:port; implements `interface.Transport`.

    Plain text, and TLS where there are `certificates`; with `tls_only` nothing but TLS.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        host: str,
        port: int,
        *,
        limits: LeanSettings | None = None,
        clock: Clock | None = None,
        reuse_port: bool = False,
        certificates: Certificates | None = None,
        tls_only: bool = False,
        turn: LoopIteration | None = None,
        other: OtherProtocol | None = None,
    ) -> None:
        self.other = other
        self.methods = {method.path: method for method in methods}
        self.limits = limits or LeanSettings()
        self.clock = clock or SystemClock()
        # The rest is for files, brokers and the other ports of this process.
        self.max_connections = min(self.limits.max_connections, descriptor_limit() // 2)
        self.counters = LeanCounters()
        self.shared = SharedInflow(self.limits, InflationTurns(_in_next_turn))
        self.connections: dict[ClientSocket, None] = {}  # the oldest first
        self.stopping = False
        self.certificates = certificates
        self.tls_only = tls_only
        self.turn = turn or LoopIteration()
        self._chance = random.Random()
        self._host = host
        self._port = port
        self._reuse_port = reuse_port
        self._listener: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    async def start(self, sock: socket.socket | None = None) -> int:
        """Raises RuntimeError when the address cannot be taken.

        `sock`, bound already, replaces the address; that of a unix socket has no port: 0.
        """
        loop = asyncio.get_running_loop()
        if sock is not None:
            # Not create_unix_server, which would remove the file that other workers serve, too.
            self._listener = await loop.create_server(
                lambda: ClientSocket(self, loop), sock=sock, backlog=BACKLOG
            )
            self._ticking = loop.call_later(TICK_S, self._tick, loop)
            return 0 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])
        try:
            self._listener = await loop.create_server(
                lambda: ClientSocket(self, loop),
                self._host,
                self._port,
                backlog=ACCEPTS_PER_TURN,
                reuse_port=self._reuse_port or None,
            )
            for listener in self._listener.sockets:
                with listener.dup() as same:
                    same.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            where = format_address(self._host, self._port)
            raise RuntimeError(f"cannot listen on {where}") from error
        self._ticking = loop.call_later(TICK_S, self._tick, loop)
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        if self._listener is None:
            return
        self.stopping = True
        await stop_listening(self._listener)
        self._emptied = asyncio.Event()
        await self._each(lambda core: core.retire(STOPS), grace_s / 2)
        await self._each(lambda core: core.drain(STOPS), grace_s / 2)
        for connection in tuple(self.connections):
            connection.cut()
        if self.connections:
            await self._wait(LINGER_S)
        if self._ticking is not None:
            self._ticking.cancel()
        await self._listener.wait_closed()
        self._listener = None

    def peers(self) -> Iterable[str]:
        """The clients' addresses."""
        return (connection.core.peer for connection in self.connections)

    def max_age_ms(self) -> int:
        """Of the next connection: not all that came together go together."""
        share = self._chance.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
        return math.ceil(self.limits.max_age_ms * share)

    def gone(self, socket: "ClientSocket") -> None:
        self.connections.pop(socket, None)
        self.counters.connections = len(self.connections)
        if self._emptied is not None and not self.connections:
            self._emptied.set()

    def cut_idle_before(self, newest: "ClientSocket") -> bool:
        """End the oldest connection that has said nothing yet; False when there is none."""
        for connection in self.connections:
            if connection is not newest and connection.is_silent:
                self.counters.cut_off["connections"] += 1
                connection.cut()
                self.gone(connection)
                return True
        return False

    async def _each(self, end: Callable[[ConnectionCore], None], limit_s: float) -> None:
        """Tell every connection, and wait until they are gone."""
        for connection in tuple(self.connections):
            end(connection.core)
            connection.flush()
        if self.connections and limit_s > 0:
            await self._wait(limit_s)

    async def _wait(self, limit_s: float) -> None:
        assert self._emptied is not None
        try:
            async with asyncio.timeout(limit_s):
                await self._emptied.wait()
        except TimeoutError:
            return

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = loop.call_later(TICK_S, self._tick, loop)
        if self.certificates is not None:
            self.certificates.refresh()
        now_ms = self.clock.boot_ms()
        for connection in tuple(self.connections):
            connection.tick(now_ms)


class ClientSocket(asyncio.Protocol):
    """One client's socket, and the core that reads from it."""

    def __init__(self, server: "LeanTransport", loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._clock_ms = server.clock.boot_ms
        self._transport: asyncio.Transport | None = None
        self._tls: TlsSession | None = None
        self._begun = False  # the first byte came
        self._chosen = False
        self._inside = False  # `receive` runs; what it leaves is written behind it
        self._closed = False
        self._linger: asyncio.TimerHandle | None = None
        http2 = LeanConnection(
            server.methods,
            server.limits,
            server.counters,
            self._clock_ms,
            self._woken,
            server.shared,
            max_age_ms=server.max_age_ms(),
        )
        self._http2: LeanConnection | None = http2  # None: it speaks another protocol
        self.core: ConnectionCore = http2

    @property
    def is_silent(self) -> bool:
        """Nothing came that says which protocol it speaks, or HTTP/2 and no SETTINGS."""
        return self._http2 is not None and not self._http2.settled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        assert self._http2 is not None
        self._transport = transport
        self.core.peer = _peer_of(transport)
        server = self._server
        server.connections[self] = None
        server.counters.connections = len(server.connections)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        # A client whose answers wait is given its time by the core, so no less here.
        give_up_ms = server.limits.stall_ms + STALL_SLACK_MS
        notice_dead_peer(transport, idle_s=30, interval_s=10, give_up_ms=give_up_ms)
        limit = server.max_connections
        if server.stopping:
            transport.abort()
        elif len(server.connections) > limit and not server.cut_idle_before(self):
            # The client reads SETTINGS before anything else.
            self._http2.outbox.control(frames.settings({}))
            why = (
                f"all {limit} connections are taken (lean.max_connections, and half of the "
                "descriptors that the process may have)"
            )
            self._http2.fail(ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, why, "connections"))

    def data_received(self, data: bytes) -> None:
        try:
            self._read(data)
        except Exception:
            self._failed()

    def _read(self, data: bytes) -> None:
        if self._closed:
            return
        if not self._begun:
            self._begun = True
            self._begin(data[0])
        session = self._tls
        if session is not None:
            data = self._opened(session, data)
        if data and not self._closed:
            if not self._chosen:
                self._chosen = True
                self._choose(data[0])
            self._receive(data)
        if session is not None and session.ended and self._transport is not None:
            self._transport.close()

    def eof_received(self) -> bool:
        return False  # closes; HTTP/2 has no half-closed connections

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._linger is not None:
            self._linger.cancel()
        try:
            self.core.lost()
        except Exception:
            logger.exception("a call failed at its end", extra={"peer": self.core.peer})
        self._server.gone(self)

    def pause_writing(self) -> None:
        self.core.outbox.writable = False

    def resume_writing(self) -> None:
        outbox = self.core.outbox
        outbox.writable = True
        try:
            outbox.pump()
        except Exception:
            self._failed()

    def tick(self, now_ms: int) -> None:
        """What only time tells."""
        try:
            self.core.tick(now_ms)
        except Exception:
            self._failed()

    def flush(self) -> None:
        """Write what there is; close when the core is done."""
        try:
            self._flush()
        except Exception:
            self._failed()

    def _flush(self) -> None:
        transport = self._transport
        if transport is None or self._closed:
            return
        if self.core.outbox.has_output:
            data = self.core.outbox.take()
            try:
                self._write(transport, data if self._tls is None else self._tls.seal(data))
            except TlsFault as fault:
                logger.debug("TLS failed", extra={"peer": self.core.peer, "why": str(fault)})
                self.cut()
            if self._closed:
                return
        if self.core.done and not self.core.outbox.has_output:
            self._close(transport)

    def cut(self) -> None:
        """End the connection now, whatever is in progress."""
        self._closed = True
        self.core.lost()
        if self._transport is not None:
            self._transport.abort()

    def _failed(self) -> None:
        """A fault of ours in what one client asked: the other clients keep their connections."""
        logger.exception("a client's connection failed", extra={"peer": self.core.peer})
        self._closed = True
        if self._transport is not None:
            self._transport.abort()  # `connection_lost` ends its calls

    # -- bytes

    def _receive(self, data: bytes) -> None:
        core = self.core
        self._inside = True
        try:
            core.receive(data, self._clock_ms())
        except Exception:
            logger.exception("the lean transport failed", extra={"peer": core.peer})
            if self._http2 is None:
                self.cut()
            else:
                self._http2.fail(ConnectionFault(ErrorCode.INTERNAL_ERROR, "internal error"))
        self._inside = False
        if core.outbox.has_output or core.done:
            self.flush()

    def _write(self, transport: asyncio.Transport, data: bytes) -> None:
        transport.write(data)
        if transport.get_write_buffer_size() > self._server.limits.max_unsent_bytes:
            self._server.counters.cut_off["unread"] += 1
            self.cut()

    def _woken(self) -> None:
        if not self._inside:
            self._server.turn.call_at_end(self.flush)

    def _close(self, transport: asyncio.Transport) -> None:
        """Only our half at first: closing with bytes unread resets the socket, and the GOAWAY
        would be lost."""
        self._closed = True
        try:
            if self._tls is not None:
                transport.write(self._tls.close())
            transport.write_eof()
        except OSError:  # the client has gone meanwhile
            transport.abort()
        self._linger = self._loop.call_later(LINGER_S, transport.abort)

    # -- which protocol

    def _choose(self, first: int) -> None:
        """By the first byte, within TLS if there is any; ALPN has named HTTP/2 already, or not."""
        assert self._transport is not None
        assert self._http2 is not None
        named = self._tls is not None and self._tls.protocol == tls.ALPN
        other = self._server.other
        if other is not None and first in other.first_bytes and not named:
            local = self._transport.get_extra_info("sockname")
            address = (str(local[0]), int(local[1]))
            opening = Opening(self.core.peer, address, self._woken, self._tls is not None)
            refused = self.core.refused
            self.core, self._http2 = other.open(opening), None
            self.core.refused = refused
        elif self._tls is not None and not named:
            self._server.counters.tls_refused["alpn"] += 1
            self._http2.refused, self._http2.inadequate = _NO_ALPN, True

    # -- TLS or not

    def _begin(self, first: int) -> None:
        server = self._server
        if first != tls.HANDSHAKE:
            if server.tls_only:
                server.counters.tls_refused["plain"] += 1
                self.core.refused = _NO_PLAIN_TEXT
            return
        if server.certificates is None:
            self._refuse("off", tls.NO_TLS_HERE)
            return
        try:
            self._tls = TlsSession(server.certificates.context())
            assert self._http2 is not None, "nothing is chosen before the first byte"
            self._http2.encrypted = True
        except ConfigError as error:
            logger.error("no certificate for a client that speaks TLS", extra={"why": str(error)})
            self._refuse("certificate", tls.NO_TLS_HERE)

    def _opened(self, session: TlsSession, data: bytes) -> bytes:
        """What the records say; nothing while the handshake goes on, or when it failed."""
        assert self._transport is not None
        try:
            data = session.feed(data)
        except TlsFault as fault:
            logger.debug("TLS failed", extra={"peer": self.core.peer, "why": str(fault)})
            self._refuse("record" if session.established else "handshake", session.take())
            return b""
        if answer := session.take():
            self._write(self._transport, answer)
        return data

    def _refuse(self, why: str, alert: bytes) -> None:
        assert self._transport is not None
        self._server.counters.tls_refused[why] += 1
        self._transport.write(alert)
        self.core.lost()
        self._close(self._transport)


def _in_next_turn(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)


def _peer_of(transport: asyncio.Transport) -> str:
    """Its address, or over a unix socket the user and process."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        return user_of_peer(sock)
    return _host_and_port(transport.get_extra_info("peername"))


def _host_and_port(name: object) -> str:
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    host, port = name[:2]
    return format_address(host, port)
