"""How a connection behaves, by bytes in and bytes out."""

import pytest
from proxy.lean.peer import END, WHOLE, Peer, prefixed, request_headers, zipped

from popmq.proxy.transport.interface import UNREAD_MS, GrpcStatus
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.connection import REMEMBERED_STREAMS
from popmq.proxy.transport.lean.frames import PREFACE, ErrorCode


def test_a_client_is_greeted_with_our_settings_and_an_answer_to_its_own() -> None:
    peer = Peer(max_streams=77)
    ours = dict(frames.settings_content(0, 0, peer.frames[0][3]))
    assert ours[frames.MAX_CONCURRENT_STREAMS] == 77
    assert ours[frames.MAX_FRAME_SIZE] == peer.limits.max_frame_bytes
    window = frames.DEFAULT_WINDOW + frames.window_content(0, peer.frames[1][3])
    assert window == peer.limits.connection_window_bytes
    assert peer.frames[2][:2] == (frames.SETTINGS, frames.ACK)


def test_a_preface_in_single_bytes_is_one() -> None:
    peer = Peer(greet=False)
    for byte in PREFACE:
        peer.send(bytes((byte,)))
    peer.send(frames.settings({}))
    assert peer.answers[peer.call("/s/echo", b"x")].messages == [b"x"]


def test_a_browser_is_told_what_this_port_speaks() -> None:
    peer = Peer(greet=False)
    peer.core.receive(b"GET / HTTP/1.1\r\n\r\n", 0)
    assert peer.core.outbox.take().startswith(b"HTTP/1.1 505 ")
    assert peer.core.done


def test_anything_else_is_cut_off() -> None:
    peer = Peer(greet=False)
    peer.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    assert peer.goaway == (ErrorCode.PROTOCOL_ERROR, "this is not HTTP/2")


def test_a_whole_unary_call_is_one_answer() -> None:
    peer = Peer()
    stream = peer.call("/s/echo", b"hello")
    answer = peer.answers[stream]
    assert answer.headers == [
        {":status": "200", "content-type": "application/grpc"},
        {"grpc-status": "0"},
    ]
    assert answer.messages == [b"hello"]
    assert answer.ended
    assert answer.reset is None
    assert peer.core.streams == {}


def test_calls_of_one_read_are_answered_in_one_write() -> None:
    peer = Peer()
    wakes = peer.wakes
    parts = []
    for _ in range(50):
        stream = peer.next_id()
        parts.append(frames.frame(frames.HEADERS, WHOLE, stream, peer.block()))
        parts.append(frames.frame(frames.DATA, END, stream, prefixed(b"x")))
    peer.core.receive(b"".join(parts), 0)
    assert peer.wakes == wakes + 1
    assert len([entry for entry in peer.read() if entry[0] == frames.DATA]) == 50


def test_an_answer_may_come_later_and_in_another_order() -> None:
    peer = Peer()
    first, second = peer.call("/s/held", b"1"), peer.call("/s/held", b"2")
    for call in reversed(peer.held.calls):
        call.send(b"answer")
        call.finish()
    ended = [entry[2] for entry in peer.read() if entry[1] & END and entry[0] == frames.HEADERS]
    assert ended == [second, first]


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_every_kind_of_grpc_content_is_taken(kind: str) -> None:
    peer = Peer()
    block = peer.encoder.encode([*request_headers("/s/echo")[:4], ("content-type", kind)])
    stream = peer.next_id()
    content = frames.frame(frames.DATA, END, stream, prefixed(b"x"))
    peer.send(frames.frame(frames.HEADERS, WHOLE, stream, block), content)
    assert peer.answers[stream].messages == [b"x"]


