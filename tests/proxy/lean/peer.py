"""The other end of a lean connection, in bytes: what a client sends, and what it got."""

import gzip
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hpack import Decoder, Encoder

from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import Call, Method, MethodType, StreamListener
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.frames import Frame
from popmq.proxy.transport.lean.inbox import SharedInflow
from popmq.proxy.transport.lean.messages import InflationTurns

Headers = list[tuple[str, str]]
END = frames.END_STREAM
WHOLE = frames.END_HEADERS


def echo(call: Call, data: bytes) -> None:
    call.send(data)
    call.finish()


@dataclass
class Held:
    """Calls that a handler took and did not answer."""

    calls: list[Call] = field(default_factory=list)
    gone: list[Call] = field(default_factory=list)

    def start(self, call: Call, data: bytes) -> None:
        self.calls.append(call)
        call.on_cancelled(lambda: self.gone.append(call))


@dataclass
class Talk:
    """A bidirectional handler that repeats what it hears."""

    call: Call
    messages: list[bytes] = field(default_factory=list)

    def message(self, data: bytes) -> None:
        self.messages.append(data)
        self.call.send(data)

    def half_closed(self) -> None:
        self.call.finish()


@dataclass
class Answer:
    """What came on one stream."""

    headers: list[dict[str, str]] = field(default_factory=list)
    data: bytes = b""
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> str | None:
        return self.headers[-1].get("grpc-status") if self.headers else None

    @property
    def messages(self) -> list[bytes]:
        data, at = [], 0
        while at < len(self.data):
            size = int.from_bytes(self.data[at + 1 : at + 5], "big")
            data.append(self.data[at + 5 : at + 5 + size])
            at += 5 + size
        return data


class Peer:
    """A client that speaks in frames to a `LeanConnection` with a few methods."""

    def __init__(
        self,
        *,
        greet: bool = True,
        settings: dict[int, int] | None = None,
        beside: "Peer | None" = None,
        peer: str = "10.0.0.9:999",
        **limits: Any,
    ):
        """`beside` is another client of the same server."""
        self.now_ms = 1_000
        self.held = Held()
        self.talks: list[Talk] = []
        self.counters: LeanCounters = beside.counters if beside else LeanCounters()
        self.turns: list[Callable[[], None]] = beside.turns if beside else []
        self.limits = replace(LeanSettings(), **limits)
        methods = [
            Method("/s/echo", MethodType.UNARY, start=echo),
            Method("/s/held", MethodType.UNARY, start=self.held.start),
            Method("/s/flow", MethodType.SERVER_STREAM, start=self.held.start),
            Method("/s/talk", MethodType.BIDI_STREAM, open=self._talk),
        ]
        turns = InflationTurns(self.turns.append)
        self.shared: SharedInflow = beside.shared if beside else SharedInflow(self.limits, turns)
        self.wakes = 0
        self.core = LeanConnection(
            {method.path: method for method in methods},
            self.limits,
            self.counters,
            lambda: self.now_ms,
            self._woken,
            self.shared,
            peer,
            max_age_ms=self.limits.max_age_ms,
        )
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.frames: list[Frame] = []
        self.answers: dict[int, Answer] = {}
        self.last_id = -1
        if greet:
            self.send(frames.PREFACE, frames.settings(settings or {}), frames.SETTINGS_ACK)

    def _talk(self, call: Call) -> StreamListener:
        self.talks.append(Talk(call))
        return self.talks[-1]

    def _woken(self) -> None:
        self.wakes += 1

    # -- sending

    def send(self, *parts: bytes) -> None:
        self.core.receive(b"".join(parts), self.now_ms)
        while self.turns:
            self.turn()
        self.read()

    def turn(self) -> None:
        """One turn of the loop, for what waits for it."""
        waiting = self.turns[:]
        self.turns.clear()
        for callback in waiting:
            callback()

    def block(self, path: str = "/s/echo", extra: Iterable[tuple[str, str]] = ()) -> bytes:
        return self.encoder.encode([*request_headers(path), *extra])

    def next_id(self) -> int:
        self.last_id += 2
        return self.last_id

    def open(self, path: str, extra: Iterable[tuple[str, str]] = (), flags: int = 0) -> int:
        stream_id = self.next_id()
        self.send(frames.frame(frames.HEADERS, WHOLE | flags, stream_id, self.block(path, extra)))
        return stream_id

    def call(
        self, path: str, *messages: bytes, extra: Iterable[tuple[str, str]] = (), end: bool = True
    ) -> int:
        """A whole request, its messages in one DATA frame if that is not too long."""
        stream_id = self.next_id()
        content, most = b"".join(map(prefixed, messages)), self.limits.max_frame_bytes
        parts = [frames.frame(frames.HEADERS, WHOLE, stream_id, self.block(path, extra))]
        for at in range(0, max(len(content), 1), most):
            last = END if end and at + most >= len(content) else 0
            parts.append(frames.frame(frames.DATA, last, stream_id, content[at : at + most]))
        self.send(*parts)
        return stream_id

    # -- reading

    def read(self) -> list[Frame]:
        """Take what the connection wants to send; returns the new frames."""
        new: list[Frame] = []
        while self.core.outbox.has_output:
            data = self.core.outbox.take()
            new += frames.Http2FrameReader(frames.LARGEST_FRAME_BYTES).feed(data)
        for frame in new:
            self._note(*frame)
        self.frames += new
        return new

    def _note(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        answer = self.answers.setdefault(stream_id, Answer())
        if kind == frames.HEADERS:
            answer.headers.append(decoded(self.decoder, payload))
        elif kind == frames.DATA:
            answer.data += payload
        elif kind == frames.RST_STREAM:
            answer.reset = int.from_bytes(payload, "big")
        if kind in (frames.HEADERS, frames.DATA) and flags & END:
            answer.ended = True

    def of_kind(self, kind: int) -> list[Frame]:
        return [frame for frame in self.frames if frame[0] == kind]

    @property
    def goaway(self) -> tuple[int, str] | None:
        """Code and sentence of the last GOAWAY."""
        for _, _, _, payload in reversed(self.of_kind(frames.GOAWAY)):
            return int.from_bytes(payload[4:8], "big"), payload[8:].decode()
        return None


def decoded(decoder: Decoder, block: bytes) -> dict[str, str]:
    return {str(name): str(value) for name, value in decoder.decode(block)}


def request_headers(path: str) -> Headers:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "127.0.0.1:8081"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("x-mq-client-id", "me@1"),
    ]


def prefixed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def zipped(message: bytes) -> bytes:
    content = gzip.compress(message, mtime=0)
    return b"\1" + len(content).to_bytes(4, "big") + content
