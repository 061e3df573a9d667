"""Looking up stored messages: by id, key, place and time, through the store and on the wire."""

from dataclasses import dataclass, field, replace

import pytest

from popmq.broker.handlers.lookup_requests import find_messages
from popmq.broker.index.key_index import KeyIndex
from popmq.broker.log.commit_log import CommitLog
from popmq.broker.meta.registry import Registry
from popmq.broker.store.lookup import REPLY_BYTES, Lookup, LookupResult
from popmq.broker.store.message_store import MessageStore
from popmq.common.errors import Code, PopmqError, Refused, TopicNotFound
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, WITHOUT_TAIL, CoreBroker

START_MS = 1_700_000_000_000


@dataclass
class Found:
    """What `find_messages` needs of a broker."""

    registry: Registry
    store: MessageStore
    lookup: Lookup
    settings: Settings


@dataclass
class Shop:
    """A broker, and a lookup whose index is made from a scan of the broker's log."""

    core: CoreBroker = field(default_factory=CoreBroker)
    sent: int = 0

    def send(
        self, body: bytes, *keys: str, message_id: str = "", topic: str = "orders", queue: int = 0
    ) -> None:
        properties = api.SystemProperties(keys=keys, message_id=message_id).SerializeToString()
        entry = hop.PutEntry(MessageType.NORMAL, body, properties, 0, queue)
        reply = self.core.reply(Kind.PUT, hop.encode_put(hop.PutRequest(topic, [entry])))
        assert hop.decode_put_reply(reply)[0].code == Code.OK

    def lookup(self) -> Lookup:
        self.sent += 1
        folder = self.core.settings.broker.data
        segment_bytes = self.core.settings.store.segment_bytes
        log = CommitLog(self.core.disk, f"{folder}/commitlog", segment_bytes=segment_bytes)
        log.load()
        self.index = KeyIndex(self.core.disk, f"{folder}/index-{self.sent}", entries_per_file=16)
        self.index.load(log.start)
        for record in log.scan(log.start):
            self.index.enter(record)
            self.index.spill()
        log.close()
        return Lookup(self.core.broker.store, self.index)

    def ask(self, request: pb.FindMessagesRequest) -> pb.FindMessagesReply:
        broker = Found(
            self.core.broker.registry, self.core.broker.store, self.lookup(), self.core.settings
        )
        return pb.FindMessagesReply.FromString(find_messages(broker, request.SerializeToString()))

    def id_of(self, topic: str) -> int:
        return self.core.broker.registry.topic(topic).id


@pytest.fixture
def shop() -> Shop:
    new_shop = Shop()
    new_shop.core.topic("orders", queues=2)
    new_shop.core.topic("bills", queues=1)
    return new_shop


def heads(findings: LookupResult) -> list[bytes]:
    return [message.head for message in findings.messages]


def test_a_message_is_found_by_its_id_with_everything_that_is_known_of_it(shop: Shop) -> None:
    shop.send(b"first", message_id="01AA")
    shop.core.clock.advance(1500)
    shop.send(b"second", "k", message_id="01BB", queue=1)
    (message,) = shop.ask(pb.FindMessagesRequest(topic="orders", message_id="01BB")).messages
    assert (message.broker, message.topic) == (shop.core.settings.broker.name, "orders")
    assert (message.queue_id, message.queue_offset, message.attempt) == (1, 0, 1)
    assert message.stored_ms == START_MS + 1500
    assert message.head == b"second"
    assert api.SystemProperties.FromString(message.properties).keys == ["k"]
    assert 0 < message.position < shop.core.broker.store.end


def test_messages_of_a_key_come_newest_first_and_of_their_topic_only(shop: Shop) -> None:
    for number in range(40):
        shop.send(b"%d" % number, "even" if number % 2 == 0 else "odd", queue=number % 2)
    shop.send(b"bill", "even", topic="bills")
    lookup = shop.lookup()
    evens = [b"%d" % number for number in range(38, -1, -2)]
    assert heads(lookup.by_key(shop.id_of("orders"), "even")) == evens
    assert heads(lookup.by_key(shop.id_of("bills"), "even")) == [b"bill"]
    assert heads(lookup.by_key(shop.id_of("orders"), "neither")) == []


def test_a_key_of_any_letters_is_found(shop: Shop) -> None:
    shop.send(b"one", "Größe 日本 🐘")
    assert heads(shop.lookup().by_key(shop.id_of("orders"), "Größe 日本 🐘")) == [b"one"]


def test_a_key_that_a_message_has_twice_leads_to_it_once(shop: Shop) -> None:
    shop.send(b"one", "k", "k")
    assert heads(shop.lookup().by_key(shop.id_of("orders"), "k")) == [b"one"]


