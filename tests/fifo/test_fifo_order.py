"""FIFO groups on a real broker core under virtual time: order, commit, retries, changes."""

import pytest
from fifo.cores import ack, attempts, made_core, names, progress, receive, restart, send

from popmq.common.errors import Code
from popmq.common.topics import GroupType, MessageType
from popmq.testing.harness.core_broker import CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    return made_core()


# -- order and availability


def test_messages_of_one_queue_come_in_order(core: CoreBroker) -> None:
    send(core, "a1", "a2", "b1", "a3", "b2")
    assert names(receive(core)) == ["a1", "a2", "b1", "a3", "b2"]


def test_a_message_group_is_blocked_while_one_of_its_messages_is_in_flight(
    core: CoreBroker,
) -> None:
    send(core, "a1", "a2")
    (first,) = receive(core, limit=1)
    assert receive(core) == []
    ack(core, first)
    assert names(receive(core)) == ["a2"]


def test_a_stuck_message_group_slows_no_other(core: CoreBroker) -> None:
    send(core, "a1", "b1", "a2", "c1", "b2")
    (stuck,) = receive(core, limit=1)
    assert names([stuck]) == ["a1"]
    got = receive(core)
    assert names(got) == ["b1", "c1", "b2"]
    ack(core, *got)
    send(core, "b3", "a3", "d1")
    assert names(receive(core)) == ["b3", "d1"]


def test_messages_without_a_message_group_are_ordered_with_each_other(core: CoreBroker) -> None:
    for body in (b"x1", b"x2"):
        core.send("orders", body, queue_id=0)
    send(core, "a1")
    (delivery,) = receive(core, limit=1)
    assert names(receive(core)) == ["a1"]
    ack(core, delivery)
    assert names(receive(core)) == ["x2"]


def test_queues_are_independent_also_for_one_message_group(core: CoreBroker) -> None:
    send(core, "a1", queue_id=0)
    send(core, "a2", queue_id=1)
    assert sorted(names(receive(core))) == ["a1", "a2"]


def test_a_receive_may_name_a_queue(core: CoreBroker) -> None:
    send(core, "a1", queue_id=0)
    send(core, "b1", queue_id=1)
    assert names(core.receive("orders", "g", queue_id=1)) == ["b1"]


def test_topics_of_every_type_can_be_read_in_order(core: CoreBroker) -> None:
    core.topic("plain", queues=1)
    for number in range(3):
        core.send("plain", b"%d" % number)
    (first,) = core.receive("plain", "g", limit=1)
    assert core.receive("plain", "g") == []
    core.ack("plain", "g", first.handle)
    assert names(core.receive("plain", "g")) == ["1", "2"]


def test_two_fifo_groups_and_a_normal_one_read_the_same_messages(core: CoreBroker) -> None:
    core.group("h", type=GroupType.FIFO)
    core.group("n")
    send(core, "a1", "a2")
    for group in ("g", "h", "n"):
        assert sorted(names(core.receive("orders", group))) == ["a1", "a2"]


# -- commit


def test_an_ack_of_the_second_message_leaves_the_offset_at_the_first_until_that_is_over(
    core: CoreBroker,
) -> None:
    send(core, "a1", "a2", "a3")
    got = receive(core)
    ack(core, got[1])
    assert progress(core).committed == 0
    ack(core, got[0])
    assert progress(core).committed == 2
    ack(core, got[2])
    assert progress(core).committed == 3
    assert progress(core).in_flight == core.broker.table.in_flight == 0


def test_one_batch_ack_moves_the_offset_past_all_its_messages(core: CoreBroker) -> None:
    send(core, "a1", "a2", "b1", "a3")
    ack(core, *receive(core))
    assert progress(core).committed == 4
    assert len(core.broker.table) == 0


