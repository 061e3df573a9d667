"""Bytes of messages as Remoting clients know them: properties, batches, ids, stored messages.

Pure functions.  A client stops reading an answer at the first message that it cannot decode, so
the lengths in here are exact (docs/concepts/remoting.md).
"""

import ipaddress
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from popmq.common.errors import Code, Refused

MAX_PROPERTIES_BYTES = 32_767  # an i16 holds their length
_NAME_END, _VALUE_END = "\x01", "\x02"
_MAGIC = -626843481  # 0xDAA320A7: the topic's length is one byte
_FRONT = struct.Struct(">iiIiiqqiq")
_BATCH_FRONT = struct.Struct(">iiiii")
_I16, _I32, _I64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")
BORN_HOST_V6, STORE_HOST_V6 = 1 << 4, 1 << 5

Host = tuple[str, int]


class BatchMember(NamedTuple):
    flag: int
    body: bytes
    properties: dict[str, str]


class StoredForm(NamedTuple):
    """What a client decodes; times in wall milliseconds."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    flag: int
    sys_flag: int
    born_ms: int
    born_host: Host
    stored_ms: int
    store_host: Host
    reconsume_times: int
    body: bytes
    properties: Mapping[str, str]


def parse_properties(text: str) -> dict[str, str]:
    """`name 1 value 2 ...`; the last 2 may be missing (4.9.8). Entries without a name or a value
    are dropped, as RocketMQ's clients drop them."""
    pairs = (entry.partition(_NAME_END) for entry in text.split(_VALUE_END))
    return {name: value for name, _, value in pairs if name and value}


def format_properties(properties: Mapping[str, str]) -> str:
    """A separator inside of a value, which a gRPC client may send, becomes a blank."""
    return "".join(
        f"{_plain(name)}{_NAME_END}{_plain(value)}{_VALUE_END}"
        for name, value in properties.items()
        if name and value
    )


def _plain(text: str) -> str:
    return text.replace(_NAME_END, " ").replace(_VALUE_END, " ")


def parse_batch(body: bytes) -> list[BatchMember]:
    """The members of a batch send. Raises MESSAGE_CORRUPTED."""
    members = []
    at = 0
    try:
        while at < len(body):
            size, _magic, _crc, flag, length = _BATCH_FRONT.unpack_from(body, at)
            content_at = at + _BATCH_FRONT.size
            content, next_at = _slice(body, content_at, length)
            (length,) = _I16.unpack_from(body, next_at)
            text, end = _slice(body, next_at + _I16.size, length)
            if size != end - at:
                raise ValueError(f"its size says {size} bytes, it has {end - at}")
            members.append(BatchMember(flag, content, parse_properties(text.decode())))
            at = end
    except (struct.error, ValueError) as error:
        raise Refused(
            Code.MESSAGE_CORRUPTED, f"message {len(members)} of the batch cannot be read: {error}"
        ) from error
    return members


def _slice(data: bytes, at: int, length: int) -> tuple[bytes, int]:
    if not 0 <= length <= len(data) - at:
        raise ValueError(f"{length} bytes at {at} of {len(data)}")
    return data[at : at + length], at + length


def encode_host(host: Host) -> bytes:
    """Address and port of a message; a host without a numeric address becomes 0.0.0.0."""
    try:
        address = ipaddress.ip_address(host[0].strip("[]").partition("%")[0]).packed
    except ValueError:
        address = bytes(4)
    return address + _I32.pack(host[1])


def offset_message_id(store_host: Host, physical_offset: int) -> str:
    """32 or 56 hexadecimal digits, which clients take apart: nothing else may stand here."""
    return (encode_host(store_host) + _I64.pack(physical_offset)).hex().upper()


def encode_stored(message: StoredForm) -> bytes:
    born, store = encode_host(message.born_host), encode_host(message.store_host)
    sys_flag = message.sys_flag
    sys_flag |= BORN_HOST_V6 if len(born) > 8 else 0
    sys_flag |= STORE_HOST_V6 if len(store) > 8 else 0
    topic, properties = message.topic.encode(), format_properties(message.properties).encode()
    body = message.body
    size = _FRONT.size + len(born) + 8 + len(store) + 12 + 4 + len(body)
    size += 1 + len(topic) + 2 + len(properties)
    front = _FRONT.pack(
        size,
        _MAGIC,
        crc32(body) & 0x7FFF_FFFF,
        message.queue_id,
        message.flag,
        message.queue_offset,
        message.physical_offset,
        sys_flag,
        message.born_ms,
    )
    return b"".join(
        (
            front,
            born,
            _I64.pack(message.stored_ms),
            store,
            _I32.pack(message.reconsume_times),
            bytes(8),  # the offset of a prepared transaction
            _I32.pack(len(body)),
            body,
            bytes((len(topic),)),
            topic,
            _I16.pack(len(properties)),
            properties,
        )
    )


def encode_all(messages: Iterable[StoredForm]) -> bytes:
    return b"".join(map(encode_stored, messages))


def joined_ids(store_host: Host, offsets: Sequence[int]) -> str:
    return ",".join(offset_message_id(store_host, offset) for offset in offsets)
