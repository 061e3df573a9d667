"""Request headers: HPACK blocks to what a call needs of them (RFC 7541; RFC 9113, section 8).

One decoder per connection, as the dynamic table is state of a connection: every block must be
decoded, in order, also those of streams that are refused.  A block that left the table alone
means the same until the table changes, so its result is kept.  Calls of one client differ in a
few values, which are kept apart from what the calls have in common (`RequestShape`).
"""

import re
from collections import deque
from typing import NamedTuple

from hpack.exceptions import HPACKError
from hpack.table import HeaderTable

from popmq.proxy.transport.lean.frames import ConnectionFault, ErrorCode
from popmq.proxy.transport.lean.metadata import (
    MAX_KEPT_TEXT,
    PSEUDO,
    HuffmanCoded,
    Metadata,
    kept_in,
    plain_text,
)

STATIC_ENTRIES = 61
ENTRY_OVERHEAD = 32  # what RFC 7541 adds to the size of each field
KEPT_HEADS = 64
MAX_KEPT_BLOCK = 1_024
MAX_HEADER_FRAMES = 32  # HEADERS and its CONTINUATIONs
MAX_SIZE_UPDATES = 2  # RFC 7541, section 4.2
TABLE_BYTES = HeaderTable.DEFAULT_SIZE  # of the dynamic table; our SETTINGS name no other
_LONGEST_INTEGER = 5  # bytes behind the prefix: 35 bits

# No handler decides by these; the Huffman code of a field costs more than the rest of its call.
LAZY_NAMES = frozenset({"x-mq-request-id", "x-mq-date-time", "traceparent", "tracestate"})
# Fields of which each call has a value of its own.
CHANGING_NAMES = LAZY_NAMES | {"grpc-timeout", "authorization"}
_GRPC_KINDS = (b"application/grpc+", b"application/grpc;")  # not grpc-web
_OF_HTTP_1 = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
# Indexed fields, each in one byte: what a client repeats with every call.
_INDEXED_RUN = re.compile(rb"[\x80-\xfe]*")
_VISIBLE = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
_GOOD_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_BLANKS = b" \t"  # neither first nor last in a value
_BREAKS = b"\0\r\n"  # nowhere in a value


class Malformed(Exception):
    """The fields were decoded, and are no request; the fault of one stream."""


Field = tuple[str, bytes]  # a malformed name is ""


class RequestShape:
    """What header blocks have in common that differ in the values of CHANGING_NAMES alone."""

    __slots__ = ("accepted", "content_length", "encoding", "fields", "is_grpc", "method", "path")

    def __init__(self, fields: list[Field]) -> None:
        """Raises Malformed."""
        self.fields = headers = _in_order(fields)
        get = headers.get
        self.method = get(":method", b"")
        path = get(":path", b"")
        if not (self.method and path and get(":scheme")):
            raise Malformed("the pseudo-header fields are not those of a request")
        if get("te", b"trailers") != b"trailers":
            raise Malformed("te is not trailers")
        self.path = path.decode("latin-1")
        kind = get("content-type", b"")
        self.is_grpc = kind == b"application/grpc" or kind.startswith(_GRPC_KINDS)
        self.content_length = _length(get("content-length", b""))
        self.encoding = get("grpc-encoding", b"")
        self.accepted = get("grpc-accept-encoding", b"")


def _in_order(fields: list[Field]) -> dict[str, bytes]:
    """The fields of a request by name. Raises Malformed for a wrong name or order."""
    headers: dict[str, bytes] = {}
    plain = False  # whether a field came that is no pseudo-header
    for name, value in fields:
        if name[:1] == ":":
            if plain or name in headers or name not in PSEUDO:
                raise Malformed(f"{name} is unknown, comes twice, or behind other fields")
        elif name:
            plain = True
        else:
            raise Malformed("a field has a name or a value that HTTP/2 forbids")
        headers[name] = value
    return headers


