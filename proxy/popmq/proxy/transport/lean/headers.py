"""Request headers: HPACK blocks to what a call needs of them (RFC 7541; RFC 9113, section 8).

One decoder per connection, as the dynamic table is state of a connection: every block must be
decoded, in order, also those of streams that are refused.  A block that left the table alone
means the same until the table changes, so its result is kept.  Values that change with every
call and that hardly anybody reads stay Huffman-coded until they are asked for.
"""

import re

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
_LONGEST_INTEGER = 5  # bytes behind the prefix: 35 bits

# Nobody decides on these; the Huffman code of a field costs more than the rest of its call.
LAZY_NAMES = frozenset({"x-mq-request-id", "x-mq-date-time", "traceparent", "tracestate"})
_GRPC_KINDS = (b"application/grpc+", b"application/grpc;")  # not grpc-web
_OF_HTTP_1 = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)
# Indexed fields, each in one byte: what a client repeats with every call.
_INDEXED_RUN = re.compile(rb"[\x80-\xfe]*")
_GOOD_NAME = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
_BLANKS = b" \t"  # neither first nor last in a value
_BREAKS = b"\0\r\n"  # nowhere in a value


class Malformed(Exception):
    """The fields were decoded, and are no request; the fault of one stream."""


Field = tuple[str, bytes]  # a malformed name is ""


class Gathered:
    """Fields of a request so far, in the order in which they may come."""

    __slots__ = ("found", "plain")

    def __init__(self, before: "Gathered | None" = None) -> None:
        self.found: dict[str, bytes] = {} if before is None else before.found.copy()
        # Whether a field came that is no pseudo-header.
        self.plain: bool = before is not None and before.plain

    def add(self, fields: list[Field]) -> None:
        """Raises Malformed."""
        headers = self.found
        for name, value in fields:
            if name[:1] == ":":
                if self.plain or name in headers or name not in PSEUDO:
                    raise Malformed(f"{name} is unknown, comes twice, or behind other fields")
            elif name:
                self.plain = True
            else:
                raise Malformed("a field has a name or a value that HTTP/2 forbids")
            headers[name] = value


class RequestHead:
    """What the header block of a request says. Shared by calls whose blocks were the same."""

    __slots__ = (
        "accepted",
        "content_length",
        "encoding",
        "is_grpc",
        "metadata",
        "method",
        "path",
        "timeout",
    )

    def __init__(self, headers: dict[str, bytes]) -> None:
        """Raises Malformed."""
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
        self.timeout = get("grpc-timeout", b"")
        self.encoding = get("grpc-encoding", b"")
        self.accepted = get("grpc-accept-encoding", b"")
        self.metadata = Metadata(headers)

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


