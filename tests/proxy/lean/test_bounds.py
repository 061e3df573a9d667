"""Every bound of the lean transport: what passes, what is cut off, and what it holds meanwhile."""

from collections.abc import Callable
from itertools import count

import pytest
from proxy.lean.peer import END, WHOLE, Peer, prefixed, zipped

from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import CONNECTION_BOUNDS, STREAM_BOUNDS
from popmq.proxy.transport.lean.frames import ErrorCode
from popmq.proxy.transport.lean.headers import MAX_HEADER_FRAMES
from popmq.proxy.transport.lean.messages import TURN_BYTES
from popmq.proxy.transport.token_bucket import TokenBucket

CALM = ErrorCode.ENHANCE_YOUR_CALM


def until_cut(peer: Peer, step: Callable[[int], bytes], most: int = 100_000) -> int:
    """How often `step` was taken until the connection was over."""
    for number in count():
        assert number < most, "nothing stopped it"
        peer.send(step(number))
        if peer.core.done:
            return number + 1
    raise AssertionError


def cut_off(peer: Peer, bound: str, setting: str) -> None:
    """It was, for this bound, and the client was told the name of the setting."""
    assert peer.goaway is not None
    assert peer.goaway[0] == CALM
    assert setting in peer.goaway[1]
    assert dict(peer.counters.cut_off) == {bound: 1}


def test_a_rate_lets_a_burst_pass_and_then_so_many_a_second() -> None:
    rate = TokenBucket(10, 30)
    assert sum(rate.take(1_000) for _ in range(100)) == 30
    assert sum(rate.take(1_500) for _ in range(100)) == 5
    assert sum(rate.take(60_000) for _ in range(100)) == 30


@pytest.mark.parametrize(
    "frame",
    [
        frames.ping(b"12345678"),
        frames.ping(b"12345678", ack=True),
        frames.settings({}),
        frames.SETTINGS_ACK,
        frames.settings({frames.INITIAL_WINDOW_SIZE: 70_000}),
        frames.frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\0"),
        frames.frame(0x42, 0, 0, b"unknown"),
    ],
)
def test_a_flood_of_control_frames_is_cut_off(frame: bytes) -> None:
    peer = Peer(max_control_per_s=100)
    taken = until_cut(peer, lambda _: frame)
    assert 190 <= taken <= 201
    cut_off(peer, "control_frames", "lean.max_control_per_s")


def test_a_flood_of_resets_for_what_is_over_is_cut_off() -> None:
    peer = Peer(max_control_per_s=100)
    stream = peer.call("/s/echo", b"x")
    assert 190 <= until_cut(peer, lambda _: frames.reset(stream, ErrorCode.CANCEL)) <= 201
    cut_off(peer, "control_frames", "lean.max_control_per_s")


def test_control_frames_within_the_rate_are_answered_for_ever() -> None:
    peer = Peer(max_control_per_s=100)
    for _ in range(2_000):
        peer.now_ms += 11
        peer.send(frames.ping(b"12345678"))
    assert peer.goaway is None


def test_a_flood_of_empty_data_is_cut_off() -> None:
    peer = Peer(max_control_per_s=100)
    stream = peer.open("/s/talk")
    taken = until_cut(peer, lambda _: frames.frame(frames.DATA, 0, stream))
    assert 190 <= taken <= 201
    cut_off(peer, "empty_frames", "lean.max_control_per_s")


def test_a_flood_of_padding_is_cut_off_too() -> None:
    peer = Peer(max_control_per_s=100)
    stream = peer.open("/s/talk")
    until_cut(peer, lambda _: frames.frame(frames.DATA, frames.PADDED, stream, b"\3\0\0\0"))
    cut_off(peer, "empty_frames", "lean.max_control_per_s")


def test_streams_that_are_opened_and_reset_at_once_are_cut_off() -> None:
    peer = Peer(max_resets_per_s=50, max_streams=20)

    def one(_: int) -> bytes:
        stream = peer.next_id()
        opened = frames.frame(frames.HEADERS, WHOLE, stream, peer.block("/s/held"))
        return opened + frames.reset(stream, ErrorCode.CANCEL)

    assert until_cut(peer, one) == 71
    assert peer.core.streams == {}
    cut_off(peer, "resets", "lean.max_resets_per_s")


