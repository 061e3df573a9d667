"""The one message of an ordinary send, read in one pass over the request's bytes.

Nearly every send looks alike: one message without a delivery time, a transaction, or anything
else that takes thought.  Such a request is checked and cut into its slices (D5) without protobuf
objects.  This module accepts common messages only: for anything unusual, wrong or unknown here
the result is None, and the general path (`send.py`, `convert.py`, `validate.py`) gives the answer.
Both store the same bytes.
"""

import re
from binascii import hexlify
from hashlib import md5
from typing import NamedTuple, TypeVar

from popmq.common.record.message import tag_hash
from popmq.common.record.send_fingerprint import fingerprint_field
from popmq.common.settings.settings import MessageSettings
from popmq.common.topics import MessageType, check_topic_name
from popmq.common.varint import read_varint
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.messaging.delay import SPREAD_MS, TTL_MS
from popmq.proxy.rpc.convert import IDENTITY_ENCODING, MD5_DIGEST, timestamp
from popmq.proxy.rpc.validate import (
    CONTROL,
    DELAY_KEYS,
    EVERY_TAG,
    MESSAGE_GROUP_LIMIT,
    RESERVED_KEYS,
)
from popmq.proxy.rpc.wire_scan import chunk, scalar

K = TypeVar("K")
V = TypeVar("V")

REMEMBERED = 4_096  # names of each kind, and none longer than 127 bytes

# Tags of the fields, as one byte: number and wire type.
_M, _P = pb.Message, pb.SystemProperties
_REQUEST = 1 << 3 | 2
_TOPIC = _M.TOPIC_FIELD_NUMBER << 3 | 2
_USER = _M.USER_PROPERTIES_FIELD_NUMBER << 3 | 2
_SYSTEM = _M.SYSTEM_PROPERTIES_FIELD_NUMBER << 3 | 2
_BODY = _M.BODY_FIELD_NUMBER << 3 | 2
_TAG = _P.TAG_FIELD_NUMBER << 3 | 2
_KEY = _P.KEYS_FIELD_NUMBER << 3 | 2
_ID = _P.MESSAGE_ID_FIELD_NUMBER << 3 | 2
_ENCODING = _P.BODY_ENCODING_FIELD_NUMBER << 3
_TYPE = _P.MESSAGE_TYPE_FIELD_NUMBER << 3
_BORN = _P.BORN_TIMESTAMP_FIELD_NUMBER << 3 | 2
_HOST = _P.BORN_HOST_FIELD_NUMBER << 3 | 2
_QUEUE = _P.QUEUE_ID_FIELD_NUMBER << 3
# The first bytes of tags whose second byte is 1.
_GROUP, _TRACE = 0x8A, 0x92
_PRIORITY = 0xB0  # the Node client sends priority 0 with every message
_ENCODED, _HAS_HOST, _HAS_BIRTH = 1, 2, 4
_NOTHING_MISSING = _ENCODED | _HAS_HOST | _HAS_BIRTH

# Below 2^35 seconds, and below a second of nanoseconds; `convert.py` looks at the others.
_TIMESTAMP = re.compile(
    rb"(?:\x08[\x80-\xff]{0,4}[\0-\x7f])?"
    rb"(?:\x10(?:[\x80-\xff]{0,3}[\0-\x7f]|[\x80-\xff]{4}[\0-\x02]|[\x80-\xff]{3}[\x80-\xdb]\x03))?"
)
_PLAIN_TYPES = (0, MessageType.NORMAL, MessageType.FIFO)


_new = tuple.__new__


class OrdinaryMessage(NamedTuple):
    """A NORMAL or FIFO message that passed every check that needs no topic."""

    topic: str
    kind: MessageType
    message_id: bytes
    group: str
    tag_hash: int
    head: bytes
    properties: bytes


def read_ordinary(
    data: bytes,
    begin: int,
    end: int,
    limits: MessageSettings,
    sender: int,
    peer: str,
    now_ms: int,
) -> OrdinaryMessage | None:
    """The message of the SendMessageRequest data[begin:end], if it is ordinary.

    `sender` is the `sender_hash` of the client; `now_ms` is wall time, for a message without its
    own.  IndexError, ValueError and PopmqError mean None too.
    """
    size, start = read_varint(data, begin + 1)
    if data[begin] != _REQUEST or start + size != end:
        return None
    topic = body = b""
    system = system_end = users = 0
    at = start
    while at < end:
        size, content = data[at + 1], at + 2
        if size >= 0x80:
            size, content = read_varint(data, at + 1)
        after = content + size
        kind = data[at]
        if kind == _USER:
            users += 1
            if not _is_plain_user(data, content, after):
                return None
        elif kind == _SYSTEM and not system:
            system, system_start, system_end = at, content, after
        elif kind == _BODY and not body:
            body = data[content:after]
        elif kind == _TOPIC and not topic:
            topic = data[content:after]
        else:
            return None
        at = after
    if at != end or not (body and topic and system) or users > limits.max_properties:
        return None
    # Those of the limit are a part of what is beside the body.
    around = end - start - len(body)
    if len(body) > limits.max_body_bytes or around > limits.max_properties_bytes:
        return None
    head = data[start:system] + data[system_end:end]
    properties = data[system_start:system_end]
    return _with_properties(topic, body, head, properties, sender, peer, now_ms)


def _is_plain_user(data: bytes, at: int, end: int) -> bool:
    """An entry of the map, both texts short: a name that is no word of ours, and a value."""
    value = at + 2 + data[at + 1]
    if data[at] != 0x0A or data[value] != 0x12 or value + 2 + data[value + 1] != end:
        return False
    name = data[at + 2 : value]
    if name not in _GOOD_NAMES and not _is_good_name(name):
        return False
    text = data[value + 2 : end].decode()
    return text.isprintable() or not CONTROL.search(text)


