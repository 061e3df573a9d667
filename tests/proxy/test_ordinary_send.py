"""An ordinary send is read as the general path reads it, or not at all."""

import random
from dataclasses import replace

import pytest
from proxy.send_requests import NOW_MS, ordinary, request, spoil

from popmq.common.errors import PopmqError
from popmq.common.record.message import tag_hash
from popmq.common.record.send_fingerprint import sender_hash
from popmq.common.settings.settings import MessageSettings, TimerSettings
from popmq.common.topics import MessageType, TopicConfig, check_topic_name
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.lanes.ordinary_send import _TAGS, REMEMBERED, OrdinaryMessage, read_ordinary
from popmq.proxy.messaging.delay import NO_DELAY, delay_of
from popmq.proxy.rpc.convert import sent_messages
from popmq.proxy.rpc.validate import check_message, check_stored_size, check_type
from popmq.proxy.rpc.wire_scan import chunk, scalar

LIMITS = MessageSettings(max_body_bytes=2_000, max_properties=4, max_properties_bytes=600)
SENDER = sender_hash("me@1")
PEER = "10.0.0.9:999"
ANY = TopicConfig(1, "orders", type=MessageType.MIXED)


def read(data: bytes, limits: MessageSettings = LIMITS, peer: str = PEER) -> OrdinaryMessage | None:
    """As it stands between other bytes, which may be anything."""
    before, behind = b"\x0a\x04", b"\x0a\x04\0\0\0\0" + data
    try:
        data, end = before + data + behind, 2 + len(data)
        return read_ordinary(data, 2, end, limits, sender=SENDER, peer=peer, now_ms=NOW_MS)
    except (IndexError, ValueError, PopmqError):
        return None


def on_the_general_path(data: bytes, peer: str = PEER) -> OrdinaryMessage | None:
    """What the full handler would store of a plain message; None if it refuses it or more is to
    be said of it."""
    try:
        (sent,) = sent_messages(data)
        facts = sent.facts()
        check_topic_name(sent.topic)
        check_message(facts, LIMITS)
        kind = check_type(facts, ANY)
        if delay_of(facts, TimerSettings(), now_ms=NOW_MS) is not NO_DELAY:
            return None
        head, properties = sent.slices(kind, sender=SENDER, peer=peer, now_ms=NOW_MS)
        check_stored_size(len(head) + len(properties), LIMITS)
    except (PopmqError, ValueError):
        return None
    return OrdinaryMessage(
        sent.topic,
        kind,
        facts.message_id.encode(),
        facts.message_group,
        tag_hash(facts.tag),
        head,
        properties,
    )


def check_alike(data: bytes, peer: str = PEER) -> bool:
    """Whether it is read as ordinary; then both must agree."""
    plain = read(data, peer=peer)
    if plain is None:
        return False
    full = on_the_general_path(data, peer)
    assert full is not None, "the general path has something to say"
    if full.properties != plain.properties:  # only what the general path wrote anew
        short = pb.SystemProperties.FromString(plain.properties)
        assert short == pb.SystemProperties.FromString(full.properties)
        assert not short.queue_id
        plain = plain._replace(properties=full.properties)
    assert plain == full
    return True


def test_what_official_clients_send_every_day_is_ordinary() -> None:
    chance = random.Random(7)
    assert all(check_alike(request(ordinary(chance))) for _ in range(500))


def test_whatever_is_sent_both_readers_agree() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    taken = 0
    for _ in range(3_000):
        message = ordinary(chance)
        for _ in range(chance.choice((1, 1, 2))):
            spoil(message, chance)
        taken += check_alike(request(message))
    assert taken < 1_500


def test_bytes_that_were_changed_are_taken_only_as_protobuf_reads_them() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    taken = 0
    for _ in range(4_000):
        message = ordinary(chance)
        message.body = message.body[:20]
        data = bytearray(request(message))
        for _ in range(chance.choice((1, 1, 2, 4))):
            at = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at]
                case _:
                    data.insert(at, chance.randrange(256))
        taken += check_alike(bytes(data))
    assert 100 < taken < 3_900


@pytest.mark.parametrize("count", [0, 2])
def test_only_requests_of_one_message_are_ordinary(count: int) -> None:
    messages = [ordinary(random.Random(1))] * count
    data = service.SendMessageRequest(messages=messages).SerializeToString()
    assert read(data) is None


def test_fields_that_are_not_known_yet_go_on_the_general_path() -> None:
    data = request(ordinary(random.Random(1)))
    assert read(data + b"\x10\x01") is None


def test_a_limit_that_is_lower_is_kept() -> None:
    message = ordinary(random.Random(1))
    message.body = b"x" * 100
    data = request(message)
    assert read(data, replace(LIMITS, max_body_bytes=100)) is not None
    assert read(data, replace(LIMITS, max_body_bytes=99)) is None


