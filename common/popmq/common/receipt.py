"""Receipt handles: self-contained and signed, good through any proxy (D6).

Text form: url-safe base64 of

    version u8 = 2 | broker length u8 | broker name
    topic u32, group u32, queue u32, attempt u16, epoch u32, sequence u64
    16 bytes of HMAC over all of the above
    queue offset u64 | member u8 | crc32c u32 over everything before

The proxy reads the broker's name to find the way and trusts nothing else; the broker that made
the handle verifies the signature (HMAC-SHA256, cut to 128 bits, with the key that `rmq_sys_meta`
holds) before it looks at a field.  What is signed is the check point and the attempt, once for
all messages of a receive; the check says which of them.  Whoever makes up another member of
the same check point names a message that the same reply gave to the same client.
"""

import binascii
import hmac
import struct
from binascii import a2b_base64, b2a_base64
from typing import NamedTuple

from crc32c import crc32c

from popmq.common.errors import InvalidReceiptHandle

HANDLE_VERSION = 2
_SIGNATURE_SIZE = 16
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")
_FILLER = b"="
# topic_id, group_id, queue_id, attempt, epoch, sequence
_SIGNED = struct.Struct(">IIIHIQ")
_Signed = tuple[str, int, int, int, int, int, int]  # the broker's name and those
_MEMBER = struct.Struct(">QB")
_CHECK = struct.Struct(">I")
_BEHIND_NAME = _SIGNED.size + _SIGNATURE_SIZE + _MEMBER.size + _CHECK.size


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

    def encode(self, key: bytes) -> bytes:
        signed = sign_check_point(
            key,
            self.broker,
            self.topic_id,
            self.group_id,
            self.queue_id,
            self.attempt,
            self.epoch,
            self.sequence,
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
) -> bytes:
    """What the handles of one check point and attempt have in common; for `encode_member`."""
    name = broker.encode()
    fields = _SIGNED.pack(topic_id, group_id, queue_id, attempt, epoch, sequence)
    plain = b"".join((bytes((HANDLE_VERSION, len(name))), name, fields))
    return plain + _signature(key, plain)


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
        self._right: dict[bytes, _Signed] = {}

    def decode(self, raw: bytes, key: bytes) -> ReceiptHandle:
        """The handle, if it was made with `key`; else InvalidReceiptHandle that says what is
        wrong."""
        data = _unpacked(raw)
        name_end = 2 + data[1]
        fields_end = name_end + _SIGNED.size
        member_at = fields_end + _SIGNATURE_SIZE
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
            fields = _SIGNED.unpack_from(data, name_end)
            known = self._right[signed] = (data[2:name_end].decode(), *fields)
        broker, topic, group, queue, attempt, epoch, sequence = known
        offset, member = _MEMBER.unpack_from(data, member_at)
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
    return hmac.digest(key, plain, "sha256")[:_SIGNATURE_SIZE]