class HeaderDecoder:
    """Decodes the header blocks of one connection, each exactly once and in their order."""

    def __init__(self, max_header_bytes: int) -> None:
        self._table = HeaderTable()
        self._allowed_table_bytes = self._table.maxsize
        self._max_header_bytes = max_header_bytes
        self._heads: dict[bytes, RequestHead] = {}
        self._runs: dict[bytes, tuple[Gathered, int]] = {}  # with their size

    def request(self, block: bytes) -> RequestHead:
        """Raises Malformed, or ConnectionFault when the state is lost or a bound is passed."""
        head = self._heads.get(block)
        if head is None:
            before, size, start = self._run(block)
            fields, changed = self.fields(block, start, size)
            if changed:
                self._forget()
            gathered = Gathered(before)
            gathered.add(fields)
            head = RequestHead(gathered.found)
            if not changed and len(block) <= MAX_KEPT_BLOCK:
                kept_in(self._heads, block, head, KEPT_HEADS)
        return head

    def trailers(self, block: bytes) -> None:
        """Only for the state of the table; raises Malformed when they cannot be trailers."""
        fields, changed = self.fields(block)
        if changed:
            self._forget()
        if any(not name or name[0] == ":" for name, _ in fields):
            raise Malformed("a field that does not belong into trailers")

    def _forget(self) -> None:
        self._heads.clear()
        self._runs.clear()

    def _run(self, block: bytes) -> tuple[Gathered | None, int, int]:
        """What the block starts with, its size, and where it ends."""
        match = _INDEXED_RUN.match(block)
        end = match.end() if match else 0
        if not 0 < end <= MAX_KEPT_BLOCK:
            return None, 0, 0
        run = block[:end]
        kept = self._runs.get(run)
        if kept is None:
            fields, _ = self.fields(run)
            gathered = Gathered()
            try:
                gathered.add(fields)
            except Malformed:
                return None, 0, 0  # the whole block will say so, once the table has all of it
            size = sum(len(name) + len(value) + ENTRY_OVERHEAD for name, value in fields)
            kept = kept_in(self._runs, run, (gathered, size), KEPT_HEADS)
        return *kept, end

    def fields(self, block: bytes, start: int = 0, size: int = 0) -> tuple[list[Field], bool]:
        """The fields of a block from `start` on, and whether they changed the dynamic table.

        `size` is that of the fields before.
        """
        try:
            return self._decode(block, start, size)
        except (IndexError, HPACKError) as error:
            raise _lost("the header block cannot be decoded") from error

    def _decode(self, block: bytes, start: int, size: int) -> tuple[list[Field], bool]:
        fields: list[Field] = []
        dynamic, names, end = self._table.dynamic_entries, _NAMES, len(block)
        position, changed = self._size_updates(block) if start == 0 else (start, False)
        while position < end:
            first = block[position]
            position += 1
            if first >= 0x80:
                index = first & 0x7F
                if index == 0x7F:
                    index, position = _long_integer(block, position, 0x7F)
                if index <= STATIC_ENTRIES:
                    if index == 0:
                        raise _lost("a field has index 0")
                    name, value = _STATIC[index]
                else:
                    raw_name, value = dynamic[index - STATIC_ENTRIES - 1]
                    name = _name(raw_name)
                size += len(name) + len(value) + ENTRY_OVERHEAD
            else:
                if 0x20 <= first < 0x40:
                    raise _lost("the table's size is updated behind a field")
                mask = 0x3F if first >= 0x40 else 0x0F
                index = first & mask
                if index == mask:
                    index, position = _long_integer(block, position, mask)
                if index == 0:
                    length = block[position]
                    if length < 0x7F:
                        raw_name = block[position + 1 : position + 1 + length]
                        position += 1 + length
                    else:
                        text, position = _string(block, position)
                        raw_name = plain_text(text)
                    name = names[raw_name] if raw_name in names else _name(raw_name)
                elif index <= STATIC_ENTRIES:
                    name = _STATIC[index][0]
                    raw_name = name.encode()
                else:
                    raw_name = dynamic[index - STATIC_ENTRIES - 1][0]
                    name = _name(raw_name)
                length = block[position]
                if length < 0x7F:
                    value = block[position + 1 : position + 1 + length]
                    position += 1 + length
                    if position > end:
                        raise _lost("a string is longer than its block")
                else:
                    value, position = _string(block, position)
                    if type(value) is HuffmanCoded and (first >= 0x40 or name not in LAZY_NAMES):
                        value = plain_text(value)
                if type(value) is bytes and (
                    value.strip(_BLANKS) != value or value.translate(None, _BREAKS) != value
                ):
                    name = ""
                if first >= 0x40:
                    if not name:
                        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a field HTTP/2 forbids")
                    self._table.add(raw_name, value)
                    changed = True
                # No code is shorter than 5 bits, so a coded value counts for what it can be.
                long = len(value) * 8 // 5 if type(value) is HuffmanCoded else len(value)
                size += len(raw_name) + long + ENTRY_OVERHEAD
            if size > self._max_header_bytes:
                raise ConnectionFault(
                    ErrorCode.ENHANCE_YOUR_CALM,
                    f"more than {self._max_header_bytes} bytes of headers (lean.max_header_bytes)",
                    "header_bytes",
                )
            fields.append((name, value))
        return fields, changed

    def _size_updates(self, block: bytes) -> tuple[int, bool]:
        position, count = 0, 0
        while position < len(block) and 0x20 <= block[position] < 0x40:
            size = block[position] & 0x1F
            position += 1
            if size == 0x1F:
                size, position = _long_integer(block, position, 0x1F)
            count += 1
            if size > self._allowed_table_bytes or count > MAX_SIZE_UPDATES:
                raise _lost(f"update {count} of the table's size is {size}")
            self._table.maxsize = size
        return position, count > 0


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


_STATIC: list[tuple[str, bytes]] = [("", b"")] + [
    ("" if name in _OF_HTTP_1 else name.decode(), value) for name, value in HeaderTable.STATIC_TABLE
]
