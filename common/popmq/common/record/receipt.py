"""Receipt handles: self-contained and signed, good through any proxy (D6).

Text form: url-safe base64 of

    version u8 = 2 | broker length u8 | broker name
    topic u32, group u32, queue u32, attempt u16, epoch u32, key id u8, sequence u56
    16 bytes of HMAC over all of the above
    queue offset u64 | member u8 | crc32c u32 over everything before

The proxy reads the broker's name to find the way and trusts nothing else; the broker that made
the handle verifies the signature (HMAC-SHA256, cut to 128 bits, with the key of that id, which
`rmq_sys_meta` holds) before it looks at another field.  What is signed is the check point and the
attempt, once for all messages of a receive; the check says which of them.  A client that changes
the member names another message of the same check point, which the same reply gave to it.  The
broker compares member and offset with the check point before it uses them.
"""

import binascii
import hashlib
import hmac
import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from crc32c import crc32c

from popmq.common.errors import InvalidReceiptHandle
from popmq.common.record.signing_keys import ID_SHIFT, PLAIN_MASK, SigningKeys

HANDLE_VERSION = 2
_SIGNATURE_SIZE = 16
_BLOCK = hashlib.sha256().block_size
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")
_FILLER = b"="
# topic_id, group_id, queue_id, attempt, epoch, sequence
_SIGNED = struct.Struct(">IIIHIQ")
_SEQUENCE_SIZE = 8  # with the key's id, which comes first
_MEMBER = struct.Struct(">QB")
_CHECK = struct.Struct(">I")
_TAIL_TEXT = 20  # characters; of the 15 bytes that `_tails` has for each
_BEHIND_NAME = _SIGNED.size + _SIGNATURE_SIZE + _MEMBER.size + _CHECK.size


class ReceiptPrefix(NamedTuple):
    """What the handles of one check point and attempt have in common."""

    broker: str
    topic_id: int
    group_id: int
    queue_id: int
    attempt: int
    epoch: int
    sequence: int


class ReceiptHandle(NamedTuple):
    """One delivery of one message: member `member` of check point (epoch, sequence)."""

    broker: str
    topic_id: int
    group_id: int
    queue_id: int
    queue_offset: int
    attempt: int
    epoch: int
    sequence: int
    member: int

    def encode(self, key: bytes, key_id: int = 0) -> bytes:
        signed = sign_check_point(
            key,
            self.broker,
            self.topic_id,
            self.group_id,
            self.queue_id,
            self.attempt,
            self.epoch,
            self.sequence,
            key_id,
        )
        return encode_member(signed, self.queue_offset, self.member)


def sign_check_point(
    key: bytes,
    broker: str,
    topic_id: int,
    group_id: int,
    queue_id: int,
    attempt: int,
    epoch: int,
    sequence: int,
    key_id: int = 0,
) -> bytes:
    """What the handles of one check point and attempt have in common; for `encode_member`."""
    name = broker.encode()
    numbered = sequence | key_id << ID_SHIFT
    fields = _SIGNED.pack(topic_id, group_id, queue_id, attempt, epoch, numbered)
    plain = b"".join((bytes((HANDLE_VERSION, len(name))), name, fields))
    return plain + _signature(key, plain)


def encode_members(signed: bytes, members: Sequence[tuple[int, int]]) -> tuple[bytes, list[bytes]]:
    """Handles of some messages, by queue offset and member: what they begin with, and how each
    goes on.  In one go, because this runs for all that is delivered."""
    aligned = len(signed) - len(signed) % 3  # base64 turns three bytes into four characters
    lead = signed[aligned:]
    crc, pack = crc32c(signed), _MEMBER.pack
    fields: list[bytes | int] = []
    for offset, member in members:
        fields += (lead, offset, member, crc32c(pack(offset, member), crc))
    text = b2a_base64(_tails(len(lead), len(members)).pack(*fields), newline=False)
    text = text.translate(_TO_URL)
    size = _TAIL_TEXT - (2 - len(lead))
    tails = [text[at : at + size] for at in range(0, len(text), _TAIL_TEXT)]
    return b2a_base64(signed[:aligned], newline=False).translate(_TO_URL), tails


@lru_cache(256)
def _tails(lead: int, count: int) -> struct.Struct:
    """Of `count` handles what is their own, behind the last `lead` bytes of what is signed."""
    return struct.Struct(">" + f"{lead}sQBI{2 - lead}x" * count)


