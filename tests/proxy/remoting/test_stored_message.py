"""Properties, batches, ids and stored messages, byte by byte."""

import struct
from dataclasses import dataclass
from typing import Any

import pytest

from popmq.common.errors import Refused
from popmq.proxy.remoting.stored_message import (
    StoredForm,
    encode_all,
    format_properties,
    offset_message_id,
    parse_batch,
    parse_properties,
)

V4, V6 = ("127.0.0.1", 8081), ("fd00::1", 8081)


def stored(**fields: Any) -> StoredForm:
    plain = StoredForm(
        topic="orders",
        queue_id=2,
        queue_offset=5,
        physical_offset=77,
        flag=9,
        sys_flag=0,
        born_ms=1_700_000_000_000,
        born_host=V4,
        stored_ms=1_700_000_000_009,
        store_host=V4,
        reconsume_times=3,
        body=b"body",
        properties={"UNIQ_KEY": "id", "TAGS": "red"},
    )
    return plain._replace(**fields)


@dataclass(frozen=True)
class Decoded:
    """What a client reads: it goes by the lengths inside, not by the size in front."""

    size: int
    taken: int
    topic: str
    body: bytes
    properties: str
    reconsume_times: int


def decoded(data: bytes, at: int) -> Decoded:
    size, magic, _crc, _queue, _flag, _offset, _physical, sys_flag, _born = struct.unpack_from(
        ">iiIiiqqiq", data, at
    )
    assert magic & 0xFFFF_FFFF == 0xDAA3_20A7
    start, at = at, at + 48
    at += (20 if sys_flag & 16 else 8) + 8 + (20 if sys_flag & 32 else 8)
    (times,) = struct.unpack_from(">i", data, at)
    at += 12
    (length,) = struct.unpack_from(">i", data, at)
    body, at = data[at + 4 : at + 4 + length], at + 4 + length
    topic, at = data[at + 1 : at + 1 + data[at]].decode(), at + 1 + data[at]
    (length,) = struct.unpack_from(">h", data, at)
    properties, at = data[at + 2 : at + 2 + length].decode(), at + 2 + length
    return Decoded(size, at - start, topic, body, properties, times)


@pytest.mark.parametrize("born", [V4, V6])
@pytest.mark.parametrize("store", [V4, V6])
def test_each_message_of_an_answer_ends_where_the_next_begins(
    born: tuple[str, int], store: tuple[str, int]
) -> None:
    first = stored(born_host=born, store_host=store)
    data = encode_all([first, stored(body=b"", properties={})])
    item = decoded(data, 0)
    two = decoded(data, item.taken)
    assert item == Decoded(
        item.taken, item.size, "orders", b"body", "UNIQ_KEY\x01id\x02TAGS\x01red\x02", 3
    )
    assert (two.size, two.body, two.properties) == (two.taken, b"", "")
    assert item.taken + two.taken == len(data)


def test_a_host_without_a_numeric_address_is_written_as_none() -> None:
    assert decoded(encode_all([stored(born_host=("pod.local", 1))]), 0).topic == "orders"


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("A\x011\x02B\x012\x02", {"A": "1", "B": "2"}),
        ("A\x011\x02B\x012", {"A": "1", "B": "2"}),
        ("A\x01\x02\x01x\x02\x02B\x012\x02", {"B": "2"}),
        ("", {}),
    ],
)
def test_properties_are_read_with_and_without_their_last_mark(
    text: str, pairs: dict[str, str]
) -> None:
    assert parse_properties(text) == pairs


def test_a_separator_in_a_value_does_not_split_the_property() -> None:
    assert parse_properties(format_properties({"a": "x\x01y\x02z"})) == {"a": "x y z"}


def member(body: bytes, properties: bytes, *, size: int = 0) -> bytes:
    content = struct.pack(">iii", 0, 0, 7)  # magic, crc, flag
    content += struct.pack(">i", len(body)) + body
    content += struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", size or len(content) + 4) + content


def test_the_members_of_a_batch_are_read_in_order() -> None:
    data = member(b"one", b"TAGS\x01a\x02") + member(b"two", b"")
    assert [(m.body, m.flag, m.properties) for m in parse_batch(data)] == [
        (b"one", 7, {"TAGS": "a"}),
        (b"two", 7, {}),
    ]


@pytest.mark.parametrize(
    "data",
    [
        member(b"one", b"")[:-1],
        member(b"one", b"", size=99),
        member(b"one", b"\xff"),
        b"\0\0\0",
        struct.pack(">iiiii", 26, 0, 0, 0, -1) + bytes(6),
    ],
)
def test_a_batch_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(Refused, match="message 0 of the batch cannot be read"):
        parse_batch(data)


@pytest.mark.parametrize(("host", "digits"), [(V4, 32), (V6, 56)])
def test_an_offset_id_has_the_digits_that_clients_take_apart(
    host: tuple[str, int], digits: int
) -> None:
    name = offset_message_id(host, 77)
    assert len(name) == digits
    assert name.endswith("00001F91" + "000000000000004D")
