"""Seeds of the timer's world: 0 early, 0 lost, 0 twice; and every planted mistake is found."""

from functools import partial

import pytest
import sim_seeds
from sim.planted_timers import PLANTED_TIMERS, PlantedTimer

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.simulator import run_one_crash_seed, run_overtaken_seed, run_timer_seed
from popmq.testing.timer_world.sometimes_states import TimerSometimes

FEWEST = 200  # in which every rare state is reached
HEAVY = 4_000  # seeds of a planted mistake; more are run by hand


def run(seeds: range) -> StateCounts:
    return sim_seeds.checked(run_timer_seed, seeds, TimerSometimes)


def test_no_timer_is_early_lost_or_twice() -> None:
    run(range(1, 31))


@pytest.mark.more
@pytest.mark.timeout(300)
def test_no_timer_is_early_lost_or_twice_and_every_rare_state_is_reached() -> None:
    assert not run(range(1, FEWEST + 1)).never


@pytest.mark.more
@pytest.mark.timeout(300)
def test_no_timer_is_early_lost_or_twice_in_the_seeds_of_the_day() -> None:
    sim_seeds.check_the_day(run_timer_seed, 200, TimerSometimes)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_timer_is_early_lost_or_twice_in_three_thousand_seeds() -> None:
    assert not run(range(100_000, 103_000)).never


@pytest.mark.parametrize("seeds", [10, pytest.param(60, marks=pytest.mark.more)])
def test_no_timer_is_lost_or_twice_when_its_files_overtake_the_log(seeds: int) -> None:
    for seed in range(1, seeds + 1):
        outcome = run_overtaken_seed(seed)
        assert not outcome.violations, outcome.history(40)


def test_a_segment_that_a_crash_left_short_is_read_to_its_end() -> None:
    """Its allocation was lost with a failed sync, while another segment is behind it."""
    outcome = run_timer_seed(201_123)
    assert not outcome.violations, outcome.history(40)


def test_a_timer_is_kept_whose_unit_was_damaged_after_it_had_rolled() -> None:
    """The wheel knew the lap to which it had rolled, and the checkpoint was older than both."""
    outcome = run_timer_seed(100_994)
    assert not outcome.violations, outcome.history(40)


@pytest.mark.more
def test_one_timer_seed_gives_one_trace_under_every_hash_seed() -> None:
    assert len(sim_seeds.digests_under_hash_seeds(run_timer_seed, range(1, 16))) == 1
    assert len(sim_seeds.digests_under_hash_seeds(run_one_crash_seed, range(1, 3))) == 1


@pytest.mark.more
def test_a_failed_timer_seed_names_the_command_that_replays_it() -> None:
    outcome = run_timer_seed(3)
    assert f"trace {outcome.digest}" in sim_seeds.replayed(outcome)


def marks(planted: PlantedTimer) -> list[pytest.MarkDecorator]:
    if not planted.rare:
        return [pytest.mark.more]
    by_hand = planted.seeds > HEAVY
    return [pytest.mark.long if by_hand else pytest.mark.heavy, pytest.mark.timeout(1_800)]


@pytest.mark.parametrize(
    "planted",
    [pytest.param(p, id=p.name, marks=marks(p)) for p in PLANTED_TIMERS],
)
def test_planted_mistake_of_timers_is_found(planted: PlantedTimer) -> None:
    breaks = partial(sim_seeds.breaks, planted.plant, lambda seed: planted.world(seed).run())
    seeds = planted.numbers(planted.seeds)
    result = sim_seeds.found_at("timers", planted.name, seeds, breaks)
    assert result, f"{planted.name}: not seen in {planted.seeds} seeds"
