"""The Remoting frame: what is read, what is refused, and before how many bytes."""

import json
import random
import struct

import pytest

from popmq.proxy.remoting.frames import (
    MAX_FIELDS,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    BadFrame,
    Command,
    FrameReader,
    Serialization,
    decode,
    encode,
    release,
)

SEED = random.randrange(1 << 32)


def json_frame(header: object, body: bytes = b"") -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">II", 4 + len(content) + len(body), len(content)) + content + body


def read(data: bytes) -> list[Command]:
    return list(FrameReader().feed(data))


@pytest.mark.parametrize("serialization", list(Serialization))
def test_a_command_survives_both_serializations(serialization: Serialization) -> None:
    command = Command(
        310,
        opaque=-7,
        flag=2,
        fields={"b": "orders", "i": "TAGS\x01red\x02", "empty": ""},
        body=b"body",
        remark="näher",
        language="GO",
        version=317,
        serialization=serialization,
    )
    assert read(encode(command)) == [command]


def test_frames_that_arrive_byte_by_byte_are_the_same_frames() -> None:
    commands = [Command(34, opaque=n, body=bytes(n)) for n in range(5)]
    reader = FrameReader()
    seen: list[Command] = []
    for byte in b"".join(map(encode, commands)):
        seen += reader.feed(bytes([byte]))
    assert seen == commands
    assert reader.is_between_frames


@pytest.mark.parametrize(("sent", "meant"), [(3442, 200050), (3443, 200051), (3445, 200053)])
def test_the_sixteen_bits_of_a_pop_code_in_a_binary_header_mean_the_whole_code(
    sent: int, meant: int
) -> None:
    command = Command(meant, serialization=Serialization.BINARY)
    data = encode(command)
    assert struct.unpack_from(">h", data, 8) == (sent,)
    assert read(data)[0].code == meant


def test_numbers_and_booleans_among_the_fields_become_text() -> None:
    header = {"code": 310, "extFields": {"e": 0, "k": False, "b": "orders", "x": None}}
    assert read(json_frame(header))[0].fields == {"e": "0", "k": "false", "b": "orders"}


@pytest.mark.parametrize("fields", [None, {}])
def test_absent_fields_and_members_that_are_not_known_are_fine(fields: object) -> None:
    header = {"code": 105, "extFields": fields, "remark": None, "news": [1]}
    (command,) = read(json_frame(header))
    assert (command.code, command.fields, command.remark) == (105, {}, "")


def test_a_language_that_is_not_known_breaks_nothing() -> None:
    data = bytearray(encode(Command(34, serialization=Serialization.BINARY)))
    data[10] = 99
    assert read(bytes(data))[0].language == "OTHER"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack(">II", MAX_FRAME_BYTES + 1, 0), "a frame of 16777217 bytes"),
        (struct.pack(">II", 3, 0), "a frame of 3 bytes"),
        (struct.pack(">II", 100, 97), "a header of 97 bytes"),
        (struct.pack(">II", 1 << 23, MAX_HEADER_BYTES + 1), "a header of 262145 bytes"),
        (struct.pack(">II", 4, 7 << 24), "serialization 7"),
        (json_frame(b"{"), "no JSON"),
        (json_frame(b"[1]"), "no JSON object"),
        (json_frame(b"[" * 100_000), "no JSON"),
        (json_frame({"code": "x"}), "numbers of 32 bits"),
        (json_frame({"code": 1 << 40}), "numbers of 32 bits"),
        (json_frame({"code": 1, "extFields": [1]}), "extFields"),
        (json_frame({"code": 1, "extFields": dict.fromkeys(map(str, range(257)), "")}), "at most"),
    ],
)
def test_what_is_no_frame_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(BadFrame, match=why):
        read(data)


def test_a_binary_header_with_too_many_fields_is_refused() -> None:
    fields = {str(number): "" for number in range(MAX_FIELDS + 1)}
    data = encode(Command(34, fields=fields, serialization=Serialization.BINARY))
    with pytest.raises(BadFrame, match="more than 256 fields"):
        read(data)


def test_bytes_at_random_are_frames_or_refused() -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    command = Command(310, fields={"b": "orders", "e": "1"}, body=b"x" * 20, remark="r")
    for serialization in Serialization:
        whole = encode(Command(310, fields=command.fields, serialization=serialization))
        for _ in range(2_000):
            data = bytearray(whole)
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            try:
                read(bytes(data))
            except BadFrame:
                continue


def test_a_header_that_ends_inside_of_a_text_is_refused() -> None:
    whole = encode(Command(34, fields={"name": "value"}, serialization=Serialization.BINARY))[8:]
    for size in range(len(whole)):
        with pytest.raises(BadFrame):
            decode(Serialization.BINARY, whole[:size], b"")


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (121, "121"),
        (317, "4.5.2"),
        (409, "4.9.8"),
        (412, "5.0.0-SNAPSHOT"),
        (413, "5.0.0"),
        (513, "5.5.0"),
        (612, "612"),
    ],
)
def test_a_version_is_shown_as_its_release(version: int, name: str) -> None:
    assert release(version) == name
