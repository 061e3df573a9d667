"""One HTTP/2 connection, as a core: bytes in, calls to handlers, bytes out (RFC 9113).

Nothing here waits or looks at a clock: whoever owns it hands in what was received and the time,
and takes what is to be sent from `outbox` after every `wake`.  Whatever a peer sends, `receive`
returns; a broken rule or a passed bound leaves a GOAWAY in the outbox and `closing` set.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import UNREAD_MS, GrpcStatus, Method, MethodType
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.connection_timeouts import ConnectionTimeouts
from popmq.proxy.transport.lean.frames import (
    CONTINUATION,
    DATA,
    HEADERS,
    ConnectionFault,
    ErrorCode,
    Http2FrameReader,
    StreamFault,
)
from popmq.proxy.transport.lean.headers import HeaderBlock, HeaderDecoder, Malformed, RequestHead
from popmq.proxy.transport.lean.inbox import Inbox, SharedInflow
from popmq.proxy.transport.lean.lanes import Lanes
from popmq.proxy.transport.lean.messages import ENCODINGS
from popmq.proxy.transport.lean.outbox import Outbox
from popmq.proxy.transport.lean.stream import MAX_REMAINING_MS, Stream
from popmq.proxy.transport.token_bucket import TokenBucket

_HTTP_1_VERBS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"CONNECT ")
_HTTP_2_ONLY = "this port speaks gRPC over HTTP/2"


class Http1Peer(Exception):
    """The peer is a browser or curl; `http_1` tells it."""


def http_1(why: str) -> bytes:
    """An answer that somebody who speaks HTTP/1.1 can show; `why` or that it is the wrong port."""
    text = (why or _HTTP_2_ONLY).encode() + b"\n"
    return (
        b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\n"
        b"content-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
    )


class Preface:
    """Waits for the 24 bytes that open every HTTP/2 connection."""

    __slots__ = ("_early", "complete")

    def __init__(self) -> None:
        self._early = b""
        self.complete = False

    def feed(self, data: bytes) -> bytes:
        """What follows the preface. Raises Http1Peer, or ConnectionFault for anything else."""
        data = self._early + data
        size = min(len(data), len(frames.PREFACE))
        if data[:size] != frames.PREFACE[:size]:
            if data.startswith(_HTTP_1_VERBS):
                raise Http1Peer
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")
        self.complete = size == len(frames.PREFACE)
        self._early = b"" if self.complete else data
        return data[size:]


def greeting(limits: LeanSettings) -> bytes:
    """Our SETTINGS, and the connection's window, which SETTINGS cannot change."""
    ours = {
        frames.MAX_CONCURRENT_STREAMS: limits.max_streams,
        frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        frames.MAX_FRAME_SIZE: limits.max_frame_bytes,
        frames.MAX_HEADER_LIST_SIZE: limits.max_header_bytes,
    }
    more = limits.connection_window_bytes - frames.DEFAULT_WINDOW
    return frames.settings(ours) + (frames.window_update(0, more) if more > 0 else b"")


logger = logging.getLogger(__name__)

REMEMBERED_STREAMS = 256  # closed ones, to tell a late frame from a wrong one
CONTROL_BURST_S = 2  # a rate may be passed by that much at once
_GRPC_ONLY = b"this port speaks gRPC: POST with content-type application/grpc\n"


