"""Seeds of the simulated cluster: every promise holds in each, and the rare states are reached."""

from functools import partial

import pytest
import sim_seeds
from cluster.planted_cluster import PLANTED, PlantedCluster

from popmq.testing.cluster_world.run import run_cluster_seed
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes, NetSometimes
from popmq.testing.cluster_world.timeline import MOVING_SEEDS
from popmq.testing.harness.sometimes import StateCounts


def run(seeds: range) -> StateCounts:
    return sim_seeds.checked(run_cluster_seed, seeds, ClusterSometimes, NetSometimes, lines=60)


def test_every_promise_holds() -> None:
    run(range(1, 2))


@pytest.mark.heavy
@pytest.mark.timeout(3_600)
def test_every_promise_holds_in_seeds_of_half_a_minute() -> None:
    states, limit_s = (ClusterSometimes, NetSometimes), 3 * sim_seeds.SECONDS
    seeds = sim_seeds.of_the_day(70)
    sim_seeds.checked(run_cluster_seed, seeds, *states, lines=60, limit_s=limit_s)


@pytest.mark.heavy
@pytest.mark.timeout(3_600)
def test_every_promise_holds_in_seventy_seeds_and_every_rare_state_is_reached() -> None:
    assert not run(range(1, 71)).never


@pytest.mark.heavy
@pytest.mark.timeout(3_600)
def test_every_promise_holds_while_time_passes_within_steps() -> None:
    run(range(MOVING_SEEDS + 1, MOVING_SEEDS + 13))


@pytest.mark.long
@pytest.mark.timeout(7_200)
def test_every_promise_holds_in_five_hundred_seeds() -> None:
    assert not run(range(20_000, 20_500)).never


@pytest.mark.heavy
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("planted", PLANTED, ids=[item.name for item in PLANTED])
def test_a_planted_mistake_is_found(planted: PlantedCluster) -> None:
    seeds = range(planted.first, planted.first + planted.seeds)
    result = sim_seeds.found_at(
        "cluster", planted.name, seeds, partial(sim_seeds.breaks, planted.plant, run_cluster_seed)
    )
    assert result, f"{planted.name}: not seen in {planted.seeds} seeds"


@pytest.mark.more
def test_one_seed_gives_one_trace_under_every_hash_seed() -> None:
    assert len(sim_seeds.digests_under_hash_seeds(run_cluster_seed, range(1, 3))) == 1


@pytest.mark.more
def test_a_failed_seed_names_the_command_that_replays_it() -> None:
    replayed = sim_seeds.replayed(run_cluster_seed(3))
    assert "leads epoch 1" in replayed
    assert "seed 3: " in replayed
