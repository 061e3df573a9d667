"""Where a group begins in a lite topic, and subscriptions that the server ends."""

import pytest
from lite.lites import TOPIC, forgets, live, made, put, receive, sync, take

from popmq.broker.lite.lite_notices import EXPIRY_MS, NOTICES_LIMIT, LiteNotices
from popmq.broker.lite.lite_service import Action
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.lite_settings import LiteSettings
from popmq.common.topics import MessageType
from popmq.testing.harness.core_broker import CoreBroker

ENDING = LiteSettings(ttl_ms=60_000, ttl_ends_subscriptions=True)


def test_a_subscription_may_begin_at_a_time() -> None:
    core = made()
    stored = []
    for body in (b"1", b"2", b"3"):
        stored.append(core.clock.wall_ms())
        put(core, "one", body)
        core.advance(1_000)
    for group, at_ms in (("first", 0), ("second", stored[1]), ("third", stored[1] + 1)):
        sync(core, ["one", "unborn"], group=group, stored_ms=at_ms)
    sync(core, ["one"], group="behind", stored_ms=core.clock.wall_ms() + 60_000)
    put(core, "unborn", b"4")
    assert sorted(all_of(core, "first")) == [b"1", b"2", b"3", b"4"]
    assert sorted(all_of(core, "second")) == [b"2", b"3", b"4"]
    assert sorted(all_of(core, "third")) == [b"3", b"4"]
    assert all_of(core, "behind") == []
    put(core, "one", b"5")
    assert all_of(core, "behind") == [b"5"]


def all_of(core: CoreBroker, group: str) -> list[bytes]:
    results: list[bytes] = []
    while some := take(core, group=group):
        results += some
    return results


def test_a_group_that_reads_already_goes_on_where_it_is_whatever_time_is_said() -> None:
    core = made()
    put(core, "one", b"1")
    sync(core, ["one"])
    assert take(core) == [b"1"]
    put(core, "one", b"2")
    sync(core, [], action=Action.COMPLETE_REMOVE)
    sync(core, ["one"], stored_ms=core.clock.wall_ms() + 60_000)
    assert take(core) == [b"2"]


def test_a_time_survives_a_restart_as_the_place_that_it_meant() -> None:
    core = made()
    put(core, "one", b"1")
    core.advance(1_000)
    sync(core, ["one"], stored_ms=core.clock.wall_ms())
    put(core, "one", b"2")
    core.stop()
    core.start()
    sync(core, ["one"], action=Action.COMPLETE_ADD)
    assert take(core) == [b"2"]


def test_a_time_to_live_ends_subscriptions_where_it_is_to_and_clients_are_told() -> None:
    core = made(ENDING)
    sync(core, ["brief", "unborn"])
    sync(core, ["brief"], client="b")
    put(core, "brief", b"1")
    (got,) = receive(core)
    core.ack(TOPIC, "g", got.handle)
    assert forgets(core) == []
    core.advance(75_000)
    assert live(core) == []
    put(core, "brief", b"2")
    assert take(core) == []
    sync(core, ["brief", "unborn"], action=Action.COMPLETE_ADD)  # it has not heard of it yet
    assert take(core) == []
    assert forgets(core) == ["brief"]
    assert forgets(core) == []
    assert forgets(core, "b") == ["brief"]
    sync(core, ["brief", "unborn"])
    assert take(core) == [b"2"]


def test_a_time_to_live_leaves_subscriptions_alone_unless_it_is_to_end_them() -> None:
    core = made(LiteSettings(ttl_ms=60_000))
    sync(core, ["brief"])
    put(core, "brief", b"1")
    take(core)
    core.advance(75_000)
    assert live(core) == []
    assert forgets(core) == []
    put(core, "brief", b"2")
    assert take(core) == [b"2"]


def test_who_wants_a_lite_topic_again_before_it_heard_of_its_end_is_told_nothing() -> None:
    core = made(ENDING)
    sync(core, ["brief"])
    put(core, "brief", b"1")
    take(core)
    core.advance(75_000)
    sync(core, ["brief"])
    assert forgets(core) == []
    put(core, "brief", b"2")
    assert take(core) == [b"2"]


def test_clients_of_a_parent_topic_or_a_group_that_is_deleted_are_to_forget_its_lite_topics() -> (
    None
):
    core = made()
    core.topic("others", queues=1, type=MessageType.LITE)
    sync(core, ["one", "two"])
    sync(core, ["three"], client="b", group="h")
    core.broker.registry.delete_topic("others")
    core.run_until_idle()
    assert forgets(core) == []
    core.broker.registry.delete_group("h")
    core.run_until_idle()
    assert (forgets(core), forgets(core, "b")) == ([], ["three"])
    core.broker.registry.delete_topic(TOPIC)
    core.run_until_idle()
    assert forgets(core) == ["one", "two"]


def test_of_a_whole_list_beyond_the_quota_the_beginning_counts_and_the_rest_is_forgotten() -> None:
    """As when the limit was lowered: such a client would else have nothing, again and again."""
    core = made(LiteSettings(max_client_subscriptions=2))
    names = ["delta", "alpha", "charlie", "bravo"]
    for name in names:
        put(core, name, name.encode())
    with pytest.raises(PopmqError, match=r"lite\.max_client_subscriptions") as refusal:
        sync(core, names, action=Action.COMPLETE_ADD)
    assert refusal.value.code is Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED
    assert sorted(take(core)) == [b"alpha", b"delta"]
    assert forgets(core) == ["charlie", "bravo"]
    sync(core, names[:2], action=Action.COMPLETE_ADD)
    assert forgets(core) == []


def test_what_nobody_comes_for_is_forgotten_in_time_and_in_number() -> None:
    notices = LiteNotices()
    notices.add(1, ["a", "b"], 0)
    notices.step(EXPIRY_MS - 1)
    assert notices.of(1) == {"a", "b"}
    notices.step(EXPIRY_MS)
    assert list(notices.take(1)) == []
    for client in range(3):
        notices.add(client, map(str, range(NOTICES_LIMIT // 2)), 0)
    assert [len(notices.take(client)) for client in range(3)] == [
        0,
        NOTICES_LIMIT // 2,
        NOTICES_LIMIT // 2,
    ]


def test_who_said_good_bye_is_told_nothing_later() -> None:
    core = made()
    sync(core, ["one"])
    core.broker.registry.delete_topic(TOPIC)
    core.run_until_idle()
    core.reply(Kind.CLIENTS, hop.encode_clients(hop.ClientsReport(closed=["a"])))
    assert forgets(core) == []