class RequestHead:
    """The header block of a request. Shared by calls whose blocks were the same."""

    __slots__ = ("_changing", "_metadata", "shape", "timeout")

    def __init__(self, shape: RequestShape, changing: dict[str, bytes]) -> None:
        """`changing`: the values of CHANGING_NAMES that came."""
        self.shape = shape
        self.timeout = changing.get("grpc-timeout", b"")
        self._changing = changing
        self._metadata: Metadata | None = None

    @property
    def metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = Metadata(self.shape.fields | self._changing)
        return self._metadata

    def timeout_ms(self) -> int | None:
        """Milliseconds that the client gave this call; None without a limit.

        Raises Malformed for what is no grpc-timeout.
        """
        text = self.timeout
        if not text:
            return None
        unit, digits = _MS_PER_UNIT.get(text[-1:]), text[:-1]
        if unit is None or not digits.isdigit() or len(digits) > 8:
            raise Malformed("grpc-timeout is no number of at most 8 digits with a unit")
        return int(int(digits) * unit)


_MS_PER_UNIT: dict[bytes, float] = {
    b"H": 3_600_000,
    b"M": 60_000,
    b"S": 1_000,
    b"m": 1,
    b"u": 1e-3,
    b"n": 1e-6,
}


class HeaderBlock:
    """A header block that goes on in CONTINUATION; `stream_id` is 0 while there is none."""

    __slots__ = ("_bytes", "_ends", "_max_bytes", "_parts", "stream_id")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._bytes = 0
        self._ends = False
        self.stream_id = 0

    def open(self, stream_id: int, ends: bool, part: bytes) -> None:
        self.stream_id, self._ends = stream_id, ends
        self.add(part)

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self._bytes += len(part)
        if self._bytes > self._max_bytes:
            why = f"a header block of more than {self._max_bytes} bytes (lean.max_header_bytes)"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, why, "header_bytes")
        if len(self._parts) > MAX_HEADER_FRAMES:
            why = f"headers in more than {MAX_HEADER_FRAMES} frames"
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, why, "header_frames")

    def take(self) -> tuple[int, bool, bytes]:
        """(stream id, whether HEADERS ended the stream, the whole block)"""
        taken = self.stream_id, self._ends, b"".join(self._parts)
        self._parts.clear()
        self._bytes = self.stream_id = 0
        return taken


class Changing(NamedTuple):
    """Where in a block a value of CHANGING_NAMES stands that the table does not keep."""

    name: str
    start: int
    stop: int
    coded: bool


class _Template:
    """A block that left the table alone; others mean the same but for the values that change."""

    __slots__ = ("_changing", "_pieces", "_size", "shape")

    def __init__(self, block: bytes, changing: list[Changing], shape: RequestShape) -> None:
        self.shape = shape
        self._size = len(block)
        self._changing = changing
        starts = [0, *(value.stop for value in changing)]
        stops = [*(value.start for value in changing), len(block)]
        self._pieces = [
            (start, stop, block[start:stop]) for start, stop in zip(starts, stops, strict=True)
        ]

    def values(self, block: bytes) -> dict[str, bytes] | None:
        """Those of a block that differs in nothing else; None if it has to be decoded.

        Raises HPACKError for what is no Huffman code.
        """
        if len(block) != self._size:
            return None
        for start, stop, piece in self._pieces:
            if block[start:stop] != piece:
                return None
        values: dict[str, bytes] = {}
        for name, start, stop, coded in self._changing:
            value = block[start:stop]
            if not coded:
                if not _VISIBLE.fullmatch(value):
                    return None
            elif name in LAZY_NAMES:
                value = HuffmanCoded(value)
            else:
                value = plain_text(HuffmanCoded(value))
                if not _VISIBLE.fullmatch(value):
                    return None
            values[name] = value
        return values


