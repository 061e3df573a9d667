"""Bytes to frames and back, and the fault that each broken frame names."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.frames import (
    ConnectionFault,
    ErrorCode,
    Http2FrameReader,
    StreamFault,
)

FRAMES = st.tuples(
    st.integers(0, 255), st.integers(0, 255), st.integers(0, (1 << 31) - 1), st.binary(max_size=300)
)


@given(st.lists(FRAMES, max_size=20), st.randoms(use_true_random=False))
def test_any_split_of_the_stream_gives_the_same_frames(
    wanted: list[frames.Frame], chance: random.Random
) -> None:
    data = b"".join(frames.frame(*item) for item in wanted)
    reader, at = Http2FrameReader(300), 0
    got: list[frames.Frame] = []
    while at < len(data):
        size = chance.randint(1, 40)
        got += reader.feed(data[at : at + size])
        at += size
    assert got == wanted
    assert reader.held_bytes == 0


def test_a_frame_over_the_limit_is_refused_as_soon_as_its_header_is_there() -> None:
    with pytest.raises(ConnectionFault) as caught:
        list(Http2FrameReader(100).feed(frames.frame_header(101, 0, 0, 1)))
    assert caught.value.code is ErrorCode.FRAME_SIZE_ERROR


def test_the_reserved_bit_of_a_stream_id_is_ignored() -> None:
    data = bytearray(frames.frame(frames.PING, 0, 0, b"12345678"))
    data[5] |= 0x80
    assert list(Http2FrameReader(100).feed(bytes(data))) == [(frames.PING, 0, 0, b"12345678")]


@pytest.mark.parametrize(
    ("payload", "content"), [(b"\0ab", b"ab"), (b"\2ab\0\0", b"ab"), (b"\2\0\0", b"")]
)
def test_padding_is_cut_off(payload: bytes, content: bytes) -> None:
    assert frames.data_content(frames.PADDED, payload) == content
    assert frames.headers_content(frames.PADDED, 1, payload) == content


@pytest.mark.parametrize("payload", [b"", b"\1", b"\3ab", b"\xffab"])
def test_padding_that_is_longer_than_its_frame_ends_the_connection(payload: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        frames.data_content(frames.PADDED, payload)
    assert caught.value.code is ErrorCode.PROTOCOL_ERROR


def test_a_priority_in_front_of_headers_is_passed_over() -> None:
    payload = b"\x80\0\0\7\x10block"
    assert frames.headers_content(frames.PRIORITIZED, 1, payload) == b"block"


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (lambda: frames.headers_content(frames.PRIORITIZED, 1, b"1234"), 6),
        (lambda: frames.headers_content(frames.PRIORITIZED, 3, b"\0\0\0\3\0"), 1),
        (lambda: frames.settings_content(0, 1, b""), 1),
        (lambda: frames.settings_content(0, 0, b"12345"), 6),
        (lambda: frames.settings_content(frames.ACK, 0, b"123456"), 6),
        (lambda: frames.settings_content(0, 0, b"\0\2\0\0\0\2"), 1),
        (lambda: frames.settings_content(0, 0, b"\0\4\x80\0\0\0"), 3),
        (lambda: frames.settings_content(0, 0, b"\0\5\0\0\x3f\xff"), 1),
        (lambda: frames.settings_content(0, 0, b"\0\5\1\0\0\0"), 1),
        (lambda: frames.ping_content(1, b"12345678"), 1),
        (lambda: frames.ping_content(0, b"1234567"), 6),
        (lambda: frames.reset_content(0, b"1234"), 1),
        (lambda: frames.reset_content(1, b"123"), 6),
        (lambda: frames.goaway_content(1, b"12345678"), 1),
        (lambda: frames.goaway_content(0, b"1234"), 6),
        (lambda: frames.window_content(0, b"\0\0\0\0"), 1),
        (lambda: frames.window_content(1, b"123"), 6),
        (lambda: frames.check_priority(0, b"12345"), 1),
    ],
)
def test_a_frame_that_breaks_a_rule_of_the_connection_names_it(build: object, code: int) -> None:
    assert callable(build)
    with pytest.raises(ConnectionFault) as caught:
        build()
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (lambda: frames.window_content(3, b"\x80\0\0\0"), 1),
        (lambda: frames.check_priority(3, b"1234"), 6),
        (lambda: frames.check_priority(3, b"\0\0\0\3\0"), 1),
    ],
)
def test_a_frame_that_breaks_a_rule_of_its_stream_names_both(build: object, code: int) -> None:
    assert callable(build)
    with pytest.raises(StreamFault) as caught:
        build()
    assert (caught.value.stream_id, caught.value.code) == (3, code)


def test_what_is_built_is_read_back() -> None:
    built = [
        frames.settings({1: 2, 3: 4}),
        frames.ping(b"12345678", ack=True),
        frames.reset(5, 8),
        frames.goaway(7, 11, "why"),
        frames.window_update(9, 1000),
    ]
    feed, two, three, four, five = Http2FrameReader(100).feed(b"".join(built))
    assert frames.settings_content(feed[1], feed[2], feed[3]) == [(1, 2), (3, 4)]
    assert (two[1], frames.ping_content(two[2], two[3])) == (frames.ACK, b"12345678")
    assert frames.reset_content(three[2], three[3]) == 8
    assert frames.goaway_content(four[2], four[3]) == (7, 11)
    assert frames.window_content(five[2], five[3]) == 1000
