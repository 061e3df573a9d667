"""Lite topics end when nobody uses them; a restart, a crash or a new master keeps the others."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from lite.lites import TOPIC, live, made, put, receive, small, sync, take
from replica.pair import OF_TWO, Pair

from popmq.broker.diagnostics.lag import lags
from popmq.broker.lite.lite_service import Action
from popmq.common.errors import Code
from popmq.common.settings.lite_settings import LiteSettings
from popmq.common.topics import MessageType
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import CoreBroker

SHORT = LiteSettings(ttl_ms=60_000)


def queue_of(core: CoreBroker, name: str) -> int:
    lite = core.broker.registry.lites.find(core.broker.registry.topic(TOPIC).id, name)
    assert lite is not None, f"no lite topic {name}"
    return lite.queue_id


def test_one_without_a_message_for_its_time_to_live_is_removed_with_its_progress() -> None:
    core = made(SHORT)
    sync(core, ["idle", "busy"])
    put(core, "idle", b"1")
    put(core, "busy", b"2")
    take(core)
    core.advance(45_000)
    put(core, "busy", b"3")
    core.advance(30_000)
    assert live(core) == ["busy"]
    topic = core.broker.registry.topic(TOPIC)
    places = [place for place, _ in core.broker.table.progress_items() if place[1] == topic.id]
    assert [place[2] for place in places] == [queue_of(core, "busy")]


def test_one_that_a_group_has_not_read_stays_until_it_has() -> None:
    core = made(SHORT)
    sync(core, ["one"])
    put(core, "one", b"1")
    core.advance(90_000)
    assert live(core) == ["one"]
    sync(core, ["one"], action=Action.COMPLETE_ADD)
    (got,) = receive(core)
    core.advance(20_000)
    assert live(core) == ["one"]
    core.ack(TOPIC, "g", got.handle)
    core.advance(20_000)
    assert live(core) == []


def test_one_that_nobody_ever_read_goes_with_its_messages() -> None:
    core = made(SHORT)
    put(core, "one", b"1")
    core.advance(80_000)
    assert live(core) == []
    sync(core, ["one"])
    put(core, "one", b"2")
    assert take(core) == [b"2"]


def test_a_topic_may_say_how_long_its_lite_topics_live() -> None:
    core = made(SHORT)
    topic = core.broker.registry.topic(TOPIC)
    core.broker.registry.alter_topic(replace(topic, lite_ttl_ms=600_000))
    put(core, "one", b"1")
    core.advance(90_000)
    assert live(core) == ["one"]
    core.advance(600_000)
    assert live(core) == []


def test_queues_of_those_that_went_are_given_to_those_that_come() -> None:
    core = made(SHORT)
    for round_ in range(4):
        for number in range(3):
            put(core, f"r{round_}-{number}", b"%d" % round_)
        assert {queue_of(core, name) for name in live(core)} == {0, 1, 2}
        core.advance(80_000)
        assert live(core) == []


def test_the_next_in_a_queue_has_nothing_of_the_one_before_also_after_a_restart() -> None:
    core = made(SHORT)
    put(core, "before", b"secret")
    core.advance(80_000)
    put(core, "behind", b"own")
    core.stop()
    core.start()
    sync(core, ["behind", "before"])
    assert queue_of(core, "behind") == 0
    assert take(core) == [b"own"]


def test_a_queue_that_was_free_over_a_restart_shows_nothing_of_the_one_before() -> None:
    core = made(SHORT)
    put(core, "before", b"secret")
    core.advance(80_000)
    core.stop()
    core.start()
    put(core, "behind", b"own")
    sync(core, ["behind"])
    assert queue_of(core, "behind") == 0
    assert take(core) == [b"own"]


def test_a_handle_of_the_one_before_does_not_end_what_is_of_the_next() -> None:
    core = made(SHORT)
    sync(core, ["before", "behind"])
    put(core, "before", b"1")
    (old,) = receive(core)
    core.ack(TOPIC, "g", old.handle)
    core.advance(80_000)
    sync(core, ["before", "behind"], action=Action.COMPLETE_ADD)
    put(core, "behind", b"2")
    (new,) = receive(core)
    core.ack(TOPIC, "g", old.handle)
    core.advance(61_000)
    (again,) = receive(core)
    assert (again.head, again.attempt) == (b"2", 2)
    assert again.queue_offset == new.queue_offset == old.queue_offset + 1


def test_a_quota_is_of_those_that_there_are() -> None:
    core = made(replace(SHORT, max_topics=1))
    put(core, "one", b"1")
    assert put(core, "two", b"2").code == Code.LITE_TOPIC_QUOTA_EXCEEDED
    core.advance(80_000)
    assert put(core, "two", b"2").code == Code.OK


def test_a_deleted_parent_topic_takes_its_lite_topics_along() -> None:
    core = made()
    sync(core, ["one"])
    put(core, "one", b"1")
    core.broker.registry.delete_topic(TOPIC)
    core.run_until_idle()
    assert not list(core.broker.registry.lites)
    assert not len(core.broker.lites.subscriptions)
    core.topic(TOPIC, queues=1, type=MessageType.LITE)
    sync(core, ["one"])
    assert take(core) == []


def test_after_a_clean_stop_everything_is_as_it_was_but_for_subscriptions() -> None:
    core = made()
    sync(core, ["one", "two"])
    for name in ("one", "two", "one"):
        put(core, name, name.encode())
    (first,) = receive(core, limit=1)
    core.ack(TOPIC, "g", first.handle)
    core.stop()
    core.start()
    assert live(core) == ["one", "two"]
    assert take(core) == []  # until the client says again what it wants
    sync(core, ["one", "two"], action=Action.COMPLETE_ADD)
    assert sorted(take(core) + take(core)) == [b"one", b"two"]


def test_a_time_to_live_goes_on_over_a_restart() -> None:
    core = made(SHORT)
    put(core, "one", b"1")
    core.advance(40_000)
    core.stop()
    core.start()
    core.advance(10_000)
    assert live(core) == ["one"]
    core.advance(25_000)
    assert live(core) == []


@pytest.mark.more
@pytest.mark.parametrize("seed", range(12))
def test_a_crash_loses_nothing_that_was_confirmed_and_brings_nothing_to_others(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    core = CoreBroker(
        disk=LyingDisk(), seed=seed, settings=small(LiteSettings(ttl_ms=60_000, max_topics=40))
    )
    core.topic(TOPIC, queues=1, type=MessageType.LITE)
    names = [f"l{number}" for number in range(8)]
    wants: dict[str, set[str]] = {client: set() for client in "abc"}
    waiting: dict[bytes, str] = {}  # what somebody is to get, and from which lite topic
    for number in range(250):
        match rng.choices(
            ("send", "receive", "sync", "unsync", "time", "crash"), (40, 30, 12, 6, 6, 2)
        )[0]:
            case "send":
                name, body = rng.choice(names), b"%d" % number
                if put(core, name, body).code == Code.OK:
                    waiting[body] = name
            case "receive":
                client = rng.choice("abc")
                for delivery in receive(core, client, limit=rng.randrange(1, 5)):
                    name = waiting.get(delivery.head, "")
                    assert name in wants[client], f"{delivery.head!r} of {name} came to {client}"
                    if rng.random() < 0.8:
                        assert core.ack(TOPIC, "g", delivery.handle)[0].code == Code.OK
                        waiting.pop(delivery.head)
            case "sync":
                client = rng.choice("abc")
                added = rng.sample(names, 3)
                wants[client].update(added)
                sync(core, added, client=client)
            case "unsync":
                client = rng.choice("abc")
                removed = rng.sample(names, 2)
                wants[client].difference_update(removed)
                sync(core, removed, client=client, action=Action.PARTIAL_REMOVE)
            case "time":
                core.advance(rng.randrange(1_000, 30_000))
                say_all(core, wants)
                gone = set(names) - set(live(core))
                waiting = {body: name for body, name in waiting.items() if name not in gone}
            case "crash":
                core.disk.restore_power()  # type: ignore[attr-defined]
                core.start()
                say_all(core, wants)
    core.advance(61_000)
    gone = set(names) - set(live(core))
    left = {body for body, name in waiting.items() if name not in gone}
    wants = {"a": set(names)}
    say_all(core, wants)
    got: set[bytes] = set()
    while some := take(core):
        got.update(some)
    assert got == left


def say_all(core: CoreBroker, wants: dict[str, set[str]]) -> None:
    for client, names in wants.items():
        sync(core, sorted(names), client=client, action=Action.COMPLETE_ADD)


def test_a_slave_has_the_same_tables_and_goes_on_when_it_is_promoted(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    master = pair.master
    master.topic(TOPIC, queues=1, type=MessageType.LITE)
    master.group("g")
    sync(master, ["one", "two"])
    for name in ("one", "two", "one", "gone"):
        put(master, name, name.encode())
    (first,) = receive(master, limit=1)
    master.ack(TOPIC, "g", first.handle)
    lites = master.broker.registry.lites
    topic = master.broker.registry.topic(TOPIC)
    gone = lites.find(topic.id, "gone")
    assert gone is not None
    master.broker.expiries.lites.remove(gone)
    master.run_until_idle()
    pair.follow()
    slave = pair.slave.broker.registry.lites
    assert list(slave) == list(lites)
    promoted = pair.fail_over()
    sync(promoted, ["one", "two"], action=Action.COMPLETE_ADD)
    assert sorted(take(promoted) + take(promoted)) == [b"one", b"two"]
    put(promoted, "next", b"3")
    assert queue_of(promoted, "next") == gone.queue_id


@pytest.mark.more
def test_snapshots_of_master_and_slave_hash_the_same(tmp_path: Path) -> None:
    pair = Pair(tmp_path, settings=replace(OF_TWO, lite=SHORT))
    master = pair.master
    master.topic(TOPIC, queues=1, type=MessageType.LITE)
    sync(master, [f"l{number}" for number in range(5)])
    for number in range(400):
        put(master, f"l{number % 7}", b"x" * 200)
        if number % 5 == 0:
            take(master)
        if number % 50 == 0:
            pair.follow()
            master.advance(15_000)
            pair.follow()
    hashes = pair.slave.broker.store.slave.hashes  # type: ignore[union-attr]
    assert hashes.compared > 0
    assert hashes.diverged == 0


def test_a_message_that_came_back_keeps_its_lite_topic_though_retention_went_past_it() -> None:
    core = made(SHORT)
    sync(core, ["one"])
    put(core, "one", b"1")
    (first,) = receive(core)
    topic = core.broker.registry.topic(TOPIC)
    core.broker.store.queue(topic.id, 0).raise_minimum(1)
    core.advance(80_000)
    assert live(core) == ["one"]
    sync(core, ["one"])
    (again,) = receive(core)
    assert (again.head, again.attempt) == (first.head, 2)
    core.ack(TOPIC, "g", again.handle)
    core.advance(20_000)
    assert live(core) == []


def test_a_lite_topic_whose_last_messages_went_by_retention_unread_is_no_lag_and_ends() -> None:
    core = made(SHORT)
    sync(core, ["one"])
    put(core, "one", b"1")
    assert take(core) == [b"1"]
    for _ in range(3):
        put(core, "one", b"2")
    registry, topic = core.broker.registry, core.broker.registry.topic(TOPIC)
    core.broker.store.queue(topic.id, 0).raise_minimum(4)
    (lag,) = lags(core.broker.store, registry, core.broker.table, topic=topic)
    assert (lag.total, lag.expired) == (0, 3)
    core.advance(80_000)
    assert live(core) == []
