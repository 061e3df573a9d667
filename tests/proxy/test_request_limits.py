"""Parts of requests are counted before protobuf sees them; each method has a size of its own."""

import time
from typing import Any

import pytest

from popmq.common.errors import Code
from popmq.common.settings.settings import Settings
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.request_limits import MAX_ENTRIES, MAX_PARTS, RequestLimit, request_limits
from popmq.proxy.rpc.wire_scan import chunk

SEND = service.SendMessageRequest


def refusal(bench: Any, method: str, data: bytes) -> tuple[int, str]:
    """The status of the reply, and that protobuf did not parse the request: that takes seconds."""
    call = bench.make_call()
    began_s = time.thread_time()
    bench.methods[method].start(call, data)
    assert time.thread_time() - began_s < 1
    (sent,) = call.sent
    status = service.AckMessageResponse.FromString(sent).status
    return status.code, status.message


@pytest.fixture
def calls(bench: Any, make_call: Any) -> Any:
    bench.make_call = make_call
    return bench


@pytest.mark.parametrize(
    ("method", "field"), [("SendMessage", 1), ("AckMessage", 3), ("SyncLiteSubscription", 4)]
)
def test_a_mebibyte_of_empty_entries_is_refused_before_it_is_parsed(
    calls: Any, method: str, field: int
) -> None:
    code, text = refusal(calls, method, chunk(field, b"") * (1 << 19))
    assert code == Code.BAD_REQUEST
    assert "entries" in text or "bytes" in text


@pytest.mark.parametrize(
    "inside",
    [
        chunk(2, chunk(1, b"k") + chunk(2, b"")),  # user properties
        chunk(3, chunk(2, b"")),  # keys
        chunk(3, b"") * 2,  # system properties again and again
    ],
)
def test_parts_of_one_message_are_counted_at_every_level(calls: Any, inside: bytes) -> None:
    data = chunk(1, inside * ((1 << 20) // len(inside)))
    code, text = refusal(calls, "SendMessage", data)
    assert code == Code.BAD_REQUEST
    assert "fields" in text


def test_keys_inside_of_one_list_are_counted(calls: Any) -> None:
    code, text = refusal(calls, "SendMessage", chunk(1, chunk(3, chunk(2, b"") * (1 << 19))))
    assert (code, "fields" in text) == (Code.BAD_REQUEST, True)


def test_a_request_that_is_too_large_for_its_method_names_the_limit(calls: Any) -> None:
    code, text = refusal(calls, "Heartbeat", chunk(1, b"x" * (1 << 17)))
    assert code == Code.BAD_REQUEST
    assert str(128 << 10) in text


def test_a_group_that_nobody_sends_is_no_way_around_the_limit(calls: Any) -> None:
    data = chunk(1, b"\x53" + b"\x58\x00" * (1 << 19) + b"\x54")
    code, text = refusal(calls, "SendMessage", data)
    assert (code, "group" in text) == (Code.BAD_REQUEST, True)


def test_bytes_that_are_no_request_are_refused(calls: Any) -> None:
    code, text = refusal(calls, "AckMessage", b"\x0a\xff" + b"\xff" * 8_000)
    assert code == Code.BAD_REQUEST
    assert "no AckMessageRequest" in text


def test_a_large_body_is_not_counted_as_parts() -> None:
    message = pb.Message(body=b"\0" * (4 << 20))
    message.user_properties.update({f"key-{n}": "v" for n in range(128)})
    limit = request_limits(Settings())["SendMessage"]
    limit.check(SEND.DESCRIPTOR, SEND(messages=[message]).SerializeToString())


def test_as_many_entries_as_the_limit_says_pass_and_one_more_does_not() -> None:
    limit = RequestLimit()
    message = pb.Message(body=b"some bytes")
    limit.check(SEND.DESCRIPTOR, SEND(messages=[message] * MAX_ENTRIES).SerializeToString())
    with pytest.raises(Exception, match=f"more than {MAX_ENTRIES} entries"):
        limit.check(
            SEND.DESCRIPTOR, SEND(messages=[message] * (MAX_ENTRIES + 1)).SerializeToString()
        )


def test_two_thousand_lite_topics_with_the_longest_names_are_within_their_limit() -> None:
    names = [f"{n:064}" for n in range(2_000)]
    request = service.SyncLiteSubscriptionRequest(lite_topic_set=names)
    limit = request_limits(Settings())["SyncLiteSubscription"]
    limit.check(request.DESCRIPTOR, request.SerializeToString())


def test_a_thousand_messages_with_properties_are_within_the_limit_of_a_send() -> None:
    message = pb.Message(topic=pb.Resource(name="orders"), body=b"x" * 200)
    message.user_properties.update({f"key-{n}": "v" for n in range(4)})
    message.system_properties.keys.extend(("a", "b"))
    message.system_properties.message_id = "1" * 32
    limit = request_limits(Settings())["SendMessage"]
    limit.check(SEND.DESCRIPTOR, SEND(messages=[message] * 1_024).SerializeToString())
    assert limit.max_parts > MAX_PARTS
