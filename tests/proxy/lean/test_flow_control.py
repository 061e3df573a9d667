"""Windows both ways, by bytes in and bytes out: what waits, for whom, and in whose turn."""

import random

import pytest
from proxy.lean.peer import Peer, prefixed

from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.frames import ErrorCode

OPEN = frames.INITIAL_WINDOW_SIZE


def test_an_answer_waits_for_the_window_of_its_stream() -> None:
    peer = Peer(settings={OPEN: 10})
    stream = peer.call("/s/echo", b"x" * 30)
    assert len(peer.answers[stream].data) == 10
    peer.send(frames.window_update(stream, 5))
    assert len(peer.answers[stream].data) == 15
    peer.send(frames.settings({OPEN: 20}))
    assert len(peer.answers[stream].data) == 25
    assert not peer.answers[stream].ended
    peer.send(frames.window_update(stream, 1_000))
    assert peer.answers[stream].messages == [b"x" * 30]
    assert peer.answers[stream].status == "0"
    assert peer.core.outbox.unsent_bytes == 0


def test_a_window_may_become_negative() -> None:
    peer = Peer(settings={OPEN: 10})
    stream = peer.call("/s/echo", b"x" * 30)
    peer.send(frames.settings({OPEN: 4}))
    peer.send(frames.window_update(stream, 6))
    assert len(peer.answers[stream].data) == 10
    peer.send(frames.window_update(stream, 1))
    assert len(peer.answers[stream].data) == 11


def test_an_answer_waits_for_the_window_of_the_connection_and_streams_take_turns() -> None:
    peer = Peer(settings={OPEN: 1 << 20})
    first = peer.call("/s/echo", b"x" * 100_000)
    second = peer.call("/s/echo", b"y" * 100_000)
    got = len(peer.answers[first].data) + len(peer.answers[second].data)
    assert got == frames.DEFAULT_WINDOW
    before = len(peer.answers[second].data)
    peer.send(frames.window_update(0, 4 * frames.DEFAULT_FRAME_BYTES))
    assert len(peer.answers[second].data) == before + 2 * frames.DEFAULT_FRAME_BYTES
    peer.send(frames.window_update(0, 1 << 20))
    assert peer.answers[first].messages == [b"x" * 100_000]
    assert peer.answers[second].messages == [b"y" * 100_000]


def test_small_answers_wait_for_the_window_of_the_connection_too() -> None:
    peer = Peer()
    streams = [peer.call("/s/echo", b"x" * 10_000) for _ in range(10)]
    got = sum(len(peer.answers[stream].data) for stream in streams if stream in peer.answers)
    assert got == frames.DEFAULT_WINDOW
    peer.send(frames.window_update(0, 1 << 20))
    assert all(peer.answers[stream].messages == [b"x" * 10_000] for stream in streams)


def test_frames_are_no_longer_than_the_client_takes() -> None:
    peer = Peer(settings={OPEN: 1 << 20, frames.MAX_FRAME_SIZE: 20_000})
    stream = peer.call("/s/echo", b"x" * 50_000)
    assert sizes_of(peer, stream) == [20_000, 20_000, 10_005]


def sizes_of(peer: Peer, stream: int) -> list[int]:
    """Of the frames of DATA that came."""
    return [
        len(frame[3]) for frame in peer.frames if frame[0] == frames.DATA and frame[2] == stream
    ]


def test_messages_of_an_answer_share_frames_as_long_as_the_client_takes_them() -> None:
    peer = Peer(settings={OPEN: 1 << 20, frames.MAX_FRAME_SIZE: 20_000})
    stream = peer.call("/s/flow", b"")
    messages = [b"x" * size for size in (0, 9_000, 9_000, 5_000, 14_990, 19_995, 1)]
    peer.held.calls[0].send_all(messages)
    peer.held.calls[0].finish()
    peer.send()
    assert peer.answers[stream].messages == messages
    assert peer.answers[stream].status == "0"
    assert sizes_of(peer, stream) == [18_015, 20_000, 20_000, 6]


