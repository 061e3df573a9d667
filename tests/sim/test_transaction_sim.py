"""Seeds of the transactions' world: each has its one end; and every planted mistake is found."""

import time
from functools import partial

import pytest
import sim_seeds
from sim.planted_transactions import PLANTED_TRANSACTIONS, PlantedTransaction

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.simulator import run_transaction_seed
from popmq.testing.transaction_world.sometimes_states import TransactionSometimes

FEWEST = 120  # in which every rare state is reached


def run(seeds: range) -> StateCounts:
    """Stops at the first failure."""
    tally, began = StateCounts(TransactionSometimes), time.monotonic()
    for seed in seeds:
        outcome = run_transaction_seed(seed)
        assert not outcome.violations, outcome.history(40)
        tally.add(outcome.tally)
    a_second = len(seeds) / (time.monotonic() - began)
    print(f"{len(seeds)} seeds, {a_second:.0f} a second\n{tally.table()}")
    return tally


def test_every_transaction_has_its_one_end() -> None:
    run(range(1, 31))


@pytest.mark.more
def test_every_transaction_has_its_one_end_and_every_rare_state_is_reached() -> None:
    assert not run(range(1, FEWEST + 1)).never


@pytest.mark.more
@pytest.mark.timeout(300)
def test_every_transaction_has_its_one_end_in_the_seeds_of_the_day() -> None:
    run(sim_seeds.of_the_day(200))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_transaction_has_its_one_end_in_a_thousand_seeds() -> None:
    assert not run(range(10_000, 11_000)).never


def breaks(planted: PlantedTransaction, seed: int) -> bool:
    """Whether the run is broken by the mistake and whole without it."""
    with pytest.MonkeyPatch.context() as patch:
        planted.plant(patch)
        broken = bool(run_transaction_seed(seed).violations)
    return broken and not run_transaction_seed(seed).violations


@pytest.mark.more
@pytest.mark.parametrize(
    "planted", [pytest.param(one, id=one.name) for one in PLANTED_TRANSACTIONS]
)
def test_a_planted_mistake_in_transactions_is_found(planted: PlantedTransaction) -> None:
    seeds = range(1, planted.seeds + 1)
    found = sim_seeds.found_at("transactions", planted.name, seeds, partial(breaks, planted))
    assert found, f"{planted.name}: not seen in {planted.seeds} seeds"