class HeaderDecoder:
    """Decodes the header blocks of one connection, each exactly once and in their order."""

    def __init__(self, max_header_bytes: int) -> None:
        # The dynamic table, the newest entry first: fields with their sizes.
        self._entries: deque[tuple[Field, int]] = deque()
        self._table_bytes = 0
        self._max_table_bytes = TABLE_BYTES
        self._max_header_bytes = max_header_bytes
        self._heads: dict[bytes, RequestHead] = {}
        # By the indexed fields with which a block begins.
        self._templates: dict[bytes, _Template] = {}
        self._shapes: dict[tuple[Field | str, ...], RequestShape] = {}

    def request(self, block: bytes) -> RequestHead:
        """Raises Malformed, or ConnectionFault when the state is lost or a bound is passed."""
        head = self._heads.get(block)
        if head is not None:
            return head
        match = _INDEXED_RUN.match(block)
        run = match.group() if match else b""
        template = self._templates.get(run)
        if template is not None:
            try:
                values = template.values(block)
            except HPACKError as error:
                raise _undecodable() from error
            if values is not None:
                return RequestHead(template.shape, values)
        fields, changed, changing = self._fields(block)
        if changed:
            self._forget()
        shape = self._shape(fields)
        head = RequestHead(
            shape, {field[0]: field[1] for field in fields if field[0] in CHANGING_NAMES}
        )
        if not changed and len(block) <= MAX_KEPT_BLOCK:
            if changing:
                kept_in(self._templates, run, _Template(block, changing, shape), KEPT_HEADS)
            else:
                kept_in(self._heads, block, head, KEPT_HEADS)
        return head

    def trailers(self, block: bytes) -> None:
        """Only for the state of the table; raises Malformed when they cannot be trailers."""
        fields, changed = self.fields(block)
        if changed:
            self._forget()
        if any(not name or name[0] == ":" for name, _ in fields):
            raise Malformed("a field that does not belong into trailers")

    def fields(self, block: bytes) -> tuple[list[Field], bool]:
        """The fields of a block, and whether they changed the dynamic table."""
        fields, changed, _ = self._fields(block)
        return fields, changed

    def _fields(self, block: bytes) -> tuple[list[Field], bool, list[Changing]]:
        try:
            return self._decode(block)
        except (IndexError, HPACKError) as error:
            raise _undecodable() from error

    def _shape(self, fields: list[Field]) -> RequestShape:
        key = tuple([field[0] if field[0] in CHANGING_NAMES else field for field in fields])
        shape = self._shapes.get(key)
        if shape is None:
            shape = RequestShape(fields)
            for name in CHANGING_NAMES:
                shape.fields.pop(name, None)
            kept_in(self._shapes, key, shape, KEPT_HEADS)
        return shape

    def _forget(self) -> None:
        self._heads.clear()
        self._templates.clear()

    def _decode(self, block: bytes) -> tuple[list[Field], bool, list[Changing]]:
        fields: list[Field] = []
        changing: list[Changing] = []
        entries, end = self._entries, len(block)
        position, changed = self._size_updates(block)
        left = self._max_header_bytes
        while position < end:
            first = block[position]
            position += 1
            if first >= 0x80:
                index = first & 0x7F
                if index == 0x7F:
                    index, position = _long_integer(block, position, 0x7F)
                if index > STATIC_ENTRIES:
                    field, size = entries[index - STATIC_ENTRIES - 1]
                elif index:
                    field, size = _STATIC[index]
                else:
                    raise _lost("a field has index 0")
            else:
                if 0x20 <= first < 0x40:
                    raise _lost("the table's size is updated behind a field")
                name, position = self._name_at(block, position, first)
                size = block[position]
                start = position + 1
                position = start + size
                if size < 0x7F:
                    value = block[start:position]
                    if position > end:
                        raise _lost("a string is longer than its block")
                else:
                    value, position = _string(block, start - 1)
                    start = position - len(value)
                coded = type(value) is HuffmanCoded
                if not coded or first >= 0x40 or name not in LAZY_NAMES:
                    value = plain_text(value)
                    size = len(name) + len(value) + ENTRY_OVERHEAD
                    if value.strip(_BLANKS) != value or value.translate(None, _BREAKS) != value:
                        name = ""
                else:  # no code is shorter than 5 bits
                    size = len(name) + len(value) * 8 // 5 + ENTRY_OVERHEAD
                field = name, value
                if first >= 0x40:
                    if not name:
                        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a field HTTP/2 forbids")
                    self._add(field, size)
                    changed = True
                elif name in CHANGING_NAMES:
                    changing.append(Changing(name, start, position, coded))
            left -= size
            if left < 0:
                raise ConnectionFault(
                    ErrorCode.ENHANCE_YOUR_CALM,
                    f"more than {self._max_header_bytes} bytes of headers (lean.max_header_bytes)",
                    "header_bytes",
                )
            fields.append(field)
        return fields, changed, changing

    def _name_at(self, block: bytes, position: int, first: int) -> tuple[str, int]:
        """Of a literal whose first byte is before `position`, and where its value begins."""
        mask = 0x3F if first >= 0x40 else 0x0F
        index = first & mask
        if index == mask:
            index, position = _long_integer(block, position, mask)
        if index > STATIC_ENTRIES:
            return self._entries[index - STATIC_ENTRIES - 1][0][0], position
        if index:
            return _STATIC[index][0][0], position
        text, position = _string(block, position)
        raw_name = plain_text(text)
        return _NAMES.get(raw_name) or _name(raw_name), position

    def _add(self, field: Field, size: int) -> None:
        """RFC 7541, section 4.4: an entry larger than the table empties it."""
        self._entries.appendleft((field, size))
        self._table_bytes += size
        self._evict()

    def _evict(self) -> None:
        while self._table_bytes > self._max_table_bytes:
            self._table_bytes -= self._entries.pop()[1]

    def _size_updates(self, block: bytes) -> tuple[int, bool]:
        position, count = 0, 0
        while position < len(block) and 0x20 <= block[position] < 0x40:
            size = block[position] & 0x1F
            position += 1
            if size == 0x1F:
                size, position = _long_integer(block, position, 0x1F)
            count += 1
            if size > TABLE_BYTES or count > MAX_SIZE_UPDATES:
                raise _lost(f"update {count} of the table's size is {size}")
            self._max_table_bytes = size
            self._evict()
        return position, count > 0


