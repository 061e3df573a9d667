"""The parts of the load generator: answers read fast mean what a full parser says they mean."""

import socket
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popmq.cli.load.figures import LatencySummary
from popmq.cli.load.http2 import Headers, Http2Channel, grpc_message, grpc_payloads
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import (
    AckTemplate,
    LoadMessage,
    SendTemplate,
    ack_refusals,
    received,
    send_refusal,
)
from popmq.common.errors import Code
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.transport.lean import frames

CODES = st.sampled_from([Code.OK, Code.TOPIC_NOT_FOUND, Code.INTERNAL_SERVER_ERROR])
# Texts near the bytes that are searched for: 20000 as a varint is a0 9c 01.
TEXTS = st.text(st.sampled_from("OK\x08\x01\x02\x9c\xa0\u0720"), max_size=20)


def status(code: int, message: str) -> api.Status:
    new_status = api.Status(message=message)
    new_status.code = api.Code.Value(Code(code).name)
    return new_status


@given(CODES, st.lists(CODES, max_size=2), TEXTS, st.integers(0, 2**63 - 1))
def test_a_send_is_done_only_if_the_answer_and_its_one_entry_say_so(
    top: Code, entries: list[Code], text: str, offset: int
) -> None:
    answer = service.SendMessageResponse(
        status=status(top, text),
        entries=[
            service.SendResultEntry(
                status=status(code, text),
                message_id=text,
                transaction_id=text,
                offset=offset,
                recall_handle=text,
            )
            for code in entries
        ],
    )
    refusal = send_refusal("0", grpc_message(answer.SerializeToString()))
    assert (refusal == "") == (top is Code.OK and entries == [Code.OK])
    assert send_refusal("13 broken", b"") == "grpc-status 13 broken"


@given(st.lists(CODES, min_size=1, max_size=4), TEXTS)
def test_as_many_acks_are_refused_as_entries_say(entries: list[Code], text: str) -> None:
    top = Code.OK if all(code is Code.OK for code in entries) else Code.MULTIPLE_RESULTS
    answer = service.AckMessageResponse(
        status=status(top, text),
        entries=[
            service.AckMessageResultEntry(
                message_id=text, receipt_handle=text, status=status(code, text)
            )
            for code in entries
        ],
    )
    data = grpc_message(answer.SerializeToString())
    assert len(ack_refusals("0", data, len(entries))) == sum(c is not Code.OK for c in entries)


def test_an_ack_without_an_entry_is_refused() -> None:
    data = grpc_message(service.AckMessageResponse(status=status(Code.OK, "")).SerializeToString())
    assert len(ack_refusals("0", data, 2)) == 2


def test_each_request_has_an_id_and_a_stamp_of_its_own() -> None:
    template = SendTemplate("t", 64)
    request, two = (
        service.SendMessageRequest.FromString(next(iter(grpc_payloads(template.request(stamp)))))
        for stamp in (7, 8)
    )
    ids = {
        request.messages[0].system_properties.message_id,
        two.messages[0].system_properties.message_id,
    }
    assert len(ids) == 2
    assert all(len(name) == 34 and name.startswith("01") for name in ids)
    assert int(request.messages[0].body[:20]) == 7
    assert int(two.messages[0].body[:20]) == 8
    assert len(request.messages[0].body) == 64


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_an_ack_is_what_protobuf_would_write(message_id: str, handle: str) -> None:
    template = AckTemplate("t", "g")
    (payload,) = grpc_payloads(template.request([LoadMessage(message_id, handle, 0, 1)]))
    request = service.AckMessageRequest.FromString(payload)
    assert (request.topic.name, request.group.name) == ("t", "g")
    (entry,) = request.entries
    assert (entry.message_id, entry.receipt_handle) == (message_id, handle)


def test_a_receive_that_was_refused_says_why_and_an_empty_one_does_not() -> None:
    def answer(code: Code) -> bytes:
        part = service.ReceiveMessageResponse(status=status(code, "so"))
        return grpc_message(part.SerializeToString())

    assert received("0", answer(Code.MESSAGE_NOT_FOUND)) == ([], "")
    assert received("0", answer(Code.TOPIC_NOT_FOUND)) == ([], "TOPIC_NOT_FOUND (40402): so")


def test_half_a_message_is_an_error() -> None:
    with pytest.raises(LoadError, match="ends in the middle"):
        list(grpc_payloads(grpc_message(b"abc")[:-1]))


def test_ranks_of_a_spread() -> None:
    spread = LatencySummary.of_seconds([number / 1000 for number in range(1, 1001)])
    assert (spread.count, spread.p50, spread.p99, spread.p999, spread.max) == (
        1000,
        501.0,
        991.0,
        1000.0,
        1000.0,
    )
    assert LatencySummary.of_seconds([]) == LatencySummary()


SETTINGS = frames.settings({})
GRPC_OK = b"\x00\x0bgrpc-status\x010"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (SETTINGS + frames.frame(frames.GOAWAY, 0, 0, b"\0" * 7 + b"\x0bcalm"), "GOAWAY 11 calm"),
        (SETTINGS, "the server closed a connection"),
        (frames.settings({frames.INITIAL_WINDOW_SIZE: 10}), "takes 10 bytes ahead"),
        (SETTINGS + frames.frame(frames.CONTINUATION, 4, 1, b""), "headers are continued"),
        (SETTINGS + frames.frame(frames.HEADERS, 5, 9, GRPC_OK), "where nothing was asked"),
    ],
)
def test_a_server_that_goes_away_or_is_none_ends_the_run(
    says: Callable[[bytes], tuple[str, int]], reactor: Reactor, answer: bytes, why: str
) -> None:
    Http2Channel(reactor, says(answer), Headers("localhost", "c"))
    with pytest.raises(LoadError, match=why):
        reactor.run(lambda: False, limit_s=30, what="nothing")


@given(st.data())
def test_an_answer_cut_anywhere_is_the_same_answer(data: st.DataObject) -> None:
    """HEADERS, two DATA frames, one of them padded, trailers; a PING between them."""
    answer = (
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x88")
        + frames.frame(frames.DATA, 0, 1, b"abc")
        + frames.frame(frames.PING, 0, 0, b"12345678")
        + frames.frame(frames.DATA, frames.PADDED, 1, b"\x02def\0\0")
        + frames.frame(frames.HEADERS, 5, 1, GRPC_OK)
    )
    cuts = data.draw(st.lists(st.integers(0, len(answer)), max_size=6).map(sorted))
    pieces = _Pieces()
    try:
        pieces.channel.received(SETTINGS)
        for start, stop in zip([0, *cuts], [*cuts, len(answer)], strict=True):
            pieces.channel.received(answer[start:stop])
    finally:
        pieces.close()
    assert pieces.ended == [("0", b"abcdef")]


class _Pieces:
    """A channel with one call, to be fed by hand."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._reactor = Reactor()
        host, port = self._listener.getsockname()
        self.channel = Http2Channel(self._reactor, (host, port), Headers("localhost", "c"))
        self.ended: list[tuple[str, bytes]] = []
        self.channel.call("/a/b", b"\0\0\0\0\0", self._end, 0.0)

    def _end(self, token: float, status: str, data: bytes) -> None:
        self.ended.append((status, data))

    def close(self) -> None:
        self._reactor.close()
        self._listener.close()