def test_an_ack_from_an_earlier_delivery_has_no_effect(core: CoreBroker) -> None:
    send(core, "a1", "a2")
    (old,) = receive(core, limit=1, invisible_ms=1_000)
    core.advance(1_100)
    (new,) = receive(core, limit=1)
    (result,) = core.ack("orders", "g", old.handle)
    assert result.code == Code.INVALID_RECEIPT_HANDLE
    assert "revived as attempt 2" in result.message
    assert (progress(core).committed, receive(core)) == (0, [])
    ack(core, new)
    assert progress(core).committed == 1


def test_what_ended_behind_a_stuck_message_is_one_range_however_much_it_is(
    core: CoreBroker,
) -> None:
    send(core, "stuck1")
    receive(core, limit=1)
    for number in range(300):
        send(core, f"a{number}")
        ack(core, *receive(core))
    assert list(progress(core).finished) == [(1, 301)]
    assert progress(core).committed == 0


# -- retries


def test_unacked_messages_come_again_in_order_before_later_ones_with_the_next_attempt(
    core: CoreBroker,
) -> None:
    send(core, "a1", "a2", "a3")
    receive(core, limit=2, invisible_ms=1_000)
    send(core, "a4")
    core.advance(1_100)
    assert attempts(receive(core)) == [("a1", 2), ("a2", 2), ("a3", 1), ("a4", 1)]


def test_each_message_is_delivered_twice_in_order_when_the_first_delivery_is_not_acked(
    core: CoreBroker,
) -> None:
    send(core, *(f"a{number}" for number in range(1, 6)))
    assert attempts(receive(core, invisible_ms=1_000)) == [(f"a{n}", 1) for n in range(1, 6)]
    core.advance(1_100)
    again = receive(core)
    assert attempts(again) == [(f"a{n}", 2) for n in range(1, 6)]
    ack(core, *again)
    assert receive(core) == []


def test_acks_of_later_messages_of_a_batch_count_and_only_the_others_come_again(
    core: CoreBroker,
) -> None:
    send(core, "a1", "a2", "a3", "a4", "a5")
    got = receive(core, limit=4, invisible_ms=1_000)
    ack(core, got[0], got[3])
    core.advance(1_100)
    assert attempts(receive(core)) == [("a2", 2), ("a3", 2), ("a5", 1)]


def test_attempts_are_counted_for_each_message_of_a_changing_batch(core: CoreBroker) -> None:
    send(core, "a1", "a2", "a3")
    assert attempts(receive(core, invisible_ms=1_000)) == [("a1", 1), ("a2", 1), ("a3", 1)]
    core.advance(1_100)
    again = receive(core, invisible_ms=1_000)
    assert attempts(again) == [("a1", 2), ("a2", 2), ("a3", 2)]
    ack(core, again[0])
    send(core, "a4")
    core.advance(1_100)
    assert attempts(receive(core, limit=2, invisible_ms=1_000)) == [("a2", 3), ("a3", 3)]
    core.advance(1_100)
    assert attempts(receive(core)) == [("a2", 4), ("a3", 4), ("a4", 1)]


def test_attempts_are_counted_in_each_queue_by_itself(core: CoreBroker) -> None:
    send(core, "a1", queue_id=0)
    core.receive("orders", "g", queue_id=0, invisible_ms=1_000)
    core.advance(1_100)
    send(core, "a2", queue_id=1)
    assert sorted(attempts(receive(core))) == [("a1", 2), ("a2", 1)]


def test_after_max_attempts_a_message_is_a_dead_letter_and_its_group_goes_on(
    core: CoreBroker,
) -> None:
    core.group("two", type=GroupType.FIFO, max_attempts=2)
    send(core, "a1", "a2")
    for attempt in (1, 2):
        (delivery,) = core.receive("orders", "two", limit=1, invisible_ms=1_000)
        assert (delivery.head, delivery.attempt) == (b"a1", attempt)
        core.advance(1_100)
    assert attempts(core.receive("orders", "two")) == [("a2", 1)]
    core.group("reader")
    assert [entry.head for entry in core.receive("%DLQ%two", "reader")] == [b"a1"]
    assert progress(core, group="two").committed == 1


