"""What comes in on DATA: the windows that we give, and messages out of the content of frames.

Content is taken at once, so a window is opened again as soon as half of it was used; what bounds
the memory is how many bytes of messages that are not complete a connection, and the server, hold.
"""

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import GrpcStatus
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode, StreamFault
from popmq.proxy.transport.lean.messages import GrpcMessageReader, MessageRefused
from popmq.proxy.transport.lean.outbox import Outbox
from popmq.proxy.transport.lean.replies import MESSAGE_PREFIX, PREFIX_BYTES
from popmq.proxy.transport.lean.stream import Stream


class Inbox:
    __slots__ = ("_counters", "_incoming_bytes", "_limits", "_outbox", "_window")

    def __init__(self, limits: LeanSettings, counters: LeanCounters, outbox: Outbox) -> None:
        self._limits = limits
        self._counters = counters
        self._outbox = outbox
        self._window = limits.connection_window_bytes
        self._incoming_bytes = 0

    def count(self, size: int) -> None:
        """Take a frame's size, padding and all, from the connection's window."""
        self._window -= size
        if self._window < 0:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window"
            )

    def widen(self) -> None:
        """Open the connection's window again if half of it is used; once for many frames."""
        full = self._limits.connection_window_bytes
        if self._window * 2 < full:
            self._outbox.control(frames.window_update(0, full - self._window))
            self._window = full

    def data(self, stream: Stream, size: int, content: bytes, ends: bool) -> None:
        """The content of a DATA frame of `size` bytes for an open stream."""
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamFault(
                stream.stream_id,
                ErrorCode.FLOW_CONTROL_ERROR,
                "more DATA than the stream's window",
            )
        if stream.head.content_length >= 0:
            stream.content_bytes += len(content)
        if content and not (stream.finished or stream.plain_status):
            self._content(stream, content)
        full = self._limits.stream_window_bytes
        if not ends and stream.receive_window * 2 < full:
            increment = full - stream.receive_window
            stream.receive_window = full
            self._outbox.control(frames.window_update(stream.stream_id, increment))

    def refuse(self, stream: Stream, status: GrpcStatus, detail: str) -> None:
        """End a call whose handler may wait for more."""
        if not stream.finished:
            stream.on_client_cancelled()
            stream.finished = True
            self._outbox.end(stream, status, detail)

    def forget(self, stream: Stream) -> None:
        """Let go of what a stream that is over has not completed."""
        if stream.reader is not None:
            self._hold(-stream.reader.held_bytes)
            stream.reader = None

    def _content(self, stream: Stream, content: bytes) -> None:
        reader, limits = stream.reader, self._limits
        if reader is None:
            # Nearly every message comes whole in one frame.
            if len(content) >= PREFIX_BYTES:
                coded, size = MESSAGE_PREFIX.unpack_from(content)
                if coded == 0 and size == len(content) - PREFIX_BYTES <= limits.max_message_bytes:
                    stream.message(content[PREFIX_BYTES:])
                    return
            reader = stream.reader = GrpcMessageReader(
                stream.head.encoding, limits.max_message_bytes, limits.max_inflated_bytes
            )
        before = reader.held_bytes
        try:
            for message in reader.feed(content):
                stream.message(message)
        except MessageRefused as refusal:
            if refusal.bound:
                self._counters.cut_off[refusal.bound] += 1
            self._hold(reader.held_bytes - before)
            self.refuse(stream, refusal.status, str(refusal))
            return
        if stream.reader is None:  # a message ended the call
            self._hold(-before)
        else:
            self._hold(reader.held_bytes - before)
            self._check_incoming(stream)

    def _hold(self, delta: int) -> None:
        self._incoming_bytes += delta
        self._counters.incoming_bytes += delta

    def _check_incoming(self, stream: Stream) -> None:
        for held, limit, name in (
            (self._incoming_bytes, self._limits.max_incoming_bytes, "max_incoming_bytes"),
            (
                self._counters.incoming_bytes,
                self._limits.max_incoming_total_bytes,
                "max_incoming_total_bytes",
            ),
        ):
            if held > limit:
                self._counters.cut_off["incoming_bytes"] += 1
                detail = f"more than {limit} bytes of incomplete messages (lean.{name})"
                self.refuse(stream, GrpcStatus.RESOURCE_EXHAUSTED, detail)
                return