def test_a_message_that_was_sent_twice_is_found_twice_by_its_id(shop: Shop) -> None:
    shop.send(b"one", message_id="01AA", queue=0)
    shop.send(b"one", message_id="01AA", queue=1)
    assert len(shop.lookup().by_id(shop.id_of("orders"), "01AA").messages) == 2


def test_names_of_equal_hash_are_told_apart_by_the_message(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "popmq.broker.index.key_index.name_hash", lambda topic, kind, name: b"\x07" * 8
    )
    for number in range(50):
        shop.send(b"%d" % number, f"key-{number}", topic="orders" if number % 2 else "bills")
    lookup = shop.lookup()
    assert heads(lookup.by_key(shop.id_of("orders"), "key-7")) == [b"7"]
    assert heads(lookup.by_key(shop.id_of("bills"), "key-7")) == []
    assert heads(lookup.by_id(shop.id_of("orders"), "key-7")) == []


def test_a_limit_says_that_there_are_more(shop: Shop) -> None:
    for number in range(100):
        shop.send(b"%d" % number, "k")
    lookup = shop.lookup()
    few = lookup.by_key(shop.id_of("orders"), "k", limit=3)
    assert heads(few) == [b"99", b"98", b"97"]
    assert few.incomplete
    many = lookup.by_key(shop.id_of("orders"), "k", limit=1000)
    assert len(many.messages) == 64
    assert many.incomplete
    assert not lookup.by_key(shop.id_of("orders"), "other").incomplete


def test_a_reply_has_a_bound_in_bytes(shop: Shop) -> None:
    for _ in range(40):
        shop.send(bytes(250_000), "k")
    lookup = shop.lookup()
    result = lookup.by_key(shop.id_of("orders"), "k")
    assert 0 < len(result.messages) * 250_000 <= REPLY_BYTES
    assert str(REPLY_BYTES) in result.incomplete
    row = lookup.at(shop.id_of("orders"), 0, 0, limit=64)
    assert 0 < len(row.messages) * 250_000 <= REPLY_BYTES
    assert row.incomplete


def test_a_key_is_looked_up_in_a_stretch_of_time(shop: Shop) -> None:
    for number in range(60):
        shop.send(b"%d" % number, "k")
        shop.core.clock.advance(1000)
    reply = shop.ask(
        pb.FindMessagesRequest(
            topic="orders", key="k", begin_ms=START_MS + 10_000, end_ms=START_MS + 12_000
        )
    )
    assert [message.head for message in reply.messages] == [b"12", b"11", b"10"]
    assert not reply.incomplete


def test_messages_are_shown_from_an_offset_on(shop: Shop) -> None:
    for number in range(10):
        shop.send(b"%d" % number)
    lookup = shop.lookup()
    assert heads(lookup.at(shop.id_of("orders"), 0, 4)) == [b"4"]
    assert heads(lookup.at(shop.id_of("orders"), 0, 8, limit=64)) == [b"8", b"9"]


@pytest.mark.parametrize("offset", [-1, 3, 1 << 40])
def test_an_offset_without_a_message_is_refused_with_those_that_there_are(
    shop: Shop, offset: int
) -> None:
    for _ in range(3):
        shop.send(b"x")
    with pytest.raises(Refused, match="0 to 2") as refusal:
        shop.lookup().at(shop.id_of("orders"), 0, offset)
    assert refusal.value.code is Code.ILLEGAL_OFFSET


