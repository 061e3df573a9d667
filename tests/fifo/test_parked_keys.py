"""Message groups that are stuck are parked at the bound of open messages, and come back."""

from dataclasses import replace

import pytest
from fifo.cores import attempts, names

from popmq.broker.deliveries.parked_keys import ParkedKeys
from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.record import message_deadline as expiry
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.testing.harness.core_broker import SMALL, CoreBroker

PARKING = "%PARKED%g+orders"


def made(**settings: int) -> CoreBroker:
    values = {"fifo_open_offsets": 12, "fifo_park_after_ms": 5_000, **settings}
    core = CoreBroker(settings=replace(SMALL, pop=PopSettings(**values)))
    core.topic("orders", queues=1, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO, max_attempts=100)
    return core


def send(core: CoreBroker, *messages: str) -> None:
    for name in messages:
        core.send("orders", name.encode(), message_group=name.rstrip("0123456789"))


def receive(core: CoreBroker, invisible_ms: int = 3_600_000, **kwargs: object) -> list[Delivery]:
    return core.receive("orders", "g", invisible_ms=invisible_ms, **kwargs)  # type: ignore[arg-type]


def ack(core: CoreBroker, *deliveries: Delivery) -> None:
    results = core.ack("orders", "g", *(delivery.handle for delivery in deliveries))
    assert {result.code for result in results} <= {Code.OK}


def parked(core: CoreBroker) -> dict[str, int]:
    group = core.broker.registry.group("g")
    return {
        key.name.decode(): len(key.messages) for key in core.broker.table.parked.of_group(group.id)
    }


def say(core: CoreBroker, key: str, what: UnparkAction) -> int:
    registry = core.broker.registry
    messages = core.broker.fifo.parking.apply_action(
        registry.group("g"), registry.topic("orders"), key, what
    )
    core.run_steps()
    return messages


def send_for(core: CoreBroker, name: str, for_ms: int) -> None:
    """As a proxy puts a message that expires."""
    system = api.SystemProperties(message_group=name.rstrip("0123456789"))
    deadline_ms = core.clock.wall_ms() + for_ms
    properties = expiry.with_deadline(system.SerializeToString(), deadline_ms)
    entry = hop.PutEntry(MessageType.FIFO, name.encode(), properties, 0, 0, due_ms=1)
    reply = core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
    assert hop.decode_put_reply(reply)[0].code == Code.OK


def restart(core: CoreBroker, how: str) -> None:
    if how == "clean":
        core.stop()
    else:
        core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()


def with_a_parked_key() -> tuple[CoreBroker, Delivery]:
    """`a1` is in flight and stuck, `a2` to `a11` are parked, `b1` and `b2` are over."""
    core = made()
    send(core, "a1")
    (stuck,) = receive(core)
    send(core, *(f"a{number}" for number in range(2, 12)), "b1", "b2")
    (busy,) = receive(core)
    assert busy.head == b"b1", "b2 is behind the bound"
    core.advance(6_000)
    ack(core, busy)
    others = receive(core)
    assert names(others) == ["b2"], "which fills the window again"
    ack(core, *others)
    core.run_steps()
    assert parked(core) == {"a": 10}
    return core, stuck


def test_a_key_stuck_at_the_bound_is_parked_and_the_others_go_on() -> None:
    core, _ = with_a_parked_key()
    send(core, "b3", "c1")
    assert names(receive(core)) == ["b3", "c1"]


def test_a_busy_key_is_not_parked_however_many_messages_wait() -> None:
    core = made()
    send(core, *(f"a{number}" for number in range(1, 40)))
    for _ in range(20):
        (delivery,) = receive(core, limit=1)
        core.advance(4_000)
        assert receive(core) == []
        ack(core, delivery)
        core.run_steps()
    assert parked(core) == {}


def test_later_messages_of_a_parked_key_follow_it() -> None:
    core, _ = with_a_parked_key()
    ack(core, *receive(core))
    send(core, "a12", "d1", "a13")
    assert names(receive(core)) == ["d1"]
    core.run_steps()
    assert parked(core) == {"a": 12}


