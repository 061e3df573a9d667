"""Messages cut into slices and put together again, against protobuf as the judge."""

from hashlib import md5
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Delivery
from popmq.common.record.message_deadline import with_deadline
from popmq.common.record.send_fingerprint import fingerprint_of, sender_hash
from popmq.common.topics import MessageType, Permission
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.convert import (
    SentMessage,
    group_of,
    message_parts,
    name_of,
    sent_messages,
    status_only,
    topic_of,
)
from popmq.proxy.rpc.wire_scan import LEN, BadWire, chunk, cut, fields, only_content, scalar, varint

NOW_MS = 1_700_000_000_123
PEER = "10.0.0.1:5000"
# An own tag in every list: unknown to us, and a nested group, as a newer client may send them.
UNKNOWN = scalar(900, 7) + chunk(901, b"new") + b"\xb3\x38\x08\x01\xb4\x38"

TEXT = st.text(max_size=12)
TIMES: st.SearchStrategy[dict[str, int]] = st.builds(
    dict, seconds=st.integers(0, 2**33), nanos=st.integers(0, 999_999_999)
)
CLIENT_FIELDS = {
    "tag": TEXT,
    "keys": st.lists(TEXT, max_size=3),
    "message_id": TEXT,
    "body_encoding": st.sampled_from([0, 1, 2]),
    "message_type": st.sampled_from([0, 1, 2, 3, 4]),
    "born_timestamp": TIMES,
    "born_host": TEXT,
    "delivery_timestamp": TIMES,
    "message_group": TEXT,
    "trace_context": TEXT,
    "priority": st.integers(0, 9),
}
SERVER_FIELDS = {
    "body_digest": st.builds(dict, type=st.sampled_from([1, 2, 3]), checksum=TEXT),
    "receipt_handle": TEXT,
    "store_timestamp": TIMES,
    "store_host": TEXT,
    "delivery_attempt": st.integers(0, 9),
    "queue_id": st.integers(0, 9),
    "queue_offset": st.integers(0, 9),
    "invisible_duration": TIMES,
    "dead_letter_queue": st.builds(dict, topic=TEXT, message_id=TEXT),
}
SYSTEM_PROPERTIES: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {}, optional=CLIENT_FIELDS | SERVER_FIELDS
)


@st.composite
def messages(draw: st.DrawFn) -> pb.Message:
    sent = pb.Message(
        topic=pb.Resource(name=draw(TEXT)),
        user_properties=draw(st.dictionaries(TEXT, TEXT, max_size=4)),
        body=draw(st.binary(max_size=200)),
    )
    sent.system_properties.MergeFrom(pb.SystemProperties(**draw(SYSTEM_PROPERTIES)))
    return sent


def request(*sent: bytes) -> bytes:
    return b"".join(chunk(1, data) for data in sent)


def one_sent(message: bytes) -> SentMessage:
    (sent,) = sent_messages(request(message))
    return sent


def delivery(head: bytes, properties: bytes) -> Delivery:
    return Delivery(3, 2**40, 2, NOW_MS + 5, b"handle", head, properties)


def delivered(message: bytes, kind: MessageType = MessageType.NORMAL) -> pb.Message:
    """The message after a send and a receive, with one system_properties in it."""
    head, properties = one_sent(message).slices(kind, sender=1, peer=PEER, now_ms=NOW_MS)
    (part,) = message_parts((delivery(head, properties),), b"broker-a")
    wire = service.ReceiveMessageResponse.FromString(part).message
    assert [field.number for field in fields(part[only_content(part, 2) :])].count(3) == 1
    return wire


def stored(message: bytes, kind: MessageType = MessageType.NORMAL) -> pb.SystemProperties:
    _, properties = one_sent(message).slices(kind, sender=1, peer=PEER, now_ms=NOW_MS)
    return pb.SystemProperties.FromString(properties)


@pytest.mark.parametrize(
    ("seconds", "nanos", "expected"),
    [
        (-5, 0, (0, 0)),
        (1 << 55, 5, (253_402_300_799, 5)),
        (1, -7, (1, 0)),
        (1, 2_000_000_000, (1, 999_999_999)),
        (253_402_300_799, 999_999_999, (253_402_300_799, 999_999_999)),
    ],
)
def test_a_time_of_birth_that_no_client_can_read_is_stored_as_the_nearest_that_all_can(
    seconds: int, nanos: int, expected: tuple[int, int]
) -> None:
    sent = pb.Message(body=b"x")
    sent.system_properties.born_timestamp.seconds = seconds
    sent.system_properties.born_timestamp.nanos = nanos
    born = delivered(sent.SerializeToString()).system_properties.born_timestamp
    assert (born.seconds, born.nanos) == expected
    assert born.ToMilliseconds() >= 0  # which official clients call


