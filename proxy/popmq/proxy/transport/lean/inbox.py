"""What comes in on DATA: the windows that we give, and messages out of the content of frames.

Content is taken at once, so a window is opened again as soon as half of it was used; what bounds
the memory is how many bytes of requests that are not complete a connection, and the server, hold,
decompressed.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Protocol

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import GrpcStatus
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode, StreamFault
from popmq.proxy.transport.lean.messages import GrpcMessageReader, InflationTurns, MessageRefused
from popmq.proxy.transport.lean.outbox import Outbox
from popmq.proxy.transport.lean.replies import MESSAGE_PREFIX, PREFIX_BYTES
from popmq.proxy.transport.lean.stream import Stream

LARGE_SHARE = 16  # a connection that holds that part of the limit is refused before others


class InboxOwner(Protocol):
    """What an inbox needs of its connection."""

    @property
    def peer(self) -> str: ...
    @property
    def streams(self) -> Mapping[int, Stream]: ...
    def request_complete(self, stream: Stream) -> None: ...


class IncomingBytes:
    """What all connections of a server hold of requests that have not begun (docs/security.md).

    From 3/4 of the limit on the largest holder loses what it holds, so there is always room for
    others: the connection that holds most, or where none has a large share, that of the source
    address that does.
    """

    __slots__ = ("_holders", "_limit", "total")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holders: dict[Inbox, int] = {}
        self.total = 0

    def hold(self, holder: "Inbox", delta: int) -> None:
        """Count `delta` bytes more for a connection, which may then lose all that it holds."""
        self.total += delta
        held = self._holders.get(holder, 0) + delta
        if held:
            self._holders[holder] = held
        else:
            self._holders.pop(holder, None)

    def refuse_largest(self) -> None:
        """Make room, if it is needed."""
        most = self._limit - self._limit // 4
        while self.total > most and self._holders:
            largest = max(self._holders, key=self._holders.__getitem__)
            if self._holders[largest] * LARGE_SHARE < self._limit:
                largest = self._largest_of_address()
            largest.refuse_all(
                f"the server holds more than {most} bytes of incomplete requests, 3/4 of "
                "the fixed limit, and this client most of them"
            )

    def _largest_of_address(self) -> "Inbox":
        by_address: Counter[str] = Counter()
        for holder, held in self._holders.items():
            by_address[holder.address] += held
        ((address, _),) = by_address.most_common(1)
        holders = (holder for holder in self._holders if holder.address == address)
        return max(holders, key=self._holders.__getitem__)


class Inbox:
    __slots__ = (
        "_counters",
        "_incoming",
        "_incoming_bytes",
        "_limits",
        "_outbox",
        "_owner",
        "_turns",
        "window",
    )

    def __init__(
        self,
        limits: LeanSettings,
        counters: LeanCounters,
        outbox: Outbox,
        owner: InboxOwner,
        shared: "SharedInflow",
    ) -> None:
        self._limits = limits
        self._counters = counters
        self._outbox = outbox
        self._owner = owner
        self._turns = shared.turns
        self._incoming = shared.incoming
        self.window = limits.connection_window_bytes
        self._incoming_bytes = 0

    @property
    def address(self) -> str:
        """The client's, without its port."""
        return self._owner.peer.rpartition(":")[0]

    def count(self, size: int) -> None:
        """Take a frame's size, padding and all, from the connection's window."""
        self.window -= size
        if self.window < 0:
            raise ConnectionFault(
                ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window"
            )

    def widen(self) -> None:
        """Open the connection's window again if half of it is used; once for many frames."""
        full = self._limits.connection_window_bytes
        if self.window * 2 < full:
            self._outbox.control(frames.window_update(0, full - self.window))
            self.window = full

    def data(self, stream: Stream, size: int, content: bytes, ends: bool) -> None:
        """The content of a DATA frame of `size` bytes for an open stream."""
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamFault(
                stream.stream_id,
                ErrorCode.FLOW_CONTROL_ERROR,
                "more DATA than the stream's window",
            )
        if stream.head.shape.content_length >= 0:
            stream.content_bytes += len(content)
        if content and not (stream.finished or stream.plain_status):
            self._content(stream, content, ends)
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

    def refuse_all(self, detail: str) -> None:
        """End every call whose request is not complete."""
        for stream in [stream for stream in self._owner.streams.values() if stream.held_bytes]:
            self._counters.cut_off["incoming_bytes"] += 1
            self._refuse_held(stream, detail)

    def forget(self, stream: Stream) -> None:
        """Let go of what a stream that is over has not completed."""
        stream.reader = None
        self._hold(stream, 0)

    def begin(self, stream: Stream) -> None:
        """The handler takes the request: it is the handler's from now on."""
        self._hold(stream, 0)

    def _content(self, stream: Stream, content: bytes, ends: bool) -> None:
        reader, limits = stream.reader, self._limits
        if reader is None:
            max_bytes = stream.method.max_bytes or limits.max_message_bytes
            # Nearly every message comes whole in one frame.
            if len(content) >= PREFIX_BYTES:
                coded, size = MESSAGE_PREFIX.unpack_from(content)
                if coded == 0 and size == len(content) - PREFIX_BYTES <= max_bytes:
                    stream.message(content[PREFIX_BYTES:])
                    if not ends and stream.request is not None and not stream.over:
                        self._hold(stream, size)
                        self._check_incoming(stream)
                    return
            reader = stream.reader = GrpcMessageReader(
                stream.head.shape.encoding, max_bytes, min(max_bytes, limits.max_inflated_bytes)
            )
        reader.feed(content)
        if reader.waits:
            self._hold(stream, stream.held_bytes + len(content))
            self._check_incoming(stream)
        else:
            self._read(stream, reader)

    def _read(self, stream: Stream, reader: GrpcMessageReader) -> None:
        """Give the stream what is complete; the rest goes on in the next turn."""
        try:
            while (message := reader.next(self._turns)) is not None:
                stream.message(message)
                if stream.reader is None or stream.finished:
                    break
        except MessageRefused as refusal:
            if refusal.bound:
                self._counters.cut_off[refusal.bound] += 1
            self.refuse(stream, refusal.status, str(refusal))
            return
        if stream.reader is None:  # a message ended the call
            return
        if reader.waits:
            self._turns.wait(partial(self._resume, stream, reader))
        self._hold(stream, reader.held_bytes + len(stream.request or b""))
        self._check_incoming(stream)

    def _resume(self, stream: Stream, reader: GrpcMessageReader) -> None:
        if stream.reader is not reader or stream.finished:
            return
        self._read(stream, reader)
        if stream.remote_closed and not reader.waits and not stream.over:
            self._owner.request_complete(stream)

    def _hold(self, stream: Stream, size: int) -> None:
        delta = size - stream.held_bytes
        stream.held_bytes = size
        self._incoming_bytes += delta
        self._incoming.hold(self, delta)
        self._counters.incoming_bytes = self._incoming.total

    def _check_incoming(self, stream: Stream) -> None:
        limit = self._limits.max_incoming_bytes
        if self._incoming_bytes > limit:
            self._counters.cut_off["incoming_bytes"] += 1
            detail = (
                f"more than {limit} bytes of incomplete requests on a connection, the fixed limit"
            )
            self._refuse_held(stream, detail)
        self._incoming.refuse_largest()

    def _refuse_held(self, stream: Stream, detail: str) -> None:
        stream.request = None
        self.refuse(stream, GrpcStatus.RESOURCE_EXHAUSTED, detail)
        self.forget(stream)


class SharedInflow:
    """What the inboxes of all connections of a server share."""

    __slots__ = ("incoming", "turns")

    def __init__(self, limits: LeanSettings, turns: InflationTurns) -> None:
        self.incoming = IncomingBytes(limits.max_incoming_total_bytes)
        self.turns = turns