def test_properties_of_more_than_the_limit_go_on_the_general_path() -> None:
    message = ordinary(random.Random(1))
    message.system_properties.keys.extend(["k" * 100] * 3)
    data = request(message)
    assert read(data, replace(LIMITS, max_properties_bytes=299)) is None
    assert read(data, replace(LIMITS, max_properties_bytes=700)) is not None


_P = pb.SystemProperties
TAG, KEY, ID, ENCODING, TYPE, BORN, HOST, STORE, QUEUE, GROUP, TRACE, PRIORITY = (
    *(_P.TAG_FIELD_NUMBER, _P.KEYS_FIELD_NUMBER, _P.MESSAGE_ID_FIELD_NUMBER),
    *(_P.BODY_ENCODING_FIELD_NUMBER, _P.MESSAGE_TYPE_FIELD_NUMBER),
    *(_P.BORN_TIMESTAMP_FIELD_NUMBER, _P.BORN_HOST_FIELD_NUMBER, _P.STORE_HOST_FIELD_NUMBER),
    *(_P.QUEUE_ID_FIELD_NUMBER, _P.MESSAGE_GROUP_FIELD_NUMBER, _P.TRACE_CONTEXT_FIELD_NUMBER),
    _P.PRIORITY_FIELD_NUMBER,
)
NAMED, BODY = chunk(1, chunk(2, b"orders")), chunk(4, b"x")
HAS_ID = chunk(ID, b"m1")
COMPLETE = (
    HAS_ID + scalar(TYPE, 1) + scalar(ENCODING, 1) + chunk(BORN, scalar(1, 1)) + chunk(HOST, b"h")
)


def written(system: bytes, *, named: bytes = NAMED, body: bytes = BODY) -> bytes:
    """A request as bytes, of which no library would write some."""
    return chunk(1, named + chunk(3, system) + body)


@pytest.mark.parametrize(
    "system",
    [
        COMPLETE,
        HAS_ID,
        COMPLETE + chunk(KEY, b"k") * 3,
        HAS_ID + scalar(TYPE, 0),
        HAS_ID + scalar(ENCODING, 0),
        HAS_ID + chunk(HOST, b""),
        HAS_ID + chunk(BORN, b""),
        HAS_ID + scalar(QUEUE, 3),
        HAS_ID + chunk(GROUP, b"g"),
        HAS_ID + scalar(PRIORITY, 0),
        HAS_ID + chunk(TRACE, b"trace"),
        HAS_ID + chunk(TAG, b""),
    ],
)
def test_what_a_client_may_leave_out_or_write_out_is_ordinary(system: bytes) -> None:
    assert check_alike(written(system))
    assert check_alike(written(system), peer="")


@pytest.mark.parametrize(
    "data",
    [
        *(
            written(COMPLETE + again)
            for again in (
                *(HAS_ID, scalar(TYPE, 1), scalar(ENCODING, 1), chunk(BORN, b""), chunk(HOST, b"")),
                *(scalar(QUEUE, 1) * 2, chunk(TAG, b"a") * 2, chunk(GROUP, b"g") * 2),
                *(scalar(PRIORITY, 1), chunk(99, b"x"), chunk(GROUP, b"g" * 128), b"\x92"),
                *(chunk(STORE, b"host"), chunk(GROUP, b" "), chunk(KEY, b" "), b"\x9a\x01\0"),
                *(chunk(BORN, b"\x18\1"), b"\xb0\x01", chunk(KEY, b"k")[:-1]),
            )
        ),
        written(b""),
        written(COMPLETE, named=NAMED * 2),
        written(COMPLETE, body=BODY * 2),
        written(COMPLETE, named=chunk(1, chunk(1, b"n"))),
        written(COMPLETE, named=chunk(1, chunk(2, b"orders") + scalar(3, 1))),
        written(COMPLETE, named=b""),
        written(COMPLETE, body=b""),
        chunk(1, NAMED + BODY),
        chunk(1, NAMED + chunk(3, COMPLETE) * 2 + BODY),
        chunk(2, NAMED + chunk(3, COMPLETE) + BODY),
        written(COMPLETE) + b"\0",
        written(COMPLETE)[:-1],
        b"\x0a" + b"\x80" * 11 + NAMED,
        written(COMPLETE, body=BODY + chunk(2, scalar(1, 1) + chunk(2, b"x"))),
        written(COMPLETE, body=BODY + chunk(2, chunk(1, b"k") + chunk(3, b"x"))),
        written(COMPLETE, body=BODY + chunk(2, chunk(1, b"k") + chunk(2, b"x") + b"\0")),
    ],
)
def test_what_no_library_writes_goes_on_the_general_path(data: bytes) -> None:
    assert not check_alike(data)


def test_what_was_found_good_is_remembered_within_a_bound() -> None:
    for number in range(REMEMBERED + 10):
        message = pb.Message(topic=pb.Resource(name="orders"), body=b"x")
        message.system_properties.message_id = "m"
        message.system_properties.tag = f"tag {number}"
        read_message = read(request(message))
        assert read_message is not None
        assert read_message.tag_hash == tag_hash(f"tag {number}")
    assert len(_TAGS) <= REMEMBERED