@pytest.mark.parametrize("how", ["none", "clean", "power cut"])
def test_a_resumed_key_comes_first_in_order_with_its_attempts_and_is_then_as_before(
    how: str,
) -> None:
    core, stuck = with_a_parked_key()
    ack(core, *receive(core))
    core.change("orders", "g", stuck.handle, 0)  # a1 came back, and is parked behind a11
    core.advance(50)
    receive(core)
    core.run_steps()
    assert parked(core) == {"a": 11}
    if how != "none":
        restart(core, how)
    assert parked(core) == {"a": 11}
    assert say(core, "a", UnparkAction.RESUME) == 11
    send(core, "e1", "a12")
    got: list[tuple[str, int]] = []
    for _ in range(8):
        batch = receive(core, limit=5)
        got += attempts(batch)
        ack(core, *batch)
        core.run_steps()
        if how != "none":
            restart(core, how)
    of_key = [item for item in got if item[0].startswith("a")]
    assert of_key == [("a1", 2), *((f"a{number}", 1) for number in range(2, 13))]
    assert ("e1", 1) in got
    assert parked(core) == {}
    send(core, "a13")
    (last,) = receive(core)
    assert (last.head, last.queue_offset) == (
        b"a13",
        core.broker.store.queue(core.broker.registry.topic("orders").id, 0).count - 1,
    )


def test_a_resumed_key_waits_for_its_message_that_is_in_flight() -> None:
    core, stuck = with_a_parked_key()
    ack(core, *receive(core))
    say(core, "a", UnparkAction.RESUME)
    assert receive(core) == []
    ack(core, stuck)
    core.run_steps()
    assert names(receive(core)) == [f"a{number}" for number in range(2, 12)]


def test_failures_of_resumed_messages_are_retried_in_order_and_end_as_dead_letters() -> None:
    core, stuck = with_a_parked_key()
    ack(core, stuck, *receive(core))
    core.broker.registry.alter_group(replace(core.broker.registry.group("g"), max_attempts=2))
    say(core, "a", UnparkAction.RESUME)
    assert attempts(receive(core, 1_000, limit=2)) == [("a2", 1), ("a3", 1)]
    core.advance(1_100)
    got = receive(core, 1_000, limit=2)
    assert attempts(got) == [("a2", 2), ("a3", 2)]
    ack(core, got[1])
    core.advance(1_100)
    assert attempts(receive(core, limit=1)) == [("a4", 1)]
    core.group("reader")
    assert names(core.receive("%DLQ%g", "reader")) == ["a2"]


@pytest.mark.parametrize("rejected", [False, True])
def test_a_resumed_message_that_dies_is_a_dead_letter_of_its_topic_and_can_be_sent_back(
    rejected: bool,
) -> None:
    core, stuck = with_a_parked_key()
    ack(core, stuck, *receive(core))
    core.broker.registry.alter_group(replace(core.broker.registry.group("g"), max_attempts=1))
    say(core, "a", UnparkAction.RESUME)
    (first,) = receive(core, 1_000, limit=1)
    if rejected:
        core.reject("orders", "g", first.handle)
    core.advance(1_100)
    asked = admin.ListDeadLettersRequest(group="g").SerializeToString()
    answer = admin.ListDeadLettersReply.FromString(core.reply(Kind.LIST_DEAD_LETTERS, asked))
    (letter,) = answer.letters
    assert (letter.origin_topic, letter.origin_offset) == ("orders", 1)
    core.reply(Kind.REDRIVE, admin.RedriveRequest(group="g").SerializeToString())
    rest = receive(core)
    assert names(rest) == [f"a{number}" for number in range(3, 12)]
    ack(core, *rest)
    assert names(receive(core)) == ["a2"]


@pytest.mark.parametrize("how", ["none", "clean", "power cut"])
def test_skipped_messages_are_over_and_the_key_is_parked_no_more(how: str) -> None:
    core, stuck = with_a_parked_key()
    ack(core, *receive(core))
    assert say(core, "a", UnparkAction.SKIP) == 10
    if how != "none":
        restart(core, how)
    assert parked(core) == {}
    send(core, "a12")
    assert receive(core) == [], "a1 is in flight"
    ack(core, stuck)
    assert names(receive(core)) == ["a12"]
    parking = core.broker.registry.find_topic(PARKING)
    assert parking is not None
    progress = core.broker.table.progress(core.broker.registry.group("g").id, parking.id, 0)
    assert progress is not None
    assert progress.committed == 10


@pytest.mark.parametrize("how", ["none", "clean", "power cut"])
def test_dead_lettered_messages_go_there_in_order_once(how: str) -> None:
    core, stuck = with_a_parked_key()
    ack(core, stuck, *receive(core))
    registry = core.broker.registry
    core.broker.fifo.parking.apply_action(
        registry.group("g"), registry.topic("orders"), "a", UnparkAction.DEAD_LETTER
    )
    assert core.broker.fifo.parking.step(limit=4) == 4
    core.run_until_idle()
    if how != "none":
        restart(core, how)
    core.run_steps()
    assert parked(core) == {}
    core.group("reader")
    assert names(core.receive("%DLQ%g", "reader")) == [f"a{number}" for number in range(2, 12)]
    send(core, "a12")
    assert names(receive(core)) == ["a12"]