def _undecodable() -> ConnectionFault:
    return _lost("the header block cannot be decoded")


def _lost(why: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.COMPRESSION_ERROR, why)


def _long_integer(block: bytes, position: int, value: int) -> tuple[int, int]:
    """The rest of an integer whose prefix is full, and where it ends (RFC 7541, section 5.1)."""
    for shift in range(0, 7 * _LONGEST_INTEGER, 7):
        byte = block[position]
        position += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _lost("an integer has more than 35 bits")


def _string(block: bytes, position: int) -> tuple[bytes, int]:
    first = block[position]
    position += 1
    size = first & 0x7F
    if size == 0x7F:
        size, position = _long_integer(block, position, 0x7F)
    stop = position + size
    if stop > len(block):
        raise _lost("a string is longer than its block")
    text = block[position:stop]
    return (HuffmanCoded(text) if first >= 0x80 else text), stop


_NAMES: dict[bytes, str] = {}  # for all connections


def _name(raw: bytes) -> str:
    """A field name as text; "" for one that HTTP/2 forbids."""
    name = _NAMES.get(raw)
    if name is None:
        good = raw not in _OF_HTTP_1 and _GOOD_NAME.fullmatch(raw)
        name = raw.decode("ascii") if good else ""
        if len(raw) <= MAX_KEPT_TEXT:
            kept_in(_NAMES, raw, name)
    return name


def _length(text: bytes) -> int:
    """-1 without one."""
    if not text:
        return -1
    if not text.isdigit() or len(text) > 15:
        raise Malformed("content-length is no number")
    return int(text)


def _static_entry(raw_name: bytes, value: bytes) -> tuple[Field, int]:
    name = "" if raw_name in _OF_HTTP_1 else raw_name.decode()
    return (name, value), len(raw_name) + len(value) + ENTRY_OVERHEAD


_STATIC = [(("", b""), 0)] + [_static_entry(*entry) for entry in HeaderTable.STATIC_TABLE]