def test_a_request_in_many_frames_is_put_together() -> None:
    peer = Peer()
    stream = peer.open("/s/echo")
    content = prefixed(b"hello" * 10)
    for byte in content:
        peer.send(frames.frame(frames.DATA, 0, stream, bytes((byte,))))
    peer.send(frames.frame(frames.DATA, END, stream))
    assert peer.answers[stream].messages == [b"hello" * 10]
    assert peer.counters.incoming_bytes == 0


def test_padded_and_prioritized_frames_are_taken() -> None:
    peer = Peer()
    stream = peer.next_id()
    block = b"\3" + b"\0\0\0\0\x10" + peer.block() + b"\0\0\0"
    flags = WHOLE | frames.PADDED | frames.PRIORITIZED
    peer.send(
        frames.frame(frames.HEADERS, flags, stream, block),
        frames.frame(frames.DATA, END | frames.PADDED, stream, b"\2" + prefixed(b"x") + b"\0\0"),
    )
    assert peer.answers[stream].messages == [b"x"]


def test_a_header_block_in_pieces_is_one() -> None:
    peer = Peer()
    stream, block = peer.next_id(), peer.block()
    peer.send(
        frames.frame(frames.HEADERS, END, stream, block[:3]),
        frames.frame(frames.CONTINUATION, 0, stream, block[3:20]),
        frames.frame(frames.CONTINUATION, WHOLE, stream, block[20:]),
    )
    assert peer.answers[stream].status == "12"  # one message is needed, none came


def test_trailers_of_a_client_end_its_request() -> None:
    peer = Peer()
    stream = peer.call("/s/echo", b"x", end=False)
    peer.send(
        frames.frame(
            frames.HEADERS, WHOLE | END, stream, peer.encoder.encode([("x-checksum", "1")])
        )
    )
    assert peer.answers[stream].messages == [b"x"]


@pytest.mark.parametrize(
    ("path", "messages", "extra", "status", "detail"),
    [
        ("/s/nothing", [b"x"], [], "12", "there is no method /s/nothing"),
        ("/s/echo", [], [], "12", "this method takes one message, none came"),
        ("/s/echo", [b"x", b"y"], [], "12", "this method takes one message, two came"),
        ("/s/echo", [b"x"], [("grpc-encoding", "snappy")], "12", "grpc-encoding snappy"),
        ("/s/echo", [b"x"], [("grpc-timeout", "soon")], "13", "grpc-timeout is no number"),
    ],
)
def test_a_call_that_cannot_be_served_ends_with_nothing_but_trailers(
    path: str, messages: list[bytes], extra: list[tuple[str, str]], status: str, detail: str
) -> None:
    peer = Peer()
    answer = peer.answers[peer.call(path, *messages, extra=extra)]
    (only,) = answer.headers
    assert only["grpc-status"] == status
    assert only["grpc-message"].startswith(detail)
    assert answer.ended
    assert peer.answers[peer.call("/s/echo", b"next")].messages == [b"next"]


def test_a_call_that_is_refused_early_tells_the_client_to_stop_and_ignores_the_rest() -> None:
    peer = Peer()
    stream = peer.open("/s/nothing")
    assert peer.answers[stream].reset == ErrorCode.NO_ERROR
    peer.send(frames.frame(frames.DATA, END, stream, prefixed(b"late")))
    assert peer.goaway is None
    assert len(peer.of_kind(frames.RST_STREAM)) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(":method", "GET"), *request_headers("/")[1:4]], "405"),
        (request_headers("/")[:4], "415"),
        ([*request_headers("/")[:4], ("content-type", "text/plain")], "415"),
        ([*request_headers("/")[:4], ("content-type", "application/grpc-web")], "415"),
    ],
)
def test_who_does_not_speak_grpc_is_told_in_http(
    headers: list[tuple[str, str]], status: str
) -> None:
    peer = Peer()
    stream = peer.next_id()
    block = peer.encoder.encode(headers)
    peer.send(frames.frame(frames.HEADERS, WHOLE | END, stream, block))
    answer = peer.answers[stream]
    assert answer.headers[0][":status"] == status
    assert answer.data.startswith(b"this port speaks gRPC")
    assert int(answer.headers[0]["content-length"]) == len(answer.data)
    assert answer.ended


