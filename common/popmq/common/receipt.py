"""Receipt handles: self-contained and signed, good through any proxy (D6).

Text form: url-safe base64 of

    version u8 = 1 | broker length u8 | broker name | 43 bytes of fields | 16 bytes of HMAC

The proxy reads the broker's name to find the way and trusts nothing else; the broker that
made the handle verifies the signature (HMAC-SHA256, cut to 128 bits, with the key that
`rmq_sys_meta` holds) before it looks at a field.
"""

import binascii
import hmac
import struct
from binascii import a2b_base64, b2a_base64
from dataclasses import dataclass

from popmq.common.errors import InvalidReceiptHandle

HANDLE_VERSION = 1
_SIGNATURE_SIZE = 16
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")
# topic_id, group_id, queue_id, queue_offset, attempt, epoch, sequence, member, reserved
_FIELDS = struct.Struct(">IIIQHIQBQ")


@dataclass(frozen=True, slots=True)
class ReceiptHandle:
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
        name = self.broker.encode()
        plain = b"".join(
            (
                bytes((HANDLE_VERSION, len(name))),
                name,
                _FIELDS.pack(
                    self.topic_id,
                    self.group_id,
                    self.queue_id,
                    self.queue_offset,
                    self.attempt,
                    self.epoch,
                    self.sequence,
                    self.member,
                    0,
                ),
            )
        )
        signed = b2a_base64(plain + _signature(key, plain), newline=False)
        return signed.translate(_TO_URL).rstrip(b"=")


def decode_receipt(raw: bytes, key: bytes) -> ReceiptHandle:
    """The handle, if it was made with `key`; else InvalidReceiptHandle that says what is wrong."""
    data = _unpacked(raw)
    plain, signature = data[:-_SIGNATURE_SIZE], data[-_SIGNATURE_SIZE:]
    if not hmac.compare_digest(_signature(key, plain), signature):
        raise InvalidReceiptHandle(
            "the receipt handle's signature does not match: it was changed, or made by another "
            "cluster"
        )
    name_end = 2 + plain[1]
    topic, group, queue, offset, attempt, epoch, sequence, member, _ = _FIELDS.unpack(
        plain[name_end:]
    )
    broker = plain[2:name_end].decode()
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
        data = a2b_base64(raw.translate(_FROM_URL) + b"=" * (-len(raw) % 4))
    except (binascii.Error, ValueError) as error:
        raise InvalidReceiptHandle("the receipt handle is not base64 text") from error
    if len(data) < 2 or len(data) != 2 + data[1] + _FIELDS.size + _SIGNATURE_SIZE:
        raise InvalidReceiptHandle(
            f"the receipt handle has {len(data)} bytes, which no popmq handle has: "
            "it was cut short or comes from elsewhere"
        )
    if data[0] != HANDLE_VERSION:
        raise InvalidReceiptHandle(f"the receipt handle has unknown version {data[0]}")
    return data


def _signature(key: bytes, plain: bytes) -> bytes:
    return hmac.digest(key, plain, "sha256")[:_SIGNATURE_SIZE]
