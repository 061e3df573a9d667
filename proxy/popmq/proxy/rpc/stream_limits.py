"""The messages of bidirectional calls: each within its limit, and one long message in each turn.

A long message costs milliseconds before its handler has it, and a client may send many at once on
many streams.  So those of all streams of a method wait in one queue, in their order, while other
calls are served between them (docs/security.md).
"""

import asyncio
from collections import deque
from collections.abc import Callable

from popmq.common.errors import PopmqError
from popmq.common.quantities import KIB, MIB
from popmq.proxy.transport.interface import Call, ForwardedCall, GrpcStatus, StreamListener

LONG_BYTES = 4 * KIB
WAITING_LIMIT_BYTES = 16 * MIB


class StreamLimits:
    """The streams of one method. `check` raises PopmqError for a message over its limit.

    Invariant: at most WAITING_LIMIT_BYTES wait.
    """

    def __init__(
        self, check: Callable[[bytes], None], open_: Callable[[Call], StreamListener]
    ) -> None:
        self._check = check
        self._open = open_
        self._waiting: deque[tuple[_LimitedStream, bytes]] = deque()
        self._waiting_bytes = 0

    def open(self, call: Call) -> StreamListener:
        limited = _LimitedCall(call)
        return _LimitedStream(self, limited, self._open(limited))

    def read(self, stream: "_LimitedStream", message: bytes) -> None:
        try:
            self._check(message)
        except PopmqError as error:
            stream.refuse(GrpcStatus.INVALID_ARGUMENT, str(error))
        else:
            stream.listener.message(message)

    def read_later(self, stream: "_LimitedStream", message: bytes) -> bool:
        """False: too much waits already."""
        if self._waiting_bytes + len(message) > WAITING_LIMIT_BYTES:
            return False
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._read_next)
        self._waiting.append((stream, message))
        self._waiting_bytes += len(message)
        return True

    def _read_next(self) -> None:
        stream, message = self._waiting.popleft()
        self._waiting_bytes -= len(message)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._read_next)
        stream.read_waiting(message)


class _LimitedCall(ForwardedCall):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.over = False
        self._cancelled: list[Callable[[], None]] = []
        call.on_cancelled(self._cancel)

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        if self.over:
            callback()
        else:
            self._cancelled.append(callback)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        if not self.over:
            self.over = True
            self._call.finish(status, detail)

    def refuse(self, status: GrpcStatus, detail: str) -> None:
        """For its handler the client is gone."""
        if not self.over:
            self._cancel()
            self._call.finish(status, detail)

    def _cancel(self) -> None:
        if not self.over:
            self.over = True
            for callback in self._cancelled:
                callback()


class _LimitedStream:
    def __init__(self, limits: StreamLimits, call: _LimitedCall, listener: StreamListener) -> None:
        self.listener = listener
        self.refuse = call.refuse
        self._limits = limits
        self._call = call
        self._waiting = 0  # messages
        self._client_ended = False

    def message(self, data: bytes) -> None:
        if self._call.over:
            return
        if len(data) <= LONG_BYTES and not self._waiting:
            self._limits.read(self, data)
        elif self._limits.read_later(self, data):
            self._waiting += 1
        else:
            why = f"{WAITING_LIMIT_BYTES} bytes of long messages wait on this proxy already"
            self.refuse(GrpcStatus.RESOURCE_EXHAUSTED, why)

    def read_waiting(self, message: bytes) -> None:
        self._waiting -= 1
        if not self._call.over:
            self._limits.read(self, message)
        if self._client_ended and not self._waiting:
            self.half_closed()

    def half_closed(self) -> None:
        self._client_ended = True
        if not self._waiting and not self._call.over:
            self.listener.half_closed()
