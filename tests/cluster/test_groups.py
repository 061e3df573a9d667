"""Seeds of several broker groups under the nemesis' clients, and mistakes that they show."""

from functools import partial

import pytest
import sim_seeds
from cluster.groups import run_groups_seed
from cluster.planted_cluster import PlantedCluster
from cluster.planted_groups import PLANTED

from popmq.testing.cluster_world.sometimes_states import NetSometimes
from popmq.testing.groups_world.sometimes_states import GroupsSometimes

SEEDS = (1, 2, 9, 13)
IN_CI = ("requests name no incarnation",)  # the others take minutes to be seen


@pytest.mark.heavy
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_promise_holds_over_several_broker_groups(seed: int) -> None:
    seeds = range(seed, seed + 1)
    sim_seeds.checked(run_groups_seed, seeds, GroupsSometimes, NetSometimes, lines=60)


@pytest.mark.long
@pytest.mark.timeout(14_400)
def test_every_promise_holds_in_two_hundred_seeds_and_every_rare_state_is_reached() -> None:
    seeds = range(1_000, 1_200)
    tally = sim_seeds.checked(run_groups_seed, seeds, GroupsSometimes, NetSometimes, lines=60)
    assert not tally.never


def planted_mistakes(*, in_ci: bool) -> list[PlantedCluster]:
    return [item for item in PLANTED if (item.name in IN_CI) is in_ci]


def is_found(planted: PlantedCluster) -> bool:
    seeds = range(planted.first, planted.first + planted.seeds)
    run = partial(sim_seeds.breaks, planted.plant, run_groups_seed)
    return bool(sim_seeds.found_at("groups", planted.name, seeds, run))


@pytest.mark.heavy
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("planted", planted_mistakes(in_ci=True), ids=lambda item: item.name)
def test_a_planted_mistake_is_found(planted: PlantedCluster) -> None:
    assert is_found(planted)


@pytest.mark.long
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("planted", planted_mistakes(in_ci=False), ids=lambda item: item.name)
def test_a_rare_planted_mistake_is_found(planted: PlantedCluster) -> None:
    assert is_found(planted)


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_one_seed_gives_one_trace_under_every_hash_seed() -> None:
    assert len(sim_seeds.digests_under_hash_seeds(run_groups_seed, range(1, 2))) == 1