def encode_member(signed: bytes, queue_offset: int, member: int) -> bytes:
    """The handle of one message."""
    data = signed + _MEMBER.pack(queue_offset, member)
    text = b2a_base64(data + _CHECK.pack(crc32c(data)), newline=False)
    return text.translate(_TO_URL, _FILLER)


class ReceiptReader:
    """Takes handles apart; remembers signatures that were right, since acks of one receive come
    one after the other."""

    _REMEMBERED = 4_096

    def __init__(self) -> None:
        self._right: dict[bytes, ReceiptPrefix] = {}

    def decode(self, raw: bytes, keys: SigningKeys) -> ReceiptHandle:
        """As `open`, in one piece."""
        return receipt_of(*self.open(raw, keys))

    def open(self, raw: bytes, keys: SigningKeys) -> tuple[ReceiptPrefix, int, int]:
        """What is signed, queue offset and member, if the handle was made with one of them; else
        InvalidReceiptHandle that says what is wrong."""
        data = _unpacked(raw)
        name_end = 2 + data[1]
        fields_end = name_end + _SIGNED.size
        member_at = fields_end + _SIGNATURE_SIZE
        newest, key_id = keys.newest, data[fields_end - _SEQUENCE_SIZE]
        # Nearly all handles are of the newest one.
        key = newest.secret if key_id == newest.id else keys.find(key_id)
        if not key:
            raise InvalidReceiptHandle(
                "the receipt handle's signature does not match: its key is unknown or over, so it "
                "was changed, is too old, or was made by another cluster"
            )
        signed = key + data[:member_at]
        known = self._right.get(signed)
        if known is None:
            if not hmac.compare_digest(
                _signature(key, data[:fields_end]), data[fields_end:member_at]
            ):
                raise InvalidReceiptHandle(
                    "the receipt handle's signature does not match: it was changed, or made by "
                    "another cluster"
                )
            if len(self._right) >= self._REMEMBERED:
                self._right.clear()
            topic, group, queue, attempt, epoch, numbered = _SIGNED.unpack_from(data, name_end)
            known = self._right[signed] = ReceiptPrefix(
                data[2:name_end].decode(),
                topic,
                group,
                queue,
                attempt,
                epoch,
                numbered & PLAIN_MASK,
            )
        offset, member = _MEMBER.unpack_from(data, member_at)
        return known, offset, member


def receipt_of(signed: ReceiptPrefix, offset: int, member: int) -> ReceiptHandle:
    broker, topic, group, queue, attempt, epoch, sequence = signed
    return ReceiptHandle(broker, topic, group, queue, offset, attempt, epoch, sequence, member)


def broker_of(raw: bytes) -> str:
    """The broker group that the handle names, unverified: only good for finding the way."""
    data = _unpacked(raw)
    try:
        return data[2 : 2 + data[1]].decode()
    except UnicodeDecodeError as error:
        raise InvalidReceiptHandle("the receipt handle names no readable broker") from error


def _unpacked(raw: bytes) -> bytes:
    try:
        data = a2b_base64(raw.translate(_FROM_URL) + _FILLER * (-len(raw) % 4))
    except (binascii.Error, ValueError) as error:
        raise InvalidReceiptHandle("the receipt handle is not base64 text") from error
    if len(data) < 2 or len(data) != 2 + data[1] + _BEHIND_NAME:
        raise InvalidReceiptHandle(
            f"the receipt handle has {len(data)} bytes, which no popmq handle has: "
            "it was cut short or comes from elsewhere"
        )
    if data[0] != HANDLE_VERSION:
        raise InvalidReceiptHandle(f"the receipt handle has unknown version {data[0]}")
    if crc32c(data[: -_CHECK.size]) != _CHECK.unpack_from(data, len(data) - _CHECK.size)[0]:
        raise InvalidReceiptHandle(
            "the receipt handle's signature does not match: it was changed on its way"
        )
    return data


def _signature(key: bytes, plain: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104), cut.  `hmac.digest` begins with the key each time, which is most of
    what it costs."""
    begun_inner, begun_outer = _begun(key)
    inner, outer = begun_inner.copy(), begun_outer.copy()
    inner.update(plain)
    outer.update(inner.digest())
    return outer.digest()[:_SIGNATURE_SIZE]


@lru_cache(16)
def _begun(key: bytes) -> tuple["hashlib._Hash", "hashlib._Hash"]:
    """The two hashes, each with its padded key."""
    block = (key if len(key) <= _BLOCK else hashlib.sha256(key).digest()).ljust(_BLOCK, b"\0")
    inner, outer = (bytes(byte ^ pad for byte in block) for pad in (0x36, 0x5C))
    return hashlib.sha256(inner), hashlib.sha256(outer)