# -- compression


@pytest.mark.parametrize("encoding", ["gzip", "identity", "deflate"])
def test_a_message_that_is_not_compressed_passes_with_any_encoding(encoding: str) -> None:
    peer = Peer()
    stream = peer.call("/s/echo", b"x", extra=[("grpc-encoding", encoding)])
    assert peer.answers[stream].messages == [b"x"]


def sent_content(peer: Peer, content: bytes, encoding: str = "gzip", path: str = "/s/echo") -> int:
    stream = peer.open(path, [("grpc-encoding", encoding)])
    peer.send(frames.frame(frames.DATA, END, stream, content))
    return stream


def test_a_compressed_message_is_unpacked() -> None:
    peer = Peer()
    assert peer.answers[sent_content(peer, zipped(b"long " * 99))].messages == [b"long " * 99]


@pytest.mark.parametrize(
    ("content", "encoding", "status", "detail"),
    [
        (zipped(b"x"), "identity", "13", "a compressed message without a grpc-encoding"),
        (b"\1\0\0\0\4nope", "gzip", "13", "a message that cannot be decompressed"),
        (b"\1\0\0\0\x0a" + zipped(b"x" * 99)[5:15], "gzip", "13", "a compressed message that ends"),
        (b"\2\0\0\0\1x", "gzip", "13", "compressed-flag 2"),
        (b"\0\0\0\0\5x", "gzip", "13", "the last message is not complete"),
    ],
)
def test_broken_content_ends_its_call(
    content: bytes, encoding: str, status: str, detail: str
) -> None:
    peer = Peer()
    answer = peer.answers[sent_content(peer, content, encoding)]
    assert answer.status == status
    assert answer.headers[-1]["grpc-message"].startswith(detail)
    assert peer.counters.incoming_bytes == 0


# -- streams of messages


def test_a_bidirectional_handler_hears_each_message_and_the_end() -> None:
    peer = Peer()
    stream = peer.open("/s/talk")
    peer.send(frames.frame(frames.DATA, 0, stream, prefixed(b"one") + prefixed(b"two")))
    assert peer.answers[stream].messages == [b"one", b"two"]
    peer.send(frames.frame(frames.DATA, END, stream, prefixed(b"three")))
    answer = peer.answers[stream]
    assert answer.messages == [b"one", b"two", b"three"]
    assert (answer.status, answer.ended, answer.reset) == ("0", True, None)


def test_a_server_that_ends_first_asks_the_client_to_stop() -> None:
    peer = Peer()
    stream = peer.open("/s/talk")
    peer.talks[0].call.finish(GrpcStatus.INVALID_ARGUMENT, "no settings")
    peer.read()
    answer = peer.answers[stream]
    assert (answer.status, answer.reset) == ("3", ErrorCode.NO_ERROR)
    peer.send(frames.frame(frames.DATA, 0, stream, prefixed(b"late")))
    assert peer.talks[0].messages == []
    assert peer.goaway is None


def test_a_reset_is_heard_once_and_nothing_is_sent_after_it() -> None:
    peer = Peer()
    stream = peer.call("/s/held", b"")
    peer.send(frames.reset(stream, ErrorCode.CANCEL))
    peer.send(frames.reset(stream, ErrorCode.CANCEL))
    (call,) = peer.held.calls
    assert peer.held.gone == [call]
    call.send(b"nobody listens")
    call.finish()
    assert peer.read() == []
    assert peer.core.streams == {}


def test_a_lost_connection_is_heard_by_every_call_and_by_no_answered_one() -> None:
    peer = Peer()
    for _ in range(3):
        peer.call("/s/held", b"")
    peer.held.calls[0].finish()
    peer.core.lost()
    assert peer.held.gone == peer.held.calls[1:]
    assert peer.counters.streams == 0


