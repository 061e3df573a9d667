"""The light replicas' world: no rule of replication breaks, and each broken rule is seen."""

from functools import partial

import pytest
import sim_seeds
from cluster.planted_model import PLANTED, PlantedModel

from popmq.testing.cluster_world.sometimes_states import ModelSometimes, NetSometimes
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.model.run import run_model_seed


def run(seeds: range) -> StateCounts:
    return sim_seeds.checked(run_model_seed, seeds, ModelSometimes, NetSometimes)


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


QUICK, HEAVY = 8, 200  # seeds


def marks(planted: PlantedModel) -> list[pytest.MarkDecorator]:
    """Rare ones are looked for by hand."""
    if planted.seeds <= QUICK:
        return [pytest.mark.more]
    return [pytest.mark.heavy if planted.seeds <= HEAVY else pytest.mark.long]


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize(
    "planted", [pytest.param(item, id=item.name, marks=marks(item)) for item in PLANTED]
)
def test_an_unsafe_variant_is_found(planted: PlantedModel) -> None:
    seeds = range(1, planted.seeds + 1)
    result = sim_seeds.found_at(
        "light", planted.name, seeds, partial(sim_seeds.breaks, planted.plant, run_model_seed)
    )
    assert result, f"{planted.name}: not seen in {planted.seeds} seeds"


@pytest.mark.more
def test_one_seed_gives_one_trace_under_every_hash_seed() -> None:
    assert len(sim_seeds.digests_under_hash_seeds(run_model_seed, range(1, 7))) == 1


@pytest.mark.more
def test_a_failed_seed_names_the_command_that_replays_it() -> None:
    replayed = sim_seeds.replayed(run_model_seed(3))
    assert "master of epoch 1" in replayed
    assert "seed 3: " in replayed
