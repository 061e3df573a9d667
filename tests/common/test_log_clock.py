"""Log time of one process: what a slave makes of the log times that its master sends."""

import random

import pytest

from popmq.common.clock import SAMPLES_MS, LogClock
from popmq.testing.harness.clock import MachineClock, ManualClock

HOUR = 3_600_000


def pair(*, ahead_ms: int = 100 * HOUR) -> tuple[ManualClock, LogClock, LogClock]:
    """Time, and the log clocks of a master and of a slave on another machine."""
    time = ManualClock()
    master = LogClock(time)
    master.start(5_000, epoch=1)
    machine = MachineClock(time, wall_ahead_ms=ahead_ms, boot_ahead_ms=77_000_000)
    return time, master, LogClock(machine)


@pytest.mark.parametrize("seed", range(5))
def test_a_slaves_log_time_is_never_ahead_of_its_masters_and_behind_by_one_delay(seed: int) -> None:
    rng = random.Random(seed)
    time, master, slave = pair()
    least_ms = 1 << 40
    for _ in range(200):
        sent, delay_ms = master.now_ms(), rng.randrange(200)
        time.advance(delay_ms)
        slave.sample(sent, epoch=1)
        least_ms = min(least_ms, delay_ms)
        behind_ms = master.now_ms() - slave.now_ms()
        assert 0 <= behind_ms <= delay_ms, seed
        time.advance(rng.randrange(500))
    time.advance(HOUR)  # idle: the time since boot goes on
    assert 0 <= master.now_ms() - slave.now_ms() < 200


def test_an_old_record_that_arrives_late_does_not_turn_log_time_back() -> None:
    time, master, slave = pair()
    slave.sample(master.now_ms(), epoch=1)
    time.advance(1_000)
    slave.sample(master.now_ms() - HOUR, epoch=1)
    assert slave.now_ms() == master.now_ms()


def test_samples_are_forgotten_so_that_clocks_of_different_rates_do_not_part() -> None:
    time, master, slave = pair()
    drift_ms = 0
    for _ in range(1_000):  # this master's clock loses 1 ms in a second
        drift_ms += 1
        slave.sample(master.now_ms() - drift_ms, epoch=1)
        time.advance(1_000)
    ahead_ms = slave.now_ms() - (master.now_ms() - drift_ms)
    assert 0 <= ahead_ms <= 2 * SAMPLES_MS // 1_000 + 1


def test_the_next_master_may_be_at_an_earlier_log_time() -> None:
    time, master, slave = pair()
    slave.sample(master.now_ms(), epoch=1)
    next_ms = master.now_ms() - 30_000  # of a cold start that counted less
    slave.sample(next_ms, epoch=2)
    assert slave.now_ms() == next_ms
    time.advance(10)
    assert slave.now_ms() == next_ms + 10


def test_a_master_that_was_deposed_still_knows_its_log_time() -> None:
    time, master, _ = pair()
    time.advance(HOUR)
    assert master.known
    assert master.now_ms() == 5_000 + HOUR
    master.sample(5_000 + HOUR - 20, epoch=2)
    assert master.now_ms() == 5_000 + HOUR - 20
