"""The simulated machine: how long a broker may be busy."""

import random

import pytest

from popmq.common.settings.settings import MessageSettings, Settings, StoreSettings, TimerSettings
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.oracle.client_history import ResourceIncarnation
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.timer_world.clients import TimerClients
from popmq.testing.timer_world.oracle import TimerOracle
from popmq.testing.timer_world.sometimes_states import TimerSometimes

HOUR_MS = 3_600_000
FEW = 40  # steps


def machine_with_timers(ahead: list[int]) -> SimulatedBroker:
    """A wheel of a minute, a timer a step; and timers that are due so many ms ahead."""
    settings = Settings(
        store=StoreSettings(segment_bytes=64 << 10, reserved_segments=1),
        message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
        timer=TimerSettings(wheel_slots=60, slot_ms=1_000, log_segment_bytes=4 << 10),
    )
    rng, tally = random.Random(1), StateCounts(TimerSometimes)
    machine, oracle = SimulatedBroker(settings, rng, tally), TimerOracle()
    machine.start()
    oracle.watch(machine)
    clients = TimerClients(machine, oracle, rng, tally, lambda line: None)
    clients.make_topic("d", 1, fifo=True)
    machine.run_until_idle()
    topic = clients.topics["d"]
    assert isinstance(topic, ResourceIncarnation)
    clients.send_delayed(topic, [(-number, 0) for number in ahead])
    service = machine.broker.timers.service
    service.enqueue_limit = service.load_limit = service.fire_limit = 1
    machine.run_steps()
    assert machine.broker.timers.state.pending_total == len(ahead)
    return machine


def test_a_wheel_that_is_hours_behind_may_be_busy_for_as_long_as_it_turns() -> None:
    machine = machine_with_timers([3 * HOUR_MS - 1_000 * at for at in range(10)])
    machine.busy_limit = FEW
    machine.advance(3 * HOUR_MS)
    machine.run_steps()
    assert machine.broker.timers.service.enqueue.rolled > 10 * FEW
    assert machine.broker.timers.state.pending_total == 0


def test_a_step_that_always_finds_work_is_a_mistake() -> None:
    machine = machine_with_timers([])
    machine.busy_limit = FEW
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.broker.timers, "step", lambda: 1)
        with pytest.raises(AssertionError, match="busy 40 times in a row"):
            machine.run_steps()
