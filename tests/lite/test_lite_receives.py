"""Lite topics at a broker: made on use, received by those who subscribed, each in order."""

import pytest
from lite.lites import TOPIC, live, made, put, receive, sync, take

from popmq.broker.diagnostics.lag import lags
from popmq.broker.lite.lite_service import Action, LiteStart
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.lite_settings import LiteSettings
from popmq.common.topics import MessageType, StartAt
from popmq.testing.harness.core_broker import bodies, pop


def test_a_lite_topic_is_made_by_the_first_message_that_names_it() -> None:
    core = made()
    assert live(core) == []
    assert put(core, "one", b"1").code == Code.OK
    put(core, "one", b"2")
    put(core, "two", b"3")
    assert live(core) == ["one", "two"]


def test_a_client_gets_what_is_in_its_lite_topics_and_nothing_else() -> None:
    core = made()
    for name in ("mine", "yours", "nobody"):
        put(core, name, name.encode())
    sync(core, ["mine"], client="a")
    sync(core, ["yours"], client="b")
    assert take(core, "a") == [b"mine"]
    assert take(core, "b") == [b"yours"]
    assert take(core, "a") == take(core, "b") == take(core, "c") == []


def test_a_lite_topic_that_is_made_after_the_subscription_is_received() -> None:
    core = made()
    sync(core, ["later"])
    assert take(core) == []
    put(core, "later", b"1")
    assert take(core) == [b"1"]


def test_a_waiting_receive_is_woken_by_a_message_in_any_of_its_lite_topics_only() -> None:
    core = made()
    sync(core, ["one", "two"], client="a")
    sync(core, ["three"], client="b")
    a = core.ask(Kind.POP, pop(TOPIC, "g", client_id="a", poll_ms=20_000))
    b = core.ask(Kind.POP, pop(TOPIC, "g", client_id="b", poll_ms=20_000))
    put(core, "two", b"x")
    assert a.heard
    assert not b.heard
    put(core, "three", b"y")
    assert b.heard


def test_a_waiting_receive_is_woken_by_a_subscription_to_what_is_there() -> None:
    core = made()
    put(core, "one", b"x")
    sync(core, ["other"])
    waiting = core.ask(Kind.POP, pop(TOPIC, "g", client_id="a", poll_ms=20_000))
    assert not waiting.heard
    sync(core, ["one"])
    assert waiting.heard


def test_messages_of_a_lite_topic_leave_in_order_and_behind_what_is_in_flight() -> None:
    core = made()
    sync(core, ["one"])
    for body in (b"1", b"2", b"3"):
        put(core, "one", body)
    first = receive(core, limit=2)
    assert [delivery.head for delivery in first] == [b"1", b"2"]
    assert receive(core) == []
    core.ack(TOPIC, "g", first[1].handle)
    assert receive(core) == []
    core.change(TOPIC, "g", first[0].handle, 0)
    core.advance(1_000)
    again = receive(core)
    assert [(delivery.head, delivery.attempt) for delivery in again] == [(b"1", 2), (b"3", 1)]


def test_a_waiting_receive_is_woken_when_what_was_in_flight_ends() -> None:
    core = made()
    sync(core, ["one"], client="a")
    sync(core, ["one"], client="b")
    put(core, "one", b"1")
    put(core, "one", b"2")
    (first,) = receive(core, "a", limit=1)
    waiting = core.ask(Kind.POP, pop(TOPIC, "g", client_id="b", poll_ms=20_000))
    core.run_steps()
    assert not waiting.heard
    core.ack(TOPIC, "g", first.handle)
    core.run_steps()
    assert waiting.heard


def test_what_is_not_acked_comes_back_to_another_subscriber() -> None:
    core = made()
    sync(core, ["one"], client="a")
    sync(core, ["one"], client="b")
    put(core, "one", b"1")
    receive(core, "a")
    core.advance(61_000)
    (again,) = receive(core, "b")
    assert (again.head, again.attempt) == (b"1", 2)


def test_each_group_gets_every_message_of_its_lite_topics() -> None:
    core = made()
    sync(core, ["one"], group="g")
    sync(core, ["one"], group="h")
    put(core, "one", b"1")
    assert take(core, group="g") == take(core, group="h") == [b"1"]


