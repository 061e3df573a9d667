"""The message group of a stored message: what order is kept by; its lite topic, and its host.

The slice is the content of the client's SystemProperties (D5), in which field 17 holds the group
and field 21 the lite topic.  Nothing else is decoded; a proxy bounds the slice
(`message.max_properties_bytes`).
"""

from popmq.common.varint import read_varint

_LEN = 2
_GROUP_TAG = 17 << 3 | _LEN
_LITE_TAG = 21 << 3 | _LEN
_HOST_TAG = 8 << 3 | _LEN


def message_group(properties: bytes) -> bytes:
    """Empty for a message without one, and for bytes that are no protobuf."""
    return _field(properties, _GROUP_TAG)


def lite_topic(properties: bytes) -> str:
    """Like `message_group`: the name of the lite topic."""
    return _field(properties, _LITE_TAG).decode(errors="replace")


def born_host(properties: bytes) -> str:
    """The host that the client says it runs on."""
    return _field(properties, _HOST_TAG).decode(errors="replace")


def _field(properties: bytes, requested: int) -> bytes:
    group = b""
    at, end = 0, len(properties)
    try:
        while at < end:
            tag, at = read_varint(properties, at)
            match tag & 7:
                case 2:  # its size, then its content
                    size, at = read_varint(properties, at)
                    if tag == requested:
                        group = properties[at : at + size]
                    at += size
                case 0:  # a varint
                    _, at = read_varint(properties, at)
                case 5:  # four bytes
                    at += 4
                case 1:  # eight
                    at += 8
                case _:
                    return b""
    except (IndexError, ValueError):
        return b""
    return group if at == end else b""
