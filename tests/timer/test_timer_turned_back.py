"""A wall clock that was far ahead once: the wheel comes back with it, and nothing else changes."""

from dataclasses import replace

import pytest
from timer.timer_client import HOUR, MINUTE, SECOND, core_with_topic, crash, received, send

from popmq.testing.harness.core_broker import SMALL, CoreBroker

DAY = 24 * HOUR

WHEEL_MS = SMALL.timer.wheel_slots * SMALL.timer.slot_ms


def spread_over_slots(core: CoreBroker) -> int:
    """In how many slots there is something."""
    now_ms = core.clock.wall_ms()
    return len(list(core.broker.timers.files.wheel.occupied(now_ms, now_ms + WHEEL_MS)))


def in_memory(core: CoreBroker) -> int:
    return len(core.broker.timers.service.due._heap)


def was_ahead() -> tuple[CoreBroker, int]:
    """The clock was a month ahead, and is right again; `waits` is due in a year."""
    core = core_with_topic()
    now_ms = core.clock.wall_ms()
    send(core, "waits", now_ms + 366 * DAY)
    core.run_steps()
    core.clock.step_wall(30 * DAY)
    core.advance(2 * SECOND)
    core.clock.step_wall(-30 * DAY)
    return core, now_ms


@pytest.mark.parametrize(
    "how",
    ["crashed", *(pytest.param(how, marks=pytest.mark.more) for how in ("running", "stopped"))],
)
def test_timers_are_in_their_slots_and_not_in_memory_after_the_clock_came_back(how: str) -> None:
    core, now_ms = was_ahead()
    if how == "stopped":
        core.stop()
        core.start()
    elif how == "crashed":
        crash(core)
    core.run_steps()
    for minute in range(10, 40):
        send(core, f"T{minute}", now_ms + minute * MINUTE)
    core.run_steps()
    assert core.broker.timers.service.turned_back == 1
    assert (in_memory(core), spread_over_slots(core)) == (0, 31), "each, and one on its way"
    if how != "running":
        core.advance(2 * SECOND)  # it is on the disk
        crash(core)
        core.run_steps()
        assert core.broker.timers.service.turned_back == 0
        assert (in_memory(core), spread_over_slots(core)) == (0, 31)
    for minute in range(10, 40):
        core.advance(now_ms + minute * MINUTE - 1 - core.clock.wall_ms())
        assert received(core) == []
        core.advance(1)
        assert received(core) == [b"T%d" % minute]
    core.advance(now_ms + 366 * DAY - 1 - core.clock.wall_ms())
    assert received(core) == []
    core.advance(1)
    assert received(core) == [b"waits"]


def test_a_crash_before_the_turned_wheel_is_on_the_disk_turns_it_again() -> None:
    core, now_ms = was_ahead()
    send(core, "T", now_ms + HOUR)
    service = core.broker.timers.service
    while not service.turned_back:
        service.step()
    crash(core)
    core.run_steps()
    assert core.broker.timers.service.turned_back == 1
    core.advance(now_ms + HOUR - core.clock.wall_ms())
    assert received(core) == [b"T"]


def test_what_fired_while_the_clock_was_ahead_does_not_fire_again() -> None:
    core = core_with_topic()
    now_ms = core.clock.wall_ms()
    for name, ahead_ms in (("A", HOUR), ("B", 2 * HOUR), ("late", 3 * HOUR)):
        send(core, name, now_ms + ahead_ms)
    core.run_steps()
    core.clock.step_wall(2 * HOUR)
    core.advance(SECOND)
    assert received(core) == [b"A", b"B"]
    core.clock.step_wall(-2 * HOUR)
    send(core, "new", now_ms + HOUR)
    core.run_steps()
    assert core.broker.timers.service.turned_back == 1
    core.advance(HOUR)
    assert received(core) == [b"new"]
    core.advance(3 * HOUR)
    assert received(core) == [b"late"]


def test_a_small_step_back_leaves_the_wheel_where_it_is() -> None:
    core = core_with_topic()
    now_ms = core.clock.wall_ms()
    core.advance(HOUR)
    core.clock.step_wall(-9 * MINUTE)
    send(core, "T", now_ms + 55 * MINUTE)
    core.run_steps()
    assert core.broker.timers.service.turned_back == 0
    core.advance(4 * MINUTE)
    assert received(core) == [b"T"]


def test_segments_of_the_turned_wheel_are_kept_until_its_checkpoint_is_written() -> None:
    """The former checkpoint says of all their slots that they are over."""
    timer = replace(SMALL.timer, log_segment_bytes=4 << 10, flush_ms=60_000, clean_ms=1)
    core = core_with_topic(settings=replace(SMALL, timer=timer))
    now_ms = core.clock.wall_ms()
    core.clock.step_wall(30 * DAY)
    core.advance(2 * MINUTE)
    core.clock.step_wall(-30 * DAY)
    for number in range(400):
        send(core, f"T{number}", now_ms + HOUR)
    core.run_steps()
    core.advance(HOUR + MINUTE)
    assert core.broker.timers.service.turned_back == 1
    assert core.broker.timers.service.rebuilds == 0
    assert len(received(core)) == 32
    assert core.broker.timers.service.fired == 400
