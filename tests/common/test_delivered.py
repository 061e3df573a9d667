"""The short way from a record to a reply: the same as the long one, bit for bit."""

import random

from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, PopReply
from popmq.common.protocol.pop_reply import PopReplyBuilder, content_of, intact_contents
from popmq.common.record.message import Stamp, StoredMessage, decode_message, encode_message
from popmq.common.record.receipt import encode_member, encode_members, sign_check_point

KEY = bytes(range(32))


def record(position: int, rng: random.Random, *, token: bytes = b"") -> bytes:
    return encode_message(
        stamp=Stamp(3, 1_000 + position, 2_000 + position),
        position=position,
        topic_id=64,
        queue_id=1,
        queue_offset=position,
        tag_hash=rng.getrandbits(64),
        head=rng.randbytes(rng.randrange(60)),
        properties=rng.randbytes(rng.randrange(30)),
        token=token,
        attempt=rng.randrange(1, 5),
    )


def log(count: int, rng: random.Random) -> tuple[bytearray, list[tuple[int, int, int]]]:
    """Records with gaps between them, from position 500, and where they are."""
    data, units = bytearray(), []
    for _ in range(count):
        data += rng.randbytes(rng.randrange(40))
        new_record = record(500 + len(data), rng)
        units.append((500 + len(data), len(new_record), 0))
        data += new_record
    return data, units


def messages(data: bytearray, units: list[tuple[int, int, int]]) -> list[StoredMessage]:
    return [decode_message(memoryview(data), position - 500) for position, _, _ in units]


def test_contents_are_those_of_the_messages() -> None:
    data, units = log(20, random.Random(1))
    expected = [content_of(message) for message in messages(data, units)]
    assert intact_contents(memoryview(data), 500, units) == expected


def test_any_flipped_bit_of_a_record_is_seen() -> None:
    data, units = log(3, random.Random(2))
    (position, size, _) = units[1]
    for at in range(position - 500, position - 500 + size):
        for bit in range(8):
            data[at] ^= 1 << bit
            contents = intact_contents(memoryview(data), 500, units)
            assert [content is None for content in contents] == [False, True, False], (at, bit)
            data[at] ^= 1 << bit


def test_a_unit_that_says_another_size_or_place_finds_nothing() -> None:
    data, [(position, size, _)] = log(1, random.Random(3))
    wrong = [(position, size - 1, 0), (position, size + 1, 0), (position + 1, size, 0)]
    wrong += [(position, 79, 0), (position, 1 << 31, 0)]
    assert intact_contents(memoryview(data), 500, wrong) == [None] * len(wrong)


def test_a_record_with_a_token_is_left_to_who_reads_tokens() -> None:
    data = record(500, random.Random(4), token=b"\xff" * 8)
    assert intact_contents(data, 500, [(500, len(data), 0)]) == [None]


def test_the_reply_is_that_of_the_single_deliveries() -> None:
    rng = random.Random(5)
    data, units = log(32, rng)
    found_messages = messages(data, units)
    for name in ("b", "bb", "bbb"):  # all lengths that base64 tells apart
        signed = sign_check_point(KEY, name, 64, 7, 1, 2, 3, 4)
        members = [(number * 2 + 10, number * 2) for number in range(32)]
        handle, tails = encode_members(signed, members)
        deliveries = PopReplyBuilder()
        contents = [content_of(message) for message in found_messages]
        at = [offset for offset, _ in members]
        deliveries.add(1, 2, handle, tails, list(zip(at, contents, strict=True)))
        single = [
            Delivery(
                1,
                offset,
                2,
                message.header.wall_ms,
                encode_member(signed, offset, member),
                message.head,
                message.properties,
            )
            for (offset, member), message in zip(members, found_messages, strict=True)
        ]
        assert len(deliveries) == 32
        assert deliveries.encode_reply(9, 77) == hop.encode_pop_reply(PopReply(single, 9, 77))
