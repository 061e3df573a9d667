"""One Remoting connection, as a core: frames in, calls to handlers, frames out.

Implements `ConnectionCore`.  Requests of a connection run side by side and are answered in any
order; a held pull blocks nobody.  Whatever a peer sends harms only its own connection.
"""

import logging
from collections.abc import Callable, Mapping
from itertools import count

from popmq.common.quantities import MIB
from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.remoting.frames import BadFrame, Command, FrameReader, encode
from popmq.proxy.remoting.result_codes import ResultCode
from popmq.proxy.transport.interface import GrpcStatus, OneByOne, Opening

logger = logging.getLogger(__name__)

IDLE_MS = 120_000  # without a byte and a call; RocketMQ's clients close theirs after as long
MAX_HELD_BYTES = 64 * MIB  # bodies of requests in progress
GO_AWAY_VERSION = 475  # later clients open another connection when they are told to

ASKED_LIMIT = 1_000  # requests of ours that a client has not answered yet

OnAnswer = Callable[[Command | None], None]
Dispatch = Callable[["RemotingConnection", "RemotingCall"], None]


class Outbox:
    """Frames for the socket, in the order in which they were answered."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.writable = True
        self.wake = wake  # the connection's state has changed
        self._frames: list[bytes] = []

    @property
    def has_output(self) -> bool:
        return bool(self._frames)

    def take(self) -> bytes:
        data = b"".join(self._frames)
        self._frames.clear()
        return data

    def add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.wake()

    def pump(self) -> None:
        """The socket's buffer has room; its bound is the server's (lean.max_unsent_bytes)."""


class RemotingConnection:
    def __init__(
        self,
        opening: Opening,
        limits: LeanSettings,
        dispatch: Dispatch,
        now_ms: int,
        broker_group: str = "",
    ) -> None:
        self.peer = opening.peer
        self.local = opening.local
        self.encrypted = opening.encrypted
        self.refused = ""
        self.client_id = ""  # of its last heartbeat
        self.broker_group = broker_group  # which its port stands for; "": any
        self.outbox = Outbox(opening.wake)
        self.calls: set[RemotingCall] = set()
        self.now_ms = now_ms
        self._limits = limits
        self._dispatch = dispatch
        self._reader = FrameReader()
        self._opaque = count(1)
        self._asked: dict[int, tuple[int, OnAnswer]] = {}  # until when, by number
        self._when_lost: list[Callable[[], None]] = []
        self._opened_ms = self._heard_ms = now_ms
        self._greeted = False  # a whole frame came
        self._closing = self._draining = False
        self._held_bytes = 0

    def on_lost(self, callback: Callable[[], None]) -> None:
        """`callback` runs when the connection is over."""
        self._when_lost.append(callback)

    def receive(self, data: bytes, now_ms: int) -> None:
        self.now_ms = self._heard_ms = now_ms
        try:
            for command in self._reader.feed(data):
                if self._closing:
                    return
                self._greeted = True
                if command.is_response:
                    self._answered(command)
                else:
                    self._start(command)
        except BadFrame as error:
            # Not louder: whoever breaks rules would write our log.
            logger.debug("cut off a client", extra={"peer": self.peer, "why": str(error)})
            self.lost()

    def _start(self, command: Command) -> None:
        call = RemotingCall(self, command)
        if self.refused:
            call.answer(ResultCode.SYSTEM_ERROR, self.refused)
        elif self._draining and command.version > GO_AWAY_VERSION:
            call.answer(ResultCode.GO_AWAY, "the server stops")
        elif len(self.calls) >= self._limits.max_streams:
            why = f"{self._limits.max_streams} requests are in progress (lean.max_streams)"
            call.answer(ResultCode.SYSTEM_BUSY, why)
        elif self._held_bytes + len(command.body) > MAX_HELD_BYTES:
            why = f"the requests in progress have {self._held_bytes} bytes of {MAX_HELD_BYTES}"
            call.answer(ResultCode.SYSTEM_BUSY, why)
        else:
            self.calls.add(call)
            self._held_bytes += len(command.body)
            self._dispatch(self, call)

    def request(
        self, code: int, fields: Mapping[str, str], body: bytes = b"", *, flag: int = 0
    ) -> int:
        """A request to the client, and its number: each side counts its own."""
        opaque = next(self._opaque) & 0x7FFF_FFFF
        self.outbox.add(encode(Command(code, opaque, flag, fields, body)))
        return opaque

    def ask(
        self, code: int, fields: Mapping[str, str], body: bytes, timeout_ms: int, then: OnAnswer
    ) -> None:
        """Ask the client; `then` gets its answer, or None when it gave none in time."""
        if self._closing or len(self._asked) >= ASKED_LIMIT:
            then(None)
            return
        self._asked[self.request(code, fields, body)] = self.now_ms + timeout_ms, then

    def _answered(self, command: Command) -> None:
        _, then = self._asked.pop(command.opaque, (0, None))
        if then is not None:
            then(command)

    def finished(self, call: "RemotingCall") -> None:
        if call in self.calls:
            self.calls.discard(call)
            self._held_bytes -= len(call.command.body)

    def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        for opaque, (until_ms, then) in list(self._asked.items()):
            if until_ms <= now_ms:
                del self._asked[opaque]
                then(None)
        silent_ms = now_ms - self._heard_ms
        if not self._greeted:
            if now_ms - self._opened_ms > self._limits.handshake_ms:
                self.lost()
        elif not self._reader.is_between_frames:
            if silent_ms > self._limits.stall_ms:
                self.lost()
        elif silent_ms > IDLE_MS and not self.calls:
            self.lost()

    def lost(self) -> None:
        if self._closing:
            return
        self._closing = True
        for call in tuple(self.calls):
            call.client_gone()
        self.calls.clear()
        asked, self._asked = self._asked, {}
        for _, then in asked.values():
            then(None)
        for callback in self._when_lost:
            callback()
        self.outbox.wake()

    def retire(self, why: str) -> None:
        """Clients notice a closed connection themselves and open another one."""

    def drain(self, why: str) -> None:
        self._draining = True
        self.outbox.wake()

    @property
    def done(self) -> bool:
        return self._closing or (self._draining and not self.calls)


class RemotingCall(OneByOne):
    """Implements `Call`: what a handler sends is a whole frame; nothing leaves for a one-way
    request."""

    __slots__ = (
        "_began_ms",
        "_connection",
        "_gone",
        "_is_gone",
        "_over",
        "command",
        "timeout_ms",
    )

    def __init__(self, connection: RemotingConnection, command: Command) -> None:
        self.command = command
        self.timeout_ms: int | None = None  # what the client waits, as far as is known
        self._connection = connection
        self._began_ms = connection.now_ms
        self._over = False
        self._gone: list[Callable[[], None]] = []
        self._is_gone = False

    @property
    def metadata(self) -> Mapping[str, str]:
        return {"x-mq-client-id": self._connection.client_id}

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def encrypted(self) -> bool:
        return self._connection.encrypted

    def remaining_ms(self) -> int | None:
        if self.timeout_ms is None:
            return None
        return self.timeout_ms - (self._connection.now_ms - self._began_ms)

    def answer(self, code: ResultCode, remark: str) -> None:
        self.send(self.command.answer(code, remark=remark))
        self.finish()

    def send(self, message: bytes) -> None:
        if not self._over and not self.command.is_one_way:
            self._connection.outbox.add(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        if self._over:
            return
        if status is not GrpcStatus.OK:
            self.send(self.command.answer(ResultCode.SYSTEM_ERROR, remark=detail))
        self._over = True
        self._gone.clear()
        self._connection.finished(self)
        if self._connection.done:  # it was the last one of a connection that drains
            self._connection.outbox.wake()

    def on_unread(self, callback: Callable[[], None]) -> None:
        """Never runs: no client sees its deliveries renewed, so what it has not read comes again
        when its invisible time is over."""

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        if self._is_gone:
            callback()
        else:
            self._gone.append(callback)

    def client_gone(self) -> None:
        if not self._over:
            self._over = self._is_gone = True
            for callback in self._gone:
                callback()
