"""Behaviours of pop that pop.md lists and no other test shows by itself."""

from dataclasses import replace
from typing import cast

import pytest

from popmq.common import topics
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import tag_hash
from popmq.common.topics import (
    CheckPoints,
    GroupType,
    MessageType,
    Permission,
    StartAt,
)
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import Answer, CoreBroker, bodies, pop, tagged

MODES = pytest.mark.parametrize("mode", list(CheckPoints))


@pytest.fixture
def core() -> CoreBroker:
    """With a topic `orders` of one queue, and a group `g`."""
    broker = CoreBroker()
    broker.topic("orders", queues=1)
    broker.group("g")
    return broker


def found(answer: Answer) -> list[bytes] | None:
    """What a receive was given; None while it waits."""
    if answer.body is None:
        return None
    return bodies(hop.decode_pop_reply(answer.body).deliveries)


def wait(core: CoreBroker, group: str = "g", topic: str = "orders", **more: str | int) -> Answer:
    return core.ask(Kind.POP, pop(topic, group, poll_ms=20_000, **more))  # type: ignore[arg-type]


def step(core: CoreBroker) -> None:
    core.broker.step()
    core.run_until_idle()


def restart(core: CoreBroker) -> None:
    cast(LyingDisk, core.disk).restore_power()
    core.start()


# -- receiving


def test_a_receive_of_an_unknown_topic_is_refused_with_its_name(core: CoreBroker) -> None:
    with pytest.raises(PopmqError, match="topic nowhere") as refused:
        core.receive("nowhere", "g")
    assert refused.value.code == Code.TOPIC_NOT_FOUND


def test_a_queue_that_the_topic_does_not_have_is_refused(core: CoreBroker) -> None:
    with pytest.raises(PopmqError, match="queue 1 of topic orders, which has 1") as refused:
        core.receive("orders", "g", queue_id=1)
    assert refused.value.code == Code.BAD_REQUEST


@pytest.mark.parametrize("type", list(GroupType))
def test_who_may_not_read_is_refused_and_nothing_is_written(
    core: CoreBroker, type: GroupType
) -> None:
    core.topic("closed", permission=Permission.WRITE)
    core.group("reader", type=type)
    core.send("closed", b"x")
    end = core.broker.store.end
    with pytest.raises(PopmqError, match="closed is not readable") as refused:
        core.receive("closed", "reader")
    assert refused.value.code == Code.FORBIDDEN
    assert core.broker.store.end == end


def test_a_receive_that_does_not_wait_is_answered_at_once_with_nothing(core: CoreBroker) -> None:
    answer = core.ask(Kind.POP, pop("orders", "g", poll_ms=0))
    assert found(answer) == []
    assert core.broker.polling.count == 0


@pytest.mark.parametrize("poll_ms", [0, 20_000])
@pytest.mark.parametrize("type", list(GroupType))
def test_an_empty_pop_writes_nothing_also_when_a_filter_passed_over_messages(
    core: CoreBroker, type: GroupType, poll_ms: int
) -> None:
    core.group("reader", type=type)
    for number in range(1_000):
        core.send("orders", b"%d" % number, tag="other")
    end = core.broker.store.end
    answer = core.ask(Kind.POP, pop("orders", "reader", poll_ms=poll_ms, expression="wanted"))
    for _ in range(10):
        step(core)
    core.advance(poll_ms + 100)
    assert found(answer) == []
    assert core.broker.store.end == end


@MODES
def test_the_next_pop_reads_on_behind_what_is_in_flight(
    core: CoreBroker, mode: CheckPoints
) -> None:
    core.group("reader", check_points=mode)
    for number in range(4):
        core.send("orders", b"%d" % number)
    assert bodies(core.receive("orders", "reader", limit=2)) == [b"0", b"1"]
    core.advance(1_000)
    assert bodies(core.receive("orders", "reader", limit=2)) == [b"2", b"3"]
    assert core.receive("orders", "reader") == []


def test_two_receives_at_the_same_moment_share_no_message(core: CoreBroker) -> None:
    for number in range(6):
        core.send("orders", b"%d" % number)
    asked = [core.ask(Kind.POP, pop("orders", "g", limit=3), settle=False) for _ in range(3)]
    core.run_until_idle()
    assert [found(answer) for answer in asked] == [[b"0", b"1", b"2"], [b"3", b"4", b"5"], []]


# -- waiting


def test_what_one_waiting_receive_leaves_wakes_the_next(core: CoreBroker) -> None:
    waiting = [wait(core, limit=1) for _ in range(4)]
    entries = [hop.PutEntry(MessageType.NORMAL, b"%d" % number, b"") for number in range(3)]
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", entries)))
    assert [found(answer) for answer in waiting] == [[b"0"], [b"1"], [b"2"], None]


