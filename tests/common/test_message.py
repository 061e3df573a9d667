"""Records: the quick way of reading a message says what the careful way says."""

import random

import pytest

from popmq.common.record.message import (
    HEADER_SIZE,
    BadRecord,
    EndedDelivery,
    RecordKind,
    RevivalToken,
    Stamp,
    StoredMessage,
    check_record,
    decode_message,
    encode_message,
    encode_record,
    intact_message,
)

STAMP = Stamp(3, 5_000, 6_000)
TOKEN = RevivalToken(False, EndedDelivery(3, 9, 4), 64, 1, 17, 4_000, 4_500)


def message(position: int, *, token: bytes = b"", kind: int = RecordKind.MESSAGE) -> bytes:
    return encode_message(
        stamp=STAMP,
        position=position,
        topic_id=64,
        queue_id=2,
        queue_offset=99,
        tag_hash=1 << 63,
        head=b"head" * 10,
        properties=b"properties",
        token=token,
        attempt=4,
        kind=kind,
        unconfirmed=77,
    )


def carefully(data: bytes, at: int, position: int, size: int) -> StoredMessage | None:
    try:
        header = check_record(data, at, position)
        return decode_message(data, at, header) if header.size == size else None
    except BadRecord:
        return None


@pytest.mark.parametrize("token", [b"", TOKEN.encode()], ids=["no token", "token"])
@pytest.mark.parametrize("kind", [RecordKind.MESSAGE, RecordKind.MOVED])
def test_the_quick_way_reads_what_the_careful_way_reads(token: bytes, kind: RecordKind) -> None:
    record = message(1_000, token=token, kind=kind)
    data = b"before" + record + b"behind"
    result = intact_message(data, 6, 1_000, len(record))
    assert result is not None
    assert result == carefully(data, 6, 1_000, len(record))
    assert result.token == (TOKEN if token else None)


def test_no_changed_byte_gets_through_the_quick_way() -> None:
    record = message(1_000)
    for at in range(len(record)):
        wrong = bytearray(record)
        wrong[at] ^= 1 << at % 8
        assert intact_message(bytes(wrong), 0, 1_000, len(record)) is None, f"byte {at}"


def test_the_quick_way_refuses_what_the_careful_way_refuses() -> None:
    """Other places, other sizes, records of other kinds, bytes that end early."""
    rng = random.Random(1)
    system = encode_record(
        kind=RecordKind.REVIVE,
        stamp=STAMP,
        position=1_000,
        topic_id=1,
        queue_id=0,
        queue_offset=1,
        body=message(0)[HEADER_SIZE:],  # looks like a message behind its header
    )
    for record in (message(1_000), system):
        for _ in range(500):
            data = record[: rng.randrange(len(record) + 1)] if rng.random() < 0.5 else record
            at = rng.choice((0, 0, 0, 1, 56))
            position = rng.choice((1_000, 1_000, 1_001, 0))
            size = rng.choice((len(record), len(record), len(record) - 1, 0, 56, 79, 80, 1 << 20))
            found_message = intact_message(data, at, position, size)
            assert found_message == carefully(data, at, position, size), (
                len(data),
                at,
                position,
                size,
            )


def test_a_message_with_an_unknown_token_is_a_bad_record() -> None:
    record = message(1_000, token=b"\x09" * 20)
    with pytest.raises(BadRecord, match="token version 9"):
        intact_message(record, 0, 1_000, len(record))
