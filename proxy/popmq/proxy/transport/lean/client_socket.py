"""One client's socket: what asyncio tells of it, TLS or plain text, and the core that reads it.

The first byte says which of the two it is, so one port takes both.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from popmq.common.errors import ConfigError
from popmq.common.protocol.frames import notice_dead_peer
from popmq.proxy.transport.lean import frames, tls
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode
from popmq.proxy.transport.lean.tls import TlsFault, TlsSession

if TYPE_CHECKING:
    from popmq.proxy.transport.lean.server import LeanTransport

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # how long a closed connection may take to hand over its last bytes
WRITE_BUFFER_BYTES = 256 << 10  # in the socket's transport; beyond it messages wait in streams
STALL_SLACK_MS = 5_000
_NO_PLAIN_TEXT = "this port takes TLS only (proxy.tls)"
_NO_ALPN = (
    f"over TLS this port speaks HTTP/2 only, which the client has to name by ALPN ({tls.ALPN})"
)


class ClientSocket(asyncio.Protocol):
    """One client's socket, and the core that reads from it."""

    def __init__(self, server: "LeanTransport", loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._clock_ms = server.clock.boot_ms
        self._transport: asyncio.Transport | None = None
        self._tls: TlsSession | None = None
        self._begun = False  # the first byte came
        self._inside = False  # `receive` runs; what it leaves is written behind it
        self._closed = False
        self._linger: asyncio.TimerHandle | None = None
        self.core = LeanConnection(
            server.methods,
            server.limits,
            server.counters,
            self._clock_ms,
            self._woken,
            max_age_ms=server.max_age_ms(),
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
            core.fail(ConnectionFault(ErrorCode.INTERNAL_ERROR, "internal error"))
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
        except ConfigError as error:
            logger.error("no certificate for a client that speaks TLS", extra={"why": str(error)})
            self._refuse("certificate", tls.NO_TLS_HERE)

    def _opened(self, session: TlsSession, data: bytes) -> bytes:
        """What the records say; nothing while the handshake goes on, or when it failed."""
        assert self._transport is not None
        began = session.established
        try:
            data = session.feed(data)
        except TlsFault as fault:
            logger.debug("TLS failed", extra={"peer": self.core.peer, "why": str(fault)})
            self._refuse("record" if session.established else "handshake", session.take())
            return b""
        if not began and session.established and session.protocol != tls.ALPN:
            self._server.counters.tls_refused["alpn"] += 1
            self.core.refused, self.core.inadequate = _NO_ALPN, True
        if answer := session.take():
            self._write(self._transport, answer)
        return data

    def _refuse(self, why: str, alert: bytes) -> None:
        assert self._transport is not None
        self._server.counters.tls_refused[why] += 1
        self._transport.write(alert)
        self.core.lost()
        self._close(self._transport)


def _host_and_port(name: object) -> str:
    if not isinstance(name, tuple) or len(name) < 2:
        return ""
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