@pytest.mark.parametrize("seed", range(20))
def test_messages_sent_together_are_those_sent_one_by_one(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    windows = {OPEN: chance.choice((10, 5_000, 1 << 20))}
    compress_bytes = chance.choice((0, 0, 3_000))
    together, alone = (Peer(settings=windows, compress_bytes=compress_bytes) for _ in range(2))
    accepts = [("grpc-accept-encoding", "gzip")] if chance.random() < 0.5 else []
    streams = [peer.call("/s/flow", b"", extra=accepts) for peer in (together, alone)]
    for _ in range(chance.randint(1, 4)):
        messages = [b"x" * chance.choice((0, 1, 700, 20_000)) for _ in range(chance.randint(0, 9))]
        together.held.calls[0].send_all(messages)
        for message in messages:
            alone.held.calls[0].send(message)
        for peer, stream in zip((together, alone), streams, strict=True):
            if chance.random() < 0.5:
                peer.send(frames.window_update(stream, 1_000))
    for peer, stream in zip((together, alone), streams, strict=True):
        peer.held.calls[0].finish()
        peer.send(frames.window_update(stream, 1 << 20), frames.window_update(0, 1 << 20))
        assert peer.answers[stream].status == "0"
        assert peer.core.outbox.unsent_bytes == 0
    ours, theirs = (
        peer.answers[stream].data for peer, stream in zip((together, alone), streams, strict=True)
    )
    assert ours == theirs


def test_windows_are_opened_again_once_half_of_them_is_used() -> None:
    peer = Peer(stream_window_bytes=65_535, connection_window_bytes=1 << 20)
    stream = peer.open("/s/talk")
    content = prefixed(b"x" * 16_000)
    for _ in range(100):
        peer.send(frames.frame(frames.DATA, 0, stream, content))
    assert len(peer.talks[0].messages) == 100
    updates = [
        (where, frames.window_content(where, payload))
        for kind, _, where, payload in peer.frames[2:]
        if kind == frames.WINDOW_UPDATE
    ]
    assert sum(size for where, size in updates if where == stream) > 1_500_000
    assert 1 <= sum(1 for where, _ in updates if where == 0) <= 4
    assert peer.goaway is None


def test_a_client_that_overruns_the_window_of_a_stream_loses_the_stream() -> None:
    peer = Peer(stream_window_bytes=65_535, max_frame_bytes=1 << 20)
    stream = peer.open("/s/talk")
    peer.send(frames.frame(frames.DATA, 0, stream, b"\0" * 65_536))
    assert peer.answers[stream].reset == ErrorCode.FLOW_CONTROL_ERROR
    assert peer.goaway is None


def test_a_client_that_overruns_the_window_of_the_connection_loses_it() -> None:
    peer = Peer(connection_window_bytes=65_535, max_frame_bytes=1 << 20)
    stream = peer.open("/s/talk")
    peer.send(frames.frame(frames.DATA, 0, stream, b"\0" * 65_536))
    assert peer.goaway is not None
    assert peer.goaway[0] == ErrorCode.FLOW_CONTROL_ERROR


def test_a_socket_that_takes_nothing_holds_messages_back_and_nothing_else() -> None:
    peer = Peer()
    peer.core.outbox.writable = False
    stream = peer.call("/s/echo", b"x")
    peer.send(frames.ping(b"12345678"))
    assert peer.answers[stream].data == b""
    assert peer.frames[-1][:2] == (frames.PING, frames.ACK)
    peer.core.outbox.writable = True
    peer.core.outbox.pump()
    peer.read()
    assert peer.answers[stream].messages == [b"x"]


def test_a_client_with_a_smaller_header_table_is_told_that_we_use_none() -> None:
    peer = Peer(settings={frames.HEADER_TABLE_SIZE: 100})
    peer.decoder.max_allowed_table_size = 100
    assert peer.answers[peer.call("/s/echo", b"x")].status == "0"
    assert peer.answers[peer.call("/s/echo", b"x")].status == "0"
