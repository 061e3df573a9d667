"""The daily count of pending timers: right beside traffic, and a repair where it was wrong."""

import random
from dataclasses import replace

import pytest
from timer.timer_client import (
    HOUR,
    MINUTE,
    SECOND,
    core_with_topic,
    crash,
    recall,
    received,
    reschedule,
    send,
    send_all,
)

from popmq.broker.timer import timer_count_audit as timer_check
from popmq.common.record.timer_token import TimerRecount
from popmq.common.topics import MessageType
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, WITHOUT_TAIL, CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    return core_with_topic(settings=WITHOUT_TAIL)


def topic_id(core: CoreBroker, name: str = "orders") -> int:
    return core.broker.registry.topic(name).id


def count(core: CoreBroker) -> int:
    """Count now; returns how many topics were counted wrongly before."""
    check = core.broker.timers.check
    before = check.mismatches
    check.start()
    core.run_steps()
    assert not check.running
    return check.mismatches - before


def test_a_wrong_count_is_found_and_made_right(core: CoreBroker) -> None:
    send_all(core, {"A": HOUR, "B": HOUR, "recalled": HOUR, "fired": SECOND})
    recall(core, "recalled")
    core.advance(2 * SECOND)
    state = core.broker.timers.state
    right = {topic_id(core): 2}
    assert state.pending == right
    assert count(core) == 0
    state.pending = {topic_id(core): 7, 999: 1}
    assert count(core) == 2
    assert state.pending == right
    assert count(core) == 0