def test_at_the_bound_of_parked_messages_the_queue_waits() -> None:
    core = made(fifo_parked_messages=4)
    send(core, "a1")
    (stuck,) = receive(core)
    send(core, *(f"a{number}" for number in range(2, 14)), "b1")
    core.advance(6_000)
    receive(core)
    core.run_steps()
    assert parked(core) == {"a": 4}
    say(core, "a", UnparkAction.SKIP)
    receive(core)
    core.run_steps()
    ack(core, stuck)
    assert sum(parked(core).values()) <= 4


def test_nobody_can_name_or_send_to_a_parking_topic() -> None:
    core, _ = with_a_parked_key()
    for attempt in (lambda: core.send(PARKING, b"x"), lambda: core.receive(PARKING, "h")):
        with pytest.raises(PopmqError, match="%PARKED%g") as refused:
            attempt()
        assert refused.value.code == Code.ILLEGAL_TOPIC
    with pytest.raises(PopmqError, match="%PARKED%g"):
        core.topic(PARKING)


def test_an_unknown_key_is_refused_with_the_command_that_lists_them() -> None:
    core, _ = with_a_parked_key()
    with pytest.raises(PopmqError, match="popmq group show g") as refused:
        say(core, "nobody", UnparkAction.RESUME)
    assert refused.value.code == Code.NOT_FOUND


@pytest.mark.parametrize("gone", ["topic", "group"])
def test_parked_keys_go_with_their_topic_and_their_group(gone: str) -> None:
    core, _ = with_a_parked_key()
    registry = core.broker.registry
    registry.delete_topic("orders") if gone == "topic" else registry.delete_group("g")
    assert registry.find_topic(PARKING) is None
    assert list(core.broker.table.parked.parked_queues()) == []
    assert [progress for progress in core.broker.table.progress_items()] == []


def test_the_same_attempt_id_gets_resumed_messages_again() -> None:
    core, stuck = with_a_parked_key()
    ack(core, stuck, *receive(core))
    say(core, "a", UnparkAction.RESUME)
    first = receive(core, limit=3, attempt_id="one")
    assert names(first) == ["a2", "a3", "a4"]
    assert receive(core, limit=3, attempt_id="one") == first


def test_a_snapshot_that_was_given_up_leaves_nothing_in_the_next() -> None:
    """As a clean stop does it, when it comes while one is being taken."""
    keys = ParkedKeys()
    place = (1, 2, 0)
    keys.park(place, 9, b"a", origin=0, offset=0, log_ms=1)
    keys.begin_snapshot()
    keys.park(place, 9, b"a", origin=1, offset=1, log_ms=2)  # kept as it was before
    restored = ParkedKeys()
    for content, _ in keys.begin_snapshot():
        restored.restore(content)
    (key,) = restored.of_group(1)
    assert key.messages == [(0, 0), (1, 1)]
    assert restored.counts[1, 2] == 2


def test_retention_passes_by_what_was_parked_just_now() -> None:
    core = made()
    send(core, "a1")
    receive(core)
    send(core, *(f"a{number}" for number in range(2, 14)))
    core.advance(6_000)
    receive(core)
    assert core.broker.fifo.parking.step() > 0  # and nothing of it is confirmed
    topic = core.broker.registry.topic("orders")
    live_bodies = [
        body for piece in core.broker.deliveries.bodies.bodies_below(1 << 40) for body in piece
    ]
    assert [body[:3] for body in live_bodies] == [(topic.id, 0, 0)]


def test_a_message_whose_deadline_was_over_before_it_was_parked_comes_to_nobody() -> None:
    core = made(fifo_open_offsets=4)
    send(core, "a1")
    for name, for_ms in (("a2", 1_000), ("a3", 3_600_000)):
        send_for(core, name, for_ms)
    send(core, "a4", "b1")
    (held,) = receive(core, limit=1)
    assert receive(core) == []  # at the bound
    core.advance(6_000)
    receive(core)
    core.run_steps()
    assert parked(core) == {"a": 2}
    assert core.broker.pop.service.metrics.expired == 1
    core.clock.advance(3_600_000)  # what is parked waits for a person
    ack(core, held)
    say(core, "a", UnparkAction.RESUME)
    assert names(receive(core)) == ["a3", "a4", "b1"]
