"""HTTP/2 and gRPC as a client that asks the same few things very often.

Header blocks are encoded once and repeated.  We tell the server that our table of headers has no
room (SETTINGS_HEADER_TABLE_SIZE 0), so that every block of an answer means the same each time and
can be remembered whole.  Answers come as the bytes of their gRPC messages, with the status.
"""

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError

from popmq.cli.load.reactor import Channel, LoadError, Reactor
from popmq.common.signing import DATE_HEADER, Signer
from popmq.proxy.transport.lean import frames

# status is grpc-status as text, or "reset N" for a stream that the server reset.
OnEnd = Callable[[float, str, bytes], None]
OnPart = Callable[[bytes], None]

GRPC_OK = "0"
MAX_BODY_BYTES = frames.DEFAULT_WINDOW - 5_535  # one message must fit the first window
HEADER_VARIANTS = ("indexed", "plain", "java", "node")
MESSAGE_HEAD = struct.Struct(">BI")

_FRAME = struct.Struct(">HBBBI")
_TOP_UP_BYTES = 1 << 29
_REMEMBERED_BLOCKS = 10_000
_STATUS_OF_BLOCK: dict[bytes, str] = {}
_CHANGING = ("x-mq-request-id", DATE_HEADER, "grpc-timeout")
_SIGNED_FOR_S = 20.0  # a signature is repeated for so long; proxies accept it for two minutes


@dataclass(frozen=True, slots=True)
class Headers:
    """What every call carries.

    `variant` says how the three headers that a client changes with each call travel: `indexed`
    repeats them (as h2load does).  The others are those of official clients: `plain` (Python) has
    literals that no table gets, `java` puts plain values into the server's table, and `node` codes
    them first.  The date of a call that is signed goes with its signature.
    """

    authority: str
    client_id: str
    variant: str = "indexed"
    timeout_s: int = 60
    signer: Signer = field(default_factory=Signer)

    @property
    def is_signed(self) -> bool:
        return bool(self.signer.access_key)

    def changing(self) -> list[str]:
        return [name for name in _CHANGING if not (self.is_signed and name == DATE_HEADER)]

    def fields(self, path: str) -> list[tuple[str, str]]:
        fixed = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self.authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "popmq-bench/1"),
            ("x-mq-protocol", "v2"),
            ("x-mq-language", "JAVA"),
            ("x-mq-client-version", "5.0.7"),
            ("x-mq-client-id", self.client_id),
        ]
        values = (f"{0:036d}", "20260101T000000Z", f"{self.timeout_s}S")
        changing = dict(zip(_CHANGING, values, strict=True)) if self.variant == "indexed" else {}
        return fixed + [(name, changing[name]) for name in self.changing() if name in changing]


@dataclass(slots=True)
class HeaderBlocks:
    """Header blocks of one connection: literals first, then indexes into the server's table."""

    headers: Headers
    encoder: Encoder = field(default_factory=Encoder)
    _stable: dict[str, bytes] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)
    _signature: bytes = b""
    _signed_until_s: float = 0.0

    def block(self, path: str) -> bytes:
        block = b""
        if self.headers.variant in ("indexed", "plain"):
            block = self._stable.get(path) or self._encode(path)
        if self.headers.is_signed:
            block += self._signed()
        if self.headers.variant == "indexed":
            return block
        number = next(self._numbers)
        values = {
            "x-mq-request-id": f"{number:036d}",
            DATE_HEADER: f"20260101T{number // 1_000 % 1_000_000:06d}Z",
            "grpc-timeout": f"{self.headers.timeout_s * 1000 + number % 1000}m",
        }
        changing = [(name, values[name]) for name in self.headers.changing()]
        if self.headers.variant == "plain":
            return block + b"".join(_literal(name, value) for name, value in changing)
        fields = [*self.headers.fields(path), *changing]
        return self.encoder.encode(fields, huffman=self.headers.variant == "node") + block

    def _signed(self) -> bytes:
        """Date and signature, as literals that no table gets."""
        now_s = time.monotonic()
        if now_s >= self._signed_until_s:
            headers = [(name, value, True) for name, value in self.headers.signer.headers()]
            # An encoder of its own: indexes of the connection's table move.
            self._signature = Encoder().encode(headers, huffman=False)
            self._signed_until_s = now_s + _SIGNED_FOR_S
        return self._signature

    def _encode(self, path: str) -> bytes:
        table = self.encoder.header_table.dynamic_entries
        before = len(table)
        block = self.encoder.encode(self.headers.fields(path), huffman=False)
        if len(table) == before:
            self._stable[path] = block
        else:  # a new entry moves the index of every older one
            self._stable.clear()
        return block


