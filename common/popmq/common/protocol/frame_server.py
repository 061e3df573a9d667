"""Serves a `Port` to peers over frames (TCP and unix sockets).

Every request is answered once or its asker is gone; when an asker cancels or its connection
ends, the port is told, so that a waiting pop is given up (ARCHITECTURE D5).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from popmq.common.clock import Clock, SystemClock
from popmq.common.errors import (
    Code,
    ConfigError,
    DeadlineExceeded,
    PopmqError,
    Refused,
    TooManyRequests,
)
from popmq.common.listener_close import stop_listening
from popmq.common.protocol.claimed_identity import SLAVE_KINDS, checked_kinds, foreign
from popmq.common.protocol.frames import (
    CANCEL,
    DEFAULT_SETTINGS,
    ERROR,
    FIRST_REQUEST_KIND,
    FRAME_OVERHEAD,
    REPLY,
    Address,
    FrameConnection,
    FrameError,
    FrameSettings,
    Hello,
    ProcessRole,
    peer_name,
)
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.protocol.payload import encode_error
from popmq.common.unix_socket import BoundSocket

logger = logging.getLogger(__name__)

# Which requests a peer may send, by the role in its HELLO; whatever is not named is refused.
# frame_kinds.py says what each is for.
_CLUSTER_KINDS = {Kind.ROUTES, Kind.LIST_REPLICAS, Kind.FAILOVER}
_BROKER_KINDS = {
    Kind.REGISTER,
    Kind.ALTER_SYNC_STATE_SET,
    Kind.WATCH_GROUP,
    Kind.FAILOVER,
    Kind.COPY_META,
    Kind.TAKE_TIMERS,
}
_CONTROLLER_KINDS = {Kind.HAND_OVER, Kind.DESCRIBE_ROLE}
_CLIENT_KINDS = {kind for kind in Kind if FIRST_REQUEST_KIND <= kind < Kind.REGISTER} | {
    Kind.SYNC_LITE,
    Kind.READ_MESSAGE,
    Kind.SEND_BACK,
    Kind.MEMBERS,
    Kind.LEASE,
    Kind.ASK_CLIENT,
    Kind.CLIENT_REQUESTS,
}
KINDS_OF_ROLE: dict[ProcessRole, frozenset[int]] = {
    ProcessRole.PROXY: frozenset(_CLIENT_KINDS | _CLUSTER_KINDS),
    ProcessRole.BROKER: SLAVE_KINDS | _BROKER_KINDS,
    ProcessRole.CONTROLLER: frozenset(_CONTROLLER_KINDS),
    ProcessRole.TOOL: frozenset(_CLUSTER_KINDS),
}
_REQUESTS = {int(kind): kind for kind in Kind if kind >= FIRST_REQUEST_KIND}
_POP = int(Kind.POP)
_NO_ID = -1  # the port was asked and has not returned its id yet
_ANSWERED_LIMIT = 4_096  # answered pops that a CANCEL on its way may still name


def check_frame_address(address: str, settings: FrameSettings) -> None:
    """Raises ConfigError for an address of the network when peers need not prove anything."""
    if settings.secret is None and settings.secret_required and not Address.parse(address).is_local:
        raise ConfigError(
            f"{address} can be reached from other machines, and no cluster.secret_file says "
            "how peers prove that they belong here: set it for every process of the cluster "
            "(cluster.secret_required = false listens without)"
        )


class FrameServer:
    """Listens on any number of addresses and hands each request to `port`.

    `hello` is what the next peer is told and may be replaced, at a new epoch for example.
    `on_lost` gets the peer whose connection ended, and the port's ids of the receives that were
    answered on it: the peer may not have read the last of these answers.
    """

    def __init__(
        self,
        port: Port,
        hello: Hello,
        *,
        clock: Clock | None = None,
        settings: FrameSettings = DEFAULT_SETTINGS,
        on_lost: Callable[[Hello, Sequence[int]], None] | None = None,
    ) -> None:
        self.port = port
        self.hello = hello
        self.clock = clock or SystemClock()
        self.settings = settings
        self.connections: set[_ServerConnection] = set()
        self.stopping = False
        self.requests = 0
        self.refused = 0  # by a bound
        self.forbidden = 0  # peers that were not accepted, requests that their role may not send
        self.on_lost = on_lost or (lambda *_: None)
        self._listeners: list[asyncio.Server] = []
        self._sockets: list[BoundSocket] = []

    async def listen(self, address: str) -> str:
        """Accept peers at `address`; returns it with the port that was taken for port 0.

        A socket file that nobody listens on is replaced; OSError if somebody does.  Raises
        ConfigError for an address of the network when peers need not prove anything.
        """
        check_frame_address(address, self.settings)
        where = Address.parse(address)
        loop = asyncio.get_running_loop()
        if where.path:
            bound = BoundSocket(where.path)
            self._sockets.append(bound)
            listener = await loop.create_unix_server(self._accept, sock=bound.sock)
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
        for bound in self._sockets:
            bound.remove()

    @property
    def in_flight(self) -> int:
        return sum(connection.in_flight for connection in self.connections)

    def _accept(self) -> "_ServerConnection":
        return _ServerConnection(self)


class _ServerConnection(FrameConnection):
    side = "server"

    def __init__(self, server: FrameServer) -> None:
        super().__init__(server.hello, server.settings)
        self._server = server
        self._port = server.port
        self._clock = server.clock
        self._max_reply = server.settings.max_frame_bytes - FRAME_OVERHEAD
        self._kinds: frozenset[int] = frozenset()
        self._checked: frozenset[int] = frozenset()  # those of them that name their sender
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
            text = f"all {limit} connections are taken, the fixed limit"
            self.refuse(FrameError(Code.TOO_MANY_REQUESTS, text))
            return
        timeout_ms = self.settings.connect_timeout_ms
        late = FrameError(Code.REQUEST_TIMEOUT, f"no HELLO came within {timeout_ms} ms")
        self._greeting = self._loop.call_later(timeout_ms / 1000, self.refuse, late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        answered = list(self._answered.values())
        super().connection_lost(exc)
        if self.peer is not None:
            self._server.on_lost(self.peer, answered)

    def on_hello(self, peer: Hello) -> None:
        self._kinds = KINDS_OF_ROLE[peer.role]
        self._checked = checked_kinds(peer)
        if self._greeting is not None:
            self._greeting.cancel()

    def refuse(self, error: FrameError) -> None:
        if self.peer is None and error.code == Code.FORBIDDEN:
            self._server.forbidden += 1
        super().refuse(error)

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
        if kind in self._kinds:
            if kind in self._checked and (why := self._foreign(kind, body)):
                self._forbid(request_id, why)
                return
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
        elif kind in _REQUESTS:
            assert self.peer is not None, "requests come after HELLO"
            self._forbid(request_id, f"a {self.peer.role} may not send {_REQUESTS[kind].name}")
        else:
            self.other_frame(kind, request_id, body)
            self._count_refused()

    def _foreign(self, kind: int, body: bytes) -> str:
        assert self.peer is not None, "requests come after HELLO"
        return foreign(self.peer, self._server.hello, kind, body)

    def _forbid(self, request_id: int, text: str) -> None:
        self._server.forbidden += 1
        self._say(request_id, Refused(Code.FORBIDDEN, text))
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
                f"{pops} receives of this connection wait for messages, and more may not (fixed)"
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

    def _bytes_sent(self) -> int:
        """How many of the bytes that were sent the transport has got rid of."""
        assert self._transport is not None
        return self._written - self._transport.get_write_buffer_size()

    def _watch(self) -> None:
        stalled_s = self.settings.max_stalled_ms / 1000
        self._stall = self._loop.call_later(stalled_s, self._look_at_peer, self._bytes_sent())

    def _look_at_peer(self, sent_before: int) -> None:
        """Abort if nothing left since the last look; a peer that reads may take its time."""
        if self._bytes_sent() > sent_before:
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