def test_streams_that_we_are_made_to_reset_count_as_well() -> None:
    peer = Peer(max_resets_per_s=50, max_streams=20)

    def one(_: int) -> bytes:
        stream = peer.next_id()
        opened = frames.frame(frames.HEADERS, WHOLE, stream, peer.block("/s/held"))
        return opened + frames.window_update(stream, 0x7FFF_FFFF)

    assert until_cut(peer, one) == 71
    cut_off(peer, "resets", "lean.max_resets_per_s")


def test_a_client_may_give_up_all_its_calls_at_once() -> None:
    peer = Peer(max_resets_per_s=1, max_streams=500)
    streams = [peer.call("/s/held", b"") for _ in range(500)]
    peer.send(*(frames.reset(stream, ErrorCode.CANCEL) for stream in streams))
    assert peer.goaway is None
    assert len(peer.held.gone) == 500


@pytest.mark.parametrize(("size", "bound"), [(0, "header_frames"), (1_000, "header_bytes")])
def test_a_flood_of_continuation_is_cut_off(size: int, bound: str) -> None:
    peer = Peer(max_header_bytes=4_096)
    peer.send(frames.frame(frames.HEADERS, 0, 1, b""))
    piece = frames.frame(frames.CONTINUATION, 0, 1, b"\0" * size)
    assert until_cut(peer, lambda _: piece) <= MAX_HEADER_FRAMES
    assert peer.goaway is not None
    assert peer.goaway[0] == CALM
    assert dict(peer.counters.cut_off) == {bound: 1}


def test_a_bomb_of_header_indices_is_cut_off() -> None:
    peer = Peer()
    peer.call("/s/echo", b"x", extra=[("x-bomb", "b" * 3_000)])
    bomb = peer.block("/s/echo") + b"\xbe" * 5_000
    peer.send(frames.frame(frames.HEADERS, WHOLE, peer.next_id(), bomb))
    cut_off(peer, "header_bytes", "lean.max_header_bytes")


def test_streams_beyond_the_limit_are_refused_and_may_be_repeated() -> None:
    peer = Peer(max_streams=3)
    for _ in range(3):
        peer.call("/s/held", b"")
    refused = peer.call("/s/echo", b"x")
    assert peer.answers[refused].reset == ErrorCode.REFUSED_STREAM
    assert peer.counters.cut_off["streams"] == 1
    peer.held.calls[0].finish()
    peer.read()
    assert peer.answers[peer.call("/s/echo", b"x")].messages == [b"x"]


def test_a_message_over_the_limit_is_refused_by_its_first_bytes() -> None:
    peer = Peer(max_message_bytes=1 << 16)
    stream = peer.open("/s/echo")
    peer.send(frames.frame(frames.DATA, 0, stream, b"\0\0\1\0\1"))
    answer = peer.answers[stream]
    assert (answer.status, answer.reset) == ("8", ErrorCode.NO_ERROR)
    assert "lean.max_message_bytes" in answer.headers[-1]["grpc-message"]
    assert dict(peer.counters.cut_off) == {"message_bytes": 1}


def test_a_message_at_the_limit_passes() -> None:
    peer = Peer(max_message_bytes=1 << 16, settings={frames.INITIAL_WINDOW_SIZE: 1 << 20})
    peer.send(frames.window_update(0, 1 << 20))
    assert peer.answers[peer.call("/s/echo", b"x" * (1 << 16))].messages == [b"x" * (1 << 16)]


def test_a_compressed_bomb_is_refused() -> None:
    peer = Peer(max_inflated_bytes=1 << 20)
    stream = peer.open("/s/echo", [("grpc-encoding", "gzip")])
    peer.send(frames.frame(frames.DATA, END, stream, zipped(b"\0" * ((1 << 20) + 1))))
    answer = peer.answers[stream]
    assert answer.status == "8"
    assert "lean.max_inflated_bytes" in answer.headers[-1]["grpc-message"]
    assert dict(peer.counters.cut_off) == {"message_bytes": 1}


def test_messages_that_are_never_completed_are_bounded_together() -> None:
    peer = Peer(max_incoming_bytes=1 << 16, max_streams=100)
    part = b"\0\0\0\x80\0" + b"x" * 10_000
    statuses = []
    for _ in range(20):
        stream = peer.open("/s/echo")
        peer.send(frames.frame(frames.DATA, 0, stream, part))
        answer = peer.answers.get(stream)
        statuses.append(answer.status if answer else None)
    assert statuses.count("8") == 14
    assert peer.counters.incoming_bytes <= 1 << 16
    assert peer.counters.cut_off["incoming_bytes"] == 14
    peer.core.lost()
    assert peer.counters.incoming_bytes == 0


