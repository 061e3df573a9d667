"""Seeds of the transactions' world: each has its one end; and every planted mistake is found."""

from functools import partial

import pytest
import sim_seeds
from sim.planted_transactions import PLANTED_TRANSACTIONS, PlantedTransaction

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.simulator import run_transaction_seed
from popmq.testing.transaction_world.sometimes_states import TransactionSometimes

FEWEST = 120  # in which every rare state is reached


def run(seeds: range) -> StateCounts:
    return sim_seeds.checked(run_transaction_seed, seeds, TransactionSometimes)


def test_every_transaction_has_its_one_end() -> None:
    run(range(1, 31))


@pytest.mark.more
def test_every_transaction_has_its_one_end_and_every_rare_state_is_reached() -> None:
    assert not run(range(1, FEWEST + 1)).never


@pytest.mark.more
@pytest.mark.timeout(300)
def test_every_transaction_has_its_one_end_in_the_seeds_of_the_day() -> None:
    sim_seeds.check_the_day(run_transaction_seed, 200, TransactionSometimes)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_transaction_has_its_one_end_in_a_thousand_seeds() -> None:
    assert not run(range(10_000, 11_000)).never


@pytest.mark.more
@pytest.mark.parametrize(
    "planted", [pytest.param(item, id=item.name) for item in PLANTED_TRANSACTIONS]
)
def test_a_planted_mistake_in_transactions_is_found(planted: PlantedTransaction) -> None:
    seeds = range(1, planted.seeds + 1)
    breaks = partial(sim_seeds.breaks, planted.plant, run_transaction_seed)
    result = sim_seeds.found_at("transactions", planted.name, seeds, breaks)
    assert result, f"{planted.name}: not seen in {planted.seeds} seeds"
