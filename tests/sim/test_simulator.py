"""Seeds of the simulator: every promise holds in each, and the rare states are reached."""

import os

import pytest
import sim_seeds

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.seed_runs import outcomes
from popmq.testing.simulator import run_seed

FEWEST = 300  # in which every rare state is reached


def run(seeds: range, *, processes: int = 1) -> StateCounts:
    return sim_seeds.checked(run_seed, seeds, processes=processes)


def test_every_promise_holds() -> None:
    run(range(1, 16))


@pytest.mark.more
@pytest.mark.timeout(1_200)
def test_every_promise_holds_and_every_rare_state_is_reached() -> None:
    assert not run(range(1, FEWEST + 1)).never


@pytest.mark.more
@pytest.mark.timeout(600)
def test_every_promise_holds_in_the_seeds_of_the_day() -> None:
    sim_seeds.check_the_day(run_seed, 250)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_promise_holds_in_five_thousand_seeds() -> None:
    assert not run(range(100_000, 105_000), processes=os.cpu_count() or 1).never


@pytest.mark.more
def test_one_seed_gives_one_trace_under_every_hash_seed() -> None:
    assert len(sim_seeds.digests_under_hash_seeds(run_seed, range(1, 13))) == 1


@pytest.mark.more
def test_seeds_on_two_cores_give_what_they_give_on_one() -> None:
    seeds = range(1, 25)
    counts, two = (
        [outcome.tally.counts for outcome in outcomes(run_seed, seeds, processes=processes)]
        for processes in (1, 2)
    )
    assert len(counts) == len(seeds)
    assert counts == two


def test_a_failed_seed_names_the_command_that_replays_it() -> None:
    replayed = sim_seeds.replayed(run_seed(3))
    assert "create_topic t0" in replayed
    assert "seed 3: " in replayed
