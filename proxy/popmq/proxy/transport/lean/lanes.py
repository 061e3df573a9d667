"""Ordinary unary calls of one read of a connection, taken together, without a stream for each.

A run is made of HEADERS and DATA that ends the stream, for methods that have a lane; HEADERS of
other methods may stand between them.  Clients that use nghttp2 or Netty send the HEADERS of several
calls before their DATA, and Netty perhaps in another packet, so such calls wait from one read to
the next.  gRPC's C core puts WINDOW_UPDATE of the stream between them, and of the connection behind
them.  What differs from that in one byte ends the run and takes the general path.  A call that a
lane took is a number in `open` until its answer leaves.  As soon as anything but its answer happens
to it (a reset, a window, SETTINGS, a tick of the clock, the end of the connection), it becomes a
`Stream`, and the general path goes on with it.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from popmq.common.quantities import KIB
from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import Call, Lane, Method
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADER_BYTES,
    HEADERS,
    MAX_STREAM_ID,
    MAX_WINDOW,
    PRIORITIZED,
    WINDOW_UPDATE,
    Http2FrameReader,
)
from popmq.proxy.transport.lean.headers import Malformed, RequestHead
from popmq.proxy.transport.lean.inbox import Inbox
from popmq.proxy.transport.lean.outbox import Outbox
from popmq.proxy.transport.lean.replies import MESSAGE_PREFIX, PREFIX_BYTES
from popmq.proxy.transport.lean.stream import MAX_REMAINING_MS, Stream

LARGEST_BYTES = 64 * KIB  # of a frame; no limit of a message's size is lower
_WITH_PRIORITY = END_HEADERS | PRIORITIZED
PRIORITY_BYTES = 5
_NO_PARENT = bytes(4)  # a stream that depends on itself is a fault
_frame_at = struct.Struct(">HBBBI").unpack_from
_prefix_at = MESSAGE_PREFIX.unpack_from


class LaneOwner(Protocol):
    """What the lanes need of their connection."""

    last_id: int
    limits: LeanSettings
    counters: LeanCounters
    inbox: Inbox
    outbox: Outbox
    streams: dict[int, Stream]
    peer: str

    @property
    def takes_calls(self) -> bool: ...
    def request_head(self, stream_id: int, block: bytes) -> RequestHead: ...
    def open_stream(self, stream_id: int, ends: bool, head: RequestHead) -> None: ...
    def new_stream(self, stream_id: int, head: RequestHead, method: Method) -> Stream: ...
    def answered(self, stream_ids: Sequence[int]) -> None: ...


class Look:
    """What is known of calls whose heads have one shape; implements `Caller`."""

    __slots__ = ("client_id", "lane", "metadata", "peer", "shape")

    def __init__(self, head: RequestHead, method: Method | None, peer: str) -> None:
        self.shape = shape = head.shape
        self.metadata: Mapping[str, str] = head.metadata  # of the first of them
        self.peer = peer
        self.lane: Lane | None = None  # None: they are not ordinary
        self.client_id = ""
        lane = method.lane if method is not None else None
        if (
            lane is None
            or shape.method != b"POST"
            or not shape.is_grpc
            or shape.content_length >= 0
            or shape.encoding not in (b"", b"identity")
        ):
            return
        self.client_id = lane.client_of(head.metadata)
        if self.client_id:
            self.lane = lane


class Begun(NamedTuple):
    """A call of a run whose DATA has not come."""

    look: Look
    head: RequestHead
    timeout_ms: int | None  # None: it has no limit, or a very long one


class Lanes:
    """Of one connection; implements `LaneRun`."""

    __slots__ = (
        "_begun",
        "_last",
        "_methods",
        "_owner",
        "_widened",
        "client_id",
        "data",
        "open",
    )

    def __init__(self, owner: LaneOwner, methods: Mapping[str, Method]) -> None:
        self._owner = owner
        self._methods = methods
        self.open: dict[int, OpenCalls] = {}
        self._last: Begun | None = None  # of the last call with another head
        # Calls that have no DATA yet, with the time of their HEADERS, and by how much their windows
        # were widened.  They are for the next run, which comes before any frame but DATA of others.
        self._begun: dict[int, tuple[Begun, int]] = {}
        self._widened: dict[int, int] = {}
        # Of the run in progress, what was read.
        self.data = b""
        self.client_id = ""

    @property
    def peer(self) -> str:
        return self._owner.peer

    @property
    def waits(self) -> bool:
        """Whether what comes next is for `run` to see first."""
        return bool(self._begun)

    @property
    def calls(self) -> int:
        """How many are open here."""
        return len(self.open) + len(self._begun)

    def run(self, reader: Http2FrameReader, now_ms: int) -> None:
        """Take the ordinary calls that begin where `reader` stands, up to what is none.

        Raises what the header block of a call does.
        """
        owner = self._owner
        if not owner.takes_calls:
            self._open_begun()
            return
        data, at = reader.data, reader.at
        end, limits, outbox = len(data), owner.limits, owner.outbox
        room = limits.max_streams - len(owner.streams) - len(self.open)
        largest = min(limits.max_frame_bytes, limits.stream_window_bytes, LARGEST_BYTES)
        window = left = owner.inbox.window
        begun, widened = self._begun, self._widened
        self.data, taken, came = data, 0, 0
        keeps = False
        used: list[Lane] = []
        last: Begun | None = None
        taker: Look | None = None
        try:
            while end - at >= HEADER_BYTES + 4:
                high, low, kind, flags, stream_id = _frame_at(data, at)
                size = high << 8 | low
                stop = at + HEADER_BYTES + size
                if stop > end or size > largest:
                    keeps = stop > end
                    return
                if kind == HEADERS:
                    block = at + HEADER_BYTES
                    if flags == _WITH_PRIORITY:
                        if size < PRIORITY_BYTES or data[block : block + 4] != _NO_PARENT:
                            return
                        block += PRIORITY_BYTES
                    elif flags != END_HEADERS:
                        return
                    if (
                        not owner.last_id < stream_id <= MAX_STREAM_ID
                        or not stream_id & 1
                        or taken + len(begun) >= room
                    ):
                        return
                    reader.at, owner.last_id = stop, stream_id
                    head = owner.request_head(stream_id, data[block:stop])
                    if last is None or head is not last.head:
                        last = self._begin(head)
                    if last is not None:
                        begun[stream_id] = last, now_ms
                        came += 1
                    else:
                        owner.open_stream(stream_id, False, head)
                        room -= 1
                elif kind == DATA:
                    call = begun.get(stream_id)
                    if call is None:  # of another method: those that wait go on waiting
                        keeps = stream_id in owner.streams
                        return
                    if flags != END_STREAM or not PREFIX_BYTES <= size <= left:
                        return
                    start = at + HEADER_BYTES + PREFIX_BYTES
                    if _prefix_at(data, at + HEADER_BYTES) != (0, size - PREFIX_BYTES):
                        return
                    (of, head, timeout_ms), began_ms = call
                    assert of.lane is not None
                    if of is not taker:
                        if not of.lane.is_open:
                            return
                        taker, self.client_id = of, of.client_id
                        of.lane.on_client(of.client_id, of)
                        if of.lane not in used:
                            used.append(of.lane)
                    if timeout_ms is not None:
                        timeout_ms -= now_ms - began_ms
                    calls = of.lane.take(self, start, stop, timeout_ms)
                    if calls is None:
                        return
                    assert isinstance(calls, OpenCalls)
                    more_window = widened.pop(stream_id, 0) if widened else 0
                    calls.ids.append(stream_id)
                    calls.parts.append((head, data[start:stop], more_window, began_ms))
                    self.open[stream_id] = calls
                    del begun[stream_id]
                    taken += 1
                    left -= size
                elif kind == WINDOW_UPDATE and size == 4:
                    increment = int.from_bytes(data[stop - 4 : stop], "big")
                    if not 0 < increment <= MAX_WINDOW:
                        return
                    if stream_id == 0:
                        reader.at = stop
                        outbox.widen(increment)
                    elif stream_id in begun:
                        more_window = widened.get(stream_id, 0) + increment
                        if more_window > MAX_WINDOW - outbox.initial_window:
                            return
                        widened[stream_id] = more_window
                    else:
                        return
                else:
                    return
                reader.at = at = stop
            keeps = end - at < HEADER_BYTES
        finally:
            self.data = b""
            owner.inbox.window -= window - left
            owner.counters.calls += came
            owner.counters.streams += came
            for lane in used:
                lane.end_run()
            if not keeps:  # else the next read may have their DATA
                self._open_begun()

    def _open_begun(self) -> None:
        """Calls that were only begun go on as streams."""
        owner = self._owner
        for stream_id, (call, began_ms) in self._begun.items():
            owner.counters.calls -= 1  # it is counted again
            owner.counters.streams -= 1
            owner.open_stream(stream_id, False, call.head)
            stream = owner.streams[stream_id]
            stream.window += self._widened.get(stream_id, 0)
            _set_times(stream, call.head, began_ms)
        self._begun.clear()
        self._widened.clear()

    def _begin(self, head: RequestHead) -> Begun | None:
        """None: it is not ordinary."""
        call = self._last
        if call is None or head is not call.head:
            try:
                timeout_ms = head.timeout_ms()
            except Malformed:
                return None
            if timeout_ms is not None and timeout_ms > MAX_REMAINING_MS:
                timeout_ms = None
            if call is not None and call.look.shape is head.shape:
                look = call.look
            else:
                look = Look(head, self._methods.get(head.shape.path), self._owner.peer)
            call = self._last = Begun(look, head, timeout_ms)
        lane = call.look.lane
        return call if lane is not None and lane.is_open else None

    def new_calls(self) -> "OpenCalls":
        return OpenCalls(self, self._owner)

    def method_of(self, head: RequestHead) -> Method:
        return self._methods[head.shape.path]

    def stream(self, stream_id: int) -> Stream | None:
        """The call as a stream, from now on; None if no lane has it."""
        calls = self.open.pop(stream_id, None)
        return calls.as_stream(stream_id) if calls is not None else None

    def leave_all(self) -> None:
        """Every open call goes on as a stream."""
        self._open_begun()
        for stream_id in tuple(self.open):
            self.stream(stream_id)


class OpenCalls:
    """Calls that came in one read for one lane; implements `LaneCalls`."""

    __slots__ = (
        "_cancelled",
        "_lanes",
        "_on_cancelled",
        "_owner",
        "_streams",
        "ids",
        "parts",
    )

    def __init__(self, lanes: Lanes, owner: LaneOwner) -> None:
        self._lanes = lanes
        self._owner = owner
        self.ids: list[int] = []
        # Head, message, which holds less than what was read, by how much its client widened the
        # stream's window, and when it began.
        self.parts: list[tuple[RequestHead, bytes, int, int]] = []
        self._streams: dict[int, Stream] = {}  # of calls that the lane lost
        self._cancelled = 0
        self._on_cancelled: Callable[[], None] | None = None

    def request(self, index: int) -> bytes:
        return self.parts[index][1]

    def call(self, index: int) -> Call | None:
        stream_id = self.ids[index]
        return self._lanes.stream(stream_id) or self._streams.get(stream_id)

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        self._on_cancelled = callback
        if self._cancelled == len(self.ids):
            callback()

    def answer(self, answers: Sequence[bytes]) -> None:
        open_calls, answer = self._lanes.open, self._owner.outbox.unary_without_stream
        done = []
        for stream_id, message in zip(self.ids, answers, strict=True):
            if not message:
                continue
            if open_calls.get(stream_id) is self and answer(stream_id, message):
                del open_calls[stream_id]
                done.append(stream_id)
                continue
            stream = self._lanes.stream(stream_id) or self._streams[stream_id]
            stream.send(message)
            stream.finish()
        self._owner.answered(done)

    def as_stream(self, stream_id: int) -> Stream:
        head, _, more_window, began_ms = self.parts[self.ids.index(stream_id)]
        stream = self._owner.new_stream(stream_id, head, self._lanes.method_of(head))
        stream.remote_closed = True
        stream.window += more_window
        _set_times(stream, head, began_ms)
        stream.on_cancelled(self._one_cancelled)
        self._streams[stream_id] = stream
        return stream

    def _one_cancelled(self) -> None:
        self._cancelled += 1
        if self._cancelled == len(self.ids) and self._on_cancelled is not None:
            self._on_cancelled()


def _set_times(stream: Stream, head: RequestHead, began_ms: int) -> None:
    stream.opened_ms = began_ms
    timeout_ms = head.timeout_ms()
    if timeout_ms is not None and timeout_ms <= MAX_REMAINING_MS:
        stream.deadline_ms = began_ms + timeout_ms
