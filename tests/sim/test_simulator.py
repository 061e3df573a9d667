"""Seeds of the simulator: every promise holds in each, and the rare states are reached."""

import os
import subprocess
import sys
import time

import pytest
import sim_seeds

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.seed_runs import outcomes
from popmq.testing.simulator import run_seed

FEWEST = 300  # in which every rare state is reached


def run(seeds: range, *, processes: int = 1) -> StateCounts:
    """Stops at the first failure."""
    tally, began = StateCounts(), time.monotonic()
    for outcome in outcomes(run_seed, seeds, processes=processes):
        assert not outcome.violations, outcome.history(40)
        tally.add(outcome.tally)
    a_second = len(seeds) / (time.monotonic() - began)
    print(f"{len(seeds)} seeds, {a_second:.0f} a second\n{tally.table()}")
    return tally


def test_every_promise_holds() -> None:
    run(range(1, 16))


@pytest.mark.more
@pytest.mark.timeout(300)
def test_every_promise_holds_and_every_rare_state_is_reached() -> None:
    assert not run(range(1, FEWEST + 1)).never


@pytest.mark.more
@pytest.mark.timeout(600)
def test_every_promise_holds_in_the_seeds_of_the_day() -> None:
    run(sim_seeds.of_the_day(250))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_promise_holds_in_five_thousand_seeds() -> None:
    assert not run(range(100_000, 105_000), processes=os.cpu_count() or 1).never


@pytest.mark.more
def test_one_seed_gives_one_trace_under_every_hash_seed() -> None:
    code = (
        "import logging; logging.disable()\n"
        "from popmq.testing.simulator import run_seed\n"
        "print(*(run_seed(seed).digest for seed in range(1, 13)))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "77")
    }
    assert len(digests) == 1


@pytest.mark.more
def test_seeds_on_two_cores_give_what_they_give_on_one() -> None:
    seeds = range(1, 25)
    one, two = (
        [outcome.tally.counts for outcome in outcomes(run_seed, seeds, processes=processes)]
        for processes in (1, 2)
    )
    assert len(one) == len(seeds)
    assert one == two


def test_a_failed_seed_names_the_command_that_replays_it() -> None:
    outcome = run_seed(3)
    command = outcome.history().rpartition("replay: ")[2].split()
    assert command[0] == ".venv/bin/python"
    done = subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, check=False
    )
    assert "create_topic t0" in done.stdout
    assert "seed 3: " in done.stdout
