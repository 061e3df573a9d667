"""What a message can be found by: the keys and the id in its stored properties, and their hash.

The slice is the content of the client's SystemProperties (D5): field 2 holds keys, repeated,
field 3 the message id.  Nothing else is decoded, and bytes that are no protobuf have no keys.
"""

from hashlib import blake2b
from struct import Struct

from popmq.common.varint import read_varint

ID, KEY = 1, 2  # the kinds of names
# More names of one message than this are not indexed; a proxy refuses such a message anyway.
NAMES_LIMIT = 128

_pack = Struct(">IB").pack
_LEN, _VARINT, _FIXED64, _FIXED32 = 2, 0, 1, 5
_KEYS_TAG = 2 << 3 | _LEN
_ID_TAG = 3 << 3 | _LEN


def names_in(properties: bytes) -> list[tuple[int, bytes]]:
    """Every (kind, name) of a message, as sent. Runs for every stored message."""
    keys: list[tuple[int, bytes]] = []
    at, end = 0, len(properties)
    try:
        while at < end:
            tag = properties[at]
            at += 1
            if tag >= 0x80:  # of two bytes, mostly
                more = properties[at]
                if more < 0x80:
                    tag, at = tag & 0x7F | more << 7, at + 1
                else:
                    tag, at = read_varint(properties, at - 1)
            wire_type = tag & 7
            if wire_type == _LEN:
                size = properties[at]
                at += 1
                if size >= 0x80:
                    size, at = read_varint(properties, at - 1)
                if tag == _KEYS_TAG and size:
                    keys.append((KEY, properties[at : at + size]))
                elif tag == _ID_TAG and size:
                    keys.append((ID, properties[at : at + size]))
                at += size
            elif wire_type == _VARINT:
                if not tag:
                    return []  # field 0 is none: zeros, most likely
                while properties[at] >= 0x80:
                    at += 1
                at += 1
            elif wire_type == _FIXED32:
                at += 4
            elif wire_type == _FIXED64:
                at += 8
            else:
                return []
    except (IndexError, ValueError):
        return []
    if at != end:
        return []
    return keys if len(keys) <= NAMES_LIMIT else keys[:NAMES_LIMIT]


def name_hash(topic_id: int, kind: int, name: bytes) -> bytes:
    """8 bytes that say where a name stands in the index; equal ones prove nothing."""
    return blake2b(_pack(topic_id, kind) + name, digest_size=8).digest()
