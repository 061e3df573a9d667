"""Seeds of the simulated cluster: every promise holds in each, and the rare states are reached."""

import os
import subprocess
import sys
from functools import partial

import pytest
import sim_seeds
from cluster.planted_cluster import PLANTED, PlantedCluster

from popmq.testing.cluster_world.run import run_cluster_seed
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes, NetSometimes
from popmq.testing.harness.sometimes import StateCounts


def run(first: int, seeds: int) -> StateCounts:
    tally = StateCounts(ClusterSometimes, NetSometimes)
    for seed in range(first, first + seeds):
        outcome = run_cluster_seed(seed)
        assert not outcome.violations, outcome.history(60)
        tally.add(outcome.tally)
    print(f"{seeds} seeds\n{tally.table()}")
    return tally


def test_every_promise_holds() -> None:
    run(1, 1)


# Not yet seeds of the day (sim_seeds.py): seed 267 breaks the rule for deliveries of a push group
# over a change of masters, an open issue, and others that nobody ran may do so too.
@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_every_promise_holds_in_sixty_seeds_and_every_rare_state_is_reached() -> None:
    assert not run(1, 60).never


@pytest.mark.long
@pytest.mark.timeout(7_200)
def test_every_promise_holds_in_five_hundred_seeds() -> None:
    assert not run(20_000, 500).never


def breaks(planted: PlantedCluster, seed: int) -> bool:
    """Whether the run is broken by the mistake and whole without it."""
    with pytest.MonkeyPatch.context() as patch:
        planted.plant(patch)
        broken = bool(run_cluster_seed(seed).violations)
    return broken and not run_cluster_seed(seed).violations


@pytest.mark.heavy
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("planted", PLANTED, ids=[one.name for one in PLANTED])
def test_a_planted_mistake_is_found(planted: PlantedCluster) -> None:
    seeds = range(planted.first, planted.first + planted.seeds)
    found = sim_seeds.found_at("cluster", planted.name, seeds, partial(breaks, planted))
    assert found, f"{planted.name}: not seen in {planted.seeds} seeds"


@pytest.mark.more
def test_one_seed_gives_one_trace_under_every_hash_seed() -> None:
    code = (
        "import logging; logging.disable()\n"
        "from popmq.testing.cluster_world.run import run_cluster_seed\n"
        "print(*(run_cluster_seed(seed).digest for seed in (1, 2)))"
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
def test_a_failed_seed_names_the_command_that_replays_it() -> None:
    command = run_cluster_seed(3).history().rpartition("replay: ")[2].split()
    assert command[0] == ".venv/bin/python"
    done = subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, check=False
    )
    assert "leads epoch 1" in done.stdout
    assert "seed 3: " in done.stdout
