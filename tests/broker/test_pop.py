"""Pop, ack, change and revive on a real broker core under virtual time."""

from dataclasses import replace

import pytest

from popmq.common.errors import Code, InvalidReceiptHandle, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import PollSettings, PopSettings
from popmq.common.topics import MessageType, Permission, StartAt
from popmq.testing.harness.core_broker import SMALL, CoreBroker, bodies, pop


def test_a_message_is_delivered_once_while_it_is_invisible(core: CoreBroker) -> None:
    core.send("orders", b"one")
    assert bodies(core.receive("orders", "g")) == [b"one"]
    assert core.receive("orders", "g") == []


def test_one_receive_collects_from_all_queues(core: CoreBroker) -> None:
    for queue in range(4):
        core.send("orders", b"%d" % queue, queue_id=queue)
    assert bodies(core.receive("orders", "g")) == [b"0", b"1", b"2", b"3"]


def test_each_group_gets_every_message(core: CoreBroker) -> None:
    core.group("other")
    core.send("orders", b"one")
    assert bodies(core.receive("orders", "g")) == [b"one"]
    assert bodies(core.receive("orders", "other")) == [b"one"]


def test_unacked_message_returns_after_its_invisible_time_with_the_next_attempt(
    core: CoreBroker,
) -> None:
    core.send("orders", b"one")
    (first,) = core.receive("orders", "g", invisible_ms=5_000)
    assert first.attempt == 1
    core.advance(4_990)
    assert core.receive("orders", "g") == []
    core.advance(40)
    (second,) = core.receive("orders", "g", invisible_ms=5_000)
    assert (second.head, second.attempt) == (b"one", 2)


def test_it_returns_at_the_first_step_of_the_revive_clock_from_its_time_on() -> None:
    settings = replace(SMALL, pop=PopSettings(revive_step_ms=100))
    core = CoreBroker(settings=settings)
    core.topic("orders")
    core.clock.advance(-core.broker.store.log_ms() % 100 + 60)  # 60 ms behind a multiple
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=1_000)
    core.advance(1_039)
    assert core.receive("orders", "g") == []
    core.advance(1)
    assert bodies(core.receive("orders", "g")) == [b"one"]


@pytest.mark.parametrize("invisible_ms", [1, 7, 1_000, 60_000])
def test_with_a_step_of_1_ms_it_returns_exactly_in_time(invisible_ms: int) -> None:
    core = CoreBroker(settings=replace(SMALL, pop=PopSettings(revive_step_ms=1)))
    core.topic("orders")
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=invisible_ms)
    core.advance(invisible_ms - 1)
    assert core.receive("orders", "g") == []
    core.advance(1)
    assert bodies(core.receive("orders", "g")) == [b"one"]