def held_call(peer: Peer, content: bytes, path: str = "/s/echo") -> int:
    """A call with some content, and without an end."""
    stream = peer.open(path, [("grpc-encoding", "gzip")])
    for at in range(0, len(content), 16_384):
        peer.send(frames.frame(frames.DATA, 0, stream, content[at : at + 16_384]))
    return stream


def test_a_request_whose_call_does_not_end_counts_decompressed() -> None:
    peer = Peer(max_incoming_bytes=8 << 20, max_incoming_total_bytes=1 << 30)
    bomb = zipped(b"\0" * (3 << 20))
    assert len(bomb) < 4_000
    streams = [held_call(peer, bomb) for _ in range(10)]
    statuses = [
        peer.answers[stream].status if stream in peer.answers else None for stream in streams
    ]
    assert statuses == [None, None, *["8"] * 8]
    assert 6 << 20 <= peer.counters.incoming_bytes <= 8 << 20
    assert "the fixed limit" in peer.answers[streams[-1]].headers[-1]["grpc-message"]
    for stream in streams[:2]:
        peer.send(frames.frame(frames.DATA, END, stream))
    assert peer.counters.incoming_bytes == 0


def test_a_plain_request_whose_call_does_not_end_counts_too() -> None:
    peer = Peer(max_incoming_bytes=1 << 16)
    streams = [held_call(peer, prefixed(b"x" * 10_000)) for _ in range(20)]
    refused = [stream for stream in streams if stream in peer.answers]
    assert len(refused) == 14
    assert peer.counters.incoming_bytes == 60_000
    peer.send(frames.frame(frames.DATA, END, streams[0]))
    assert peer.answers[streams[0]].messages == [b"x" * 10_000]
    assert peer.counters.incoming_bytes == 50_000


def test_a_compressed_message_is_inflated_by_a_mebibyte_in_a_turn() -> None:
    peer = Peer()
    bombs = [Peer(beside=peer) for _ in range(4)]
    message = b"\0" * (10 << 20)
    streams = [bomb.open("/s/held", [("grpc-encoding", "gzip")]) for bomb in bombs]
    for item, stream in zip(bombs, streams, strict=True):
        item.core.receive(frames.frame(frames.DATA, END, stream, zipped(message)), item.now_ms)
    turns, most = 0, 0
    while peer.turns:
        before = peer.counters.incoming_bytes
        peer.turn()
        most = max(most, peer.counters.incoming_bytes - before)
        turns += 1
    assert most <= TURN_BYTES
    assert turns >= 4 * len(message) // TURN_BYTES
    assert peer.counters.incoming_bytes == 0
    assert all(len(bomb.held.calls) == 1 for bomb in bombs)


def test_messages_of_a_stream_that_wait_for_a_turn_keep_their_order() -> None:
    peer = Peer()
    stream = peer.open("/s/talk", [("grpc-encoding", "gzip")])
    bodies = [bytes([number]) * (700 << 10) for number in range(5)]
    content = b"".join(map(zipped, bodies))
    for at in range(0, len(content), 999):
        part = content[at : at + 999]
        last = at + 999 >= len(content)
        peer.core.receive(frames.frame(frames.DATA, END * last, stream, part), 0)
    peer.send()
    assert peer.talks[0].messages == bodies
    assert peer.counters.incoming_bytes == 0


def test_a_call_that_is_reset_while_it_waits_for_its_turn_is_forgotten() -> None:
    peer = Peer()
    stream = peer.open("/s/held", [("grpc-encoding", "gzip")])
    bomb = zipped(b"\0" * (5 << 20))
    peer.core.receive(frames.frame(frames.DATA, END, stream, bomb), peer.now_ms)
    assert peer.counters.incoming_bytes >= TURN_BYTES
    peer.send(frames.reset(stream, ErrorCode.CANCEL))
    assert peer.counters.incoming_bytes == 0
    assert peer.held.calls == []


