"""A broker that has nothing to do steps rarely, and is never late because of it."""

import asyncio
from dataclasses import replace

import pytest

from popmq.broker.node.pacing import BUSY_MS, QUIET_MS, REST_MS, Pacing
from popmq.common.disk import ColdRead
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PopRequest,
    PutEntry,
    PutRequest,
    encode_pop,
    encode_put,
)
from popmq.common.settings.settings import TimerSettings
from popmq.common.step_loop import StepLoop
from popmq.common.topics import MessageType
from popmq.testing.harness.core_broker import SMALL, CoreBroker


def quiet(core: CoreBroker) -> Pacing:
    """Its log has not grown for long enough."""
    rest = Pacing(core.broker, core.clock)
    core.run_steps()
    rest.wait_ms()
    core.advance(QUIET_MS)
    return rest


def poll(core: CoreBroker, poll_ms: int, invisible_ms: int = 10_000) -> None:
    request = PopRequest("orders", "g", "c", 32, invisible_ms, poll_ms)
    core.ask(Kind.POP, encode_pop(request))


def test_a_broker_whose_log_does_not_grow_rests(core: CoreBroker) -> None:
    rest = Pacing(core.broker, core.clock)
    core.run_steps()
    assert rest.wait_ms() == BUSY_MS
    core.advance(QUIET_MS - 1)
    assert rest.wait_ms() == BUSY_MS
    core.advance(1)
    assert rest.wait_ms() == REST_MS


def test_a_record_ends_the_rest(core: CoreBroker) -> None:
    rest = quiet(core)
    core.send("orders", b"one")
    assert rest.wait_ms() == BUSY_MS


def test_a_receive_that_waits_is_answered_in_time(core: CoreBroker) -> None:
    rest = quiet(core)
    poll(core, 30)
    assert rest.wait_ms() == 30
    core.advance(28)
    assert rest.wait_ms() == BUSY_MS


def test_a_delivery_comes_back_in_time(core: CoreBroker) -> None:
    core.send("orders", b"one")
    rest = quiet(core)
    poll(core, 0, invisible_ms=QUIET_MS + 20 * REST_MS)
    rest.wait_ms()
    core.advance(QUIET_MS)
    assert rest.wait_ms() == REST_MS
    left_ms = core.broker.table.due_times.next_ms(core.broker.store.log_ms(), 1 << 40)
    core.advance(left_ms - 20)
    assert rest.wait_ms() == 20


def far_timer(core: CoreBroker, due_ms: int) -> None:
    core.topic("later", type=MessageType.DELAY)
    entry = PutEntry(MessageType.DELAY, b"one", b"", due_ms=due_ms)
    core.ask(Kind.PUT, encode_put(PutRequest("later", [entry])))


@pytest.mark.parametrize("early_ms", [0, 1, 700])
def test_a_timer_lets_the_broker_rest_and_fires_in_time(early_ms: int) -> None:
    """Due at the end of a slot, just before it, and within one."""
    core = CoreBroker(settings=replace(SMALL, timer=TimerSettings(wheel_slots=3_600)))
    now_ms = core.clock.wall_ms()
    due_ms = now_ms - now_ms % 1_000 + 600_000 - early_ms
    far_timer(core, due_ms)
    service, rest = core.broker.timers.service, quiet(core)
    rounds = 0
    while not service.fired:
        core.clock.advance(rest.wait_ms())
        core.run_steps()
        rounds += 1
        assert core.clock.wall_ms() <= due_ms + BUSY_MS
    assert core.clock.wall_ms() >= due_ms
    assert rounds <= 600_000 / REST_MS + 10


def test_timers_of_whose_loading_something_is_cold_keep_the_broker_awake(
    core: CoreBroker,
) -> None:
    rest = quiet(core)
    assert rest.wait_ms() == REST_MS

    def cold() -> int:
        raise ColdRead(lambda: None)

    core.broker.timers.service.cold.run("load", cold)
    assert rest.wait_ms() == BUSY_MS
    core.run_until_idle()
    assert rest.wait_ms() == REST_MS


async def test_a_loop_that_rests_is_woken_and_one_that_only_idles_is_not() -> None:
    waits = [3_600_000, 1, 3_600_000]
    steps: list[int] = []

    stepped = asyncio.Event()

    def step() -> int:
        steps.append(len(steps))
        stepped.set()
        return 0

    async def next_step() -> None:
        stepped.clear()
        await stepped.wait()

    loop = StepLoop(step, lambda: waits[len(steps) - 1], idle_ms=1)
    loop.wake()  # before it runs: nothing to wake
    task = asyncio.create_task(loop.run())
    await next_step()
    await asyncio.sleep(0)
    loop.wake()
    loop.wake()  # twice is once
    await next_step()
    await next_step()  # the idle wait ended by itself
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert steps == [0, 1, 2]


async def test_a_loop_goes_on_at_once_while_there_is_work() -> None:
    left = [1, 1, 1, 0]

    done = asyncio.Event()

    def step() -> int:
        if len(left) == 1:
            done.set()
        return left.pop(0)

    loop = StepLoop(step, lambda: 3_600_000, idle_ms=1)
    task = asyncio.create_task(loop.run())
    await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert left == []
