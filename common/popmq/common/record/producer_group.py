"""The producer group of a half message that a Remoting client sent, as it stands in its record.

Such a client answers a check only if the message is of a group that it has a producer of, so the
broker needs the group to choose a proxy.  It is the first field of the stored system properties,
one that clients do not know:

    tag of field 1002, length-delimited (2 bytes: D2 3E) | length u8 | group
"""

_MARK = b"\xd2\x3e"


def with_producer_group(properties: bytes, group: str) -> bytes:
    """`group` has 1 to 120 letters, so its length is one byte."""
    name = group.encode()
    assert 0 < len(name) < 128, f"a producer group of {len(name)} bytes"
    return b"".join((_MARK, bytes((len(name),)), name, properties))


def producer_group_of(properties: bytes) -> str:
    """Empty: no Remoting client sent it."""
    if properties[:2] != _MARK or len(properties) < 3:
        return ""
    return properties[3 : 3 + properties[2]].decode(errors="replace")