def _literal(name: str, value: str) -> bytes:
    """A literal that is not put into the table; both texts are shorter than 127 bytes."""
    return bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()


class Http2Channel(Channel):
    """One connection. `ready` once the server's SETTINGS are known; calls wait until then."""

    def __init__(self, reactor: Reactor, address: tuple[str, int], headers: Headers) -> None:
        super().__init__(reactor, address)
        self.ready = False
        self._blocks = HeaderBlocks(headers)
        self._next_id = 1
        self._calls: dict[int, tuple[OnEnd, float]] = {}
        self._data: dict[int, bytes] = {}
        self._parts: dict[int, OnPart] = {}
        self._rest = b""
        self._window = frames.DEFAULT_WINDOW
        self._taken = 0
        self._held: deque[tuple[str, bytes, OnEnd, float]] = deque()
        self.out.append(
            frames.PREFACE
            + frames.settings(
                {
                    frames.HEADER_TABLE_SIZE: 0,
                    frames.ENABLE_PUSH: 0,
                    frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW,
                }
            )
            + frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
        )
        self.flush()

    def call(self, path: str, message: bytes, on_end: OnEnd, token: float) -> None:
        """Ask; `on_end(token, status, messages)` comes later. Goes out with the next `flush`.

        `message` has its 5 bytes of gRPC head (`grpc_message`).
        """
        if self.ready and not self._held and self._window >= len(message):
            self._write(path, message, on_end, token)
        else:
            self._held.append((path, message, on_end, token))

    def open_stream(self, path: str, message: bytes, on_part: OnPart, on_end: OnEnd) -> int:
        """A call that stays open on our side; `on_part` gets the bytes of its DATA as they come."""
        assert self.ready, "wait for the connection first"
        stream_id = self._begin(path)
        self._calls[stream_id] = (on_end, 0.0)
        self._parts[stream_id] = on_part
        self._window -= len(message)
        self.out.append(frames.frame(frames.DATA, 0, stream_id, message))
        return stream_id

    def _begin(self, path: str) -> int:
        stream_id, self._next_id = self._next_id, self._next_id + 2
        block = self._blocks.block(path)
        self.out.append(_head(len(block), frames.HEADERS, frames.END_HEADERS, stream_id))
        self.out.append(block)
        return stream_id

    def _write(self, path: str, message: bytes, on_end: OnEnd, token: float) -> None:
        stream_id = self._begin(path)
        self._calls[stream_id] = (on_end, token)
        size = len(message)
        self._window -= size
        if size <= frames.DEFAULT_FRAME_BYTES:
            self.out.append(_head(size, frames.DATA, frames.END_STREAM, stream_id))
            self.out.append(message)
            return
        for start in range(0, size, frames.DEFAULT_FRAME_BYTES):
            piece = message[start : start + frames.DEFAULT_FRAME_BYTES]
            last = frames.END_STREAM if start + len(piece) == size else 0
            self.out.append(frames.frame(frames.DATA, last, stream_id, piece))

    # -- what comes

    def received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        start, end = 0, len(data)
        unpack = _FRAME.unpack_from
        while end - start >= 9:
            high, low, kind, flags, stream_id = unpack(data, start)
            stop = start + 9 + (high << 8 | low)
            if stop > end:
                break
            if kind == frames.DATA:
                self._on_data(flags, stream_id, data[start + 9 : stop])
            elif kind == frames.HEADERS:
                if flags & frames.END_STREAM:
                    self._on_trailers(flags, stream_id, data[start + 9 : stop])
            else:
                self._on_control(kind, flags, stream_id, data[start + 9 : stop])
            start = stop
        self._rest = data[start:] if start < end else b""
        self._send_held()

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._taken += len(payload)
        if self._taken > _TOP_UP_BYTES:
            self.out.append(frames.window_update(0, self._taken))
            self._taken = 0
        if flags & frames.PADDED:
            payload = frames.data_content(flags, payload)
        part = self._parts.get(stream_id)
        if part is not None:
            part(payload)
        else:
            before = self._data.get(stream_id)
            self._data[stream_id] = payload if before is None else before + payload
        if flags & frames.END_STREAM:
            raise LoadError("an answer ended without trailers: this is no gRPC server")

    def _on_trailers(self, flags: int, stream_id: int, block: bytes) -> None:
        if not flags & frames.END_HEADERS or flags & (frames.PADDED | frames.PRIORITIZED):
            raise LoadError("an answer's headers are continued or padded, which we do not read")
        status = _STATUS_OF_BLOCK.get(block)
        if status is None:
            status = _decode_status(block)
        self._end(stream_id, status)

    def _end(self, stream_id: int, status: str) -> None:
        self._parts.pop(stream_id, None)
        call = self._calls.pop(stream_id, None)
        if call is None:
            raise LoadError(f"an answer came on stream {stream_id}, where nothing was asked")
        on_end, token = call
        on_end(token, status, self._data.pop(stream_id, b""))

    def _on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.WINDOW_UPDATE:
            if stream_id == 0:
                self._window += int.from_bytes(payload) & frames.MAX_WINDOW
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self.out.append(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.SETTINGS:
            if not flags & frames.ACK:
                self._on_settings(payload)
        elif kind == frames.RST_STREAM:
            if stream_id in self._calls:
                self._end(stream_id, f"reset {int.from_bytes(payload)}")
        elif kind == frames.GOAWAY:
            code, why = int.from_bytes(payload[4:8]), payload[8:].decode("utf-8", "replace")
            raise LoadError(f"the server ended a connection: GOAWAY {code} {why}".strip())
        elif kind == frames.CONTINUATION:
            raise LoadError("an answer's headers are continued, which we do not read")

    def _on_settings(self, payload: bytes) -> None:
        for place in range(0, len(payload) - 5, 6):
            name, value = struct.unpack_from(">HI", payload, place)
            if name == frames.HEADER_TABLE_SIZE and value < frames.DEFAULT_TABLE_BYTES:
                self._blocks.encoder.header_table_size = value
            elif name == frames.INITIAL_WINDOW_SIZE and value < frames.DEFAULT_WINDOW:
                raise LoadError(f"the server takes {value} bytes ahead on a call, we need 65535")
        self.out.append(frames.frame(frames.SETTINGS, frames.ACK, 0, b""))
        self.ready = True

    def _send_held(self) -> None:
        while self.ready and self._held and self._window >= len(self._held[0][1]):
            self._write(*self._held.popleft())


def _head(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream_id)


def _decode_status(block: bytes) -> str:
    try:
        fields = {str(name): str(value) for name, value in Decoder().decode(block)}
    except HPACKError as error:
        raise LoadError(f"an answer's headers cannot be read: {error}") from error
    status = fields.get("grpc-status", "")
    if not status:
        raise LoadError(f"the answer has no grpc-status, its headers are {fields}")
    if fields.get("grpc-message"):
        status += f" {fields['grpc-message']}"
    if len(_STATUS_OF_BLOCK) < _REMEMBERED_BLOCKS:
        _STATUS_OF_BLOCK[block] = status
    return status


def grpc_message(payload: bytes) -> bytes:
    return MESSAGE_HEAD.pack(0, len(payload)) + payload


def grpc_payloads(data: bytes) -> Iterator[bytes]:
    """The messages of an answer; LoadError if it ends in the middle of one."""
    start = 0
    while start < len(data):
        compressed, size = MESSAGE_HEAD.unpack_from(data, start)
        if compressed or start + 5 + size > len(data):
            raise LoadError("an answer is compressed or ends in the middle of a message")
        yield data[start + 5 : start + 5 + size]
        start += 5 + size
