"""One call on one HTTP/2 stream: what its handler sees of it, and its end of the flow control."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import GrpcStatus, Method, MethodType, StreamListener
from popmq.proxy.transport.lean.headers import RequestHead
from popmq.proxy.transport.lean.messages import GrpcMessageReader

logger = logging.getLogger(__name__)

MAX_REMAINING_MS = 100 * 365 * 24 * 3_600_000  # a longer deadline is none

_UNARY = MethodType.UNARY


class StreamReplies(Protocol):
    """Where the answers of a stream go."""

    def unary(self, stream: "Stream", message: bytes) -> None: ...
    def message(self, stream: "Stream", message: bytes) -> None: ...
    def messages(self, stream: "Stream", messages: Sequence[bytes]) -> bool: ...
    def end(self, stream: "Stream", status: GrpcStatus, detail: str) -> None: ...


class StreamOwner(Protocol):
    """What a stream has of its connection."""

    @property
    def peer(self) -> str: ...
    @property
    def encrypted(self) -> bool: ...
    @property
    def limits(self) -> LeanSettings: ...
    @property
    def outbox(self) -> StreamReplies: ...
    @property
    def clock_ms(self) -> Callable[[], int]: ...


class Stream:
    """Implements `interface.Call`. Belongs to its connection until both sides are done with it."""

    __slots__ = (
        "_connection",
        "_gone_callbacks",
        "_reply",
        "content_bytes",
        "deadline_ms",
        "finished",
        "gone",
        "head",
        "head_sent",
        "held_bytes",
        "inbound",
        "is_unary",
        "may_compress",
        "method",
        "opened_ms",
        "over",
        "plain_status",
        "queue",
        "queued_bytes",
        "queued_chunks",
        "reader",
        "receive_window",
        "remote_closed",
        "request",
        "stream_id",
        "trailers",
        "unread",
        "window",
    )

    def __init__(
        self,
        connection: StreamOwner,
        stream_id: int,
        head: RequestHead,
        method: Method,
        window: int,
        now_ms: int,
    ) -> None:
        self._connection = connection
        self.stream_id = stream_id
        self.head = head
        self.method = method
        self.plain_status = 0  # the HTTP status for somebody who does not speak gRPC
        self.is_unary = method.shape is _UNARY
        self.deadline_ms: int | None = None
        # What comes in.
        self.receive_window = connection.limits.stream_window_bytes
        self.content_bytes = 0
        self.opened_ms = now_ms
        self.held_bytes = 0  # of the request, while the handler has not begun
        self.remote_closed = False
        self.reader: GrpcMessageReader | None = None
        self.request: bytes | None = None
        self.inbound: StreamListener | None = None
        # What goes out.
        self.window = window
        self.head_sent = False
        self.may_compress = False
        self.queue: deque[bytes | memoryview] | None = None
        self.queued_bytes = 0
        self.queued_chunks = 0
        self.trailers: bytes | None = None
        self.finished = False
        self.gone = False
        self.over = False  # the connection knows nothing of it any more
        self._reply = b""
        self.unread: Callable[[], None] | None = None  # what follows from an answer nobody read
        self._gone_callbacks: list[Callable[[], None]] | None = None

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.head.metadata

    @property
    def peer(self) -> str:
        return self._connection.peer

    @property
    def encrypted(self) -> bool:
        return self._connection.encrypted

    def remaining_ms(self) -> int | None:
        if self.deadline_ms is None:
            return None
        return max(0, self.deadline_ms - self._connection.clock_ms())

    def send(self, message: bytes) -> None:
        if self.finished or self.gone:
            return
        if self.is_unary:
            self._reply = message
        else:
            self._connection.outbox.message(self, message)

    def send_all(self, messages: Sequence[bytes]) -> None:
        ended = self.finished or self.gone
        if ended or self.is_unary or not self._connection.outbox.messages(self, messages):
            for message in messages:
                self.send(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        if self.finished or self.gone:
            return
        self.finished = True
        self._gone_callbacks = None
        outbox = self._connection.outbox
        if self.is_unary and status is GrpcStatus.OK:
            outbox.unary(self, self._reply)
        else:
            outbox.end(self, status, detail)

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        if self.gone:
            callback()
        elif not self.finished:
            if self._gone_callbacks is None:
                self._gone_callbacks = []
            self._gone_callbacks.append(callback)

    def on_unread(self, callback: Callable[[], None]) -> None:
        self.unread = callback

    def on_client_cancelled(self) -> None:
        """The handler hears of it; nothing is sent any more."""
        if self.finished:
            self._not_read()
            return
        if self.gone:
            return
        self.gone = True
        callbacks, self._gone_callbacks = self._gone_callbacks, None
        for callback in callbacks or ():
            try:
                callback()
            except Exception:
                logger.exception("a handler failed after its client had gone")

    def _not_read(self) -> None:
        """The end of the answer still waits here."""
        unread, self.unread = self.unread, None
        if unread is not None:
            unread()

    # -- what the connection calls as the client's messages arrive

    def opened(self) -> None:
        """A bidirectional handler may talk before its client does."""
        assert self.method.open is not None
        try:
            self.inbound = self.method.open(self)
        except Exception:
            self.handler_failed()

    def message(self, message: bytes) -> None:
        if self.finished or self.gone:
            return
        if self.inbound is not None:
            try:
                self.inbound.message(message)
            except Exception:
                self.handler_failed()
        elif self.request is None:
            self.request = message
        else:
            self.finish(GrpcStatus.UNIMPLEMENTED, "this method takes one message, two came")

    def half_closed(self) -> None:
        if self.finished or self.gone:
            return
        try:
            if self.inbound is not None:
                self.inbound.half_closed()
            elif self.request is None:
                self.finish(GrpcStatus.UNIMPLEMENTED, "this method takes one message, none came")
            else:
                request, self.request = self.request, b""
                assert self.method.start is not None, f"{self.method.path} has no `start`"
                self.method.start(self, request)
        except Exception:
            self.handler_failed()

    def handler_failed(self) -> None:
        logger.exception("a handler failed", extra={"method": self.method.path})
        self.finish(GrpcStatus.INTERNAL, "internal error")
