"""The seam between RPC handlers and whatever carries the bytes (D4).

Handlers are plain functions that are started with a `Call` and the request's bytes, answer
through the call whenever they can, and never learn which transport it is.  Bytes in, bytes
out: a handler that only forwards never decodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from popmq.common.errors import PopmqError

UNREAD_MS = 10_000  # an answer that left earlier than that before a disconnection was read


class GrpcStatus(IntEnum):
    """The gRPC statuses that calls end with; refusals travel inside the reply."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class MethodType(Enum):
    UNARY = "unary"
    SERVER_STREAM = "server stream"
    BIDI_STREAM = "bidirectional stream"


class Call(Protocol):
    """One RPC in progress. All methods are called on the event loop."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """Request headers, names in lower case."""
        ...

    @property
    def peer(self) -> str:
        """The client's address as host:port, or an empty string."""
        ...

    @property
    def encrypted(self) -> bool:
        """Whether the client came over TLS."""
        ...

    def remaining_ms(self) -> int | None:
        """Milliseconds until the client's deadline; None when it set none."""
        ...

    def send(self, message: bytes) -> None:
        """Queue one response message. Ignored once the client is gone."""
        ...

    def send_all(self, messages: Sequence[bytes]) -> None:
        """`send` each."""
        ...

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        """End the call. A unary call ended OK must have sent exactly one message."""
        ...

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        """`callback` runs once if the client cancels, times out or disconnects before `finish`; at
        once if it did."""
        ...

    def on_unread(self, callback: Callable[[], None]) -> None:
        """`callback` runs once if the call is finished and its client has perhaps not read the
        answer: it resets the call, or disconnects within UNREAD_MS.  Set it before `finish`.

        grpcio does not tell, so there it never runs.
        """
        ...


class OneByOne:
    """`send_all` of calls for which many messages cost what each of them does."""

    def send(self, message: bytes) -> None:
        raise NotImplementedError

    def send_all(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.send(message)


class ForwardedCall(OneByOne):
    """Hands all to another call. Who wraps calls overrides what it changes; implements Call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def metadata(self) -> Mapping[str, str]:
        return self._call.metadata

    @property
    def peer(self) -> str:
        return self._call.peer

    @property
    def encrypted(self) -> bool:
        return self._call.encrypted

    def remaining_ms(self) -> int | None:
        return self._call.remaining_ms()

    def send(self, message: bytes) -> None:
        self._call.send(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        self._call.finish(status, detail)

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        self._call.on_cancelled(callback)

    def on_unread(self, callback: Callable[[], None]) -> None:
        self._call.on_unread(callback)


class Caller(Protocol):
    """Who makes a call."""

    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def peer(self) -> str: ...


class LaneCalls(Protocol):
    """Calls that a lane took out of one read of a connection, in their order."""

    def request(self, index: int) -> bytes: ...

    def call(self, index: int) -> Call | None:
        """For an answer that is not ordinary; None: it was answered."""
        ...

    def answer(self, answers: Sequence[bytes]) -> None:
        """The one message of each, in their order, and their end; none for an empty one."""
        ...

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        """`callback` runs once if the clients of all of them are gone before their answers."""
        ...


class LaneRun(Protocol):
    """Calls that came together in what was read of a connection, which is `data`."""

    data: bytes
    client_id: str  # of the call that is taken now

    @property
    def peer(self) -> str: ...

    def new_calls(self) -> LaneCalls: ...


class Lane(Protocol):
    """Serves ordinary calls of one unary method, as many at a time as came together.

    What a lane does not recognise is for the method's `start`; both do the same.
    """

    @property
    def is_open(self) -> bool: ...

    def client_of(self, metadata: Mapping[str, str]) -> str:
        """Whose calls they are; empty if calls with that metadata are not ordinary."""
        ...

    def on_client(self, client_id: str, caller: Caller) -> None:
        """Calls of that client came."""
        ...

    def take(self, run: LaneRun, start: int, stop: int, timeout_ms: int | None) -> LaneCalls | None:
        """The calls to which the one with the message run.data[start:stop] was added, as the last;
        None: it is not ordinary.  `timeout_ms` is what its client gives it, if it does."""
        ...

    def end_run(self) -> None:
        """What was taken goes on at the end of the turn."""
        ...


class StreamListener(Protocol):
    """What a bidirectional handler hears from its client."""

    def message(self, data: bytes) -> None: ...

    def half_closed(self) -> None:
        """The client sends nothing more; the handler may still answer, then finishes."""
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """`path` is /service/method. For BIDI_STREAM `open` is set, otherwise `start`.

    `max_bytes` is that of one message, decompressed; 0: the transport's own limit.  `refusal`
    makes the messages that refuse a request; None: a reply that holds its Status alone.  `lane`
    serves what is ordinary, where the transport has lanes.
    """

    path: str
    shape: MethodType
    start: Callable[[Call, bytes], None] | None = None
    open: Callable[[Call], StreamListener] | None = None
    max_bytes: int = 0
    refusal: Callable[[bytes, PopmqError], Sequence[bytes]] | None = None
    lane: Lane | None = None


class Output(Protocol):
    """Bytes for one client's socket."""

    writable: bool  # whether the socket takes more at once

    @property
    def has_output(self) -> bool: ...

    def take(self) -> bytes: ...

    def pump(self) -> None:
        """The socket takes more again."""
        ...


class ConnectionCore(Protocol):
    """One client's connection without its socket: bytes in, bytes out, and what time tells."""

    peer: str
    refused: str  # why this client gets nothing but this sentence

    @property
    def outbox(self) -> Output: ...

    @property
    def done(self) -> bool:
        """Nothing more comes; the socket may be closed once the output is written."""
        ...

    def receive(self, data: bytes, now_ms: int) -> None: ...

    def tick(self, now_ms: int) -> None:
        """About once a second."""
        ...

    def lost(self) -> None:
        """The connection is over: every call loses its client."""
        ...

    def retire(self, why: str) -> None:
        """`drain` as soon as that loses no call."""
        ...

    def drain(self, why: str) -> None:
        """Take no new calls."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """What a connection knows of its client at its first byte; `wake` says that there is output."""

    peer: str
    local: tuple[str, int]
    wake: Callable[[], None]
    encrypted: bool = False


class OtherProtocol(Protocol):
    """A protocol beside HTTP/2 on the same port, known by the first byte of its clients."""

    first_bytes: frozenset[int]

    def open(self, opening: Opening) -> ConnectionCore: ...


class Transport(Protocol):
    async def start(self) -> int:
        """Listen; return the port (useful when 0 was asked for)."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones `grace_s` seconds, then cut them."""
        ...
