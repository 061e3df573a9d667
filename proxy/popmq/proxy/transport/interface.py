"""The seam between RPC handlers and whatever carries the bytes (D4).

Handlers are plain functions that are started with a `Call` and the request's bytes, answer
through the call whenever they can, and never learn which transport it is.  Bytes in, bytes
out: a handler that only forwards never decodes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol


class GrpcStatus(IntEnum):
    """The gRPC statuses that calls end with; refusals travel inside the reply."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
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

    def remaining_ms(self) -> int | None:
        """Milliseconds until the client's deadline; None when it set none."""
        ...

    def send(self, message: bytes) -> None:
        """Queue one response message. Ignored once the client is gone."""
        ...

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        """End the call. A unary call ended OK must have sent exactly one message."""
        ...

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        """`callback` runs once if the client cancels, times out or disconnects before `finish`."""
        ...


class StreamListener(Protocol):
    """What a bidirectional handler hears from its client."""

    def message(self, data: bytes) -> None: ...

    def half_closed(self) -> None:
        """The client sends nothing more; the handler may still answer, then finishes."""
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """`path` is /service/method. For BIDI_STREAM `open` is set, otherwise `start`."""

    path: str
    shape: MethodType
    start: Callable[[Call, bytes], None] | None = None
    open: Callable[[Call], StreamListener] | None = None


class Transport(Protocol):
    async def start(self) -> int:
        """Listen; return the port (useful when 0 was asked for)."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give running ones `grace_s` seconds, then cut them."""
        ...