def test_an_acked_message_never_returns(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    core.advance(10_000)
    assert core.receive("orders", "g") == []


def test_an_ack_can_be_repeated(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK


def test_a_handle_is_good_until_its_message_was_revived_and_not_longer(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    core.advance(5_000)
    (result,) = core.ack("orders", "g", delivery.handle)
    assert result.code == Code.INVALID_RECEIPT_HANDLE
    assert "revived as attempt 2" in result.message


def test_a_late_ack_counts_when_the_revive_step_has_not_come_yet(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    core.clock.advance(1_500)
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    core.advance(5_000)
    assert core.receive("orders", "g") == []


def test_one_bad_entry_hides_no_good_one(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    results = core.ack("orders", "g", b"nonsense", delivery.handle, delivery.handle[:-4])
    assert [result.code for result in results] == [
        Code.INVALID_RECEIPT_HANDLE,
        Code.OK,
        Code.INVALID_RECEIPT_HANDLE,
    ]


def test_a_handle_with_a_changed_character_is_refused(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    for at in range(0, len(delivery.handle) - 1, 3):
        forged = bytearray(delivery.handle)
        forged[at] = ord("A") if forged[at] != ord("A") else ord("B")
        (result,) = core.ack("orders", "g", bytes(forged))
        assert result.code == Code.INVALID_RECEIPT_HANDLE, at
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK


def test_a_foreign_handle_says_whose_it_is(core: CoreBroker) -> None:
    core.topic("bills")
    core.group("h")
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    assert "consumer group g" in core.ack("orders", "h", delivery.handle)[0].message
    assert "not of topic bills" in core.ack("bills", "g", delivery.handle)[0].message


def test_change_to_zero_brings_the_message_back_at_once(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    core.change("orders", "g", delivery.handle, 0)
    core.advance(20)
    (two,) = core.receive("orders", "g")
    assert (two.head, two.attempt) == (b"one", 2)


def test_a_repeated_change_gets_the_same_handle_until_that_is_used(core: CoreBroker) -> None:
    """Its first answer may have been lost with a master or a proxy."""
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g")
    first = core.change("orders", "g", delivery.handle, 10_000)
    for start_again in (False, True):
        if start_again:
            core.stop()
            core.start()
        assert core.change("orders", "g", delivery.handle, 60_000) == first
    second = core.change("orders", "g", first, 10_000)
    assert core.change("orders", "g", first, 10_000) == second
    with pytest.raises(InvalidReceiptHandle, match="superseded"):
        core.change("orders", "g", delivery.handle, 10_000)
    core.advance(9_000)
    assert core.receive("orders", "g") == []
    core.advance(1_100)
    (back,) = core.receive("orders", "g")
    assert (back.head, back.attempt) == (b"one", 2)
    with pytest.raises(InvalidReceiptHandle, match="superseded"):
        core.change("orders", "g", first, 10_000)


def test_change_extends_and_the_new_handle_replaces_the_old(core: CoreBroker) -> None:
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    new = core.change("orders", "g", delivery.handle, 10_000)
    core.advance(5_000)
    assert core.receive("orders", "g") == []
    (old_result,) = core.ack("orders", "g", delivery.handle)
    assert old_result.code == Code.INVALID_RECEIPT_HANDLE
    assert "superseded" in old_result.message
    assert core.ack("orders", "g", new)[0].code == Code.OK
    with pytest.raises(InvalidReceiptHandle, match="superseded"):
        core.change("orders", "g", delivery.handle, 10_000)
    core.advance(20_000)
    assert core.receive("orders", "g") == []


def test_a_reply_tells_the_time_from_which_the_invisible_time_counts(core: CoreBroker) -> None:
    core.send("orders", b"one")
    popped_ms = core.clock.wall_ms()
    answer = core.ask(Kind.POP, pop("orders", "g", invisible_ms=5_000), settle=False)
    core.clock.advance(90)  # a slow disk
    core.run_until_idle()
    assert answer.body is not None
    assert hop.decode_pop_reply(answer.body).popped_ms == popped_ms
    core.advance(4_910)
    assert core.clock.wall_ms() == popped_ms + 5_000


def test_a_push_nack_is_raised_to_the_groups_back_off(core: CoreBroker) -> None:
    core.send("orders", b"one")
    reply = core.reply(Kind.POP, pop("orders", "g", auto_renew=True, invisible_ms=0))
    (delivery,) = hop.decode_pop_reply(reply).deliveries
    core.change("orders", "g", delivery.handle, 0)
    core.advance(980)
    assert core.receive("orders", "g") == []
    core.advance(40)
    assert bodies(core.receive("orders", "g")) == [b"one"]


def test_committed_offset_moves_head_of_line(core: CoreBroker) -> None:
    for number in range(3):
        core.send("orders", b"%d" % number, queue_id=0)
    handles = [core.receive("orders", "g", limit=1)[0].handle for _ in range(3)]
    topic, group = core.broker.registry.topic("orders"), core.broker.registry.group("g")
    progress = core.broker.table.progress(group.id, topic.id, 0)
    assert progress is not None
    core.ack("orders", "g", handles[1])
    core.ack("orders", "g", handles[2])
    assert (progress.committed, progress.cursor) == (0, 3)
    core.ack("orders", "g", handles[0])
    assert (progress.committed, progress.cursor) == (3, 3)


def test_a_changed_member_still_holds_the_committed_offset_back(core: CoreBroker) -> None:
    core.send("orders", b"0", queue_id=0)
    (delivery,) = core.receive("orders", "g")
    new = core.change("orders", "g", core.change("orders", "g", delivery.handle, 5_000), 5_000)
    topic, group = core.broker.registry.topic("orders"), core.broker.registry.group("g")
    progress = core.broker.table.progress(group.id, topic.id, 0)
    assert progress is not None
    assert progress.committed == 0
    core.ack("orders", "g", new)
    assert progress.committed == 1
    assert core.broker.table.in_flight == progress.in_flight == len(core.broker.table) == 0


def test_after_max_attempts_the_message_is_a_dead_letter(core: CoreBroker) -> None:
    core.group("three", max_attempts=3)
    core.send("orders", b"poison")
    for attempt in (1, 2, 3):
        (delivery,) = core.receive("orders", "three", invisible_ms=1_000)
        assert delivery.attempt == attempt
        core.advance(1_100)
    assert core.receive("orders", "three") == []
    (dead,) = core.receive("%DLQ%three", "g")
    assert dead.head == b"poison"


def test_tags_are_filtered_and_the_others_are_passed_over(core: CoreBroker) -> None:
    for tag in (b"A", b"B", b"C", b"A"):
        core.send("orders", tag, tag=tag.decode(), queue_id=0)
    reply = core.reply(Kind.POP, pop("orders", "g", expression="A || C"))
    assert bodies(list(hop.decode_pop_reply(reply).deliveries)) == [b"A", b"A", b"C"]
    assert core.receive("orders", "g") == []


def test_a_span_wider_than_64_makes_several_check_points(core: CoreBroker) -> None:
    for number in range(200):
        tag = "A" if number % 50 == 0 else "B"
        core.send("orders", b"%d" % number, tag=tag, queue_id=0)
    reply = core.reply(Kind.POP, pop("orders", "g", expression="A"))
    deliveries = list(hop.decode_pop_reply(reply).deliveries)
    assert bodies(deliveries) == [b"0", b"100", b"150", b"50"]
    assert len(core.broker.table) == 2
    core.ack("orders", "g", *(delivery.handle for delivery in deliveries))
    assert len(core.broker.table) == 0


def test_a_reply_stays_within_its_bytes_but_always_holds_one_message(core: CoreBroker) -> None:
    for number in range(4):
        core.send("orders", bytes(1000) + b"%d" % number, queue_id=0)
    small = core.reply(Kind.POP, pop("orders", "g", reply_bytes=10))
    assert len(hop.decode_pop_reply(small).deliveries) == 1
    two = core.reply(Kind.POP, pop("orders", "g", reply_bytes=2_300))
    assert len(hop.decode_pop_reply(two).deliveries) == 2
    assert len(core.receive("orders", "g")) == 1


def test_a_waiting_receive_is_answered_by_an_arrival(core: CoreBroker) -> None:
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000))
    assert not waiting.heard
    core.send("orders", b"one")
    assert waiting.body is not None
    assert len(hop.decode_pop_reply(waiting.body).deliveries) == 1


def test_a_waiting_receive_is_answered_by_a_retry(core: CoreBroker) -> None:
    core.send("orders", b"one")
    core.receive("orders", "g", invisible_ms=1_000)
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000))
    core.advance(1_100)
    assert waiting.body is not None
    assert hop.decode_pop_reply(waiting.body).deliveries[0].attempt == 2


def test_a_waiting_receive_ends_empty_when_its_time_is_over(core: CoreBroker) -> None:
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=1_000))
    core.advance(990)
    assert not waiting.heard
    core.advance(20)
    assert waiting.body is not None
    assert hop.decode_pop_reply(waiting.body).deliveries == []


def test_a_receive_that_was_cancelled_takes_no_message(core: CoreBroker) -> None:
    waiting = core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000))
    core.server.cancel(waiting.id)
    core.send("orders", b"one")
    assert not waiting.heard
    assert bodies(core.receive("orders", "g")) == [b"one"]
    assert core.broker.polling.count == 0


