"""An ordinary send is read as the general path reads it, or not at all."""

import random
from dataclasses import replace

import pytest

from popmq.common.errors import PopmqError
from popmq.common.record.message import tag_hash
from popmq.common.record.send_fingerprint import sender_hash
from popmq.common.settings.settings import MessageSettings, TimerSettings
from popmq.common.topics import MessageType, TopicConfig, check_topic_name
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.lanes.ordinary_send import OrdinaryMessage, read_ordinary
from popmq.proxy.messaging.delay import NO_DELAY, delay_of
from popmq.proxy.rpc.convert import sent_messages
from popmq.proxy.rpc.validate import check_message, check_stored_size, check_type

LIMITS = MessageSettings(max_body_bytes=2_000, max_properties=4, max_properties_bytes=600)
NOW_MS = 1_700_000_000_123
SENDER = sender_hash("me@1")
PEER = "10.0.0.9:999"
ANY = TopicConfig(1, "orders", type=MessageType.MIXED)


def read(data: bytes, limits: MessageSettings = LIMITS) -> OrdinaryMessage | None:
    """As it stands between other bytes, which may be anything."""
    before, behind = b"\x0a\x04", b"\x0a\x04\0\0\0\0" + data
    try:
        data, end = before + data + behind, 2 + len(data)
        return read_ordinary(data, 2, end, limits, sender=SENDER, peer=PEER, now_ms=NOW_MS)
    except (IndexError, ValueError, PopmqError):
        return None


def on_the_general_path(data: bytes) -> OrdinaryMessage | None:
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
        head, properties = sent.slices(kind, sender=SENDER, peer=PEER, now_ms=NOW_MS)
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


def check_alike(data: bytes) -> bool:
    """Whether it is read as ordinary; then both must agree."""
    plain = read(data)
    if plain is None:
        return False
    full = on_the_general_path(data)
    assert full is not None, "the general path has something to say"
    if full.properties != plain.properties:  # only what the general path wrote anew
        short = pb.SystemProperties.FromString(plain.properties)
        assert short == pb.SystemProperties.FromString(full.properties)
        assert not short.queue_id
        plain = plain._replace(properties=full.properties)
    assert plain == full
    return True


def request(message: pb.Message) -> bytes:
    return service.SendMessageRequest(messages=[message]).SerializeToString()


def ordinary(chance: random.Random) -> pb.Message:
    """As the official clients write it."""
    message = pb.Message(topic=pb.Resource(name=chance.choice(("orders", "a-b_c", "T" * 100))))
    message.body = chance.randbytes(chance.choice((1, 100, 127, 128, 1_024)))
    for number in range(chance.randrange(4)):
        message.user_properties[f"key {number}"] = chance.choice(("", "red", "\u8272", "a\u200bb"))
    system = message.system_properties
    system.message_id = f"01{chance.getrandbits(128):032X}"
    system.message_type = pb.MessageType.NORMAL
    for expected in chance.sample(("tag", "keys", "host", "born", "encoding", "queue", "trace"), 5):
        if expected == "tag":
            system.tag = chance.choice(("a", "\u00fcber", ""))
        elif expected == "keys":
            system.keys.extend(chance.sample(("k", "\u043a", "order 7"), 2))
        elif expected == "host":
            system.born_host = "host-7"
        elif expected == "born":
            system.born_timestamp.seconds = NOW_MS // 1000 + chance.randrange(-5, 5)
            system.born_timestamp.nanos = chance.randrange(1_000_000_000)
        elif expected == "encoding":
            system.body_encoding = chance.choice((pb.Encoding.IDENTITY, pb.Encoding.GZIP))
        elif expected == "queue":
            system.queue_id = chance.randrange(16)
        else:
            system.trace_context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    if chance.random() < 0.3:
        system.message_group = chance.choice(("g", "gr\u00fcn", "g" * 63))
        system.message_type = chance.choice((pb.MessageType.FIFO, pb.MessageType.NORMAL))
    if chance.random() < 0.2:
        system.priority = 0
    return message


def spoil(message: pb.Message, chance: random.Random) -> None:
    """Something unusual or wrong, at any place."""
    system = message.system_properties
    long = "x" * chance.choice((64, 127, 128, 256, 700))
    match chance.randrange(20):
        case 0:
            message.topic.name = chance.choice(("", " ", "%RETRY%g", "a b", "T" * 128))
        case 1:
            message.topic.resource_namespace = "n"
        case 2:
            message.body = b"x" * chance.choice((0, 2_000, 2_001))
        case 3:
            message.user_properties[chance.choice(("KEYS", "a\nb", long, "TIMER_SPREAD_MS"))] = "1"
        case 4:
            message.user_properties["k"] = chance.choice(("a\0b", long, "\x9f", "\u2028"))
        case 5:
            message.user_properties[chance.choice(("TIMER_DELAY_MS", "TIMER_DELAY_SEC"))] = "7"
        case 6:
            for number in range(chance.choice((4, 5))):
                message.user_properties[f"more {number}"] = ""
        case 7:
            system.message_id = chance.choice(("", " ", "\u3000", long))
        case 8:
            system.tag = chance.choice((" ", "a|b", "a\tb", " a", "a\u3000", "*", long))
        case 9:
            system.keys.append(chance.choice(("", " ", "a\nb", long)))
        case 10:
            system.message_group = chance.choice((" ", "g\n", long, "\u00fc" * 32))
        case 11:
            system.delivery_timestamp.FromMilliseconds(NOW_MS + 5_000)
        case 12:
            system.message_type = pb.MessageType.ValueType(chance.choice((0, 3, 4, 5, 6, 9)))
        case 13:
            system.receipt_handle = "mine"
        case 14:
            system.store_host = "mine"
        case 15:
            system.body_digest.checksum = "mine"
        case 16:
            system.priority = 1
        case 17:
            system.lite_topic = "lite"
        case 18:
            born = system.born_timestamp
            born.seconds = chance.choice((-5, 1 << 34, 1 << 35, 253_402_300_800, 1 << 55, 1))
            born.nanos = chance.choice((-7, 0, 999_999_999, 1_000_000_000, 2_000_000_000))
        case _:
            system.orphaned_transaction_recovery_duration.seconds = 5


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
