"""The Remoting frame: bytes to commands and back, without a socket or a clock.

    length u32 | serialization u8 | header length u24 | header | body

`length` counts everything behind itself.  The header is JSON (0) or RocketMQ's binary form (1):

    code i16 | language u8 | version i16 | opaque i32 | flag i32
    remark length i32, remark | fields length i32, fields: (i16, name, i32, value)...

The binary form has 16 bits for the code, so the codes of pop arrive modulo 65,536 and are mapped
back here (docs/concepts/remoting.md).
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from popmq.common.quantities import KIB, MIB
from popmq.proxy.remoting.request_codes import RequestCode

MAX_FRAME_BYTES = 16 * MIB  # RocketMQ's clients and servers drop a connection with a longer one
MAX_HEADER_BYTES = 256 * KIB  # the properties of a message are at most 32,767 bytes of it
MAX_FIELDS = 256
VERSION = 513  # 5.5.0; a Java client with an SQL filter refuses anything below 232
_FIRST_RELEASE, _LAST_RELEASE = 194, 611  # 3.9.1-SNAPSHOT and 5.9.9; before, places are left out
RESPONSE, ONE_WAY = 1, 2  # bits of the flag
# Codes above 16 bits, by what a binary header leaves of them.
_LONG_CODES = {code & 0xFFFF: code for code in RequestCode if code > 0xFFFF}
_LANGUAGES = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP",
    "OMS", "RUST", "NODE_JS",
)  # fmt: skip
_FIXED = struct.Struct(">hBhii")
_I16, _I32 = struct.Struct(">h"), struct.Struct(">i")


def release(version: int) -> str:
    """The release that a header's version stands for, as 4.9.8; the number where none is known.

    RocketMQ counts them, each with its snapshot before it, up to 9 in the last two places.
    """
    if not _FIRST_RELEASE <= version <= _LAST_RELEASE:
        return str(version)
    places = 391 + (version - _FIRST_RELEASE) // 2
    name = ".".join(str(places))
    return f"{name}-SNAPSHOT" if version % 2 == 0 else name


class BadFrame(Exception):
    """The bytes are no Remoting frame, or one over a limit; the connection ends."""


class Serialization(IntEnum):
    JSON = 0
    BINARY = 1


@dataclass(frozen=True, slots=True)
class Command:
    """One request or response. `fields` are the header's own, all as text."""

    code: int
    opaque: int = 0
    flag: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    remark: str = ""
    language: str = "JAVA"
    version: int = VERSION
    serialization: Serialization = Serialization.JSON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE)

    @property
    def is_one_way(self) -> bool:
        return bool(self.flag & ONE_WAY)

    def answer(
        self,
        code: int = 0,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        remark: str = "",
    ) -> bytes:
        """The response to this request, in the serialization that it came in."""
        response = Command(
            code,
            self.opaque,
            RESPONSE,
            fields or {},
            body,
            remark,
            serialization=self.serialization,
        )
        return encode(response)


class FrameReader:
    """Cuts a stream into commands; at most one incomplete frame is kept."""

    __slots__ = ("_kept", "_max_frame_bytes")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._kept = bytearray()
        self._max_frame_bytes = max_frame_bytes

    @property
    def is_between_frames(self) -> bool:
        return not self._kept

    def feed(self, data: bytes) -> Iterator[Command]:
        """Raises BadFrame, and is over then. Lengths are checked before their bytes are awaited."""
        kept = self._kept
        kept += data
        at = 0
        while len(kept) - at >= 8:
            length, mark = struct.unpack_from(">II", kept, at)
            if not 4 <= length <= self._max_frame_bytes:
                raise BadFrame(f"a frame of {length} bytes: 4 to {self._max_frame_bytes} may come")
            header_size = mark & 0xFFFFFF
            if header_size > min(length - 4, MAX_HEADER_BYTES):
                raise BadFrame(
                    f"a header of {header_size} bytes in a frame of {length}: it takes at most "
                    f"{MAX_HEADER_BYTES} and must fit the frame"
                )
            if len(kept) - at < 4 + length:
                break
            header = bytes(kept[at + 8 : at + 8 + header_size])
            body = bytes(kept[at + 8 + header_size : at + 4 + length])
            at += 4 + length
            yield decode(mark >> 24, header, body)
        del kept[:at]


