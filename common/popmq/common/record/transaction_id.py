"""Transaction ids: self-contained and signed, good through any proxy and after any restart (D6).

Text form: url-safe base64 of

    version u8 = 1 | broker length u8 | broker name
    topic u32 | key id u8 | half offset u56
    16 bytes of HMAC over all of the above and the message id

The proxy reads the broker's name to find the way and trusts nothing else.  The broker knows the
key (`rmq_sys_meta`), so that an id is good for its own message only.
"""

import binascii
import hmac
import struct
from base64 import b64decode, urlsafe_b64encode
from typing import NamedTuple

from popmq.common.errors import Code, Refused
from popmq.common.record.signing_keys import ID_SHIFT, PLAIN_MASK, SigningKeys

_VERSION = 1
_SIGNATURE_SIZE = 16
_FIELDS = struct.Struct(">IQ")
ID_LIMIT = 1_024  # characters


class TransactionId(NamedTuple):
    broker: str
    topic_id: int
    half_offset: int

    def encode(self, key: bytes, message_id: str, key_id: int = 0) -> str:
        name = self.broker.encode()
        fields = _FIELDS.pack(self.topic_id, self.half_offset | key_id << ID_SHIFT)
        plain = b"".join((bytes((_VERSION, len(name))), name, fields))
        return urlsafe_b64encode(plain + _signature(key, plain, message_id)).decode()

    @classmethod
    def decode(cls, text: str, keys: SigningKeys, message_id: str) -> "TransactionId":
        """The id, if it was made with one of `keys` for that message; else
        INVALID_TRANSACTION_ID."""
        unpacked, key_id, plain, signature = _unpacked(text)
        key = keys.find(key_id)
        if key is None:
            raise _bad("has a key that is unknown or over: it was changed, or is too old")
        if not hmac.compare_digest(_signature(key, plain, message_id), signature):
            raise _bad(
                f"is not one of message {message_id[:64]!r}: it was changed, or made for another "
                "message or by another cluster"
            )
        return unpacked


def broker_of_transaction(text: str) -> str:
    """The broker group that the id names, unverified: only good for finding the way."""
    return _unpacked(text)[0].broker


def _unpacked(text: str) -> tuple[TransactionId, int, bytes, bytes]:
    """The id, that of its key, what is signed besides the message's id, and the signature."""
    if not text.strip():
        raise _bad("is empty: the send of a TRANSACTION message gives one")
    if len(text) > ID_LIMIT:
        raise _bad(f"of {len(text)} characters is over the limit of {ID_LIMIT}")
    try:
        data = b64decode(text, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _bad("is not base64 text") from error
    if len(data) < 2 or len(data) != 2 + data[1] + _FIELDS.size + _SIGNATURE_SIZE:
        raise _bad(f"of {len(data)} bytes was cut short or comes from elsewhere")
    if data[0] != _VERSION:
        raise _bad(f"has unknown version {data[0]}")
    name_end = 2 + data[1]
    try:
        name = data[2:name_end].decode()
    except UnicodeDecodeError as error:
        raise _bad("names no readable broker") from error
    topic_id, numbered = _FIELDS.unpack_from(data, name_end)
    fields_end = name_end + _FIELDS.size
    unpacked = TransactionId(name, topic_id, numbered & PLAIN_MASK)
    return unpacked, numbered >> ID_SHIFT, data[:fields_end], data[fields_end:]


def _signature(key: bytes, plain: bytes, message_id: str) -> bytes:
    return hmac.digest(key, b"transaction " + plain + message_id.encode(), "sha256")[
        :_SIGNATURE_SIZE
    ]


def _bad(sentence: str) -> Refused:
    return Refused(Code.INVALID_TRANSACTION_ID, f"the transaction id {sentence}")
