"""A crash at every operation of the disk: what the timer's files lead to is never wrong."""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from timer.timer_rig import CHECKPOINT, SETTINGS, SLOT_MS, Rig

from popmq.broker.timer.timer_unit import TimerUnit
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk

LOSSES = (Loss.ALL, Loss.KEPT, Loss.TORN, Loss.SCATTERED, Loss.NOTHING)
EACH_LOSS = [
    pytest.param(loss, marks=[] if loss is Loss.SCATTERED else [pytest.mark.more])
    for loss in LOSSES
]
_SLOTS_IN_USE = 60


class Scenario:
    """Timers come, slots are over, segments go; `vouched` counts those that a flush kept."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(SimDisk(random.Random(seed)))
        self.vouched = 0
        self.add_some(100)
        self.flush()

    def add_some(self, count: int) -> None:
        first = self.rig.last_read_ms // SLOT_MS
        for _ in range(count):
            self.rig.add(first + self.rng.randrange(_SLOTS_IN_USE))

    def flush(self) -> None:
        count = len(self.rig.added)
        self.rig.flush()
        self.vouched = count

    def go_on(self) -> None:
        """All that a broker does with its timers."""
        rig = self.rig
        self.add_some(self.rng.randrange(1, 150))
        self.flush()
        for _ in range(25):
            rig.files.wheel.clear(rig.last_read_ms)
            rig.last_read_ms += SLOT_MS
        self.add_some(1300)  # some of it is written before the flush
        self.flush()
        rig.now_ms += SETTINGS.clean_ms
        rig.flush()
        self.add_some(3)
        self.flush()

    def live(self, units: list[TimerUnit]) -> list[TimerUnit]:
        return [unit for unit in units if unit.slot_time_ms >= self.rig.last_read_ms]

    def check(self) -> None:
        """A first part of the timers is there, with all that was vouched for; nothing else."""
        rig = self.rig
        assert not rig.files.rebuilt
        last = rig.files.last_unit
        assert last is not None
        count = last.position // 100 + 1
        assert count >= self.vouched
        assert rig.files.checkpoint.queue_offset <= count
        assert self.live(rig.found()) == self.live(rig.added[:count])
        del rig.added[count:]
        self.vouched = min(self.vouched, count)

    def check_and_go_on(self) -> None:
        """What a start found is whole, and what is flushed behind it outlives the next crash."""
        self.check()
        self.add_some(30)
        self.flush()
        self.rig.disk.crash(Loss.ALL)
        self.rig.start()
        self.check()


def cut(rig: Rig, operations: int, work: Callable[[], None]) -> bool:
    """Run `work` until the power goes at an operation; False if it came to its end."""
    rig.disk.faults.cut_at(operations)
    with suppress(PowerCut):
        work()
        rig.disk.faults.heal()
        return False
    return True


@pytest.mark.more
@pytest.mark.parametrize("loss", EACH_LOSS)
def test_a_crash_at_every_operation_loses_nothing_that_was_vouched_for(loss: Loss) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    operations, crashed = 0, True
    while crashed:
        scenario = Scenario(seed + operations)
        rig = scenario.rig
        crashed = cut(rig, operations, scenario.go_on)
        rig.disk.crash(loss)
        rig.start()
        scenario.check_and_go_on()
        operations += 1
    assert operations > 20


@pytest.mark.parametrize("loss", EACH_LOSS)
def test_a_crash_at_every_operation_of_a_start_after_a_crash(loss: Loss) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    operations, crashed = 0, True
    while crashed:
        scenario = Scenario(seed + operations)
        rig = scenario.rig
        cut(rig, scenario.rng.randrange(30), scenario.go_on)
        rig.disk.crash(loss)
        crashed = cut(rig, operations, rig.start)
        rig.disk.crash(scenario.rng.choice(LOSSES))
        rig.start()
        scenario.check_and_go_on()
        operations += 1
    assert operations > 3


@pytest.mark.parametrize("loss", EACH_LOSS)
def test_a_crash_at_every_operation_of_a_reset_finds_the_old_or_the_new_timers(
    loss: Loss,
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    operations, crashed = 0, True
    while crashed:
        scenario = Scenario(seed + operations)
        rig, old = scenario.rig, scenario.rig.added
        rig.files.reset()
        rig.added = []

        def go_on(scenario: Scenario = scenario) -> None:
            scenario.add_some(1400)
            scenario.flush()

        crashed = cut(rig, operations, go_on)
        rig.disk.crash(loss)
        rig.start()
        result = rig.found()
        is_old = result == old and rig.files.checkpoint.queue_offset == len(old)
        is_new = result == rig.added[: len(result)]
        is_new &= rig.files.checkpoint.queue_offset <= len(result)
        assert is_old if not is_new else not is_old
        operations += 1
    assert operations > 8


@pytest.mark.parametrize("damaged_at", [20, 2048 + 20], ids=["first copy", "second copy"])
def test_a_checkpoint_of_before_a_reset_vouches_for_nothing_behind_it(damaged_at: int) -> None:
    """Seed 6200032 with a slave: the newest copy was damaged, and the one before it said that all
    was in the files, which had just been begun anew."""
    operations, crashed = 0, True
    while crashed:
        scenario = Scenario(operations)
        rig, old = scenario.rig, scenario.rig.added
        rig.files.reset()
        rig.added = []

        def go_on(scenario: Scenario = scenario) -> None:
            scenario.add_some(50)
            scenario.flush()

        crashed = cut(rig, operations, go_on)
        rig.disk.crash(Loss.NOTHING)
        rig.flip(CHECKPOINT, damaged_at)
        rig.start()
        result = rig.found()
        assert result == old or result == rig.added[: len(result)]
        assert rig.files.checkpoint.queue_offset <= len(result)
        operations += 1
    assert operations > 8