def test_one_arrival_answers_one_of_many_waiting_receives(core: CoreBroker) -> None:
    waiting = [core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000)) for _ in range(5)]
    core.send("orders", b"one")
    assert [answer.heard for answer in waiting] == [True, False, False, False, False]


def test_a_waiter_whose_filter_misses_does_not_hide_the_next_one(core: CoreBroker) -> None:
    first = core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000, expression="B", queue_id=1))
    second = core.ask(Kind.POP, pop("orders", "g", poll_ms=20_000, queue_id=0))
    core.send("orders", b"one", tag="A", queue_id=0)
    assert (first.heard, second.heard) == (False, True)


def test_the_number_of_waiting_receives_is_bounded() -> None:
    core = CoreBroker(settings=replace(SMALL, poll=PollSettings(waiters=2)))
    core.topic("orders")
    for _ in range(2):
        assert not core.ask(Kind.POP, pop("orders", "g", poll_ms=1_000)).heard
    third = core.ask(Kind.POP, pop("orders", "g", poll_ms=1_000))
    assert third.error is not None
    assert third.error.code == Code.TOO_MANY_REQUESTS
    assert "poll.waiters" in str(third.error)


def test_messages_in_flight_are_bounded_and_the_refusal_names_the_setting() -> None:
    core = CoreBroker(settings=replace(SMALL, pop=PopSettings(max_in_flight_per_queue=2)))
    core.topic("orders", queues=1)
    for number in range(3):
        core.send("orders", b"%d" % number)
    assert len(core.receive("orders", "g")) == 2
    with pytest.raises(PopmqError, match=r"pop.max_in_flight_per_queue") as refused:
        core.receive("orders", "g")
    assert refused.value.code == Code.TOO_MANY_REQUESTS