def test_of_two_that_wait_one_gets_the_message_and_the_other_ends_empty(core: CoreBroker) -> None:
    first, second = wait(core), wait(core)
    core.send("orders", b"one")
    assert (found(first), found(second)) == ([b"one"], None)
    core.advance(20_100)
    assert found(second) == []


MATCHES = pytest.mark.parametrize(("tag", "got"), [("A", [b"one"]), ("B", None)])


@MATCHES
def test_an_arrival_wakes_who_waits_if_it_matches_the_filter(
    core: CoreBroker, tag: str, got: list[bytes] | None
) -> None:
    waiting = wait(core, expression="A")
    core.send("orders", b"one", tag=tag)
    step(core)
    assert found(waiting) == got


@MATCHES
def test_a_retry_wakes_who_waits_within_one_step_if_it_matches_the_filter(
    core: CoreBroker, tag: str, got: list[bytes] | None
) -> None:
    core.send("orders", b"one", tag=tag)
    (delivery,) = core.receive("orders", "g")
    waiting = wait(core, expression="A")
    core.change("orders", "g", delivery.handle, 0)
    core.clock.advance(16)  # to the end of its bucket
    step(core)
    assert found(waiting) == got


@MATCHES
def test_an_unlock_wakes_who_waits_within_one_step_if_it_matches_the_filter(
    core: CoreBroker, tag: str, got: list[bytes] | None
) -> None:
    core.topic("steps", queues=1, type=MessageType.FIFO)
    core.group("f", type=GroupType.FIFO)
    core.send("steps", b"before", message_group="a")
    core.send("steps", b"one", tag=tag, message_group="a")
    (before,) = core.receive("steps", "f", limit=1)
    waiting = wait(core, "f", "steps", expression="A")
    assert core.ack("steps", "f", before.handle)[0].code == Code.OK
    step(core)
    assert found(waiting) == got


def test_a_waiter_whose_second_look_fails_is_answered_and_the_next_is_served(
    core: CoreBroker,
) -> None:
    """The first one's topic is closed for reading meanwhile, the second one's is not."""
    core.topic("closing", queues=1)
    first, second = wait(core, topic="closing"), wait(core)
    closing = core.broker.registry.topic("closing")
    core.broker.registry.alter_topic(replace(closing, permission=Permission.WRITE))
    core.run_until_idle()
    core.send("closing", b"unseen")
    core.send("orders", b"one")
    assert first.error is not None
    assert first.error.code == Code.FORBIDDEN
    assert found(second) == [b"one"]


# -- retries


def test_a_group_that_starts_at_the_newest_message_gets_its_first_retry(core: CoreBroker) -> None:
    core.group("new", start_at=StartAt.NEWEST)
    assert core.receive("orders", "new") == []
    core.send("orders", b"one")
    core.receive("orders", "new", invisible_ms=1_000)
    core.advance(1_100)
    assert bodies(core.receive("orders", "new")) == [b"one"]


@MODES
def test_a_batch_that_was_acked_never_comes_back(mode: CheckPoints) -> None:
    core = CoreBroker(disk=LyingDisk())
    core.topic("orders", queues=1)
    core.group("g", check_points=mode)
    for number in range(20):
        core.send("orders", b"%02d" % number)
    got = core.receive("orders", "g", invisible_ms=30_000)
    results = core.ack("orders", "g", *(delivery.handle for delivery in got))
    assert [result.code for result in results] == [Code.OK] * 20
    core.advance(120_000)
    assert core.receive("orders", "g") == []
    restart(core)
    core.advance(120_000)
    assert core.receive("orders", "g") == []


@MODES
def test_a_large_message_comes_back_with_the_bytes_that_were_sent(mode: CheckPoints) -> None:
    core = CoreBroker()
    core.topic("orders", queues=1)
    core.group("g", check_points=mode)
    body, properties = (
        bytes(range(256)) * 900,
        tagged("A") + b"\x10\x02" + bytes(40),
    )  # gzip, and more
    entry = hop.PutEntry(MessageType.NORMAL, body, properties, tag_hash("A"))
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
    for attempt in (1, 2, 3):
        (delivery,) = core.receive("orders", "g", invisible_ms=6_000, expression="A")
        assert (delivery.head, delivery.properties, delivery.attempt) == (body, properties, attempt)
        core.advance(6_100)


def test_retry_topics_of_names_that_join_to_the_same_text_are_two() -> None:
    core = CoreBroker()
    for topic, group in (("b_c", "a"), ("c", "a_b")):
        core.topic(topic, queues=1)
        core.group(group)
        core.send(topic, topic.encode())
        core.receive(topic, group, invisible_ms=1_000)
    core.advance(1_100)
    for topic, group in (("b_c", "a"), ("c", "a_b")):
        assert core.broker.registry.find_topic(topics.retry_topic(group, topic)) is not None
        assert bodies(core.receive(topic, group)) == [topic.encode()]


