"""Protobuf's wire format, as far as bytes are cut and joined without decoding them (D5).

The scan expects bytes that a real parser has accepted; on others it raises `BadWire`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from popmq.common.varint import read_varint

VARINT, FIXED64, LEN, START_GROUP, END_GROUP, FIXED32 = range(6)


class BadWire(ValueError):
    """The bytes are no protobuf message."""


class WireField(NamedTuple):
    """One field where it stands: [start, end) with its tag, the content from `content` on."""

    number: int
    wire_type: int
    start: int
    content: int
    end: int


def fields(data: bytes, start: int = 0, end: int | None = None) -> Iterator[WireField]:
    """The top-level fields of data[start:end], in their order, unknown ones included."""
    stop = len(data) if end is None else end
    at = start
    try:
        while at < stop:
            key, size = data[at], data[at + 1]
            if key < 0x80 and key & 7 == LEN and size < 0x80:  # nearly every field
                field = WireField(key >> 3, LEN, at, at + 2, at + 2 + size)
            else:
                field = field_at(data, at)
            if field.end > stop:
                raise BadWire("a field ends behind its message")
            yield field
            at = field.end
    except IndexError as error:
        raise BadWire("the message ends inside a field") from error
    except BadWire:
        raise
    except ValueError as error:
        raise BadWire(str(error)) from error


def cut(
    data: bytes, number: int, start: int = 0, end: int | None = None
) -> tuple[bytes, list[bytes]]:
    """data[start:end] without its fields `number`, and the contents of those."""
    kept: list[bytes] = []
    taken: list[bytes] = []
    stop = len(data) if end is None else end
    kept_from = at = start
    try:
        while at < stop:
            # Written out: this runs for every field of every message that is sent.
            key, size = data[at], data[at + 1]
            if key & 0x87 == LEN and size < 0x80:
                keys, kind, content, after = key >> 3, LEN, at + 2, at + 2 + size
            else:
                keys, kind, _, content, after = field_at(data, at)
            if after > stop:
                raise BadWire("a field ends behind its message")
            if keys == number:
                kept.append(data[kept_from:at])
                kept_from = after
                if kind == LEN:
                    taken.append(data[content:after])
            at = after
    except IndexError as error:
        raise BadWire("the message ends inside a field") from error
    except BadWire:
        raise
    except ValueError as error:
        raise BadWire(str(error)) from error
    kept.append(data[kept_from:stop])
    return b"".join(kept), taken


def only_content(data: bytes, number: int, start: int = 0) -> int:
    """Where the content starts, if data[start:] is nothing but one text, bytes or message in field
    `number`; else 0."""
    if len(data) <= start or data[start] != number << 3 | LEN:
        return 0
    try:
        size, at = read_varint(data, start + 1)
    except (IndexError, ValueError):
        return 0
    return at if at + size == len(data) else 0


def varint(value: int) -> bytes:
    """A value from 0 to 2^64 - 1, or a negative one as 64 bits in two's complement."""
    if 0 <= value < 0x80:
        return _SMALL[value]
    if 0x80 <= value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def scalar(number: int, value: int) -> bytes:
    return tag(number, VARINT) + varint(value)


def chunk(number: int, content: bytes) -> bytes:
    """A length-delimited field: text, bytes, or a message inside a message."""
    return b"".join((tag(number, LEN), varint(len(content)), content))


_SMALL = tuple(bytes((value,)) for value in range(0x80))


def field_at(data: bytes, start: int) -> WireField:
    """The field that starts there; it may end behind the data."""
    key, at = read_varint(data, start)
    number, wire_type = key >> 3, key & 7
    if wire_type == LEN:
        size, at = read_varint(data, at)
        return WireField(number, wire_type, start, at, at + size)
    if wire_type == VARINT:
        return WireField(number, wire_type, start, at, read_varint(data, at)[1])
    if wire_type == FIXED32:
        return WireField(number, wire_type, start, at, at + 4)
    if wire_type == FIXED64:
        return WireField(number, wire_type, start, at, at + 8)
    if wire_type == START_GROUP:
        return WireField(number, wire_type, start, at, _end_of_group(data, at))
    raise BadWire(f"wire type {wire_type} cannot start a field")


def _end_of_group(data: bytes, at: int) -> int:
    depth = 1
    while depth:
        key, after = read_varint(data, at)
        if key & 7 == END_GROUP:
            depth -= 1
            at = after
        elif key & 7 == START_GROUP:
            depth += 1
            at = after
        else:
            at = field_at(data, at).end
    return at