@pytest.mark.parametrize(
    ("limits", "topic"),
    [
        (PopSettings(max_in_flight_per_queue=2), "orders"),
        (PopSettings(max_in_flight_per_broker=2), "orders"),
        (PopSettings(max_in_flight_per_broker=2), "others"),
    ],
)
def test_at_the_limit_of_messages_in_flight_a_receive_waits_where_nothing_else_is(
    limits: PopSettings, topic: str
) -> None:
    core = CoreBroker(settings=replace(SMALL, pop=limits))
    for name in ("orders", "others"):
        core.topic(name, queues=1)
    for number in range(2):
        core.send("orders", b"%d" % number)
    taken = core.receive("orders", "g")
    assert core.receive(topic, "g") == []
    waiting = core.ask(Kind.POP, pop(topic, "g", poll_ms=1_000))
    assert not waiting.heard
    core.ack("orders", "g", *(delivery.handle for delivery in taken))
    core.send(topic, b"next")
    assert waiting.body is not None
    assert bodies(hop.decode_pop_reply(waiting.body).deliveries) == [b"next"]


def test_a_group_that_starts_at_the_newest_skips_what_is_there_also_after_a_restart(
    core: CoreBroker,
) -> None:
    core.group("new", start_at=StartAt.NEWEST)
    core.send("orders", b"old", queue_id=0)
    assert core.receive("orders", "new") == []
    core.send("orders", b"new", queue_id=0)
    core.disk.restore_power()  # type: ignore[attr-defined]
    core.start()
    assert bodies(core.receive("orders", "new")) == [b"new"]


def test_a_deleted_and_recreated_topic_is_another_topic(core: CoreBroker) -> None:
    core.send("orders", b"old")
    (delivery,) = core.receive("orders", "g", invisible_ms=1_000)
    core.broker.registry.delete_topic("orders")
    core.topic("orders")
    core.advance(5_000)
    assert core.receive("orders", "g") == []
    assert core.ack("orders", "g", delivery.handle)[0].code == Code.INVALID_RECEIPT_HANDLE
    core.start()
    assert core.receive("orders", "g") == []


@pytest.mark.parametrize(
    ("topic_type", "message_type", "code"),
    [
        (MessageType.NORMAL, MessageType.NORMAL, Code.OK),
        (MessageType.NORMAL, MessageType.FIFO, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (MessageType.FIFO, MessageType.FIFO, Code.OK),
        (MessageType.MIXED, MessageType.FIFO, Code.OK),
        (MessageType.DELAY, MessageType.NORMAL, Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        (MessageType.DELAY, MessageType.DELAY, Code.OK),
        (MessageType.TRANSACTION, MessageType.TRANSACTION, Code.OK),
    ],
)
def test_a_topic_takes_messages_of_its_type(
    core: CoreBroker, topic_type: MessageType, message_type: MessageType, code: Code
) -> None:
    core.topic("typed", type=topic_type)
    entry = hop.PutEntry(message_type, b"x", b"", due_ms=1)
    reply = core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("typed", [entry])))
    assert hop.decode_put_reply(reply)[0].code == code


def test_permissions_are_obeyed(core: CoreBroker) -> None:
    core.topic("read-only", permission=Permission.READ)
    core.topic("write-only", permission=Permission.WRITE)
    with pytest.raises(PopmqError, match="not writable"):
        core.send("read-only", b"x")
    with pytest.raises(PopmqError, match="not readable"):
        core.receive("write-only", "g")


def test_a_delayed_message_whose_time_is_over_is_delivered_at_once(core: CoreBroker) -> None:
    core.topic("later", type=MessageType.DELAY)
    entry = hop.PutEntry(MessageType.DELAY, b"x", b"")
    core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("later", [entry])))
    assert bodies(core.receive("later", "g")) == [b"x"]


def test_dead_letters_can_be_deleted(core: CoreBroker) -> None:
    core.group("one", max_attempts=1)
    core.send("orders", b"poison")
    core.receive("orders", "one", invisible_ms=1_000)
    core.advance(1_100)
    core.broker.registry.delete_topic("%DLQ%one")
    assert core.broker.registry.find_topic("%DLQ%one") is None
    assert core.receive("%DLQ%one", "g") == []


def test_acked_check_points_are_not_kept_until_their_time(core: CoreBroker) -> None:
    for number in range(50):
        core.send("orders", b"%d" % number)
        (delivery,) = core.receive("orders", "g", invisible_ms=12 * 3_600_000)
        core.ack("orders", "g", delivery.handle)
    assert len(core.broker.table.due_times) == 0
    assert not list(core.broker.table)
