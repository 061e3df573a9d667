"""The message group of a stored message: what order is kept by.

The slice is the content of the client's SystemProperties (D5), in which field 17 holds the
group.  Nothing else is decoded; a proxy bounds the slice (`message.max_properties_bytes`).
"""

_LEN = 2
_GROUP_TAG = 17 << 3 | _LEN


def message_group(properties: bytes) -> bytes:
    """Empty for a message without one, and for bytes that are no protobuf."""
    group = b""
    at, end = 0, len(properties)
    try:
        while at < end:
            tag, at = _varint(properties, at)
            match tag & 7:
                case 2:  # its size, then its content
                    size, at = _varint(properties, at)
                    if tag == _GROUP_TAG:
                        group = properties[at : at + size]
                    at += size
                case 0:  # a varint
                    _, at = _varint(properties, at)
                case 5:  # four bytes
                    at += 4
                case 1:  # eight
                    at += 8
                case _:
                    return b""
    except (IndexError, ValueError):
        return b""
    return group if at == end else b""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    at += 1
    if byte < 0x80:
        return byte, at
    value, shift = byte & 0x7F, 7
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a varint is longer than ten bytes")
