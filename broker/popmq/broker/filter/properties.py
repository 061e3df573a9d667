"""The properties that a filter looks at, read out of a stored message's two slices (D5).

User properties are map entries, field 2 of the client's Message.  Four names belong to the
message itself, as in RocketMQ: TAGS, KEYS (joined by a space), UNIQ_KEY (its id) and
__SHARDINGKEY (its message group).  Bytes that are no protobuf have no properties.
"""

from collections.abc import Iterable, Iterator

from popmq.common.varint import read_varint

_USER_PROPERTY, _KEY, _VALUE = 2, 1, 2
_KEY_TAG, _VALUE_TAG = _KEY << 3 | 2, _VALUE << 3 | 2
TAG, KEYS, MESSAGE_ID, MESSAGE_GROUP = 1, 2, 3, 17
_SYSTEM_NAMES = {
    "TAGS": TAG,
    "KEYS": KEYS,
    "UNIQ_KEY": MESSAGE_ID,
    "__SHARDINGKEY": MESSAGE_GROUP,
}


class PropertyReader:
    """Reads the properties of some names, and skips the rest."""

    def __init__(self, names: Iterable[str]) -> None:
        requested = set(names)
        self._user = {name.encode(): name for name in requested - _SYSTEM_NAMES.keys()}
        self._system = {number: name for name, number in _SYSTEM_NAMES.items() if name in requested}

    def read(self, head: bytes, properties: bytes) -> dict[str, str]:
        results: dict[str, str] = {}
        if self._user:
            self._read_user(head, results)
        if self._system:
            for number, start, end in _texts(properties):
                name = self._system.get(number)
                if name is not None:
                    text = properties[start:end].decode(errors="replace")
                    before = results.get(name) if number == KEYS else None
                    results[name] = text if before is None else f"{before} {text}"
        return results

    def _read_user(self, head: bytes, properties: dict[str, str]) -> None:
        for number, start, end in _texts(head):
            if number != _USER_PROPERTY:
                continue
            key, value = _entry(head[start:end])
            name = self._user.get(key)
            if name is not None:
                properties[name] = value.decode(errors="replace")


def _entry(data: bytes) -> tuple[bytes, bytes]:
    """Key and value of a map's entry."""
    size = len(data)
    key_end = 2 + data[1] if size > 1 else 0
    # As every client writes it: both fields once, in their order, and short.
    if key_end + 2 <= size and data[0] == _KEY_TAG and data[key_end] == _VALUE_TAG:
        value_size = data[key_end + 1]
        if data[1] < 0x80 and value_size < 0x80 and key_end + 2 + value_size == size:
            return data[2:key_end], data[key_end + 2 :]
    key, value = b"", b""
    for number, start, end in _texts(data):
        if number == _KEY:
            key = data[start:end]
        elif number == _VALUE:
            value = data[start:end]
    return key, value


def tag_of(properties: bytes) -> bytes:
    """The message's tag, as sent; empty when it has none."""
    tag = b""
    for number, start, end in _texts(properties):
        if number == TAG:
            tag = properties[start:end]
    return tag


def _texts(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Number, start and end of each field with a length; ends where the bytes are no protobuf."""
    at, size = 0, len(data)
    try:
        while at < size:
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = read_varint(data, at - 1)
            wire_type = tag & 7
            if wire_type == 2:
                length = data[at]
                at += 1
                if length >= 0x80:
                    length, at = read_varint(data, at - 1)
                if at + length > size:
                    return
                yield tag >> 3, at, at + length
                at += length
            elif wire_type == 0:
                _, at = read_varint(data, at)
            elif wire_type == 5:
                at += 4
            elif wire_type == 1:
                at += 8
            else:
                return
    except (IndexError, ValueError):
        return
