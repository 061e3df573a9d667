"""The messages that the official clients send: number `k` of a seed, byte for byte the same.

Pure, and ported to node/payloads.mjs: the sender makes a message from (seed, k), the checker
makes it again, and nothing else has to travel between them.  All randomness is SHAKE-256 of
"seed/k/purpose", which both languages have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256, shake_256

PYTHON_MAX_BODY = 4 * 1024 * 1024
# The Node client cannot receive more than 4 MiB with everything around the body (3.9 MiB).
NODE_MAX_BODY = 4_089_446

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789äöüßéèñøåçşžłβδλџджшщ漢字水火山中文日本🙂🚀"
TAGS = ("plain", "grün", "付款", "new_user")
TEXT_LIMIT = 2048


@dataclass(frozen=True, slots=True)
class Fields:
    """What a consumer must get back unchanged; `keys` are sorted, for Python sends a set."""

    sha256: str
    size: int
    keys: tuple[str, ...]
    tag: str
    properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Payload:
    """Message `k` as the sender puts it together."""

    k: int
    body: bytes
    keys: tuple[str, str]
    tag: str
    properties: dict[str, str]

    def fields(self) -> Fields:
        return Fields(
            sha256=sha256(self.body).hexdigest(),
            size=len(self.body),
            keys=tuple(sorted(self.keys)),
            tag=self.tag,
            properties=self.properties,
        )


def comes_back(k: int) -> bool:
    """The tenth of all messages whose first delivery no consumer acknowledges."""
    return k % 10 == 3


def is_largest(k: int) -> bool:
    """Twelve of 2,000 messages have the largest body that is allowed."""
    return k % 167 == 83


def payload(*, seed: int, k: int, max_body: int) -> Payload:
    draw = _bytes(seed, k, "fields", 64)
    size = _body_size(k, int.from_bytes(draw[:4], "big"), max_body)
    properties = {"k": str(k), "size": str(size)}
    for i in range(18):
        word = _text(_bytes(seed, k, f"property-{i}", 4 * (1 + draw[16 + i] % 12)))
        properties[_property_name(i)] = word
    return Payload(
        k=k,
        body=_body(seed, k, size),
        keys=(f"order-{seed}-{k}", f"client-é{int.from_bytes(draw[4:8], 'big') % 100}"),
        tag=TAGS[draw[8] % len(TAGS)],
        properties=properties,
    )


def _body_size(k: int, draw: int, max_body: int) -> int:
    if is_largest(k):
        return max_body
    if k % 50 == 7:
        return 65_536 + draw % 196_608
    if k % 10 == 5:
        return 1_024 + draw % 64_512
    if k % 20 == 1:
        return 1
    return 1 + draw % 1_024


def _body(seed: int, k: int, size: int) -> bytes:
    raw = _bytes(seed, k, "body", size)
    if k % 3 or size > TEXT_LIMIT:
        return raw
    text = bytearray()
    for letter in _text(raw):
        encoded = letter.encode()
        if len(text) + len(encoded) > size:
            break
        text += encoded
    return bytes(text.ljust(size, b"x"))


def _text(raw: bytes) -> str:
    return "".join(ALPHABET[byte % len(ALPHABET)] for byte in raw)


def _property_name(i: int) -> str:
    return {3: "größe", 7: "数量"}.get(i, f"property-{i:02d}")


def _bytes(seed: int, k: int, purpose: str, length: int) -> bytes:
    return shake_256(f"{seed}/{k}/{purpose}".encode()).digest(length)
