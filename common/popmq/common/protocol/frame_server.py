"""Serves a `Port` to peers over frames (TCP and unix sockets).

Every request is answered once or its asker is gone; when an asker cancels or its connection
ends, the port is told, so that a waiting pop is given up (ARCHITECTURE D5).
"""

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from functools import partial

from popmq.common.clock import Clock, SystemClock
from popmq.common.errors import Code, DeadlineExceeded, PopmqError, Refused, TooManyRequests
from popmq.common.listener_close import stop_listening
from popmq.common.protocol.frames import (
    CANCEL,
    DEFAULT_SETTINGS,
    ERROR,
    FIRST_REQUEST_KIND,
    FRAME_OVERHEAD,
    HELLO,
    REPLY,
    Address,
    FrameConnection,
    FrameError,
    FrameSettings,
    Hello,
    encode_hello,
    peer_name,
)
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.protocol.payload import encode_error

logger = logging.getLogger(__name__)

_REQUESTS = {int(kind): kind for kind in Kind if kind >= FIRST_REQUEST_KIND}
_POP = int(Kind.POP)
_NO_ID = -1  # the port was asked and has not returned its id yet
_ANSWERED_LIMIT = 4_096  # answered pops that a CANCEL on its way may still name


class FrameServer:
    """Listens on any number of addresses and hands each request to `port`.

    `hello` is what the next peer is told and may be replaced, at a new epoch for example.
    `on_lost` hears whose connection ended.
    """

    def __init__(
        self,
        port: Port,
        hello: Hello,
        *,
        clock: Clock | None = None,
        settings: FrameSettings = DEFAULT_SETTINGS,
        on_lost: Callable[[Hello], None] | None = None,
    ) -> None:
        self.port = port
        self.hello = hello
        self.clock = clock or SystemClock()
        self.settings = settings
        self.connections: set[_ServerConnection] = set()
        self.stopping = False
        self.requests = 0
        self.refused = 0  # by a bound
        self.on_lost = on_lost or (lambda peer: None)
        self._listeners: list[asyncio.Server] = []
        self._sockets: list[tuple[str, int]] = []  # path and inode, to remove only our own

    async def listen(self, address: str) -> str:
        """Accept peers at `address`; returns it with the port that was taken for port 0.

        A socket file that nobody listens on is replaced; OSError if somebody does.
        """
        where = Address.parse(address)
        loop = asyncio.get_running_loop()
        if where.path:
            sock = _bind_unix(where.path)
            self._sockets.append((where.path, os.stat(where.path).st_ino))
            listener = await loop.create_unix_server(self._accept, sock=sock)
        else:
            listener = await loop.create_server(self._accept, where.host, where.port)
            where = Address(where.host, listener.sockets[0].getsockname()[1])
        self._listeners.append(listener)
        return str(where)

    async def stop(self) -> None:
        """Cancel what is in flight, close every connection and remove the socket files."""
        self.stopping = True
        for listener in self._listeners:
            await stop_listening(listener)
        for connection in list(self.connections):
            connection.close("the server stops")
        if self.connections:
            await asyncio.wait([connection.lost for connection in self.connections])
        for listener in self._listeners:
            await listener.wait_closed()
        for path, inode in self._sockets:
            _remove_socket(path, inode)

    @property
    def in_flight(self) -> int:
        return sum(connection.in_flight for connection in self.connections)

    def _accept(self) -> "_ServerConnection":
        return _ServerConnection(self)