# -- the end of a connection


def test_a_connection_that_drains_finishes_its_calls_and_takes_no_new_ones() -> None:
    peer = Peer()
    running = peer.call("/s/held", b"")
    peer.core.drain("the server stops")
    assert not peer.core.done
    late = peer.call("/s/echo", b"x")
    peer.held.calls[0].finish()
    peer.read()
    assert peer.answers[running].status == "0"
    assert late not in peer.answers
    assert peer.core.done
    (goaway,) = peer.of_kind(frames.GOAWAY)
    assert frames.goaway_content(0, goaway[3]) == (running, ErrorCode.NO_ERROR)


def test_a_deadline_that_is_over_ends_the_call() -> None:
    peer = Peer()
    stream = peer.call("/s/held", b"", extra=[("grpc-timeout", "3S")])
    assert peer.held.calls[0].remaining_ms() == 3_000
    peer.now_ms += 2_000
    assert peer.held.calls[0].remaining_ms() == 1_000
    peer.core.tick(peer.now_ms)
    assert peer.held.gone == []
    peer.now_ms += 1_001
    peer.core.tick(peer.now_ms)
    peer.read()
    assert peer.held.gone == peer.held.calls
    assert peer.answers[stream].status == "4"


def test_a_deadline_of_sixty_years_is_one_and_of_a_thousand_is_none() -> None:
    peer = Peer()
    peer.call("/s/held", b"", extra=[("grpc-timeout", "525600H")])
    peer.call("/s/held", b"", extra=[("grpc-timeout", "9000000H")])
    near, far = (call.remaining_ms() for call in peer.held.calls)
    assert near == 525_600 * 3_600_000
    assert far is None


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([frames.frame(frames.DATA, 0, 0, b"x")], 1),
        ([frames.frame(frames.DATA, 0, 9, b"x")], 1),
        ([frames.frame(frames.HEADERS, WHOLE, 2, b"")], 1),
        ([frames.reset(9, 8)], 1),
        ([frames.window_update(9, 1)], 1),
        ([frames.frame(frames.CONTINUATION, WHOLE, 1, b"")], 1),
        ([frames.frame(frames.HEADERS, 0, 1, b""), frames.ping(b"12345678")], 1),
        ([frames.frame(frames.PUSH_PROMISE, WHOLE, 1, b"\0\0\0\2")], 1),
        ([frames.window_update(0, (1 << 31) - 1)], 3),
        ([frames.frame_header(1 << 20, 0, 0, 1)], 6),
    ],
)
def test_a_broken_rule_of_the_connection_ends_it_with_its_code(
    parts: list[bytes], code: int
) -> None:
    peer = Peer()
    waiting = peer.call("/s/held", b"")
    assert waiting == 1
    if parts[0][3] == frames.HEADERS and parts[0][8] == 1:
        parts = [parts[0][:8] + b"\3" + parts[0][9:], *parts[1:]]
    peer.send(*parts)
    assert peer.goaway is not None
    assert peer.goaway[0] == code
    assert peer.core.done
    assert peer.held.gone == peer.held.calls
    assert peer.counters.faults == 1


