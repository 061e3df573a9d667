"""The bytes of frames, HELLO and addresses, and what one connection writes per tick."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise

import pytest
from common.frame_peers import (
    BROKER,
    PROXY,
    PlainConnection,
    RecordingTransport,
    frame,
)
from hypothesis import given
from hypothesis import strategies as st

from popmq.common.errors import (
    ConfigError,
)
from popmq.common.protocol.frames import (
    DEFAULT_SETTINGS,
    Address,
    FrameError,
    FrameReader,
    FrameSettings,
    Hello,
    decode_hello,
    encode_hello,
)
from popmq.common.protocol.messaging_payloads import Kind


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[tuple[int, int, int, bytes]], list[bytes]]:
    frames, stream = [], b""
    for _ in range(draw(st.integers(0, 6))):
        kind, request_id = draw(st.integers(0, 255)), draw(st.integers(0, 2**64 - 1))
        body = draw(st.binary(max_size=40))
        timeout_ms = draw(st.integers(0, 2**32 - 1)) if kind >= 16 else None
        frames.append((kind, request_id, timeout_ms or 0, body))
        stream += frame(kind, request_id, body, timeout_ms=timeout_ms)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)))))
    edges = [0, *cuts, len(stream)]
    return frames, [stream[a:b] for a, b in pairwise(edges)]


@given(streams())
def test_any_split_of_the_byte_stream_gives_the_same_frames(
    case: tuple[list[tuple[int, int, int, bytes]], list[bytes]],
) -> None:
    expected, pieces = case
    reader = FrameReader(1_000)
    assert [item for piece in pieces for item in reader.feed(piece)] == expected


@given(streams(), st.sampled_from([b"\0\0\0\x0a\2", b"\0\0\x04\0\1", b"\0\0\0\x09\1"]))
def test_a_malformed_frame_is_refused_behind_the_good_ones_however_the_stream_is_split(
    case: tuple[list[tuple[int, int, int, bytes]], list[bytes]], bad: bytes
) -> None:
    expected, pieces = case
    reader = FrameReader(1_000)
    assert [item for piece in pieces for item in reader.feed(piece)] == expected
    with pytest.raises(FrameError):
        list(reader.feed(bad))


def test_good_frames_in_the_same_piece_come_before_the_refusal_of_a_bad_one() -> None:
    reader = FrameReader(1_000)
    frames = reader.feed(frame(2, 5, b"good") + b"\0\0\0\x0a\2")
    assert next(frames) == (2, 5, 0, b"good")
    with pytest.raises(FrameError, match=r"version 2 .* version 1"):
        next(frames)


@pytest.mark.timeout(30)
def test_a_long_frame_in_many_pieces_is_not_copied_once_per_piece() -> None:
    """Copying what is there for each piece would move 1 TiB and run into the timeout."""
    body = bytes(16 << 20)
    stream = frame(2, 1, body)
    reader = FrameReader(64 << 20)
    pieces = (stream[at : at + 256] for at in range(0, len(stream), 256))
    assert [item for piece in pieces for item in reader.feed(piece)] == [(2, 1, 0, body)]


def test_a_request_too_short_for_its_timeout_is_refused() -> None:
    with pytest.raises(FrameError, match="no timeout"):
        list(FrameReader(1_000).feed(frame(Kind.PUT, 1, b"abc")))


def test_hello_survives_and_fields_of_a_newer_peer_are_passed_over() -> None:
    newer = json.loads(encode_hello(PROXY)) | {"zone": "a"}
    assert decode_hello(json.dumps(newer).encode()) == PROXY


@pytest.mark.parametrize(
    "change",
    [
        {"role": "cook"},
        {"name": 5},
        {"epoch": "7"},
        {"epoch": True},
        {"features": 1},
        {"cluster": None},
    ],
)
def test_hello_with_a_field_of_the_wrong_type_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FrameError, match="HELLO"):
        decode_hello(json.dumps(json.loads(encode_hello(PROXY)) | change).encode())


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"{}", b"5", b"[" * 50_000])
def test_hello_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="HELLO"):
        decode_hello(body)


def test_credentials_are_not_shown_when_a_hello_is_printed() -> None:
    assert "s3cret" not in repr(replace(PROXY, credentials="s3cret"))


@pytest.mark.parametrize("text", ["127.0.0.1:80", "[::1]:80", "broker-0:10911", "unix:/a/b.sock"])
def test_an_address_reads_as_it_is_written(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:70000", "unix:"])
def test_an_address_without_all_its_parts_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="neither HOST:PORT nor unix:PATH"):
        Address.parse(text)


def test_a_bound_below_one_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"frames\.max_pending"):
        FrameSettings(max_pending=0)


async def test_everything_sent_in_one_tick_leaves_in_one_write() -> None:
    transport = RecordingTransport()
    connection = PlainConnection(PROXY, DEFAULT_SETTINGS)
    connection.connection_made(transport)
    sent = b""
    for number in range(1, 201):
        connection.send_request(Kind.PUT, number, 50, b"ask")
        connection.send(Kind.REPLY, number, b"answer")
        sent += frame(Kind.PUT, number, b"ask", timeout_ms=50) + frame(2, number, b"answer")
    assert transport.writes == []
    await asyncio.sleep(0)
    assert transport.writes == [sent]
    connection.send(Kind.REPLY, 201, b"next tick")
    await asyncio.sleep(0)
    assert transport.writes[1:] == [frame(2, 201, b"next tick")]


async def test_a_tick_that_writes_more_than_the_bound_does_not_hoard_it() -> None:
    transport = RecordingTransport()
    connection = PlainConnection(PROXY, FrameSettings(max_buffered_bytes=1_000))
    connection.connection_made(transport)
    for number in range(10):
        connection.send(Kind.REPLY, number, bytes(400))
        assert connection.unsent <= 1_000
    assert len(transport.writes) == 3


class ClosingConnection(PlainConnection):
    """Closes upon the first frame after HELLO."""

    bodies: list[bytes]

    def on_hello(self, peer: Hello) -> None:
        self.bodies = []

    def frame(self, kind: int, request_id: int, timeout_ms: int, body: bytes) -> None:
        self.bodies.append(body)
        self.abort("enough")


async def test_what_comes_behind_the_frame_that_closed_the_connection_is_not_read() -> None:
    connection = ClosingConnection(PROXY, DEFAULT_SETTINGS)
    connection.connection_made(RecordingTransport())
    hello = frame(Kind.HELLO, 0, encode_hello(BROKER))
    connection.data_received(hello + frame(2, 1, b"first") + frame(2, 2, b"second"))
    connection.data_received(frame(2, 3, b"third"))
    assert connection.bodies == [b"first"]
