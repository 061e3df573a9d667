"""Who sent a message, and with which body: what tells a resend from another message of the same id.

Official clients make ids out of a MAC, 16 bits of a process id, a second and a counter, so two
containers or two forked workers may make the same ones. The fingerprint stands behind the other
system properties (before a deadline, message_deadline.py), as a field that clients do not know:

    tag of field 1003, fixed64 (2 bytes: D9 3E) | fingerprint u64, little-endian

It is the first half of the body's MD5 digest, exclusive or with a hash of the client id. A proxy
of before wrote none: such messages have fingerprint 0.
"""

import struct
from functools import lru_cache
from hashlib import blake2b

from popmq.common.record.message_deadline import without_deadline

_MARK = b"\xd9\x3e"
_FIELD = struct.Struct("<2sQ")
_WORD = struct.Struct("<Q")
SIZE = _FIELD.size
_pack, _word_from = _FIELD.pack, _WORD.unpack_from


@lru_cache(maxsize=4_096)
def sender_hash(client_id: str) -> int:
    """64 bits of a client id."""
    digest = blake2b(client_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def fingerprint_field(sender: int, md5_digest: bytes) -> bytes:
    """The field, for the end of the system properties. `sender` is a `sender_hash`."""
    return _pack(_MARK, _word_from(md5_digest)[0] ^ sender)


def fingerprint_of(properties: bytes) -> int:
    """0: the message has none."""
    if properties[-10:-8] == _MARK:
        fingerprint: int = _word_from(properties, len(properties) - 8)[0]
        return fingerprint
    rest = without_deadline(properties)
    return fingerprint_of(rest) if len(rest) < len(properties) else 0
