"""The light replicas' world: no rule of replication breaks, and each broken rule is seen."""

import os
import subprocess
import sys
from functools import partial

import pytest
import sim_seeds
from cluster.planted_model import PLANTED, PlantedModel

from popmq.testing.cluster_world.sometimes_states import ModelSometimes, NetSometimes
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.model.run import run_model_seed


def run(seeds: range) -> StateCounts:
    tally = StateCounts(ModelSometimes, NetSometimes)
    for seed in seeds:
        outcome = run_model_seed(seed)
        assert not outcome.violations, outcome.history(40)
        tally.add(outcome.tally)
    print(f"{len(seeds)} seeds\n{tally.table()}")
    return tally


@pytest.mark.parametrize("seeds", [5, pytest.param(60, marks=pytest.mark.more)])
@pytest.mark.timeout(300)
def test_nothing_that_was_confirmed_is_lost_or_replaced(seeds: int) -> None:
    run(range(1, seeds + 1))


@pytest.mark.more
@pytest.mark.timeout(300)
def test_nothing_is_lost_in_the_seeds_of_the_day() -> None:
    run(sim_seeds.of_the_day(40))


@pytest.mark.more
@pytest.mark.timeout(300)
def test_nothing_is_lost_and_every_rare_state_is_reached() -> None:
    assert not run(range(10_000, 10_120)).never


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_nothing_is_lost_in_five_thousand_seeds() -> None:
    run(range(100_000, 105_000))


def breaks(planted: PlantedModel, seed: int) -> bool:
    """Whether the run is broken by the mistake and whole without it."""
    with pytest.MonkeyPatch.context() as patch:
        planted.plant(patch)
        broken = bool(run_model_seed(seed).violations)
    return broken and not run_model_seed(seed).violations


QUICK, HEAVY = 8, 200  # seeds


def marks(planted: PlantedModel) -> list[pytest.MarkDecorator]:
    """Rare ones are looked for by hand."""
    if planted.seeds <= QUICK:
        return [pytest.mark.more]
    return [pytest.mark.heavy if planted.seeds <= HEAVY else pytest.mark.long]


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "planted", [pytest.param(one, id=one.name, marks=marks(one)) for one in PLANTED]
)
def test_an_unsafe_variant_is_found(planted: PlantedModel) -> None:
    seeds = range(1, planted.seeds + 1)
    found = sim_seeds.found_at("light", planted.name, seeds, partial(breaks, planted))
    assert found, f"{planted.name}: not seen in {planted.seeds} seeds"


@pytest.mark.more
def test_one_seed_gives_one_trace_under_every_hash_seed() -> None:
    code = (
        "import logging; logging.disable()\n"
        "from popmq.testing.model.run import run_model_seed\n"
        "print(*(run_model_seed(seed).digest for seed in range(1, 7)))"
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
    command = run_model_seed(3).history().rpartition("replay: ")[2].split()
    assert command[0] == ".venv/bin/python"
    done = subprocess.run(
        [sys.executable, *command[1:]], capture_output=True, text=True, check=False
    )
    assert "master of epoch 1" in done.stdout
    assert "seed 3: " in done.stdout