def test_attempts_survive_a_restart_with_and_without_a_snapshot(core: CoreBroker) -> None:
    send(core, "a1", "a2")
    for _ in range(2):
        receive(core, invisible_ms=1_000)
        core.advance(1_100)
    restart(core)
    assert attempts(receive(core, limit=1, invisible_ms=1_000)) == [("a1", 3)]
    core.advance(1_100)
    core.stop()  # writes a snapshot
    core.start()
    assert attempts(receive(core)) == [("a1", 4), ("a2", 3)]


def test_names_of_the_longest_kind_are_retried_in_order_and_succeed(core: CoreBroker) -> None:
    topic, group = "t" * 127, "g" * 120
    core.topic(topic, queues=1, type=MessageType.FIFO)
    core.group(group, type=GroupType.FIFO)
    for number in range(2):
        core.send(topic, b"%d" % number, message_group="k" * 63)
    for _ in range(2):
        core.receive(topic, group, invisible_ms=1_000)
        core.advance(1_100)
    got = core.receive(topic, group)
    assert attempts(got) == [("0", 3), ("1", 3)]
    core.ack(topic, group, *(delivery.handle for delivery in got))
    core.advance(120_000)
    assert core.receive(topic, group) == []


# -- change of the invisible duration


def test_a_longer_invisible_duration_blocks_that_message_group_only_and_longer(
    core: CoreBroker,
) -> None:
    send(core, "a1", "b1", "a2", "b2")
    delivery, other = receive(core, limit=2, invisible_ms=1_000)
    core.change("orders", "g", delivery.handle, 5_000)
    core.advance(1_100)
    assert attempts(receive(core)) == [("b1", 2), ("b2", 1)]
    core.advance(3_800)
    assert receive(core) == []
    core.advance(200)
    assert attempts(receive(core)) == [("a1", 2), ("a2", 1)]
    assert other.head == b"b1"


def test_a_shorter_invisible_duration_unblocks_the_message_group_sooner(core: CoreBroker) -> None:
    send(core, "a1", "a2")
    (delivery,) = receive(core, limit=1)
    core.change("orders", "g", delivery.handle, 0)
    core.advance(40)
    assert attempts(receive(core)) == [("a1", 2), ("a2", 1)]


def test_a_changed_handle_replaces_the_old_one_which_has_no_effect_any_more(
    core: CoreBroker,
) -> None:
    send(core, "a1", "a2")
    (delivery,) = receive(core, limit=1)
    new = core.change("orders", "g", delivery.handle, 30_000)
    assert core.change("orders", "g", delivery.handle, 0) == new
    assert "superseded" in core.ack("orders", "g", delivery.handle)[0].message
    core.advance(1_000)
    assert receive(core) == []
    assert core.ack("orders", "g", new)[0].code == Code.OK
    assert names(receive(core)) == ["a2"]
    assert progress(core).committed == 1


def test_a_changed_message_in_the_middle_comes_again_before_later_ones(core: CoreBroker) -> None:
    send(core, "a1", "a2", "a3", "a4")
    got = receive(core, limit=3, invisible_ms=5_000)
    core.change("orders", "g", got[1].handle, 0)
    ack(core, got[0])
    core.advance(40)
    assert receive(core) == [], "a3 is in flight"
    core.advance(5_100)
    assert attempts(receive(core)) == [("a2", 2), ("a3", 2), ("a4", 1)]


def test_what_was_acked_behind_a_filtered_message_stays_over_after_a_restart(
    core: CoreBroker,
) -> None:
    send(core, "a1", tag="A")
    send(core, "b1", tag="B")
    send(core, "c1", tag="A")
    got = core.receive("orders", "g", expression="A", queue_id=0)
    assert names(got) == ["a1", "c1"]
    ack(core, *got)
    restart(core)
    assert core.receive("orders", "g", expression="A", queue_id=0) == []
    assert progress(core).committed == 3