@given(messages())
def test_what_the_client_said_arrives_and_what_it_may_not_say_is_the_servers(
    sent: pb.Message,
) -> None:
    got = delivered(sent.SerializeToString())

    assert got.topic == sent.topic
    assert got.user_properties == sent.user_properties
    assert got.body == sent.body
    old, new = sent.system_properties, got.system_properties
    for name in ("tag", "message_id", "message_group", "trace_context", "priority", "keys"):
        assert getattr(new, name) == getattr(old, name)
    assert new.HasField("tag") == old.HasField("tag")
    assert new.delivery_timestamp == old.delivery_timestamp
    assert new.message_type == pb.MessageType.NORMAL
    assert new.body_encoding == (old.body_encoding or pb.Encoding.IDENTITY)
    assert new.born_host == (old.born_host or PEER)
    if old.HasField("born_timestamp"):
        assert new.born_timestamp == old.born_timestamp
    else:
        assert new.born_timestamp.ToMilliseconds() == NOW_MS
    assert new.body_digest.type == pb.DigestType.MD5
    assert new.body_digest.checksum == md5(sent.body).hexdigest().upper()
    assert new.receipt_handle == "handle"
    assert new.store_timestamp.ToMilliseconds() == NOW_MS + 5
    assert new.store_host == "broker-a"
    assert (new.queue_id, new.queue_offset, new.delivery_attempt) == (3, 2**40, 2)
    assert not new.HasField("invisible_duration")
    assert not new.HasField("dead_letter_queue")


@given(messages())
def test_nothing_of_the_server_is_stored_but_the_digest(sent: pb.Message) -> None:
    kept = stored(sent.SerializeToString())
    present = {field.name for field, _ in kept.ListFields()}
    assert not present & (SERVER_FIELDS.keys() - {"body_digest"})


@given(messages(), st.permutations(range(4)))
def test_fields_may_come_in_any_order_and_unknown_ones_survive(
    sent: pb.Message, order: list[int]
) -> None:
    content = sent.system_properties.SerializeToString() + UNKNOWN
    rest = pb.Message()
    rest.CopyFrom(sent)
    rest.ClearField("system_properties")
    parts = [chunk(3, content), rest.SerializeToString(), UNKNOWN, chunk(77, b"more")]
    wire = b"".join(parts[place] for place in order)

    head, properties = one_sent(wire).slices(MessageType.NORMAL, sender=1, peer=PEER, now_ms=NOW_MS)

    assert head == b"".join(parts[place] for place in order if place != 0)
    assert {900, 901, 902} <= {field.number for field in fields(properties)}


@given(messages(), messages())
def test_system_properties_that_come_twice_are_merged(
    first: pb.Message, second: pb.Message
) -> None:
    wire = first.SerializeToString() + second.SerializeToString()
    merged = pb.Message.FromString(wire)

    got = delivered(wire)

    assert got.body == merged.body
    assert got.user_properties == merged.user_properties
    assert got.system_properties.tag == merged.system_properties.tag
    assert got.system_properties.keys == merged.system_properties.keys
    assert got.system_properties.message_id == merged.system_properties.message_id


def test_properties_without_a_word_of_the_servers_are_stored_as_they_came() -> None:
    properties = pb.SystemProperties(tag="a", message_id="m").SerializeToString()
    # A spelling that no serializer would choose: it shows that nobody spelled it anew.
    odd = scalar(13, 0) + properties
    wire = pb.Message(body=b"x").SerializeToString() + chunk(3, odd)
    _, kept = one_sent(wire).slices(MessageType.NORMAL, sender=1, peer=PEER, now_ms=NOW_MS)
    assert kept.startswith(odd)


def test_a_digest_that_is_right_already_is_stored_once() -> None:
    digest = pb.Digest(type=pb.DigestType.MD5, checksum=md5(b"x").hexdigest().upper())
    sent = pb.Message(body=b"x", system_properties=pb.SystemProperties(body_digest=digest))
    _, kept = one_sent(sent.SerializeToString()).slices(
        MessageType.NORMAL, sender=1, peer=PEER, now_ms=NOW_MS
    )
    assert [field.number for field in fields(kept)].count(4) == 1


def test_slicing_twice_gives_the_same_bytes() -> None:
    properties = pb.SystemProperties(message_id="m", receipt_handle="mine", queue_id=4)
    sent = one_sent(pb.Message(body=b"x", system_properties=properties).SerializeToString())
    first = sent.slices(MessageType.NORMAL, sender=1, peer=PEER, now_ms=NOW_MS)
    assert sent.slices(MessageType.NORMAL, sender=1, peer=PEER, now_ms=NOW_MS) == first


def test_the_fingerprint_says_who_sent_a_message_and_with_which_body() -> None:
    def fingerprint(body: bytes, client_id: str, born_s: int = 1, *, delayed: bool = False) -> int:
        sent = pb.Message(body=body, system_properties=pb.SystemProperties(message_id="m"))
        sent.system_properties.born_timestamp.seconds = born_s
        _, properties = one_sent(sent.SerializeToString()).slices(
            MessageType.NORMAL, sender=sender_hash(client_id), peer=PEER, now_ms=NOW_MS
        )
        return fingerprint_of(with_deadline(properties, NOW_MS) if delayed else properties)

    first = fingerprint(b"x", "me@1")
    assert first != 0
    assert fingerprint(b"x", "me@1", born_s=2) == fingerprint(b"x", "me@1", delayed=True) == first
    assert len({first, fingerprint(b"y", "me@1"), fingerprint(b"x", "me@2")}) == 3