def test_at_three_quarters_of_the_servers_bound_the_largest_connection_is_refused() -> None:
    total = 1 << 20
    small = Peer(max_incoming_total_bytes=total)
    part = b"\0\0\x40\0\0" + b"x" * 10_000
    waiting = small.open("/s/echo")
    small.send(frames.frame(frames.DATA, 0, waiting, part))
    large = [Peer(beside=small, max_incoming_total_bytes=total) for _ in range(4)]
    for _ in range(100):
        for item in large:
            stream = item.open("/s/echo")
            item.send(frames.frame(frames.DATA, 0, stream, part))
            assert small.counters.incoming_bytes <= 3 << 18
    assert small.counters.cut_off["incoming_bytes"] > 100
    assert waiting not in small.answers
    refused = [
        answer for entry in large for answer in entry.answers.values() if answer.status == "8"
    ]
    assert "3/4 of the fixed limit" in refused[0].headers[-1]["grpc-message"]
    small.send(frames.frame(frames.DATA, END, waiting, b"x" * ((4 << 20) - 10_000)))


def test_many_small_connections_of_an_address_are_refused_before_the_largest_of_another() -> None:
    total = 1 << 20
    other = Peer(peer="10.0.0.1:5", max_incoming_total_bytes=total)
    waiting = other.open("/s/echo")
    other.send(frames.frame(frames.DATA, 0, waiting, b"\0\0\1\0\0" + b"x" * 12_000))
    for _ in range(200):
        peer = Peer(beside=other, peer="10.0.0.2:6", max_incoming_total_bytes=total)
        stream = peer.open("/s/echo")
        peer.send(frames.frame(frames.DATA, 0, stream, b"\0\0\1\0\0" + b"x" * 10_000))
    assert other.counters.cut_off["incoming_bytes"] > 50
    assert waiting not in other.answers


@pytest.mark.parametrize("extra", [[], [("grpc-timeout", "99999999S")]])
def test_a_request_that_does_not_end_within_its_time_is_refused(
    extra: list[tuple[str, str]],
) -> None:
    peer = Peer()
    stream, talk = peer.open("/s/held", extra), peer.open("/s/talk", extra)
    begun = peer.now_ms
    peer.send(frames.frame(frames.DATA, 0, stream, b"\0\0\1\0\0" + b"x" * 6_395))
    peer.core.tick(begun + 30_100)
    assert stream not in peer.answers
    peer.core.tick(begun + 30_101)
    peer.read()
    assert peer.answers[stream].status == "4"
    assert dict(peer.counters.cut_off) == {"slow_request": 1}
    assert talk in peer.core.streams
    assert peer.counters.incoming_bytes == 0


@pytest.mark.parametrize("path", ["/s/flow", "/s/talk"])
def test_a_client_that_does_not_read_its_messages_is_given_no_more(path: str) -> None:
    peer = Peer(max_unsent_bytes=1 << 16, settings={frames.INITIAL_WINDOW_SIZE: 0})
    gone = []
    if path == "/s/talk":
        stream = peer.open(path)
        call = peer.talks[0].call
        call.on_cancelled(lambda: gone.append(call))
    else:
        stream = peer.call(path, b"")
        call, gone = peer.held.calls[0], peer.held.gone
    for _ in range(1_000):
        call.send(b"x" * 1_000)
        assert peer.core.outbox.unsent_bytes < (1 << 16) + 2_000
    call.finish()
    peer.read()
    assert gone == [call]
    assert peer.answers[stream].reset == CALM
    assert peer.core.outbox.unsent_bytes == 0
    assert dict(peer.counters.cut_off) == {"unsent": 1}
    assert peer.answers[peer.call("/s/nothing")].status == "12"


def test_an_answer_beyond_what_may_wait_is_an_error_of_its_call() -> None:
    peer = Peer(max_unsent_bytes=1 << 16, settings={frames.INITIAL_WINDOW_SIZE: 0})
    streams = [peer.call("/s/held", b"") for _ in range(3)]
    for call in peer.held.calls:
        call.send(b"x" * 50_000)
        call.finish()
    peer.read()
    assert [peer.answers[stream].status for stream in streams] == [None, None, "8"]
    stream = peer.next_id()
    block = peer.encoder.encode([(":method", "GET"), (":scheme", "http"), (":path", "/")])
    peer.send(frames.frame(frames.HEADERS, WHOLE | END, stream, block))
    assert peer.answers[stream].status == "8"
    assert sorted(peer.core.streams) == streams[:2]


def test_a_call_of_which_nothing_waits_yet_ends_with_a_sentence() -> None:
    peer = Peer(max_unsent_bytes=1 << 16, settings={frames.INITIAL_WINDOW_SIZE: 0})
    for _ in range(2):
        peer.call("/s/flow", b"")
    hog, other = peer.held.calls
    while not peer.counters.cut_off and peer.core.outbox.unsent_bytes <= 1 << 16:
        hog.send(b"x" * 1_000)
    other.send(b"x")
    peer.read()
    assert peer.answers[3].status == "8"
    assert "lean.max_unsent_bytes" in peer.answers[3].headers[-1]["grpc-message"]