def test_only_what_was_not_acked_of_a_batch_comes_back_also_after_a_crash(
    core: CoreBroker,
) -> None:
    for number in range(4):
        core.send("orders", b"%d" % number)
    got = core.receive("orders", "g", invisible_ms=5_000)
    for delivery in got[1:3]:
        assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    restart(core)
    core.advance(5_100)
    assert bodies(core.receive("orders", "g")) == [b"0", b"3"]


def test_what_was_in_flight_two_starts_ago_comes_back(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=5_000)
    for _ in range(2):
        restart(core)
    core.advance(5_100)
    assert [delivery.attempt for delivery in core.receive("orders", "g")] == [2]


def test_queues_of_high_numbers_are_delivered_acked_and_retried() -> None:
    core = CoreBroker()
    core.topic("wide", queues=300)
    core.group("g")
    for queue in (127, 128, 299):
        core.send("wide", b"%d" % queue, queue_id=queue)
    acked, *_ = got = sorted(core.receive("wide", "g", invisible_ms=1_000), key=lambda d: d.head)
    assert [delivery.queue_id for delivery in got] == [127, 128, 299]
    assert core.ack("wide", "g", acked.handle)[0].code == Code.OK
    core.advance(1_100)
    assert bodies(core.receive("wide", "g")) == [b"128", b"299"]


def test_one_receive_may_give_retries_and_new_messages_each_with_a_handle_that_works(
    core: CoreBroker,
) -> None:
    for body in (b"old-1", b"old-2"):
        core.send("orders", body)
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(1_100)
    core.send("orders", b"new")
    got = core.receive("orders", "g")
    assert bodies(got) == [b"new", b"old-1", b"old-2"]
    results = core.ack("orders", "g", *(delivery.handle for delivery in got))
    assert [result.code for result in results] == [Code.OK] * 3
    core.advance(120_000)
    assert core.receive("orders", "g") == []


def test_a_pop_tells_how_many_messages_it_left(core: CoreBroker) -> None:
    for number in range(5):
        core.send("orders", b"%d" % number)
    reply = hop.decode_pop_reply(core.reply(Kind.POP, pop("orders", "g", limit=2)))
    assert (len(reply.deliveries), reply.remaining) == (2, 3)


# -- handles


def test_an_ack_that_names_an_unknown_topic_is_refused(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    (result,) = core.ack("nowhere", "g", delivery.handle)
    assert result.code == Code.INVALID_RECEIPT_HANDLE
    assert "not of topic nowhere" in result.message


def test_a_change_with_a_made_up_handle_is_refused_and_changes_nothing(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=5_000)
    forged = delivery.handle[:-2] + (b"AA" if delivery.handle[-2:] != b"AA" else b"BB")
    with pytest.raises(PopmqError) as refused:
        core.change("orders", "g", forged, 60_000)
    assert refused.value.code == Code.INVALID_RECEIPT_HANDLE
    core.advance(5_100)
    assert bodies(core.receive("orders", "g")) == [b"one"]


def test_changing_twice_with_one_handle_leaves_one_delivery(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    new = core.change("orders", "g", delivery.handle, 1_000)
    assert core.change("orders", "g", delivery.handle, 1_000) == new
    core.advance(1_100)
    assert len(core.receive("orders", "g")) == 1
    with pytest.raises(PopmqError, match="superseded"):
        core.change("orders", "g", delivery.handle, 1_000)
    core.advance(10_000)
    assert core.receive("orders", "g") == []


# -- topics that are made again


@MODES
def test_a_topic_made_again_has_neither_records_nor_retries_of_the_old_one(
    mode: CheckPoints,
) -> None:
    core = CoreBroker(disk=LyingDisk())
    core.group("g", check_points=mode)
    core.topic("orders", queues=1)
    for body in (b"a-retry", b"in-flight", b"unread"):
        core.send("orders", body)
    core.receive("orders", "g", limit=1, invisible_ms=1_000)
    core.advance(1_100)  # one pending retry
    (held,) = core.receive("orders", "g", limit=1, invisible_ms=60_000)
    core.broker.registry.delete_topic("orders")
    assert core.broker.registry.find_topic(topics.retry_topic("g", "orders")) is None
    core.topic("orders", queues=1)
    for _ in range(2):
        core.advance(120_000)
        assert core.receive("orders", "g") == []
        (result,) = core.ack("orders", "g", held.handle)
        assert result.code == Code.INVALID_RECEIPT_HANDLE
        restart(core)
    core.send("orders", b"new")
    assert [(delivery.head, delivery.attempt) for delivery in core.receive("orders", "g")] == [
        (b"new", 1)
    ]