class _ServerConnection(FrameConnection):
    def __init__(self, server: FrameServer) -> None:
        super().__init__(server.hello, server.settings)
        self._server = server
        self._port = server.port
        self._clock = server.clock
        self._max_reply = server.settings.max_frame_bytes - FRAME_OVERHEAD
        self._in_flight: dict[int, int] = {}  # the asker's id -> the port's
        self._pops: set[int] = set()  # those of them that may wait for a message
        self._answered: dict[int, int] = {}  # pops whose answer may cross with a CANCEL
        self._arrived_ms = 0
        self._greeting: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None  # while paused
        self._refused = 0  # while paused

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        server, limit = self._server, self.settings.max_connections
        if server.stopping:
            self.abort("the server stops")
            return
        full = len(server.connections) >= limit
        server.connections.add(self)
        if full:
            text = f"all {limit} connections are taken (frames.max_connections)"
            self.refuse(FrameError(Code.TOO_MANY_REQUESTS, text))
            return
        timeout_ms = self.settings.connect_timeout_ms
        late = FrameError(Code.REQUEST_TIMEOUT, f"no HELLO came within {timeout_ms} ms")
        self._greeting = self._loop.call_later(timeout_ms / 1000, self.refuse, late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        super().connection_lost(exc)
        if self.peer is not None:
            self._server.on_lost(self.peer)

    def on_hello(self, peer: Hello) -> None:
        """Our HELLO goes out only now: who has it knows that it was accepted."""
        if self._greeting is not None:
            self._greeting.cancel()
        self.send(HELLO, 0, encode_hello(self.hello))

    def on_connection_lost(self, reason: str) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        self._stop_watching()
        self._pops.clear()
        self._answered.clear()
        in_flight, self._in_flight = self._in_flight, {}
        for port_id in in_flight.values():
            if port_id != _NO_ID:
                self._give_up(port_id)

    def data_received(self, data: bytes) -> None:
        try:
            self._arrived_ms = self._clock.boot_ms()
            super().data_received(data)
        except Exception:
            # What one peer sends harms that peer's connection only.
            logger.exception("a frame connection failed", extra={"peer": peer_name(self.peer)})
            self.abort("internal error")

    def pause_writing(self) -> None:
        """The peer is slow: answers to what is in flight wait in the transport."""
        super().pause_writing()
        if not self.closing:
            self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        if self._refused and self._transport is not None and not self.closing:
            self._refused = 0
            self._transport.resume_reading()

    def frame(self, kind: int, request_id: int, timeout_ms: int, body: bytes) -> None:
        if kind in _REQUESTS:
            refusal = self._refusal(kind, request_id)
            self._server.requests += 1
            if refusal is not None:
                self._server.refused += 1
                self._say(request_id, refusal)
                self._count_refused()
                return
            # The frames before it in the same read may have taken a while.
            left_ms = timeout_ms - self._clock.boot_ms() + self._arrived_ms
            if left_ms > 0:
                self._ask(_REQUESTS[kind], request_id, left_ms, body)
            else:
                text = f"the {timeout_ms} ms of this request had passed before it was handled"
                self._say(request_id, DeadlineExceeded(text))
        elif kind == CANCEL:
            self._pops.discard(request_id)
            port_id = self._in_flight.pop(request_id, None)
            if port_id is None:  # the peer threw the answer away
                port_id = self._answered.pop(request_id, None)
            if port_id is not None:
                self._give_up(port_id)
        else:
            self.other_frame(kind, request_id, body)
            self._count_refused()

    def _refusal(self, kind: int, request_id: int) -> PopmqError | None:
        if request_id in self._in_flight:
            raise FrameError(Code.BAD_REQUEST, f"request id {request_id} is in flight already")
        settings, pops = self.settings, len(self._pops)
        if self.paused:
            return TooManyRequests(
                f"{settings.max_buffered_bytes} bytes of answers wait for {peer_name(self.peer)}: "
                "the peer has to read first (frames.max_buffered_bytes)"
            )
        if kind == _POP and pops >= settings.max_waiting:
            return TooManyRequests(
                f"{pops} receives of this connection wait for messages, no more are taken "
                "(frames.max_waiting)"
            )
        if kind != _POP and len(self._in_flight) - pops >= settings.max_in_flight:
            return TooManyRequests(
                f"{settings.max_in_flight} requests of this connection are in flight, "
                "no more are taken (frames.max_in_flight)"
            )
        return None

    def _ask(self, kind: Kind, request_id: int, left_ms: int, body: bytes) -> None:
        self._in_flight[request_id] = _NO_ID
        if kind == _POP:
            self._pops.add(request_id)
        on_reply = partial(self._reply, request_id)
        try:
            port_id = self._port.request(kind, body, left_ms, on_reply)
        except PopmqError as refusal:
            on_reply(refusal)
        except Exception:
            logger.exception(
                "a request failed", extra={"kind": kind.name, "peer": peer_name(self.peer)}
            )
            on_reply(Refused(Code.INTERNAL_ERROR, "internal error"))
        else:
            if request_id in self._in_flight:
                self._in_flight[request_id] = port_id
            elif request_id in self._answered:
                self._answered[request_id] = port_id
            elif self.closing:  # dropped while the port was being asked
                self._give_up(port_id)

    def _reply(self, request_id: int, answer: bytes | PopmqError) -> None:
        port_id = self._in_flight.pop(request_id, None)
        if port_id is None:
            return
        if request_id in self._pops:
            self._pops.discard(request_id)
            self._answered[request_id] = port_id
            if len(self._answered) > _ANSWERED_LIMIT:
                del self._answered[next(iter(self._answered))]
        self._say(request_id, answer)

    def _say(self, request_id: int, answer: bytes | PopmqError) -> None:
        if isinstance(answer, PopmqError):
            self.send(ERROR, request_id, encode_error(answer))
        elif len(answer) > self._max_reply:
            text = (
                f"the answer of {len(answer)} bytes is over the limit of "
                f"{self._max_reply} bytes (frames.max_frame_bytes)"
            )
            self.send(ERROR, request_id, encode_error(Refused(Code.PAYLOAD_TOO_LARGE, text)))
        else:
            self.send(REPLY, request_id, answer)

    def _watch(self) -> None:
        stalled_s = self.settings.max_stalled_ms / 1000
        self._stall = self._loop.call_later(stalled_s, self._look_at_peer, self.unsent_bytes_left())

    def _look_at_peer(self, left_before: int) -> None:
        """Abort if nothing left since the last look; a peer that reads may take its time."""
        if self.unsent_bytes_left() > left_before:
            self._watch()
            return
        settings = self.settings
        why = (
            f"the peer left more than {settings.max_buffered_bytes} bytes unread "
            f"(frames.max_buffered_bytes) and read nothing for {settings.max_stalled_ms} ms"
        )
        logger.warning(
            "closed a frame connection", extra={"peer": peer_name(self.peer), "why": why}
        )
        self.abort(why)

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _count_refused(self) -> None:
        """Refusals wait in the transport too: a peer that goes on asking is not heard."""
        if self.paused and self._transport is not None and not self.closing:
            self._refused += 1
            if self._refused == self.settings.max_in_flight:
                self._transport.pause_reading()

    def _give_up(self, port_id: int) -> None:
        try:
            self._port.cancel(port_id)
        except Exception:
            logger.exception(
                "a request could not be cancelled", extra={"peer": peer_name(self.peer)}
            )


def _bind_unix(path: str) -> socket.socket:
    """Only our own user may connect; the rights are set before anybody can."""
    _remove_stale_socket(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise
    return sock


def _remove_stale_socket(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "not a socket, so it is not replaced", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its queue of new connections is full: somebody listens
    raise OSError(errno.EADDRINUSE, "another process listens on this socket", path)


def _remove_socket(path: str, inode: int) -> None:
    try:
        if os.stat(path).st_ino == inode:
            os.unlink(path)
    except FileNotFoundError:
        pass