class LeanConnection:
    """`clock_ms` is the shell's clock, for the time that a call has left when it asks."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        limits: LeanSettings,
        counters: LeanCounters,
        clock_ms: Callable[[], int],
        wake: Callable[[], None],
        shared: SharedInflow,
        peer: str = "",
        max_age_ms: int = 0,
    ) -> None:
        self.limits = limits
        self.counters = counters
        self.clock_ms = clock_ms
        self.peer = peer
        self.encrypted = False
        self.closing = False  # a GOAWAY says why; nothing is read any more
        self.draining = False
        self.refused = ""  # why this client gets nothing but this sentence
        self.inadequate = False  # and gets it before it asks for anything
        self.outbox = Outbox(
            limits.max_unsent_bytes, counters, wake, self._closed, limits.compress_bytes
        )
        self.inbox = Inbox(limits, counters, self.outbox, self, shared)
        self.streams: dict[int, Stream] = {}
        self._wake = wake
        self._methods = methods
        self._reader = Http2FrameReader(limits.max_frame_bytes)
        self._decoder = HeaderDecoder(limits.max_header_bytes)
        self._lanes = Lanes(self, methods) if limits.lanes else None
        self._preface = Preface()
        self.settled = False  # the peer's SETTINGS came
        self.last_id = 0
        self._over: deque[int] = deque(maxlen=REMEMBERED_STREAMS)
        self._cut: deque[int] = deque(maxlen=REMEMBERED_STREAMS)  # by us: late frames are fine
        # Of the last answers that left: when, and what follows if nobody read them.
        self._unread: dict[int, tuple[int, Callable[[], None]]] = {}
        self._block = HeaderBlock(limits.max_header_bytes)
        self._now_ms = clock_ms()
        self.watch = ConnectionTimeouts(self, self._now_ms, max_age_ms)
        per_s = limits.max_control_per_s
        self._control = TokenBucket(per_s, CONTROL_BURST_S * per_s)
        self._resets = TokenBucket(
            limits.max_resets_per_s, limits.max_streams + limits.max_resets_per_s
        )

    # -- bytes in

    def receive(self, data: bytes, now_ms: int) -> None:
        self._now_ms = self.watch.heard_ms = now_ms
        try:
            if not self._preface.complete:
                data = self._greet(data)
            reader, lanes = self._reader, self._lanes
            reader.add(data)
            while not self.closing:
                try:
                    if lanes is not None and (reader.begins_call or lanes.waits):
                        lanes.run(reader, now_ms)
                    frame = reader.next()
                    if frame is None:
                        self.inbox.widen()
                        return
                    self._frame(*frame)
                except StreamFault as broken:
                    self._reset(broken)
        except ConnectionFault as fault:
            self.fail(fault)
        except Http1Peer:
            self.outbox.control(http_1(self.refused))
            self.closing = True

    def _greet(self, data: bytes) -> bytes:
        data = self._preface.feed(data)
        if self._preface.complete:
            self.outbox.control(greeting(self.limits))
            if self.inadequate:
                raise ConnectionFault(ErrorCode.INADEQUATE_SECURITY, self.refused)
        return data

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        open_id = self._block.stream_id
        if open_id and (kind != CONTINUATION or stream_id != open_id):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a frame inside of a header block")
        if kind == DATA:
            self._data(flags, stream_id, payload)
        elif kind == HEADERS:
            self._headers(flags, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(stream_id, payload)
        elif not self.settled and kind != frames.SETTINGS:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        elif kind == frames.RST_STREAM:
            self._reset_by_client(stream_id, payload)
        elif kind == CONTINUATION:
            self._continuation(flags, payload)
        else:
            self._count_control()
            self._rare(kind, flags, stream_id, payload)

    def _rare(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.PING:
            content = frames.ping_content(stream_id, payload)
            if flags & frames.ACK:
                self.watch.answered(content)
            else:
                self.outbox.control(frames.ping(content, ack=True))
        elif kind == frames.SETTINGS:
            pairs = frames.settings_content(flags, stream_id, payload)
            if not flags & frames.ACK:
                self.settled = True
                self._leave_lanes()
                self.outbox.apply_settings(pairs, self.streams)
        elif kind == frames.PRIORITY:
            frames.check_priority(stream_id, payload)
        elif kind == frames.GOAWAY:
            frames.goaway_content(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client cannot promise")

    def _window_update(self, stream_id: int, payload: bytes) -> None:
        stream = self._stream(stream_id)
        if stream is None and stream_id:
            self._expect_known(stream_id)
        increment = frames.window_content(stream_id, payload)
        if stream is not None:
            self.outbox.widen_stream(stream, increment)
        elif stream_id == 0:
            self.outbox.widen(increment)

    def _reset_by_client(self, stream_id: int, payload: bytes) -> None:
        frames.reset_content(stream_id, payload)
        self._expect_known(stream_id)
        stream = self._stream(stream_id)
        if stream is None:
            self._count_control()
            if (unread := self._unread.pop(stream_id, None)) is not None:
                unread[1]()
            return
        self._count_reset()
        stream.remote_closed = True
        self._gone(stream)

    # -- headers

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not self.settled:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if stream_id & 1 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a request on stream {stream_id}")
        if flags & ~(frames.END_STREAM | frames.END_HEADERS):
            payload = frames.headers_content(flags, stream_id, payload)
        ends = flags & frames.END_STREAM != 0
        if flags & frames.END_HEADERS:
            self._complete(stream_id, ends, payload)
        else:
            self._block.open(stream_id, ends, payload)

    def _continuation(self, flags: int, payload: bytes) -> None:
        block = self._block
        if not block.stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        block.add(payload)
        if flags & frames.END_HEADERS:
            self._complete(*block.take())

    def _complete(self, stream_id: int, ends: bool, block: bytes) -> None:
        """A whole header block: a request, or the trailers of one."""
        if stream_id <= self.last_id:
            try:
                self._trailers(self._stream(stream_id), stream_id, ends, block)
            except Malformed as error:
                raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from error
            return
        self.last_id = stream_id
        head = self.request_head(stream_id, block)
        if self.draining:
            self._cut.append(stream_id)  # the GOAWAY said that it is not looked at
        elif self._open_calls >= self.limits.max_streams:
            self.counters.cut_off["streams"] += 1
            raise StreamFault(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
        else:
            self.open_stream(stream_id, ends, head)

    def request_head(self, stream_id: int, block: bytes) -> RequestHead:
        try:
            return self._decoder.request(block)
        except Malformed as error:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, str(error)) from error

    def _trailers(self, stream: Stream | None, stream_id: int, ends: bool, block: bytes) -> None:
        if stream is None and stream_id not in self._cut:
            closed = stream_id in self._over
            code = ErrorCode.STREAM_CLOSED if closed else ErrorCode.PROTOCOL_ERROR
            raise ConnectionFault(code, f"HEADERS on stream {stream_id}, which is over")
        self._decoder.trailers(block)
        if stream is None:
            return
        if stream.remote_closed:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED, "HEADERS behind the end")
        if not ends:
            raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "trailers without an end")
        self._half_closed(stream)

    def open_stream(self, stream_id: int, ends: bool, head: RequestHead) -> None:
        stream = self.new_stream(stream_id, head, self._methods.get(head.shape.path, _UNKNOWN))
        self.counters.streams += 1
        stream.remote_closed = ends and head.shape.content_length <= 0
        if head.shape.method != b"POST":
            stream.plain_status = 405
        elif not head.shape.is_grpc:
            stream.plain_status = 415
        else:
            self._open_call(stream, head)
        if ends:
            self._half_closed(stream)

    def new_stream(self, stream_id: int, head: RequestHead, method: Method) -> Stream:
        stream = Stream(self, stream_id, head, method, self.outbox.initial_window, self._now_ms)
        self.streams[stream_id] = stream
        return stream

    def _stream(self, stream_id: int) -> Stream | None:
        """A call that is open, whichever path it took so far."""
        stream = self.streams.get(stream_id)
        if stream is None and self._lanes is not None:
            stream = self._lanes.stream(stream_id)
        return stream

    def _leave_lanes(self) -> None:
        """Open calls go the general path from now on."""
        if self._lanes is not None:
            self._lanes.leave_all()

    @property
    def _open_calls(self) -> int:
        return len(self.streams) + (self._lanes.calls if self._lanes is not None else 0)

    @property
    def takes_calls(self) -> bool:
        """Whether a call that begins now is a call like others."""
        return self.is_whole and not (self.draining or self.refused or self.closing)

    def answered(self, stream_ids: Sequence[int]) -> None:
        """The lanes wrote the answers of these whole."""
        self.counters.streams -= len(stream_ids)
        self._over.extend(stream_ids)
        if not self._open_calls:
            self.watch.quiet_ms = self._now_ms

    def _open_call(self, stream: Stream, head: RequestHead) -> None:
        self.counters.calls += 1
        if self.refused:
            # Not a GOAWAY: a client would open connections until its deadline, and learn nothing.
            stream.finish(GrpcStatus.UNAVAILABLE, self.refused)
            return
        if stream.method is _UNKNOWN:
            stream.finish(GrpcStatus.UNIMPLEMENTED, f"there is no method {head.shape.path}")
            return
        if head.shape.encoding not in ENCODINGS:
            name = head.shape.encoding.decode("latin-1")
            stream.finish(GrpcStatus.UNIMPLEMENTED, f"grpc-encoding {name} is not known here")
            return
        if head.timeout:
            try:
                timeout_ms = head.timeout_ms()
            except Malformed as error:
                stream.finish(GrpcStatus.INTERNAL, str(error))
                return
            if timeout_ms is not None and timeout_ms <= MAX_REMAINING_MS:
                stream.deadline_ms = self._now_ms + timeout_ms
        if stream.method.open is not None:
            stream.opened()

    # -- data

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self.inbox.count(size)
        ends = flags & frames.END_STREAM != 0
        if flags & frames.PADDED:
            payload = frames.data_content(flags, payload)
        if not payload and not ends and not self._control.take(self._now_ms):
            raise _too_much("too many empty DATA frames (lean.max_control_per_s)", "empty_frames")
        stream = self._stream(stream_id)
        if stream is None or stream.remote_closed:
            self._late_data(stream_id)
            return
        self.inbox.data(stream, size, payload, ends)
        if ends:
            self._half_closed(stream)

    def _half_closed(self, stream: Stream) -> None:
        length = stream.head.shape.content_length
        if length >= 0 and length != stream.content_bytes:
            raise StreamFault(
                stream.stream_id, ErrorCode.PROTOCOL_ERROR, "content-length is not what came"
            )
        stream.remote_closed = True
        if stream.plain_status:
            self.outbox.plain_http(stream, stream.plain_status, _GRPC_ONLY)
        elif stream.reader is not None or stream.held_bytes:
            if stream.reader is None or not stream.reader.waits:
                self.request_complete(stream)
        elif not stream.over:
            stream.half_closed()

    def request_complete(self, stream: Stream) -> None:
        """All of a request that came in pieces is there, and decompressed."""
        if stream.reader is not None and not stream.reader.is_empty:
            self.inbox.refuse(stream, GrpcStatus.INTERNAL, "the last message is not complete")
        elif not stream.over:
            self.inbox.begin(stream)
            stream.half_closed()

    def _late_data(self, stream_id: int) -> None:
        """DATA for a stream that takes none."""
        self._expect_known(stream_id)
        if stream_id not in self._cut:
            raise StreamFault(stream_id, ErrorCode.STREAM_CLOSED, "DATA behind the end")

    def _expect_known(self, stream_id: int) -> None:
        if stream_id > self.last_id or stream_id & 1 == 0:
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, f"a frame for stream {stream_id}, which is not open"
            )

    # -- bounds and ends

    def _count_control(self) -> None:
        if not self._control.take(self._now_ms):
            raise _too_much(
                f"more than {self.limits.max_control_per_s} PING, SETTINGS and other control "
                "frames a second (lean.max_control_per_s)",
                "control_frames",
            )

    def _count_reset(self) -> None:
        if not self._resets.take(self._now_ms):
            raise _too_much(
                f"more than {self.limits.max_resets_per_s} streams a second are reset "
                "(lean.max_resets_per_s)",
                "resets",
            )

    def _reset(self, fault: StreamFault) -> None:
        try:
            self._count_reset()
        except ConnectionFault as too_many:
            self.fail(too_many)
            return
        self.outbox.control(frames.reset(fault.stream_id, fault.code))
        stream = self._stream(fault.stream_id)
        if stream is not None:
            stream.remote_closed = True
            self._gone(stream)
        if fault.code is not ErrorCode.STREAM_CLOSED:
            self._cut.append(fault.stream_id)

    def _gone(self, stream: Stream) -> None:
        stream.on_client_cancelled()
        if not stream.over:
            self._closed(stream)

    def _closed(self, stream: Stream) -> None:
        """The stream is over, or the client was told that we do not want the rest."""
        stream_id = stream.stream_id
        del self.streams[stream_id]
        stream.over = True
        self.counters.streams -= 1
        if stream.queue is not None:
            self.outbox.forget(stream)
        if stream.reader is not None or stream.held_bytes:
            self.inbox.forget(stream)
        (self._over if stream.remote_closed else self._cut).append(stream_id)
        if stream.unread is not None and stream.finished:
            self._remember_unread(stream_id, stream.unread)
        if not self._open_calls:
            self.watch.quiet_ms = self._now_ms
            if self.draining:
                self._wake()

    def _remember_unread(self, stream_id: int, callback: Callable[[], None]) -> None:
        self._forget_read()
        if len(self._unread) == REMEMBERED_STREAMS:
            del self._unread[next(iter(self._unread))]
        self._unread[stream_id] = (self._now_ms, callback)

    def _forget_read(self) -> None:
        while self._unread:
            stream_id, (left_ms, _) = next(iter(self._unread.items()))
            if self._now_ms - left_ms <= UNREAD_MS:
                return
            del self._unread[stream_id]

    def fail(self, fault: ConnectionFault) -> None:
        """Say why, and be over."""
        if self.closing:
            return
        if fault.bound:
            self.counters.cut_off[fault.bound] += 1
        else:
            self.counters.faults += 1
        # Not louder: whoever breaks rules would write our log.
        logger.debug(
            "cut off a client", extra={"peer": self.peer, "why": str(fault), "code": fault.code}
        )
        self.outbox.control(frames.goaway(self.last_id, fault.code, str(fault)))
        self.closing = True
        self.lost()

    def lost(self) -> None:
        """The connection is over: every call loses its client."""
        self.closing = True
        self._leave_lanes()
        for stream in tuple(self.streams.values()):
            stream.remote_closed = True
            self._gone(stream)
        self._forget_read()
        unread, self._unread = self._unread, {}
        for _, callback in unread.values():
            callback()

    def retire(self, why: str) -> None:
        """`drain` as soon as no call can be on its way; the client opens another connection."""
        self.watch.retire(self._now_ms, why)

    def drain(self, why: str) -> None:
        """Take no new calls; the client opens another connection for them."""
        if not self.draining and not self.closing:
            self._leave_lanes()
            self.draining = True
            self.outbox.control(frames.goaway(self.last_id, ErrorCode.NO_ERROR, why))

    @property
    def is_whole(self) -> bool:
        """Nothing that was begun waits for its end: the opening, or a header block."""
        return self.settled and not self._block.stream_id

    @property
    def done(self) -> bool:
        return self.closing or (self.draining and not self.streams)

    def tick(self, now_ms: int) -> None:
        """Look at everything that only time tells; call it about once a second."""
        self._now_ms = now_ms
        self._leave_lanes()  # those that are still open may be late
        try:
            self.watch.check(now_ms)
        except ConnectionFault as fault:
            self.fail(fault)


def _too_much(why: str, bound: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, why, bound)


_UNKNOWN = Method("", MethodType.UNARY)