def test_a_client_that_reads_nothing_for_long_is_cut_off() -> None:
    peer = Peer(stall_ms=5_000, settings={frames.INITIAL_WINDOW_SIZE: 0})
    stream = peer.call("/s/echo", b"x" * 100)
    for _ in range(20):  # as long as a little is read it may go on
        peer.now_ms += 3_000
        peer.send(frames.window_update(stream, 1))
        peer.core.tick(peer.now_ms)
    assert not peer.core.done
    peer.now_ms += 5_001
    peer.core.tick(peer.now_ms)
    peer.read()
    cut_off(peer, "stalled", "lean.stall_ms")


@pytest.mark.parametrize("bytes_before", [b"", frames.PREFACE[:10], frames.PREFACE])
def test_a_client_that_never_comes_to_the_point_is_cut_off(bytes_before: bytes) -> None:
    peer = Peer(greet=False, handshake_ms=2_000)
    peer.send(bytes_before)
    peer.core.tick(peer.now_ms + 2_000)
    assert not peer.core.done
    peer.core.tick(peer.now_ms + 2_001)
    peer.read()
    assert peer.counters.cut_off == {"handshake": 1}
    assert peer.core.done


def test_a_header_block_without_an_end_is_cut_off() -> None:
    peer = Peer(handshake_ms=2_000)
    peer.core.tick(peer.now_ms + 60_000)
    peer.send(frames.frame(frames.HEADERS, 0, 1, b""))
    peer.core.tick(peer.now_ms + 61_999)
    assert not peer.core.done
    peer.core.tick(peer.now_ms + 62_001)
    assert peer.core.done
    assert peer.counters.cut_off == {"handshake": 1}


def test_a_connection_without_calls_is_closed_politely_and_one_with_a_poll_is_not() -> None:
    idle, polling = Peer(idle_ms=5_000), Peer(idle_ms=5_000)
    polling.call("/s/held", b"")
    for peer in (idle, polling):
        peer.core.tick(peer.now_ms + 5_000)
        assert not peer.core.done
        peer.core.tick(peer.now_ms + 5_001)
        peer.read()
    assert idle.core.done
    assert idle.goaway is not None
    assert idle.goaway[0] == ErrorCode.NO_ERROR
    assert idle.counters.idle_closed == 1
    assert not idle.counters.cut_off
    assert not polling.core.done


def test_a_client_that_is_silent_is_asked_once_and_then_cut_off() -> None:
    peer = Peer(ping_ms=10_000, ping_answer_ms=3_000)
    peer.call("/s/held", b"")
    for later_ms in (9_999, 10_000, 11_000, 13_000):
        peer.core.tick(peer.now_ms + later_ms)
        assert not peer.core.done
        peer.read()
        assert len(peer.of_kind(frames.PING)) == (later_ms >= 10_000)
    peer.core.tick(peer.now_ms + 13_001)
    peer.read()
    cut_off(peer, "silent", "lean.ping_answer_ms")
    assert len(peer.held.gone) == 1


def test_a_client_that_answers_our_ping_stays_and_is_asked_again() -> None:
    peer = Peer(ping_ms=10_000, ping_answer_ms=3_000, handshake_ms=600_000)
    for number in range(1, 6):
        peer.now_ms += 10_000
        peer.core.tick(peer.now_ms)
        peer.read()
        asked = peer.of_kind(frames.PING)
        assert len(asked) == number
        peer.now_ms += 2_000
        peer.send(frames.ping(asked[-1][3], ack=True))
        peer.core.tick(peer.now_ms)
    assert not peer.core.done
    assert not peer.counters.cut_off


def test_a_setting_of_0_asks_nobody() -> None:
    peer = Peer(ping_ms=0)
    peer.core.tick(peer.now_ms + 3_000_000)
    peer.read()
    assert peer.of_kind(frames.PING) == []
    assert not peer.core.done


def test_every_bound_is_tried_here_or_over_a_socket() -> None:
    with open(__file__, encoding="utf-8") as file:
        here = file.read()
    over_a_socket = {"connections", "unread"}
    assert [
        name
        for name in (*CONNECTION_BOUNDS, *STREAM_BOUNDS)
        if f'"{name}"' not in here.split("over_a_socket")[0] and name not in over_a_socket
    ] == []