def decode(serialization: int, header: bytes, body: bytes) -> Command:
    """Raises BadFrame for a header that cannot be read; members that are not known are skipped."""
    if serialization == Serialization.JSON:
        return _from_json(header, body)
    if serialization == Serialization.BINARY:
        return _from_binary(header, body)
    raise BadFrame(f"serialization {serialization}: it is 0 (JSON) or 1 (binary)")


def encode(command: Command) -> bytes:
    binary = command.serialization is Serialization.BINARY
    header = _to_binary(command) if binary else _to_json(command)
    mark = command.serialization << 24 | len(header)
    size = struct.pack(">II", 4 + len(header) + len(command.body), mark)
    return b"".join((size, header, command.body))


def _from_json(header: bytes, body: bytes) -> Command:
    try:
        content = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"the header is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadFrame("the header is no JSON object")
    numbers = [content.get(name, 0) for name in ("code", "opaque", "flag", "version")]
    if not all(isinstance(number, int) and -(1 << 31) <= number < 1 << 31 for number in numbers):
        raise BadFrame("code, opaque, flag and version of a header are numbers of 32 bits")
    code, opaque, flag, version = map(int, numbers)
    given = content.get("extFields") or {}
    if not isinstance(given, dict) or len(given) > MAX_FIELDS:
        raise BadFrame(f"extFields of a header is an object of at most {MAX_FIELDS} members")
    fields = {name: _text(value) for name, value in given.items() if value is not None}
    language, remark = content.get("language"), content.get("remark")
    return Command(
        code,
        opaque,
        flag,
        fields,
        body,
        remark if isinstance(remark, str) else "",
        language if isinstance(language, str) else "OTHER",
        version,
    )


def _text(value: object) -> str:
    """C++ and ali-ons send some values as JSON numbers or booleans."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _to_json(command: Command) -> bytes:
    content: dict[str, object] = {
        "code": command.code,
        "flag": command.flag,
        "language": command.language,
        "opaque": command.opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": command.version,
    }
    if command.fields:
        content["extFields"] = command.fields
    if command.remark:
        content["remark"] = command.remark
    return json.dumps(content, separators=(",", ":")).encode()


def _from_binary(header: bytes, body: bytes) -> Command:
    try:
        code, language, version, opaque, flag = _FIXED.unpack_from(header)
        remark, at = _sized(header, _FIXED.size, _I32)
        fields_text, end = _sized(header, at, _I32)
        fields = _binary_fields(fields_text)
        text = remark.decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"the binary header cannot be read: {error}") from error
    if end != len(header):
        raise BadFrame(f"the binary header ends at byte {end} of {len(header)}")
    code &= 0xFFFF
    return Command(
        _LONG_CODES.get(code, code),
        opaque,
        flag,
        fields,
        body,
        text,
        _LANGUAGES[language] if language < len(_LANGUAGES) else "OTHER",
        version,
        Serialization.BINARY,
    )


def _binary_fields(data: bytes) -> dict[str, str]:
    fields: dict[str, str] = {}
    at = 0
    while at < len(data):
        name, at = _sized(data, at, _I16)
        value, at = _sized(data, at, _I32)
        if len(fields) == MAX_FIELDS:
            raise BadFrame(f"a header has more than {MAX_FIELDS} fields")
        fields[name.decode()] = value.decode()
    return fields


def _sized(data: bytes, at: int, size: struct.Struct) -> tuple[bytes, int]:
    (length,) = size.unpack_from(data, at)
    at += size.size
    if not 0 <= length <= len(data) - at:
        raise BadFrame(f"a text of {length} bytes, {len(data) - at} are left of the header")
    return data[at : at + length], at + length


def _to_binary(command: Command) -> bytes:
    language = _LANGUAGES.index(command.language) if command.language in _LANGUAGES else 7
    code = (command.code + 0x8000 & 0xFFFF) - 0x8000
    remark = command.remark.encode()
    parts = []
    for name, value in command.fields.items():
        key, content = name.encode(), value.encode()
        parts += [_I16.pack(len(key)), key, _I32.pack(len(content)), content]
    fields = b"".join(parts)
    fixed = _FIXED.pack(code, language, command.version, command.opaque, command.flag)
    return b"".join((fixed, _I32.pack(len(remark)), remark, _I32.pack(len(fields)), fields))