def test_the_first_frame_has_to_be_settings() -> None:
    peer = Peer(greet=False)
    peer.send(PREFACE, frames.ping(b"12345678"))
    assert peer.goaway == (ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")


@pytest.mark.parametrize("again", [frames.HEADERS, frames.DATA])
def test_a_stream_that_is_over_takes_nothing_more(again: int) -> None:
    peer = Peer()
    stream = peer.call("/s/echo", b"x")
    peer.send(frames.frame(again, WHOLE if again == frames.HEADERS else 0, stream, b"x"))
    if again == frames.HEADERS:
        assert peer.goaway is not None
        assert peer.goaway[0] == ErrorCode.STREAM_CLOSED
    else:
        assert peer.answers[stream].reset == ErrorCode.STREAM_CLOSED
        assert peer.goaway is None


def test_a_fault_of_one_stream_leaves_the_others_alone() -> None:
    peer = Peer()
    waiting = peer.call("/s/held", b"")
    broken = peer.open("/s/talk")
    peer.send(frames.window_update(broken, (1 << 31) - 1))
    assert peer.answers[broken].reset == ErrorCode.FLOW_CONTROL_ERROR
    peer.held.calls[0].send(b"fine")
    peer.held.calls[0].finish()
    peer.read()
    assert peer.answers[waiting].messages == [b"fine"]


def test_a_request_whose_length_is_not_what_it_said_is_malformed() -> None:
    peer = Peer()
    for extra in ([("content-length", "7")], [("content-length", "5")]):
        stream = peer.call("/s/echo", b"x", extra=extra)
        assert peer.answers[stream].reset == ErrorCode.PROTOCOL_ERROR
    stream = peer.call("/s/echo", b"x", extra=[("content-length", "6")])
    assert peer.answers[stream].messages == [b"x"]


def test_the_table_of_headers_is_kept_up_by_trailers() -> None:
    peer = Peer()
    stream = peer.call("/s/echo", b"x", end=False)
    block = peer.encoder.encode([("x-new", "one")])
    peer.send(frames.frame(frames.HEADERS, WHOLE | END, stream, block))
    peer.call("/s/held", b"", extra=[("x-new", "one")])
    assert peer.held.calls[0].metadata["x-new"] == "one"


def test_the_table_of_headers_is_kept_up_by_requests_that_are_refused() -> None:
    peer = Peer(max_streams=1)
    peer.call("/s/held", b"")
    refused = peer.call("/s/echo", b"", extra=[("x-new", "one")])
    assert peer.answers[refused].reset == ErrorCode.REFUSED_STREAM
    peer.held.calls[0].finish()
    peer.read()
    stream = peer.call("/s/held", b"", extra=[("x-new", "one")])
    assert peer.held.calls[-1].metadata["x-new"] == "one"
    assert stream in peer.core.streams


def answered_call(peer: Peer, unread: list[int]) -> int:
    """A call that is finished; `unread` gets its stream if the client did not read the answer."""
    stream = peer.call("/s/flow", b"x")
    call = peer.held.calls[-1]
    call.on_unread(lambda: unread.append(stream))
    call.send(b"answer")
    call.finish()
    return stream


def test_an_answer_that_its_client_resets_was_not_read() -> None:
    peer, unread = Peer(), list[int]()
    first, second = answered_call(peer, unread), answered_call(peer, unread)
    peer.send(frames.reset(first, ErrorCode.CANCEL), frames.reset(first, ErrorCode.CANCEL))
    assert unread == [first]
    assert peer.held.gone == []
    peer.core.lost()
    assert unread == [first, second]


def test_an_answer_that_still_waits_for_room_when_its_client_resets_it_was_not_read() -> None:
    peer, unread = Peer(settings={frames.INITIAL_WINDOW_SIZE: 3}), list[int]()
    stream = answered_call(peer, unread)
    assert stream in peer.core.streams
    peer.send(frames.reset(stream, ErrorCode.CANCEL))
    peer.core.lost()
    assert unread == [stream]


def test_an_answer_that_left_long_before_the_connection_broke_was_read() -> None:
    peer, unread = Peer(), list[int]()
    answered_call(peer, unread)
    peer.now_ms += UNREAD_MS + 1
    late = answered_call(peer, unread)
    peer.core.lost()
    assert unread == [late]


def test_only_the_last_answers_are_remembered() -> None:
    peer, unread = Peer(), list[int]()
    streams = [answered_call(peer, unread) for _ in range(REMEMBERED_STREAMS + 1)]
    peer.core.lost()
    assert unread == streams[1:]
