"""HTTP/2 frames (RFC 9113, sections 4 and 6): bytes to frames and back, and nothing that waits.

A frame is `(kind, flags, stream id, payload)`.  What breaks a rule raises the fault that the rule
names, with its error code: `ConnectionFault` ends the connection, `StreamFault` one stream
(docs/concepts/transport.md).
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_WINDOW = (1 << 31) - 1
MAX_STREAM_ID = (1 << 31) - 1
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
LARGEST_FRAME_BYTES = (1 << 24) - 1
DEFAULT_TABLE_BYTES = 4_096

# Plain ints: an attribute of an enum class is a slow look-up on the path of every frame.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITIZED = 0x4, 0x8, 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6

#   0        3      4       5           9
#   | length | kind | flags | stream id | payload ...      (big-endian)
_HEADER = struct.Struct(">HBBBI")
HEADER_BYTES = _HEADER.size
LEAST_CALL_BYTES = 2 * HEADER_BYTES + 5  # HEADERS, DATA, and the prefix of a message
_U32 = struct.Struct(">I")
_U32_PAIR = struct.Struct(">II")
_SETTING = struct.Struct(">HI")
_ALL_BUT_RESERVED = 0x7FFF_FFFF

Frame = tuple[int, int, int, bytes]


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12


class ConnectionFault(Exception):
    """Ends the connection with GOAWAY. `bound` names the limit that was passed, if it was one."""

    def __init__(self, code: ErrorCode, why: str, bound: str = "") -> None:
        super().__init__(why)
        self.code = code
        self.bound = bound


class StreamFault(Exception):
    """Ends one stream with RST_STREAM."""

    def __init__(self, stream_id: int, code: ErrorCode, why: str) -> None:
        super().__init__(why)
        self.stream_id = stream_id
        self.code = code


class Http2FrameReader:
    """Cuts a byte stream into frames, however the stream was split."""

    __slots__ = ("_max_frame_bytes", "at", "data")

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self.data = b""
        self.at = 0  # what is before it was read

    @property
    def held_bytes(self) -> int:
        """Of a frame that is not complete; never more than the largest frame."""
        return len(self.data) - self.at

    @property
    def begins_call(self) -> bool:
        """Whether HEADERS stand next, and there may be a message behind them."""
        data, at = self.data, self.at
        return len(data) - at >= LEAST_CALL_BYTES and data[at + 3] == HEADERS

    def add(self, data: bytes) -> None:
        self.data = self.data[self.at :] + data if self.at < len(self.data) else data
        self.at = 0

    def next(self) -> Frame | None:
        """The next frame that is complete.

        Raises ConnectionFault for a frame that is longer than we allowed, as soon as its header
        is there.
        """
        data, start = self.data, self.at
        if start == len(data):
            self.data, self.at = b"", 0
            return None
        if len(data) - start >= 9:
            high, low, kind, flags, stream_id = _HEADER.unpack_from(data, start)
            size = high << 8 | low
            if size > self._max_frame_bytes:
                raise ConnectionFault(
                    ErrorCode.FRAME_SIZE_ERROR,
                    f"a frame of {size} bytes is over the limit of {self._max_frame_bytes} "
                    "(lean.max_frame_bytes)",
                )
            self.at = stop = start + 9 + size
            if stop <= len(data):
                return kind, flags, stream_id & _ALL_BUT_RESERVED, data[start + 9 : stop]
        self.data, self.at = data[start:], 0
        return None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes, to be read to the end before the next call."""
        self.add(data)
        while (frame := self.next()) is not None:
            yield frame


# -- what is in a payload


def data_content(flags: int, payload: bytes) -> bytes:
    """The content of DATA without its padding."""
    return _without_padding(payload) if flags & PADDED else payload


def headers_content(flags: int, stream_id: int, payload: bytes) -> bytes:
    """The piece of a header block in HEADERS; padding is cut off, priorities are ignored."""
    if flags & PADDED:
        payload = _without_padding(payload)
    if not flags & PRIORITIZED:
        return payload
    if len(payload) < 5:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its priority")
    if _depends_on_itself(stream_id, payload):
        # Of its stream only, says the RFC; but its header block has not been decoded.
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")
    return payload[5:]


def check_priority(stream_id: int, payload: bytes) -> None:
    if stream_id == 0:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
    if len(payload) != 5:
        raise StreamFault(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has not 5 bytes")
    if _depends_on_itself(stream_id, payload):
        raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")


def settings_content(flags: int, stream_id: int, payload: bytes) -> list[tuple[int, int]]:
    """The (identifier, value) pairs of SETTINGS, each checked by itself; none in an ACK."""
    if stream_id != 0:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"SETTINGS on stream {stream_id}")
    if len(payload) % 6 or (flags & ACK and payload):
        raise ConnectionFault(
            ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes, flags {flags:#x}"
        )
    pairs = list(_SETTING.iter_unpack(payload))
    for name, value in pairs:
        _check_setting(name, value)
    return pairs


def ping_content(stream_id: int, payload: bytes) -> bytes:
    if stream_id != 0:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"PING on stream {stream_id}")
    if len(payload) != 8:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING has not 8 bytes")
    return payload


def reset_content(stream_id: int, payload: bytes) -> int:
    """The error code of RST_STREAM."""
    if stream_id == 0:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on stream 0")
    if len(payload) != 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has not 4 bytes")
    (code,) = _U32.unpack(payload)
    return int(code)


def goaway_content(stream_id: int, payload: bytes) -> tuple[int, int]:
    """(last stream id, error code)"""
    if stream_id != 0:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"GOAWAY on stream {stream_id}")
    if len(payload) < 8:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has less than 8 bytes")
    last, code = _U32_PAIR.unpack_from(payload)
    return last & _ALL_BUT_RESERVED, code


def window_content(stream_id: int, payload: bytes) -> int:
    """The increment of WINDOW_UPDATE; 0 is the fault of the stream that it is for."""
    if len(payload) != 4:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has not 4 bytes")
    increment = int.from_bytes(payload, "big") & _ALL_BUT_RESERVED
    if increment == 0:
        why = "WINDOW_UPDATE of 0"
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, why)
        raise StreamFault(stream_id, ErrorCode.PROTOCOL_ERROR, why)
    return increment


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def _depends_on_itself(stream_id: int, payload: bytes) -> bool:
    return int.from_bytes(payload[:4], "big") & _ALL_BUT_RESERVED == stream_id


def _check_setting(name: int, value: int) -> None:
    if name == INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
        raise ConnectionFault(
            ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE of {value}"
        )
    push = name == ENABLE_PUSH and value > 1
    frame = name == MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= LARGEST_FRAME_BYTES
    if push or frame:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"setting {name} is {value}")


# -- building frames


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def frame_header(size: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _HEADER.pack(size >> 8, size & 0xFF, kind, flags, stream_id)


def settings(pairs: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in pairs.items()))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)


def ping(content: bytes, *, ack: bool = False) -> bytes:
    return frame(PING, ACK if ack else 0, 0, content)


def reset(stream_id: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream_id, _U32.pack(code))


def goaway(last_stream_id: int, code: int, why: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, _U32_PAIR.pack(last_stream_id, code) + why.encode())


def window_update(stream_id: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream_id, _U32.pack(increment))
