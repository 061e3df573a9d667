"""Protobuf's variable-length integers, for the few places that look at bytes without a parser."""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer that starts at byte `at`, and where it ends.

    IndexError when the bytes end inside it, ValueError when it is longer than ten bytes.
    """
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