def test_what_comes_and_goes_during_a_count_is_counted_right(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    monkeypatch.setattr(timer_check, "_BODIES_A_STEP", 3)
    monkeypatch.setattr(timer_check, "_UNITS_A_STEP", 7)
    core.topic("others", type=MessageType.DELAY)
    broker = core.broker
    check, names, sent = broker.timers.check, ("orders", "others"), 0
    pieces = 0
    while check.done < 12 or pieces <= 100:  # with few timers a count has few pieces
        if not check.running:
            check.start()
        for _ in range(rng.randrange(4)):
            ahead_ms = rng.choice((SECOND, 20 * SECOND, 10 * MINUTE, 3 * HOUR))
            due_ms = core.clock.wall_ms() + ahead_ms
            send(core, f"M{sent}", due_ms, topic=rng.choice(names))
            sent += 1
        chosen = f"M{rng.randrange(sent or 1)}"
        if sent and rng.random() < 0.5:
            recall(core, chosen, topic=rng.choice(names))
        if sent and rng.random() < 0.5:
            reschedule(core, chosen, core.clock.wall_ms() + rng.randrange(HOUR))
        if rng.random() < 0.05:
            move_some(core, rng)
        if rng.random() < 0.3:
            core.clock.advance(rng.randrange(MINUTE))
        broker.timers.service.step()
        core.run_until_idle()
        pieces += check.step()
    print("pieces", pieces)
    assert check.mismatches == 0


def move_some(core: CoreBroker, rng: random.Random) -> None:
    """As retention does, of bodies anywhere in the queue."""
    bodies = core.broker.timers.bodies
    bodies.begin()
    for piece in list(bodies.bodies_below(core.broker.store.confirmed)):
        for body in piece:
            if rng.random() < 0.1:
                bodies.move(body)
    core.run_until_idle()


def damage_body(core: CoreBroker, message_id: str) -> None:
    (stored,) = core.broker.timers.recall.find(None, message_id).stored
    file = core.disk.open(f"{core.settings.broker.data}/commitlog/{0:020}")
    at = stored.timer.position + stored.timer.size - 3
    file.write(bytes([file.read(1, at)[0] ^ 1]), at)


def test_a_moved_body_whose_record_went_counts_once() -> None:
    core = core_with_topic()
    send_all(core, {"A": HOUR, "B": HOUR})
    queue = core.broker.timers.service.queue.queue
    for _ in range(2):
        bodies = core.broker.timers.bodies
        bodies.begin()
        for piece in list(bodies.bodies_below(core.broker.store.confirmed)):
            for body in piece:
                bodies.move(body)
        core.run_steps()
    queue.raise_minimum(2)  # the first records went by retention
    assert queue.count > 4
    assert count(core) == 0
    assert core.broker.timers.state.pending == {topic_id(core): 2}


def test_a_count_that_retention_overtakes_begins_anew(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_check, "_UNITS_A_STEP", 1)
    send_all(core, {f"M{number}": HOUR for number in range(4)})
    check = core.broker.timers.check
    check.start()
    check.step()
    check.step()
    core.broker.timers.bodies.begin()
    for piece in list(core.broker.timers.bodies.bodies_below(core.broker.store.confirmed)):
        for body in piece:
            core.broker.timers.bodies.move(body)
    core.run_until_idle()
    core.broker.timers.service.queue.queue.raise_minimum(4)
    running = check._count
    for _ in range(2):
        check.step()
    assert check._count is not None
    assert check._count is not running
    core.run_steps()
    assert (check.done, check.mismatches) == (1, 0)
    assert core.broker.timers.state.pending == {topic_id(core): 4}


def test_a_timer_that_is_lost_during_a_count_is_counted_out(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_check, "_UNITS_A_STEP", 1)
    send_all(core, {"lost": MINUTE, "kept": HOUR})
    damage_body(core, "lost")
    core.broker.timers.check.start()
    for _ in range(2):
        core.broker.timers.check.step()
    core.clock.advance(MINUTE)
    while not core.broker.timers.service.lost:
        core.broker.timers.service.step()
    assert core.broker.timers.state.pending == {topic_id(core): 1}, "before any count"
    core.run_steps()
    assert (core.broker.timers.check.done, core.broker.timers.check.mismatches) == (1, 0)
    assert core.broker.timers.state.pending == {topic_id(core): 1}


@pytest.mark.parametrize("late", [False, True])
def test_a_lost_timer_is_counted_out_of_its_topic(late: bool) -> None:
    core = core_with_topic(settings=WITHOUT_TAIL)
    if late:
        send_all(core, {"first": HOUR})
        core.advance(HOUR)
        core.clock.step_wall(-HOUR)
    send_all(core, {"lost": MINUTE, "kept": 2 * HOUR})
    assert len(core.broker.timers.state.late) == late
    damage_body(core, "lost")
    core.advance(MINUTE)
    timers = core.broker.timers
    assert (timers.service.lost, timers.state.pending) == (1, {topic_id(core): 1})
    core.stop()
    core.start()
    assert core.broker.timers.state.pending == {topic_id(core): 1}
    assert count(core) == 0


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_mended_count_is_a_record_of_the_log(core: CoreBroker, snapshot: bool) -> None:
    """A start has it from there, whether its snapshot is from before or after."""
    send_all(core, {"A": HOUR, "B": HOUR})
    if snapshot:
        core.stop()
        core.start()
    check, right = core.broker.timers.check, {topic_id(core): 2}
    check.mend(TimerRecount(topic_id(core), 7))
    check.mend(TimerRecount(999, 1))
    core.run_until_idle()
    crash(core)
    assert core.broker.timers.state.pending == {topic_id(core): 7, 999: 1}
    assert count(core) == 2
    assert core.broker.timers.state.pending == right
    crash(core)
    assert core.broker.timers.state.pending == right
    assert count(core) == 0


def test_a_count_on_a_full_disk_is_told_and_mended_by_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = LyingDisk()
    store = replace(SMALL.store, segment_bytes=512 << 10, reserved_segments=1)
    core = core_with_topic(disk=disk, settings=replace(SMALL, store=store))
    send_all(core, {"A": HOUR})
    disk.capacity -= disk.space("")[0] - (400 << 10)  # no room for a segment
    check, guard = core.broker.timers.check, core.broker.store.guard
    while guard.copies_allowed:
        for _ in range(100):
            check.mend(TimerRecount(topic_id(core), 7))
        core.advance(2_000)
    end = core.broker.store.end
    assert count(core) == 1
    assert (core.broker.store.end, core.broker.timers.state.pending) == (end, {topic_id(core): 7})
    assert "counted wrongly" in caplog.text
    disk.capacity = 1 << 30
    core.advance(2_000)
    assert count(core) == 1
    assert core.broker.timers.state.pending == {topic_id(core): 1}


def test_a_replica_counts_nothing(core: CoreBroker) -> None:
    send_all(core, {"A": HOUR})
    core.broker.timers.service.firing = False
    core.broker.timers.check.start()
    core.run_steps()
    assert core.broker.timers.check.done == 0


def test_the_count_comes_once_in_its_hour_of_the_day_in_utc(core: CoreBroker) -> None:
    settings = SMALL.timer
    assert (settings.check_every_ms, settings.check_hour) == (45 * MINUTE, 5)
    assert settings.check_apart_ms == 70 * MINUTE
    check = core.broker.timers.check
    hours: list[int] = []
    for _ in range(3 * 24 * 12):
        before = check.done
        core.clock.advance(5 * MINUTE)
        core.run_steps()
        hours += [core.clock.wall_ms() // HOUR % 24] * (check.done - before)
    assert hours == [5, 5, 5]


def test_a_count_survives_a_crash_as_a_new_one(core: CoreBroker) -> None:
    core.settings = replace(SMALL, timer=replace(SMALL.timer, check_every_ms=1))
    send_all(core, {"A": HOUR})
    core.broker.timers.check.start()
    core.broker.timers.check.step()
    crash(core)
    core.run_steps()
    assert count(core) == 0
    core.advance(HOUR)
    assert received(core) == [b"A"]
    assert count(core) == 0
