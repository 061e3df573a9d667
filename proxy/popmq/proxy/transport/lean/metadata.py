"""Values of request headers: Huffman-coded until they are needed, and those decoded before.

Not compiled in a compiled build: a native class cannot be `bytes`.
"""

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping
from typing import TypeVar

from hpack.exceptions import HPACKError

from popmq.proxy.transport.lean.huffman import decode_huffman

KEPT_TEXTS = 4_096
MAX_KEPT_TEXT = 256
PSEUDO = frozenset({":method", ":scheme", ":path", ":authority"})
_OF_THE_TRANSPORT = PSEUDO | {
    "te",
    "content-type",
    "content-length",
    "grpc-timeout",
    "grpc-encoding",
    "grpc-accept-encoding",
}

K = TypeVar("K")
V = TypeVar("V")


class HuffmanCoded(bytes):
    """A value as it came; `bytes` that are themselves are plain."""

    __slots__ = ()


class Metadata(Mapping[str, str]):
    """Fields of a request by name; a value is decoded when it is asked for."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, bytes]) -> None:
        self._fields = fields

    def __getitem__(self, name: str) -> str:
        if name in _OF_THE_TRANSPORT:
            raise KeyError(name)
        return _text(name, self._fields[name])

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        value = self._fields.get(name)
        return default if value is None or name in _OF_THE_TRANSPORT else _text(name, value)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._fields if name not in _OF_THE_TRANSPORT)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def kept_in(kept: dict[K, V], key: K, value: V, limit: int = KEPT_TEXTS) -> V:
    """`value`, remembered with up to `limit` others."""
    if len(kept) >= limit:
        kept.clear()
    kept[key] = value
    return value


# For all connections: bounded in number, and each short.
_DECODED: dict[bytes, bytes] = {}


def plain_text(value: bytes) -> bytes:
    """Raises HPACKError for what is no Huffman code."""
    if type(value) is not HuffmanCoded:
        return value
    plain = _DECODED.get(value)
    if plain is None:
        plain = decode_huffman(value)
        if len(value) <= MAX_KEPT_TEXT:
            kept_in(_DECODED, bytes(value), plain)
    return plain


def _text(name: str, value: bytes) -> str:
    """As grpcio gives it: binary values come in base64. "" for what cannot be decoded."""
    try:
        plain = plain_text(value)
        if name.endswith("-bin"):
            plain = b64decode(plain + b"=" * (-len(plain) % 4))
    except (HPACKError, Base64Error):
        return ""
    return plain.decode("latin-1")
