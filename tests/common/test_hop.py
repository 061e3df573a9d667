"""What proxies and brokers tell each other, at the limits of its fields."""

import pytest

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import (
    AckRequest,
    AckResult,
    ChangeRequest,
    PopRequest,
    PutEntry,
    PutRequest,
    PutResult,
    decode_ack,
    decode_ack_reply,
    decode_change,
    decode_pop,
    decode_put,
    decode_put_reply,
    encode_ack,
    encode_ack_reply,
    encode_change,
    encode_pop,
    encode_put,
    encode_put_reply,
)
from popmq.common.protocol.payload import ERROR_TEXT_LIMIT, decode_error, encode_error

LONG = "x" * 65_536


def pop(**fields: object) -> PopRequest:
    known: dict[str, object] = {"topic": "t", "group": "g", "client_id": "c", "limit": 1}
    return PopRequest(**(known | {"invisible_ms": 1, "poll_ms": 0} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "encode",
    [
        lambda: encode_ack(AckRequest(LONG, "g", [])),
        lambda: encode_ack(AckRequest("t", "g", [LONG.encode()])),
        lambda: encode_ack(AckRequest("t", "g", [b""] * 65_536)),
        lambda: encode_change(ChangeRequest("t", LONG, b"", 0)),
        lambda: encode_change(ChangeRequest("t", "g", LONG.encode(), 0)),
        lambda: encode_change(ChangeRequest("t", "g", b"", 1 << 63)),
        lambda: encode_put(PutRequest(LONG, [])),
        lambda: encode_put(PutRequest("t", [PutEntry(1, b"", b"", message_id=LONG)])),
        lambda: encode_put(PutRequest("t", [PutEntry(1, b"", b"", spread_ms=1 << 32)])),
        lambda: encode_put(PutRequest("t", [PutEntry(1, b"", b"", due_ms=1 << 63)])),
        lambda: encode_pop(pop(client_id=LONG)),
        lambda: encode_pop(pop(expression=LONG)),
        lambda: encode_pop(pop(invisible_ms=-1)),
    ],
)
def test_what_no_frame_can_hold_is_a_bad_request(encode: object) -> None:
    assert callable(encode)
    with pytest.raises(PopmqError, match="no frame can hold") as caught:
        encode()
    assert caught.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize("letter", ["x", "ü", "🎉"])
def test_a_long_error_text_is_cut_between_two_characters(letter: str) -> None:
    text = "." + letter * 70_000
    (ack,) = decode_ack_reply(encode_ack_reply([AckResult(Code.BAD_REQUEST, text)]))
    (put,) = decode_put_reply(encode_put_reply([PutResult(Code.BAD_REQUEST, text)]))
    error = decode_error(encode_error(Refused(Code.BAD_REQUEST, text)))
    for message in (ack.message, put.message, str(error)):
        assert ERROR_TEXT_LIMIT - 4 < len(message.encode()) <= ERROR_TEXT_LIMIT
        assert message.endswith(f"{letter} ...")


def test_an_error_text_of_the_limit_stays_whole() -> None:
    text = "x" * ERROR_TEXT_LIMIT
    assert str(decode_error(encode_error(Refused(Code.BAD_REQUEST, text)))) == text


REQUESTS = {
    "pop": (encode_pop, decode_pop, pop(expression="a || ü", attempt_id="again", queue_id=3)),
    "ack": (encode_ack, decode_ack, AckRequest("t", "g", [b"one", b"", b"three"])),
    "change": (encode_change, decode_change, ChangeRequest("tü", "g", b"handle", 7)),
    "put": (encode_put, decode_put, PutRequest("t", [PutEntry(1, b"head", b"more")], True)),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_arrives_as_it_was_sent(kind: str) -> None:
    encode, decode, request = REQUESTS[kind]
    assert decode(encode(request)) == request  # type: ignore[operator]


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_that_ends_early_is_a_bad_request(kind: str) -> None:
    encode, decode, request = REQUESTS[kind]
    whole = encode(request)  # type: ignore[operator]
    for size in range(len(whole)):
        with pytest.raises(PopmqError) as caught:
            decode(whole[:size])
        assert caught.value.code is Code.BAD_REQUEST, f"{size} of {len(whole)} bytes"


@pytest.mark.parametrize("kind", ["pop", "change"])
def test_a_text_that_is_no_text_is_a_bad_request(kind: str) -> None:
    encode, decode, request = REQUESTS[kind]
    with pytest.raises(PopmqError, match="bytes, not text"):
        decode(encode(request).replace("ü".encode(), b"\xff\xff"))  # type: ignore[operator]


def test_the_bytes_of_a_put_stay_as_they_are() -> None:
    entries = [
        PutEntry(3, b"head", b"p", tag_hash=7, queue_id=-1, due_ms=1_700_000_000_123),
        PutEntry(3, b"", b"", message_id="id", queue_id=2, due_ms=-90_000, spread_ms=60_000),
    ]
    request = PutRequest("later", entries, auto_create=True)
    body = encode_put(request)
    first = "03 ffffffff 0000000000000007 0000018bcfe5687b 00000000 0000 00000004 00000001"
    second = "03 00000002 0000000000000000 fffffffffffea070 0000ea60 0002 00000000 00000000 6964"
    assert body == bytes.fromhex("0005 6c61746572 01 0002" + first + "6865616470" + second)
    assert decode_put(body) == request


def test_the_bytes_of_a_put_reply_stay_as_they_are() -> None:
    results = [
        PutResult(queue_id=1, queue_offset=2, due_ms=1_700_000_000_123),
        PutResult(Code.ILLEGAL_DELIVERY_TIME, "no"),
    ]
    body = encode_put_reply(results)
    first = "00004e20 00000001 0000000000000002 0000018bcfe5687b 0000"
    second = "00009c4c 00000000 0000000000000000 0000000000000000 0002 6e6f"
    assert body == bytes.fromhex("0002" + first + second)
    assert decode_put_reply(body) == results
