"""Replies that are put together by hand are the bytes that protobuf would write."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import AckResult, PutResult
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.messaging.ack import ack_reply
from popmq.proxy.messaging.send_batch import send_reply
from popmq.proxy.rpc.convert import ok, send_entry

TEXT = st.text(max_size=200)
OFFSETS = st.integers(min_value=0, max_value=(1 << 63) - 1)


@given(st.lists(st.tuples(TEXT, OFFSETS, TEXT), min_size=1, max_size=40))
def test_a_reply_to_sends_that_were_stored(sent: list[tuple[str, int, str]]) -> None:
    results = [PutResult(queue_offset=offset) for _, offset, _ in sent]
    ids, handles = [item[0] for item in sent], [item[2] for item in sent]
    expected = service.SendMessageResponse(
        status=ok(), entries=map(send_entry, results, ids, handles)
    )
    assert send_reply(results, ids, handles) == expected.SerializeToString()


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=40))
def test_a_reply_to_acks_that_were_taken(acked: list[tuple[str, str]]) -> None:
    created: Any = service.AckMessageEntry
    entries = [created(message_id=name, receipt_handle=handle) for name, handle in acked]
    expected = service.AckMessageResponse(status=ok())
    for name, handle in acked:
        expected.entries.add(message_id=name, receipt_handle=handle, status=ok())
    assert ack_reply(entries, [AckResult()] * len(acked)) == expected.SerializeToString()


def test_one_refusal_among_them_is_told() -> None:
    results = [PutResult(), PutResult(Code.MESSAGE_BODY_TOO_LARGE, "too large")]
    reply = service.SendMessageResponse.FromString(send_reply(results, ["a", "b"], ["", ""]))
    assert [entry.status.code for entry in reply.entries] == [20000, 41301]
    assert int(reply.status.code) == Code.MULTIPLE_RESULTS
    entries = [service.AckMessageEntry(message_id=name) for name in ("a", "b")]
    acks = [AckResult(), AckResult(Code.INVALID_RECEIPT_HANDLE, "expired")]
    answer = service.AckMessageResponse.FromString(ack_reply(entries, acks))
    assert [entry.status.code for entry in answer.entries] == [20000, 40013]