def test_a_client_that_unsubscribes_gets_no_more() -> None:
    core = made()
    sync(core, ["one", "two"])
    sync(core, ["one"], action=Action.PARTIAL_REMOVE)
    put(core, "one", b"1")
    put(core, "two", b"2")
    assert take(core) == [b"2"]
    sync(core, [], action=Action.COMPLETE_REMOVE)
    put(core, "two", b"3")
    assert take(core) == []


def test_a_complete_add_replaces_the_set() -> None:
    core = made()
    sync(core, ["one", "two"])
    sync(core, ["two", "three"], action=Action.COMPLETE_ADD)
    for name in ("one", "two", "three"):
        put(core, name, name.encode())
    assert sorted(take(core)) == [b"three", b"two"]


def test_a_client_without_a_word_for_long_is_forgotten_and_one_that_says_it_again_is_not() -> None:
    core = made(LiteSettings(subscription_expiry_ms=100_000))
    sync(core, ["one"], client="a")
    sync(core, ["one"], client="b")
    core.advance(90_000)
    sync(core, ["one"], client="b", action=Action.COMPLETE_ADD)
    core.advance(20_000)
    put(core, "one", b"1")
    assert take(core, "a") == []
    assert take(core, "b") == [b"1"]


def test_lite_topics_that_have_something_take_turns() -> None:
    core = made()
    names = ["one", "two", "three"]
    sync(core, names)
    for number in range(3):
        for name in names:
            put(core, name, b"%s %d" % (name.encode(), number))
    got = [take(core, limit=1)[0] for _ in range(9)]
    assert {body.split()[0] for body in got[:3]} == {b"one", b"two", b"three"}
    assert {body.split()[0] for body in got[3:6]} == {b"one", b"two", b"three"}


def test_a_receive_with_the_same_attempt_id_gets_the_same_again() -> None:
    core = made()
    sync(core, ["one"])
    put(core, "one", b"1")
    first = receive(core, attempt_id="x")
    assert receive(core, attempt_id="y") == []
    assert [delivery.handle for delivery in receive(core, attempt_id="x")] == [
        delivery.handle for delivery in first
    ]


def test_a_message_that_fails_too_often_is_a_dead_letter_and_comes_back_into_its_lite_topic() -> (
    None
):
    core = made()
    core.group("g", max_attempts=1)
    sync(core, ["one"])
    put(core, "one", b"1")
    put(core, "one", b"2")
    (first, _) = receive(core)
    assert core.reject(TOPIC, "g", first.handle).code == Code.OK
    letters = core.broker.registry.topic("%DLQ%g")
    letter = core.broker.operations.redrives.letter(letters, 0)
    assert letter is not None
    core.broker.operations.redrives.redrive(core.broker.registry.group("g"), letters, letter)
    core.run_until_idle()
    core.advance(61_000)
    assert b"1" in take(core) + take(core)


def test_a_group_that_starts_at_the_newest_passes_over_what_was_there_when_it_subscribed() -> None:
    core = made()
    core.group("g", start_at=StartAt.NEWEST)
    put(core, "one", b"old")
    sync(core, ["one", "two"])
    put(core, "one", b"new")
    put(core, "two", b"first")
    assert sorted(take(core)) == [b"first", b"new"]


def test_such_a_group_misses_nothing_when_its_subscription_is_told_again_after_a_restart() -> None:
    core = made()
    core.group("g", start_at=StartAt.NEWEST)
    sync(core, ["one"])
    core.stop()
    core.start()
    put(core, "one", b"meanwhile")
    sync(core, ["one"], action=Action.COMPLETE_ADD)
    assert take(core) == [b"meanwhile"]


