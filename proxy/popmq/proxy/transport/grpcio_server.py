"""The reference transport: grpc.aio with generic handlers, bytes in and bytes out (D4).

grpcio wants a coroutine per call; handlers answer through a `Call` whenever they can.  The
calls here are the bridge: what a handler sends is queued, and the coroutine that grpcio started
writes it out.  Nothing a handler does wrong ends the server.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from popmq.common.address import format_address
from popmq.proxy.transport.interface import GrpcStatus, Method, MethodType, OneByOne, StreamListener

logger = logging.getLogger(__name__)

MIB = 1 << 20
MAX_UNSENT = 1024  # messages of one call that wait for a client that does not read
# A cancelled stream looks half-closed until grpcio's next event says what it was.
CANCEL_LAG_S = 0.01
MAX_REMAINING_MS = 100 * 365 * 24 * 3_600_000

# New calls that wait until Python takes them; grpcio's own 1,000 cancels bursts of our clients.
MAX_NEW_CALLS = 20_000
# Clients keep idle connections for half an hour and may ping without a call; neither is abuse.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.server.max_pending_requests", MAX_NEW_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_NEW_CALLS),
)
_STATUS_CODES = {
    GrpcStatus(code.value[0]): code for code in grpc.StatusCode if code.value[0] in set(GrpcStatus)
}

Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcioTransport:
    """Serves `methods` on host:port; implements `interface.Transport`."""

    def __init__(
        self,
        methods: Iterable[Method],
        host: str,
        port: int,
        max_message_bytes: int = 130 * MIB,
    ) -> None:
        self._methods = {method.path: method for method in methods}
        self._address = format_address(host, port)
        self._max_message_bytes = max_message_bytes
        self._server: grpc.aio.Server | None = None
        self._readers: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        options = (
            *_OPTIONS,
            ("grpc.max_receive_message_length", self._max_message_bytes),
            ("grpc.max_send_message_length", self._max_message_bytes),
        )
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((_Lookup(self._methods, self._readers),))
        port = server.add_insecure_port(self._address)
        await server.start()
        self._server = server
        return port

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None
        if self._readers:
            await asyncio.wait(self._readers, timeout=1)


class _Lookup(grpc.GenericRpcHandler):
    """Path -> coroutine that serves it; grpcio answers UNIMPLEMENTED where there is none."""

    def __init__(self, methods: Mapping[str, Method], readers: set[asyncio.Task[None]]) -> None:
        self._handlers = {path: _handler(m, readers) for path, m in methods.items()}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(details.method)


def _handler(method: Method, readers: set[asyncio.Task[None]]) -> Any:
    match method.shape:
        case MethodType.UNARY:
            return grpc.unary_unary_rpc_method_handler(partial(_serve_unary, method))
        case MethodType.SERVER_STREAM:
            return grpc.unary_stream_rpc_method_handler(partial(_serve_stream, method))
        case MethodType.BIDI_STREAM:
            return grpc.stream_stream_rpc_method_handler(partial(_serve_bidi, method, readers))


async def _serve_unary(method: Method, request: bytes, context: Context) -> bytes:
    call = _UnaryCall(context)
    await _until_finished(call, _started(method, call, request))
    await _end(call, context)
    return call.reply


async def _serve_stream(method: Method, request: bytes, context: Context) -> None:
    call = _StreamCall(context)
    await _until_finished(call, _started(method, call, request))
    await _end(call, context)


async def _serve_bidi(
    method: Method, readers: set[asyncio.Task[None]], _requests: object, context: Context
) -> None:
    assert method.open is not None, f"{method.path} is a bidirectional stream without `open`"
    call = _StreamCall(context)
    # Not cancelled at the end: grpcio may still write into a read that was given up.  The read
    # returns by itself when the call is over.
    reader = asyncio.create_task(_read(method.path, method.open, call, context))
    readers.add(reader)
    reader.add_done_callback(readers.discard)
    await _until_finished(call, call.write_out())
    await _end(call, context)


async def _read(
    path: str,
    open_: Callable[["_StreamCall"], StreamListener],
    call: "_StreamCall",
    context: Context,
) -> None:
    try:
        inbound = open_(call)
        while not call.ended:
            try:
                message = await context.read()
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError):
                return
            if call.ended:
                return
            if not isinstance(message, bytes):  # grpc.aio.EOF
                await asyncio.sleep(CANCEL_LAG_S)
                if not call.ended:
                    inbound.half_closed()
                return
            inbound.message(message)
    except Exception:
        _failed(path, call)


def _started(method: Method, call: "_BaseCall", request: bytes) -> Coroutine[Any, Any, None]:
    assert method.start is not None, f"{method.path} has no `start`"
    try:
        method.start(call, request)
    except Exception:
        _failed(method.path, call)
    return call.write_out()


def _failed(path: str, call: "_BaseCall") -> None:
    logger.exception("a handler failed", extra={"method": path})
    call.finish(GrpcStatus.INTERNAL, "internal error")


async def _until_finished(call: "_BaseCall", writing: Coroutine[Any, Any, None]) -> None:
    """Write what the handler sends. grpcio cancels this coroutine when the client is gone."""
    try:
        await writing
    except BaseException:
        call.on_client_cancelled()
        raise


async def _end(call: "_BaseCall", context: Context) -> None:
    if call.status is not GrpcStatus.OK:
        await context.abort(_STATUS_CODES[call.status], call.detail)


class _BaseCall(OneByOne):
    """What unary and streaming calls share; implements `interface.Call`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._metadata: dict[str, str] | None = None
        self._gone_callbacks: list[Callable[[], None]] = []
        self._gone = False
        self._finished = False
        self.status = GrpcStatus.OK
        self.detail = ""

    @property
    def metadata(self) -> Mapping[str, str]:
        if self._metadata is None:
            pairs = self._context.invocation_metadata() or ()
            self._metadata = {str(key).lower(): _text(value) for key, value in pairs}
        return self._metadata

    @property
    def peer(self) -> str:
        return _host_and_port(self._context.peer())

    @property
    def encrypted(self) -> bool:
        return False  # this transport serves plain text only

    @property
    def ended(self) -> bool:
        return self._finished or self._gone

    def remaining_ms(self) -> int | None:
        seconds = self._context.time_remaining()
        if seconds is None or seconds * 1000 > MAX_REMAINING_MS:
            return None
        return max(0, int(seconds * 1000))

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        if self._gone:
            callback()
        elif not self._finished:
            self._gone_callbacks.append(callback)

    def on_unread(self, callback: Callable[[], None]) -> None:
        """grpcio does not tell what becomes of a call that is finished."""

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        if self.ended:
            return
        self._finished = True
        self._gone_callbacks.clear()
        self.status, self.detail = status, detail
        self._wake()

    def on_client_cancelled(self) -> None:
        if self.ended:
            return
        self._gone = True
        callbacks, self._gone_callbacks = self._gone_callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a handler failed after its client had gone")

    async def write_out(self) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError


class _UnaryCall(_BaseCall):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reply = b""

    def send(self, message: bytes) -> None:
        if not self.ended:
            self.reply = message

    async def write_out(self) -> None:
        await self._done

    def _wake(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class _StreamCall(_BaseCall):
    """Bounded: a client that leaves MAX_UNSENT messages unread is cut off."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._unsent: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def send(self, message: bytes) -> None:
        if self.ended:
            return
        if len(self._unsent) >= MAX_UNSENT:
            self._cut_off()
            return
        self._unsent.append(message)
        self._changed.set()

    async def write_out(self) -> None:
        """Until `finish`, with everything that was sent before it."""
        while True:
            while self._unsent:
                await self._context.write(self._unsent.popleft())
            if self._finished or self._gone:
                return
            self._changed.clear()
            await self._changed.wait()

    def _cut_off(self) -> None:
        self._unsent.clear()
        self.status = GrpcStatus.RESOURCE_EXHAUSTED
        self.detail = f"{MAX_UNSENT} messages wait for a client that does not read them"
        self.on_client_cancelled()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _host_and_port(peer: str) -> str:
    """grpcio's "ipv4:127.0.0.1:5" or "ipv6:%5B::1%5D:5" as host:port; "" for a unix socket."""
    scheme, _, address = peer.partition(":")
    return unquote(address) if scheme in ("ipv4", "ipv6") else ""