def _is_good_name(raw: bytes) -> bool:
    name = raw.decode()
    if name in RESERVED_KEYS or name in DELAY_KEYS or CONTROL.search(name):
        return False
    if name in (SPREAD_MS, TTL_MS):
        return False
    return remember(_GOOD_NAMES, raw, True)


def _with_properties(
    topic: bytes, body: bytes, head: bytes, sent: bytes, sender: int, peer: str, now_ms: int
) -> OrdinaryMessage | None:
    fields = _said(sent)
    if fields is None:
        return None
    message_id, claimed, group, tag, there, queue = fields
    if queue >= 0:  # clients may not set this property
        sent = sent[:queue] + sent[queue + 2 :]
    name = _TOPICS.get(topic) or _topic_name(topic)
    if not message_id or claimed not in _PLAIN_TYPES:
        return None
    if not (text := message_id.decode()).isprintable() or text.isspace():
        return None
    tag_hash = _TAGS.get(tag)
    if tag_hash is None:
        tag_hash = _hash_of_tag(tag)
    kind = MessageType.FIFO if group else MessageType.NORMAL
    digest = md5(body, usedforsecurity=False).digest()
    checksum, print_field = hexlify(digest).upper(), fingerprint_field(sender, digest)
    missing = b""
    if claimed != kind or there != _NOTHING_MISSING:
        missing = _missing(claimed, kind, there, peer, now_ms)
    properties = b"".join((sent, MD5_DIGEST, checksum, missing, print_field))
    order = _group(group) if group else ""
    return _new(OrdinaryMessage, (name, kind, message_id, order, tag_hash, head, properties))


def _said(sent: bytes) -> tuple[bytes, int, bytes, bytes, int, int] | None:
    """Message id, claimed type, group and tag of the content of system properties, which of
    `_ENCODED`, `_HAS_HOST` and `_HAS_BIRTH` are there, and where a queue's number is, or -1."""
    message_id = group = tag = b""
    claimed = there = at = 0
    queue, end = -1, len(sent)
    while at < end:
        kind, value, content = sent[at], sent[at + 1], at + 2
        if value >= 0x80:  # for a real parser
            return None
        at = content + value
        if kind == _ID and not message_id:
            message_id = sent[content:at]
        elif kind == _TYPE and not claimed:
            claimed, at = value, content
        elif kind == _ENCODING and not there & _ENCODED:
            there |= _ENCODED if value else 0
            at = content
        elif kind == _BORN and not there & _HAS_BIRTH and _TIMESTAMP.fullmatch(sent, content, at):
            there |= _HAS_BIRTH
        elif kind == _HOST and not there & _HAS_HOST:
            sent[content:at].decode()
            there |= _HAS_HOST if value else 0
        elif kind == _TAG and not tag:
            tag = sent[content:at]
        elif (
            kind == _KEY and (key := sent[content:at].decode()).isprintable() and not key.isspace()
        ):
            pass  # any number of them, and nothing to remember
        elif kind == _QUEUE and queue < 0:
            queue, at = content - 2, content
        elif value == 1 and sent[content] < 0x80:  # the second byte of a longer tag
            at = content + 1 + sent[content]
            if kind == _GROUP and not group:
                group = sent[content + 1 : at]
            elif kind == _TRACE:
                sent[content + 1 : at].decode()
            elif kind == _PRIORITY and not sent[content]:
                at = content + 1
            else:
                return None
        else:
            return None
    return (message_id, claimed, group, tag, there, queue) if at == end else None


def _missing(claimed: int, kind: MessageType, there: int, peer: str, now_ms: int) -> bytes:
    """What `convert.py` adds to a message that does not say it, in the same order."""
    parts = b"" if there & _ENCODED else IDENTITY_ENCODING
    if claimed != kind:
        parts += scalar(_P.MESSAGE_TYPE_FIELD_NUMBER, kind)
    if not there & _HAS_HOST and peer:
        parts += chunk(_P.BORN_HOST_FIELD_NUMBER, peer.encode())
    if not there & _HAS_BIRTH:
        parts += chunk(_P.BORN_TIMESTAMP_FIELD_NUMBER, timestamp(now_ms))
    return parts


# What was found to be good, by its bytes.
_TOPICS: dict[bytes, str] = {}
_TAGS: dict[bytes, int] = {b"": 0}
_GOOD_NAMES: dict[bytes, bool] = {}


def _topic_name(raw: bytes) -> str:
    """Of a Resource that has nothing but a name."""
    if raw[0] != 0x12 or raw[1] != len(raw) - 2:
        raise ValueError("not just a name")
    name = raw[2:].decode()
    check_topic_name(name)
    return remember(_TOPICS, raw, name)


def _hash_of_tag(raw: bytes) -> int:
    tag = raw.decode()
    if tag != tag.strip() or "|" in tag or tag == EVERY_TAG or CONTROL.search(tag):
        raise ValueError("not a tag")
    return remember(_TAGS, raw, tag_hash(tag))


def _group(raw: bytes) -> str:
    group = raw.decode()
    if group.isspace() or len(raw) >= MESSAGE_GROUP_LIMIT or CONTROL.search(group):
        raise ValueError("not a message group")
    return group


def remember(known: dict[K, V], key: K, value: V) -> V:
    """Bounded: when it is full, all is learnt anew."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[key] = value
    return value