def test_a_subscription_may_say_where_it_begins() -> None:
    core = made()
    every = [b"1", b"2", b"3"]
    for body in every:
        put(core, "one", body)
    sync(core, ["one"], group="oldest", newest=False)
    sync(core, ["one"], group="newest", newest=True)
    sync(core, ["one"], group="second", offset=1)
    sync(core, ["one"], group="behind", offset=99)
    sync(core, ["one"], group="last", tail=1)
    sync(core, ["one"], group="all", tail=9)
    assert take(core, group="oldest") == take(core, group="all") == every
    assert take(core, group="newest") == take(core, group="behind") == []
    assert take(core, group="second") == every[1:]
    assert take(core, group="last") == every[2:]
    sync(core, ["one"], group="oldest", action=Action.COMPLETE_REMOVE)
    sync(core, ["one"], group="oldest", newest=False)
    assert take(core, group="oldest") == []  # it has read them


def test_the_lag_of_a_parent_topic_sums_the_lite_topics_that_the_group_reads() -> None:
    core = made()
    sync(core, ["one", "two"])
    for name in ("one", "two", "two", "nobody"):
        put(core, name, b"x")
    receive(core, limit=1)
    broker = core.broker
    (lag,) = lags(broker.store, broker.registry, broker.table)
    assert (lag.total, lag.in_flight) == (3, 1)


def test_a_lite_topic_needs_a_parent_of_its_type_and_a_parent_takes_nothing_else() -> None:
    core = made()
    core.topic("plain")
    assert core.send(TOPIC, b"x").code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    with pytest.raises(PopmqError, match="only one of type LITE") as refusal:
        core.broker.lites.sync(
            core.broker.metadata_resolver.topic("plain"),
            core.broker.metadata_resolver.group("g"),
            1,
            Action.PARTIAL_ADD,
            ["one"],
            begin=LiteStart(),
            now_ms=0,
        )
    assert refusal.value.code is Code.BAD_REQUEST
    core.topic("mixed", type=MessageType.MIXED)
    assert not MessageType.MIXED.accepts(MessageType.LITE)
    assert bodies(core.receive("mixed", "g")) == []


def test_a_lite_topic_beyond_the_quota_is_refused_and_those_there_are_take_on() -> None:
    core = made(LiteSettings(max_topics=2))
    put(core, "one", b"1")
    put(core, "two", b"2")
    refused = put(core, "three", b"3")
    assert refused.code == Code.LITE_TOPIC_QUOTA_EXCEEDED
    assert "lite.max_topics" in refused.message
    assert put(core, "two", b"4").code == Code.OK


@pytest.mark.parametrize("name", ["", "   ", "x" * 65, "no/slash", "käse"])
def test_a_name_that_no_lite_topic_may_have_is_refused(name: str) -> None:
    core = made()
    assert put(core, name, b"1").code == Code.ILLEGAL_LITE_TOPIC
    with pytest.raises(PopmqError) as refusal:
        sync(core, [name])
    assert refusal.value.code is Code.ILLEGAL_LITE_TOPIC


def test_a_client_with_too_many_subscriptions_is_refused_and_keeps_those_it_has() -> None:
    core = made(LiteSettings(max_client_subscriptions=2))
    sync(core, ["one", "two"])
    with pytest.raises(PopmqError, match=r"lite\.max_client_subscriptions") as refusal:
        sync(core, ["three"])
    assert refusal.value.code is Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED
    put(core, "one", b"1")
    assert take(core) == [b"1"]
    sync(core, ["one", "two"])  # said again it is no more


def test_all_clients_together_have_a_bound_too() -> None:
    core = made(LiteSettings(max_subscriptions=3))
    sync(core, ["one", "two"], client="a")
    with pytest.raises(PopmqError, match=r"lite\.max_subscriptions"):
        sync(core, ["one", "two"], client="b")
    sync(core, [], client="a", action=Action.COMPLETE_REMOVE)
    sync(core, ["one", "two"], client="b")


def test_a_receive_costs_the_same_with_two_thousand_subscriptions_as_with_one() -> None:
    core = made()
    names = [f"l{number}" for number in range(2_000)]
    sync(core, names)
    put(core, "l0", b"x")
    looked: list[int] = []
    service = core.broker.lites
    plain = service._wanted
    service._wanted = lambda subscriber, queue: looked.append(queue) or plain(subscriber, queue)  # type: ignore
    assert take(core) == [b"x"]
    assert take(core) == []
    assert len(looked) <= 3