@given(st.lists(messages(), max_size=4))
def test_every_message_of_a_request_is_found_where_it_stands(sent: list[pb.Message]) -> None:
    wires = [item.SerializeToString() for item in sent]
    data = UNKNOWN + request(*wires) + UNKNOWN
    found_sent_messages = sent_messages(data)
    assert [
        data[found_sent_message.start : found_sent_message.end]
        for found_sent_message in found_sent_messages
    ] == wires
    assert [found_sent_message.message for found_sent_message in found_sent_messages] == sent


def test_a_received_part_is_a_response_with_the_message() -> None:
    sent = pb.Message(body=b"x", system_properties=pb.SystemProperties(message_id="m"))
    head, properties = one_sent(sent.SerializeToString()).slices(
        MessageType.FIFO, sender=1, peer=PEER, now_ms=NOW_MS
    )
    (part,) = message_parts((delivery(head, properties),), b"broker-a")
    got = service.ReceiveMessageResponse.FromString(part)
    assert got.WhichOneof("content") == "message"
    assert got.message.body == b"x"
    assert got.message.system_properties.message_type == pb.MessageType.FIFO


@pytest.mark.parametrize("data", [b"\x0a\xff", b"\xff", b"not protobuf at all"])
def test_bytes_that_are_no_request_are_a_bad_request(data: bytes) -> None:
    with pytest.raises(PopmqError) as caught:
        sent_messages(data)
    assert caught.value.code is Code.BAD_REQUEST


def test_a_namespace_that_no_header_names_is_refused_and_not_ignored() -> None:
    assert name_of(pb.Resource(name="orders")) == "orders"
    with pytest.raises(PopmqError, match="namespace 'ns' of 'orders'") as caught:
        name_of(pb.Resource(name="orders", resource_namespace="ns"))
    assert caught.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize("name", service.DESCRIPTOR.message_types_by_name)
def test_the_status_of_every_reply_is_its_first_field(name: str) -> None:
    if not name.endswith("Response"):
        return
    reply = getattr(service, name).FromString(status_only(Refused(Code.NOT_IMPLEMENTED, "later")))
    assert reply.status.code == Code.NOT_IMPLEMENTED
    assert reply.status.message == "later"


@given(st.integers(0, 2**64 - 1))
def test_varints_read_as_they_were_written(value: int) -> None:
    assert varint(value)[-1] < 0x80
    parsed = service.QueryOffsetResponse.FromString(scalar(2, value))
    assert parsed.offset % 2**64 == value


@given(st.binary(max_size=60))
def test_a_scan_of_any_bytes_ends_and_loses_none(data: bytes) -> None:
    try:
        found_fields = list(fields(data))
    except BadWire:
        return
    assert (
        b"".join(data[found_field.start : found_field.end] for found_field in found_fields) == data
    )
    for number in {found_field.number for found_field in found_fields}:
        rest, pieces = cut(data, number)
        mine = [found_field for found_field in found_fields if found_field.number == number]
        assert len(rest) == len(data) - sum(item.end - item.start for item in mine)
        assert len(pieces) == sum(item.wire_type == LEN for item in mine)


def test_topics_and_groups_are_read_from_a_brokers_words() -> None:
    described = admin_pb2.Topic(id=70, name="t", queues=4, type="fifo", permission="r")
    topic = topic_of(admin_pb2.TopicReply(topic=described).SerializeToString())
    assert (topic.id, topic.queues, topic.type) == (70, 4, MessageType.FIFO)
    assert topic.permission is Permission.READ

    group = group_of(
        admin_pb2.GroupReply(
            group=admin_pb2.Group(id=9, name="g", type="fifo", max_attempts=3, back_off_ms=[5])
        ).SerializeToString()
    )
    assert (group.max_attempts, group.back_off_ms) == (3, (5,))


def test_a_refusal_inside_a_brokers_reply_is_a_refusal() -> None:
    status = admin_pb2.Status(code=Code.TOPIC_NOT_FOUND, message="none")
    with pytest.raises(PopmqError, match="none") as caught:
        topic_of(admin_pb2.TopicReply(status=status).SerializeToString())
    assert caught.value.code is Code.TOPIC_NOT_FOUND


@given(st.binary(max_size=300), st.integers(1, 15))
def test_a_request_that_is_one_field_is_found_without_a_scan(data: bytes, number: int) -> None:
    whole = chunk(number, data)
    start = only_content(whole, number)
    assert whole[start:] == data
    assert only_content(whole + b"\x08\x01", number) == 0
    assert only_content(whole[:-1], number) == 0 or not data
    assert only_content(b"", number) == 0
    assert only_content(chunk(number + 1, data), number) == 0
