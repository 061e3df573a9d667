"""Responses as bytes: header blocks made once, and whole unary answers in one packing.

Every block uses literals without indexing and the static table, so it means the same on every
connection, whatever table size the client allows (RFC 7541, section 6.2.2).
"""

import struct
from urllib.parse import quote

from popmq.proxy.transport.interface import GrpcStatus
from popmq.proxy.transport.lean.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    frame,
    frame_header,
)

MESSAGE_PREFIX = struct.Struct(">BI")  # compressed or not, length
PREFIX_BYTES = MESSAGE_PREFIX.size
MAX_DETAIL = 1_000  # characters; clients take 8 KiB of headers
ACCEPTED_ENCODINGS = "identity,deflate,gzip"
# An encoder's table may not be larger than the decoder allows; we need none.
TABLE_OF_ZERO = b"\x20"
# Clients show it as it is: only what grpc-message has to escape is escaped.
_UNESCAPED = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"


def _integer(value: int, prefix_bits: int, first: int) -> bytes:
    limit = (1 << prefix_bits) - 1
    if value < limit:
        return bytes((first | value,))
    coded = bytearray((first | limit,))
    value -= limit
    while value >= 0x80:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    coded.append(value)
    return bytes(coded)


def _literal(name: str | int, value: str) -> bytes:
    """A field without indexing; `name` is a text or an index of the static table."""
    if isinstance(name, int):
        coded_name = _integer(name, 4, 0)
    else:
        coded_name = b"\0" + _integer(len(name), 7, 0) + name.encode()
    return coded_name + _integer(len(value), 7, 0) + value.encode("latin-1")


_STATUS_200 = b"\x88"
_STATUS, _CONTENT_TYPE, _ALLOW = 8, 31, 22  # of the static table
_OK_TRAILERS = _literal("grpc-status", "0")
_GZIP = _literal("grpc-encoding", "gzip")
RESPONSE_HEAD = _STATUS_200 + _literal(_CONTENT_TYPE, "application/grpc")

# HEADERS, DATA up to its message, and the trailers behind it, with the stream's number in each.
_UNARY_START = struct.Struct(f">5sI{len(RESPONSE_HEAD)}sHBHIBI")
_UNARY_END = struct.Struct(f">5sI{len(_OK_TRAILERS)}s")
_HEAD_FRAME = frame_header(len(RESPONSE_HEAD), HEADERS, END_HEADERS, 0)[:5]
_OK_FRAME = frame_header(len(_OK_TRAILERS), HEADERS, END_HEADERS | END_STREAM, 0)[:5]


def unary_start(stream_id: int, size: int) -> bytes:
    """Everything before the `size` bytes of a unary answer's message."""
    content = size + 5
    return _UNARY_START.pack(
        _HEAD_FRAME,
        stream_id,
        RESPONSE_HEAD,
        content >> 8,
        content & 0xFF,
        DATA << 8,
        stream_id,
        0,
        size,
    )


def unary_end(stream_id: int) -> bytes:
    return _UNARY_END.pack(_OK_FRAME, stream_id, _OK_TRAILERS)


def response_head(stream_id: int, table: bytes = b"", gzip: bool = False) -> bytes:
    """`table` is TABLE_OF_ZERO in the first block after the client shrank its table."""
    block = table + RESPONSE_HEAD + (_GZIP if gzip else b"")
    return frame(HEADERS, END_HEADERS, stream_id, block)


def trailers(stream_id: int, status: GrpcStatus, detail: str, table: bytes = b"") -> bytes:
    block = table + _status_block(status, detail)
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)


def trailers_only(stream_id: int, status: GrpcStatus, detail: str, table: bytes = b"") -> bytes:
    block = table + RESPONSE_HEAD + _status_block(status, detail)
    if status is GrpcStatus.UNIMPLEMENTED:
        block += _literal("grpc-accept-encoding", ACCEPTED_ENCODINGS)
    return frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)


def plain_http_head(stream_id: int, status: int, size: int, table: bytes = b"") -> bytes:
    """The start of an answer to somebody who does not speak gRPC; `size` bytes of text follow."""
    block = table + _literal(_STATUS, str(status)) + _literal(_CONTENT_TYPE, "text/plain")
    if status == 405:
        block += _literal(_ALLOW, "POST")
    block += _literal("content-length", str(size))
    return frame(HEADERS, END_HEADERS, stream_id, block)


def percent_encoded(detail: str) -> str:
    """As grpc-message wants it: UTF-8, and everything but printable ASCII escaped."""
    return quote(detail[:MAX_DETAIL], safe=_UNESCAPED, errors="replace")


def _status_block(status: GrpcStatus, detail: str) -> bytes:
    block = _literal("grpc-status", str(int(status)))
    return block + _literal("grpc-message", percent_encoded(detail)) if detail else block
