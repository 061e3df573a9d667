"""Messages with a deadline: nobody gets them any more once it is over."""

from collections.abc import Callable

import pytest

from popmq.broker.filter.message_filter import EVERYTHING
from popmq.broker.operations.pull_reader import PullParams
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record import message_deadline as expiry
from popmq.common.record.message import BadRecord, decode_token, tag_hash
from popmq.common.topics import GroupType, MessageType
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.harness.core_broker import CoreBroker, bodies, pop, tagged

FOR_MS = 10_000


def put(
    core: CoreBroker,
    body: bytes,
    *,
    for_ms: int = FOR_MS,
    tag: str = "",
    kind: MessageType = MessageType.NORMAL,
    due_ms: int = 1,
    topic: str = "orders",
) -> None:
    """As a proxy puts a message that expires."""
    properties = expiry.with_deadline(tagged(tag), core.clock.wall_ms() + for_ms)
    entry = hop.PutEntry(kind, body, properties, tag_hash(tag), 0, due_ms)
    reply = core.reply(Kind.PUT, hop.encode_put(hop.PutRequest(topic, [entry])))
    assert hop.decode_put_reply(reply)[0].code == Code.OK


def test_a_time_of_birth_and_a_host_that_look_like_a_deadline_stay_whole_in_a_dead_letter() -> None:
    system_property = api.SystemProperties(message_id="m", born_host="node-1")
    system_property.born_timestamp.seconds, system_property.born_timestamp.nanos = (
        1_795_384_940,
        131_100_000,
    )
    properties = system_property.SerializeToString()
    assert properties[-10:-8] == b"\xc1\x3e", "the tag of a deadline"
    assert expiry.deadline_of(properties) == 0
    assert expiry.without_deadline(properties) == properties
    assert expiry.expiry_token(properties) == b""


def test_a_deadline_is_found_at_the_end_of_properties_and_nowhere_else() -> None:
    stamped = expiry.with_deadline(b"abc", 1_700_000_000_123)
    assert expiry.deadline_of(stamped) == 1_700_000_000_123
    assert expiry.without_deadline(stamped) == b"abc"
    for plain in (b"", b"abc", stamped[:-1], stamped + b"x"):
        assert expiry.deadline_of(plain) == 0
        assert expiry.without_deadline(plain) == plain
        assert expiry.expiry_token(plain) == b""
    token = decode_token(expiry.expiry_token(stamped))
    assert token == expiry.ExpiryToken()
    assert token, "a moved body keeps its token"
    with pytest.raises(BadRecord):
        decode_token(expiry.expiry_token(stamped) + b"x")


def by_tag(core: CoreBroker) -> list[hop.Delivery]:
    return core.receive("orders", "g", expression="t")


def by_sql(core: CoreBroker) -> list[hop.Delivery]:
    asked = pop("orders", "g", expression="TAGS = 't'", sql=True)
    return list(hop.decode_pop_reply(core.reply(Kind.POP, asked)).deliveries)


def by_all(core: CoreBroker) -> list[hop.Delivery]:
    return core.receive("orders", "g")


@pytest.mark.parametrize("receive", [by_all, by_tag, by_sql])
@pytest.mark.parametrize("type_", [GroupType.NORMAL, GroupType.FIFO])
def test_a_message_is_received_until_its_deadline_and_never_after(
    receive: Callable[[CoreBroker], list[hop.Delivery]], type_: GroupType
) -> None:
    core = CoreBroker()
    core.topic("orders")
    core.group("g", type=type_)
    put(core, b"taken", tag="t")
    core.advance(FOR_MS - 1)
    (taken,) = receive(core)
    assert taken.head == b"taken"
    core.ack("orders", "g", taken.handle)
    put(core, b"old", tag="t")
    core.send("orders", b"stays", tag="t", queue_id=0)
    core.advance(FOR_MS)
    assert bodies(receive(core)) == [b"stays"]
    assert core.broker.pop.service.metrics.expired == 1
    assert core.broker.pop.service.metrics.filtered == 0


def test_one_that_came_back_does_not_come_again_when_its_deadline_is_over(
    core: CoreBroker,
) -> None:
    put(core, b"one")
    core.receive("orders", "g", invisible_ms=5_000)
    core.advance(6_000)
    assert bodies(core.receive("orders", "g", invisible_ms=5_000)) == [b"one"]
    core.advance(6_000)
    assert core.receive("orders", "g") == []


def test_what_was_received_in_time_can_be_acked_and_renewed_later(core: CoreBroker) -> None:
    put(core, b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=2 * FOR_MS)
    core.advance(FOR_MS + 1)
    handle = core.change("orders", "g", delivery.handle, 60_000)
    assert core.ack("orders", "g", handle)[0].code == Code.OK


def test_a_dead_letter_waits_for_a_person_and_has_no_deadline(core: CoreBroker) -> None:
    put(core, b"one")
    (delivery,) = core.receive("orders", "g")
    assert core.reject("orders", "g", delivery.handle).code == Code.OK
    core.advance(10 * FOR_MS)
    assert bodies(core.receive("%DLQ%g", "readers")) == [b"one"]


@pytest.mark.parametrize("due_ms", [1, -3_000])
def test_a_delayed_message_keeps_its_deadline_whether_it_waited_or_not(due_ms: int) -> None:
    core = CoreBroker()
    core.topic("later", type=MessageType.DELAY)
    core.group("g")
    put(core, b"taken", topic="later", kind=MessageType.DELAY, due_ms=due_ms)
    core.advance(4_000)
    (taken,) = core.receive("later", "g")
    core.ack("later", "g", taken.handle)
    put(core, b"old", topic="later", kind=MessageType.DELAY, due_ms=due_ms)
    core.advance(FOR_MS)
    assert core.receive("later", "g") == []
    assert core.broker.pop.service.metrics.expired == 1


def test_a_pull_consumer_reads_past_what_expired(core: CoreBroker) -> None:
    put(core, b"old")
    core.send("orders", b"stays", queue_id=0)
    core.advance(FOR_MS)
    topic = core.broker.registry.find_topic("orders")
    assert topic is not None
    pulled = core.broker.operations.pulls.read(PullParams(topic, 0, 32, EVERYTHING, 1 << 20), 0)
    assert [message.head for _, message in pulled.messages] == [b"stays"]
    assert pulled.next_offset == 2


def test_messages_without_a_deadline_have_no_token_and_their_records_are_as_before(
    core: CoreBroker,
) -> None:
    core.send("orders", b"plain", queue_id=0)
    put(core, b"one")
    topic = core.broker.registry.find_topic("orders")
    assert topic is not None
    units = core.broker.store.queue(topic.id, 0).units(0, 2)
    plain, entry = core.broker.store.reader.read(list(units))
    assert plain.any_token is None  # type: ignore[union-attr]
    assert entry.any_token == expiry.ExpiryToken()  # type: ignore[union-attr]
