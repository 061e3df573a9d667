"""The time after which a message is not delivered any more, as it stands in its record.

The deadline (wall milliseconds) is the end of the stored system properties, as a field that
clients do not know, and so goes with every copy: timer, retry, parked.

    tag of field 1000, fixed64 (2 bytes: C1 3E) | deadline u64, little-endian

Whoever delivers looks for it in records with a token only, which takes no time from the others;
the first record of a message that has neither timer nor transaction gets this one.  The end of
other properties may look like the tag, a time of birth and a host of six letters do once in 60,000,
but no text of theirs ends with two bytes of 0, as every deadline does:

    0 version u8 = 7
"""

import struct
from dataclasses import dataclass

EXPIRY_VERSION = 7
_MARK = b"\xc1\x3e"
_DEADLINE = struct.Struct("<Q")
_SIZE = len(_MARK) + _DEADLINE.size
_LATEST_MS = 1 << 48  # 8,900 years on; the latest that a proxy writes is 200 years on


@dataclass(frozen=True, slots=True)
class ExpiryToken:
    """Says that the message has a deadline, and nothing else."""

    def encode(self) -> bytes:
        return bytes([EXPIRY_VERSION])


def with_deadline(properties: bytes, deadline_ms: int) -> bytes:
    return properties + _MARK + _DEADLINE.pack(deadline_ms)


def deadline_of(properties: bytes) -> int:
    """0: it has none."""
    if properties[-_SIZE : -_DEADLINE.size] != _MARK:
        return 0
    (deadline_ms,) = _DEADLINE.unpack_from(properties, len(properties) - _DEADLINE.size)
    return int(deadline_ms) if deadline_ms < _LATEST_MS else 0


def without_deadline(properties: bytes) -> bytes:
    """Of a dead letter: it waits for a person."""
    return properties[:-_SIZE] if deadline_of(properties) else properties


def expiry_token(properties: bytes) -> bytes:
    """For the first record of a message: empty, unless it has a deadline."""
    return ExpiryToken().encode() if deadline_of(properties) else b""