def test_the_first_message_stored_at_or_after_a_time_is_found(shop: Shop) -> None:
    for number in range(50):
        shop.send(b"%d" % number)
        shop.core.clock.advance(10)
    lookup = shop.lookup()
    topic_id = shop.id_of("orders")
    for ms in range(0, 500, 3):
        assert lookup.by_time(topic_id, 0, START_MS + ms) == min(-(-ms // 10), 50)
    assert lookup.by_time(topic_id, 0, 0) == 0
    assert lookup.by_time(topic_id, 0, START_MS + 10_000) == 50
    assert lookup.by_time(topic_id, 1, START_MS) == 0


def test_after_a_clock_that_went_back_the_time_found_is_a_border(shop: Shop) -> None:
    for number in range(30):
        if number == 15:
            shop.core.clock.step_wall(-100)
        shop.send(b"%d" % number)
        shop.core.clock.advance(10)
    lookup = shop.lookup()
    topic_id = shop.id_of("orders")
    for ms in range(1, 150, 7):
        at = lookup.by_time(topic_id, 0, START_MS + ms)
        around = lookup.at(topic_id, 0, at - 1, limit=2).messages
        assert around[0].header.wall_ms < START_MS + ms <= around[1].header.wall_ms


def test_a_time_after_the_last_message_finds_nothing_and_is_no_error(shop: Shop) -> None:
    shop.send(b"x")
    reply = shop.ask(
        pb.FindMessagesRequest(topic="orders", queue_id=0, stored_ms=START_MS + 10_000)
    )
    assert reply.status.code == Code.OK
    assert not reply.messages


def test_a_retry_is_found_in_its_own_topic_with_its_attempt(shop: Shop) -> None:
    shop.core.group("worker")
    shop.send(b"again", "k", message_id="01AA")
    shop.core.receive("orders", "worker", invisible_ms=1000)
    shop.core.advance(5000)
    reply = shop.ask(pb.FindMessagesRequest(topic="%RETRY%worker+orders", key="k"))
    assert [(message.head, message.attempt) for message in reply.messages] == [(b"again", 2)]


def test_messages_without_properties_harm_nobody(shop: Shop) -> None:
    for junk in (b"", b"\xff\xff", b"\x12\xff"):
        entry = hop.PutEntry(MessageType.NORMAL, b"x", junk, 0, 0)
        shop.core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
    shop.send(b"good", "k")
    assert heads(shop.lookup().by_key(shop.id_of("orders"), "k")) == [b"good"]


def test_what_was_found_before_a_crash_is_found_after_it() -> None:
    disk = LyingDisk()
    shop = Shop(CoreBroker(disk=disk))
    shop.core.topic("orders", queues=1)
    for number in range(100):
        shop.send(b"%d" % number, f"key-{number % 10}")
    disk.restore_power()
    shop.core.start()
    result = shop.lookup().by_key(shop.id_of("orders"), "key-3")
    assert heads(result) == [b"%d" % number for number in range(93, 0, -10)]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.FindMessagesRequest(topic="orders"), Code.BAD_REQUEST),
        (pb.FindMessagesRequest(topic="orders", key="k", message_id="i"), Code.BAD_REQUEST),
        (pb.FindMessagesRequest(topic="orders", queue_offset=0), Code.BAD_REQUEST),
        (pb.FindMessagesRequest(topic="orders", queue_id=2, queue_offset=0), Code.BAD_REQUEST),
        (pb.FindMessagesRequest(topic="orders", queue_id=-1, stored_ms=0), Code.BAD_REQUEST),
        (pb.FindMessagesRequest(topic="orders", key="k", limit=65), Code.BAD_REQUEST),
        (pb.FindMessagesRequest(topic="orders", key="k", limit=-1), Code.BAD_REQUEST),
        (pb.FindMessagesRequest(topic="nowhere", key="k"), Code.TOPIC_NOT_FOUND),
    ],
)
def test_a_request_that_asks_for_no_one_thing_is_refused(
    shop: Shop, request_: pb.FindMessagesRequest, code: Code
) -> None:
    with pytest.raises(PopmqError) as refusal:
        shop.ask(request_)
    assert refusal.value.code is code


def test_bytes_that_are_no_request_are_refused(shop: Shop) -> None:
    broker = Found(shop.core.broker.registry, shop.core.broker.store, shop.lookup(), SMALL)
    with pytest.raises(Refused, match="no FindMessagesRequest"):
        find_messages(broker, b"\xff\xff")


def test_a_topic_made_again_does_not_show_the_messages_of_the_old_one(shop: Shop) -> None:
    shop.send(b"old", "k")
    shop.core.broker.registry.delete_topic("orders")
    with pytest.raises(TopicNotFound):
        shop.ask(pb.FindMessagesRequest(topic="orders", key="k"))
    shop.core.topic("orders", queues=2)
    shop.send(b"new", "k")
    reply = shop.ask(pb.FindMessagesRequest(topic="orders", key="k"))
    assert [message.head for message in reply.messages] == [b"new"]


def test_a_damaged_message_is_passed_over_and_reported() -> None:
    settings = replace(WITHOUT_TAIL, broker=replace(SMALL.broker, data="data"))
    disk = LyingDisk()
    shop = Shop(CoreBroker(disk=disk, settings=settings))
    shop.core.topic("orders", queues=1)
    for number in range(3):
        shop.send(b"body-%d" % number, "k")
    lookup = shop.lookup()
    (path,) = [f"data/commitlog/{name}" for name in disk.names("data/commitlog")]
    file = disk.open(path)
    file.write(b"XXXX", file.read(1 << 20, 0).index(b"body-1"))
    result = lookup.by_key(shop.id_of("orders"), "k")
    assert heads(result) == [b"body-2", b"body-0"]
    assert "is damaged" in result.incomplete
