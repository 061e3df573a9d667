"""`timer.slot_limit` counts the timers whose units stand in another slot than the one in which they
are due, through starts and for as long as they wait."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from timer.timer_client import HOUR, MINUTE, SECOND, crash, recall

from popmq.broker.node.timer_metrics import timer_metrics
from popmq.broker.timer import rolling_timers as far_timers
from popmq.broker.timer import timer_admission
from popmq.broker.timer.timer_unit import TimerDamaged
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PutEntry,
    PutRequest,
    PutResult,
    RecallResult,
)
from popmq.common.topics import MessageType
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.harness.core_broker import SMALL, CoreBroker

LIMIT = 3
LIMITED = replace(SMALL, timer=replace(SMALL.timer, slot_limit=LIMIT))  # of a wheel of an hour


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker(settings=LIMITED)
    broker.topic("orders", queues=1, type=MessageType.MIXED)
    broker.group("g")
    broker.run_steps()
    return broker


def put(core: CoreBroker, due_ms: int, name: str = "") -> PutResult:
    properties = SystemProperties(message_id=name).SerializeToString()
    entry = PutEntry(MessageType.DELAY, b"x", properties, 0, 0, due_ms, name)
    (result,) = hop.decode_put_reply(
        core.reply(Kind.PUT, hop.encode_put(PutRequest("orders", [entry])))
    )
    return result


def takes(core: CoreBroker, due_ms: int) -> bool:
    """Whether another timer is taken, which then waits too."""
    result = put(core, due_ms)
    assert result.code in (Code.OK, Code.TOO_MANY_REQUESTS)
    assert result.code == Code.OK or "(timer.slot_limit): choose another time" in result.message
    return result.code == Code.OK


def in_hours(core: CoreBroker, hours: int) -> int:
    now_ms = core.clock.wall_ms()
    return now_ms - now_ms % SECOND + hours * HOUR


def forget_counts(core: CoreBroker) -> None:
    """As when 1,024 other slots came up."""
    core.broker.timers.admission._counts.clear()


@pytest.mark.parametrize("hours", [0, 2, 4])
@pytest.mark.parametrize("cleanly", [False, True])
def test_a_full_slot_beyond_the_window_is_full_after_a_start_too(
    core: CoreBroker, hours: int, cleanly: bool
) -> None:
    due_ms = in_hours(core, 5)
    for _ in range(LIMIT):
        assert takes(core, due_ms)
    assert not takes(core, due_ms + 999)
    core.advance(hours * HOUR + MINUTE)
    if cleanly:
        core.stop()
        core.start()
    else:
        crash(core)
    core.run_steps()
    assert not takes(core, due_ms)
    assert takes(core, due_ms + SECOND)


def test_a_timer_that_rolls_is_counted_once_wherever_its_unit_stands(core: CoreBroker) -> None:
    due_ms = in_hours(core, 5)
    for _ in range(LIMIT - 1):
        assert takes(core, due_ms)
    for _ in range(9):
        core.advance(HOUR // 2)
        forget_counts(core)
        assert core.broker.timers.admission._counted(due_ms).total() == LIMIT - 1
    assert takes(core, due_ms)
    assert not takes(core, due_ms)
    assert core.broker.timers.service.enqueue.far.due_in(due_ms) == {}  # they stand in their slot


def test_a_timer_that_was_recalled_counts_until_its_unit_is_met(core: CoreBroker) -> None:
    due_ms = in_hours(core, 5)
    for name in ("A", "B", "C"):
        assert put(core, due_ms, name).code == Code.OK
    core.run_steps()
    assert recall(core, "B") is RecallResult.DONE
    forget_counts(core)
    assert not takes(core, due_ms)
    core.advance(2 * HOUR)
    crash(core)
    core.run_steps()
    assert takes(core, due_ms)
    assert not takes(core, due_ms)


def test_while_far_timers_are_counted_no_more_of_them_are_taken(core: CoreBroker) -> None:
    due_ms = in_hours(core, 5)
    assert takes(core, due_ms)
    core.run_steps()
    crash(core)
    refused = put(core, due_ms)
    assert refused.code == Code.TOO_MANY_REQUESTS
    assert "counted since the start (timer.slot_limit): try again" in refused.message
    assert takes(core, in_hours(core, 0) + 2 * MINUTE)
    core.run_steps()
    assert [takes(core, due_ms) for _ in range(LIMIT)] == [True, True, False]


def test_what_was_counted_before_all_far_timers_were_is_counted_again(core: CoreBroker) -> None:
    due_ms = in_hours(core, 5)
    for _ in range(LIMIT - 1):
        assert takes(core, due_ms)
    core.advance(4 * HOUR + 5 * MINUTE)  # within the window, and their units roll
    crash(core)
    assert takes(core, due_ms)
    core.run_steps()
    assert not takes(core, due_ms)


def test_far_timers_are_counted_in_pieces(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_timers, "_UNITS_A_STEP", 10)
    due_ms = in_hours(core, 5)
    for number in range(200):
        assert takes(core, due_ms + number // LIMIT * SECOND)
    core.advance(3 * SECOND)  # they are in the files
    crash(core)
    steps = 0
    while not core.broker.timers.service.enqueue.far.complete:
        core.broker.step()
        steps += 1
    assert steps > 5
    assert not takes(core, due_ms)


def test_a_wheel_that_is_made_anew_is_counted_again(core: CoreBroker) -> None:
    due_ms = in_hours(core, 5)
    for _ in range(LIMIT):
        assert takes(core, due_ms)
    core.run_steps()
    core.broker.timers.service.rebuild(TimerDamaged("a unit is not what was written"))
    core.run_steps()
    forget_counts(core)
    assert not takes(core, due_ms)


def test_more_far_timers_than_the_bound_are_forgotten_by_slot(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_timers, "_LIMIT", 2 * LIMIT)
    due_ms = in_hours(core, 5)
    for slot in range(3):
        for _ in range(LIMIT):
            assert takes(core, due_ms + slot * SECOND)
        core.run_steps()
    named = {timer_metric.name: timer_metric.value for timer_metric in timer_metrics(core.broker)}
    assert named["timer_far_held"] == 2 * LIMIT
    assert named["timer_far_forgotten"] == LIMIT
    forget_counts(core)
    assert [takes(core, due_ms + slot * SECOND) for slot in (2, 1, 0)] == [False, False, True]


def test_without_a_limit_nothing_is_kept() -> None:
    core = CoreBroker()
    core.topic("orders", queues=1, type=MessageType.MIXED)
    due_ms = in_hours(core, 5)
    for _ in range(LIMIT + 1):
        assert takes(core, due_ms)
    core.run_steps()
    assert core.broker.timers.service.enqueue.far.due_in(due_ms) == {}


@pytest.mark.parametrize("seed", range(12))
def test_no_slot_takes_more_or_fewer_than_its_limit_whatever_happens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(timer_admission, "_COUNTED_SLOTS", 2)
    core = CoreBroker(settings=LIMITED)
    core.topic("orders", queues=1, type=MessageType.MIXED)
    first_ms = in_hours(core, 0)
    waiting: Counter[int] = Counter()
    for _ in range(150):
        match dice.randrange(12):
            case 0:
                core.advance(dice.choice([SECOND, MINUTE, 7 * MINUTE, HOUR]))
            case 1:
                crash(core)
                core.run_steps()
            case 2:
                core.run_steps()
            case _:
                due_ms = first_ms + dice.randrange(1, 40) * 10 * MINUTE + dice.randrange(SECOND)
                if (
                    due_ms > core.clock.wall_ms() + MINUTE
                    and core.broker.timers.service.enqueue.far.complete
                ):
                    slot = due_ms // SECOND
                    assert takes(core, due_ms) is (waiting[slot] < LIMIT), f"seed {seed}"
                    waiting[slot] = min(LIMIT, waiting[slot] + 1)
