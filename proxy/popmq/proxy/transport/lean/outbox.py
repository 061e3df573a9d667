"""Outbox: orders the frames that a connection sends, within the peer's flow-control windows.

Frames that are not flow-controlled are sent at once.  A message that does not fit the windows, or
that arrives while the socket is full, waits in its stream; streams with waiting messages take
turns, one frame each.  The bytes of waiting messages are bounded (`lean.max_unsent_bytes`).
"""

from collections import deque
from collections.abc import Callable, Sequence

from popmq.proxy.transport.interface import GrpcStatus
from popmq.proxy.transport.lean import frames, replies
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode, StreamFault
from popmq.proxy.transport.lean.messages import compressed, names_gzip
from popmq.proxy.transport.lean.stream import Stream

MAX_TICK_BYTES = 512 << 10  # of messages in one write to the socket
MAX_MESSAGE_BYTES = 1 << 32  # the prefix of a message has four bytes for its length
CHUNK_OVERHEAD = 64  # bytes that count for a waiting message beside its own

_OK = GrpcStatus.OK


class Outbox:
    """`wake` is called when `take` has output; `closed` when it has the end of a stream."""

    __slots__ = (
        "_closed",
        "_compress_bytes",
        "_counters",
        "_max_unsent_bytes",
        "_parts",
        "_parts_bytes",
        "_ready",
        "_table",
        "_table_bytes",
        "_wake",
        "initial_window",
        "max_frame_bytes",
        "sent_frames",
        "unsent_bytes",
        "window",
        "writable",
    )

    def __init__(
        self,
        max_unsent_bytes: int,
        counters: LeanCounters,
        wake: Callable[[], None],
        closed: Callable[[Stream], None],
        compress_bytes: int = 0,
    ) -> None:
        self.window = frames.DEFAULT_WINDOW
        self.initial_window = frames.DEFAULT_WINDOW
        self.max_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.writable = True
        self.unsent_bytes = 0  # of messages that wait, with CHUNK_OVERHEAD for each
        self.sent_frames = 0  # sent frames of DATA; does not grow while the peer does not read
        self._max_unsent_bytes = max_unsent_bytes
        self._compress_bytes = compress_bytes or MAX_MESSAGE_BYTES
        self._counters = counters
        self._wake = wake
        self._closed = closed
        self._parts: list[bytes | memoryview] = []  # the output of `take`
        self._parts_bytes = 0  # of messages in `_parts`
        self._ready: dict[int, Stream] = {}  # have something to send, and a window for it
        self._table = b""  # of the next header block: an update of the table size, or empty
        self._table_bytes = frames.DEFAULT_TABLE_BYTES

    def take(self) -> bytes:
        """All bytes that may be sent now."""
        data = b"".join(self._parts)
        self._parts.clear()
        self._parts_bytes = 0
        if self._ready and self.writable:
            self.pump()
        return data

    @property
    def has_output(self) -> bool:
        return bool(self._parts)

    def control(self, data: bytes) -> None:
        """Queue a frame that the windows allow."""
        if not self._parts:
            self._wake()
        self._parts.append(data)

    # -- answers

    def unary(self, stream: Stream, message: bytes) -> None:
        """Send the whole answer of a unary call."""
        content = len(message) + replies.PREFIX_BYTES
        stream_id = stream.stream_id
        if self._fits(stream, content) and not self._table and content < self._compress_bytes:
            parts = self._parts
            if not parts:
                self._wake()
            parts.append(replies.unary_start(stream_id, len(message)))
            parts.append(message)
            parts.append(replies.unary_end(stream_id))
            self.window -= content
            self._parts_bytes += content
            self.sent_frames += 1
            self._end(stream)
        else:
            self.message(stream, message)
            if not stream.over:  # cut off
                self.end(stream, _OK, "")

    def unary_without_stream(self, stream_id: int, message: bytes) -> bool:
        """As `unary`, for a call without a stream. False: the answer has to wait in a stream."""
        size = len(message)
        content = size + replies.PREFIX_BYTES
        if (
            content > self.initial_window
            or content > self.window
            or content > self.max_frame_bytes
            or content >= self._compress_bytes
            or self._parts_bytes >= MAX_TICK_BYTES
            or not self.writable
            or self._ready
            or self._table
        ):
            return False
        parts = self._parts
        if not parts:
            self._wake()
        parts.append(replies.unary_start(stream_id, size))
        parts.append(message)
        parts.append(replies.unary_end(stream_id))
        self.window -= content
        self._parts_bytes += content
        self.sent_frames += 1
        return True

    def message(self, stream: Stream, message: bytes) -> None:
        """Send one message of a stream's answer, after the earlier ones."""
        self._start(stream)
        coded = 0
        if stream.may_compress and len(message) >= self._compress_bytes:
            packed = compressed(message)
            if len(packed) < len(message):
                coded, message = 1, packed
        self.send(stream, replies.MESSAGE_PREFIX.pack(coded, len(message)), message)

    def messages(self, stream: Stream, messages: Sequence[bytes]) -> bool:
        """Send messages of a stream's answer now, in as few frames as hold them.

        False, with none of them sent, if one has to wait, or may be compressed.
        """
        self._start(stream)
        sizes = [len(message) + replies.PREFIX_BYTES for message in messages]
        limit = self.max_frame_bytes
        if (
            stream.queue is not None
            or stream.may_compress
            or max(sizes, default=0) > limit
            or sum(sizes) > min(stream.window, self.window, MAX_TICK_BYTES - self._parts_bytes)
            or not self.writable
            or self._ready
        ):
            return False
        prefix = replies.MESSAGE_PREFIX.pack
        chunks: list[bytes] = []
        held = 0
        for message, size in zip(messages, sizes, strict=True):
            if held + size > limit:
                self._data(stream, chunks, held)
                chunks, held = [], 0
            chunks.append(prefix(0, len(message)))
            chunks.append(message)
            held += size
        if chunks:
            self._data(stream, chunks, held)
        return True

    def _data(self, stream: Stream, chunks: Sequence[bytes], size: int) -> None:
        """One frame that fits."""
        self.control(frames.frame_header(size, frames.DATA, 0, stream.stream_id))
        self._parts.extend(chunks)
        self.window -= size
        stream.window -= size
        self._parts_bytes += size
        self.sent_frames += 1

    def send(self, stream: Stream, *chunks: bytes) -> None:
        """Send `chunks` as DATA, as soon as the windows allow it."""
        size = sum(map(len, chunks))
        if stream.queue is None and self._fits(stream, size):
            self._data(stream, chunks, size)
            return
        if self.unsent_bytes > self._max_unsent_bytes:
            self._cut_off(stream)
            return
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.extend(chunk for chunk in chunks if chunk)
        stream.queued_bytes += size
        stream.queued_chunks += 1
        self.unsent_bytes += size + CHUNK_OVERHEAD
        self._ready[stream.stream_id] = stream
        self.pump()

    def end(self, stream: Stream, status: GrpcStatus, detail: str) -> None:
        """Send the trailers after everything that waits; alone if nothing was sent before."""
        table, self._table = self._table, b""
        if not stream.head_sent:
            self.control(replies.trailers_only(stream.stream_id, status, detail, table))
            self._end(stream)
            return
        trailers = replies.trailers(stream.stream_id, status, detail, table)
        if stream.queue is None:
            self.control(trailers)
            self._end(stream)
        else:
            stream.trailers = trailers

    def plain_http(self, stream: Stream, status: int, text: bytes) -> None:
        """Answer a request that is plain HTTP."""
        table, self._table = self._table, b""
        self.control(replies.plain_http_head(stream.stream_id, status, len(text), table))
        stream.head_sent = True
        self.send(stream, text)
        if stream.over:  # cut off
            return
        end = frames.frame(frames.DATA, frames.END_STREAM, stream.stream_id)
        if stream.queue is None:
            self.control(end)
            self._end(stream)
        else:
            stream.trailers = end

    # -- the peer's windows and settings

    def apply_settings(self, pairs: list[tuple[int, int]], streams: dict[int, Stream]) -> None:
        """Apply and acknowledge the peer's SETTINGS; then send what the new windows allow."""
        for name, value in pairs:
            if name == frames.INITIAL_WINDOW_SIZE:
                self._resize_windows(value, streams)
            elif name == frames.MAX_FRAME_SIZE:
                self.max_frame_bytes = value
            elif name == frames.HEADER_TABLE_SIZE and value < self._table_bytes:
                # The client's decoder keeps `value` bytes; this encoder needs and announces 0.
                self._table_bytes = 0
                self._table = replies.TABLE_OF_ZERO
        self.control(frames.SETTINGS_ACK)
        self.pump()

    def _resize_windows(self, initial_window: int, streams: dict[int, Stream]) -> None:
        delta = initial_window - self.initial_window
        self.initial_window = initial_window
        for stream in streams.values():
            stream.window += delta
            if stream.window > frames.MAX_WINDOW:
                raise ConnectionFault(
                    ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream is larger than 2^31-1"
                )
            if stream.queue is not None and stream.window > 0:
                self._ready[stream.stream_id] = stream

    def widen(self, increment: int) -> None:
        self.window += increment
        if self.window > frames.MAX_WINDOW:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is larger than 2^31-1"
            )
        if self._ready:
            self.pump()

    def widen_stream(self, stream: Stream, increment: int) -> None:
        stream.window += increment
        if stream.window > frames.MAX_WINDOW:
            raise StreamFault(
                stream.stream_id,
                ErrorCode.FLOW_CONTROL_ERROR,
                "the window of a stream is larger than 2^31-1",
            )
        if stream.queue is not None:
            self._ready[stream.stream_id] = stream
            self.pump()

    def pump(self) -> None:
        """Send what waits, a frame of each stream in turn, until a window or the socket is full."""
        ready = self._ready
        while ready:
            for stream in tuple(ready.values()):
                if not self.writable or self.window <= 0 or self._parts_bytes >= MAX_TICK_BYTES:
                    return
                if stream.window <= 0:
                    del ready[stream.stream_id]
                else:
                    self._one_frame(stream)

    def forget(self, stream: Stream) -> None:
        """Drop the waiting messages of a stream that has ended."""
        self._ready.pop(stream.stream_id, None)
        self.unsent_bytes -= stream.queued_bytes + CHUNK_OVERHEAD * stream.queued_chunks
        stream.queue = None
        stream.queued_bytes = stream.queued_chunks = 0

    def _start(self, stream: Stream) -> None:
        if not stream.head_sent:
            stream.head_sent = True
            table, self._table = self._table, b""
            if self._compress_bytes < MAX_MESSAGE_BYTES:
                stream.may_compress = names_gzip(stream.head.shape.accepted)
            self.control(replies.response_head(stream.stream_id, table, stream.may_compress))

    def _fits(self, stream: Stream, size: int) -> bool:
        return (
            size <= stream.window
            and size <= self.window
            and size <= self.max_frame_bytes
            and self.writable
            and not self._ready
            and self._parts_bytes < MAX_TICK_BYTES
        )

    def _one_frame(self, stream: Stream) -> None:
        assert stream.queue is not None
        size = min(self.max_frame_bytes, stream.window, self.window, stream.queued_bytes)
        self.control(frames.frame_header(size, frames.DATA, 0, stream.stream_id))
        left = size
        while left:
            chunk = stream.queue[0]
            if len(chunk) <= left:
                stream.queue.popleft()
            else:
                # The view avoids a copy of the rest of a large message for each frame.
                view = memoryview(chunk)
                stream.queue[0], chunk = view[left:], view[:left]
            self._parts.append(chunk)
            left -= len(chunk)
        stream.queued_bytes -= size
        self.unsent_bytes -= size
        self.window -= size
        stream.window -= size
        self._parts_bytes += size
        self.sent_frames += 1
        if stream.queued_bytes == 0:
            self.forget(stream)
            if stream.trailers is not None:
                self.control(stream.trailers)
                self._end(stream)

    def _cut_off(self, stream: Stream) -> None:
        """End a stream whose client does not read its messages."""
        self._counters.cut_off["unsent"] += 1
        no_partial_message = stream.queue is None
        self.forget(stream)
        stream.on_client_cancelled()
        stream.finished = True
        detail = (
            f"more than {self._max_unsent_bytes} bytes wait for a client that does not read them "
            "(lean.max_unsent_bytes)"
        )
        if no_partial_message:
            self.end(stream, GrpcStatus.RESOURCE_EXHAUSTED, detail)
        else:
            self.control(frames.reset(stream.stream_id, ErrorCode.ENHANCE_YOUR_CALM))
            stream.remote_closed = True
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        """Close the stream; a reset stops a client that has not ended its side."""
        if not stream.remote_closed:
            self.control(frames.reset(stream.stream_id, ErrorCode.NO_ERROR))
        self._closed(stream)
