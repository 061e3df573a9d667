"""Seeds of the transactions' world: each has its one end; and every planted mistake is found.

POPMQ_SIM_TRANSACTION_SECONDS is how long the everyday test goes on after its first seeds (2).
"""

import os
import time

import pytest
from sim.planted_transactions import PLANTED_TRANSACTIONS, PlantedTransaction

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.simulator import run_transaction_seed
from popmq.testing.transaction_world.sometimes_states import TransactionSometimes

FEWEST = 120  # in which every rare state is reached


def run(first: int, seeds: int, *, seconds: float = 1e9) -> StateCounts:
    """Run the seeds, at least FEWEST and then while there is time; stop at the first failure."""
    tally, began, done = StateCounts(TransactionSometimes), time.monotonic(), 0
    for seed in range(first, first + seeds):
        if done >= FEWEST and time.monotonic() - began > seconds:
            break
        outcome = run_transaction_seed(seed)
        assert not outcome.violations, outcome.history(40)
        tally.add(outcome.tally)
        done += 1
    print(f"{done} seeds, {done / (time.monotonic() - began):.0f} a second\n{tally.table()}")
    return tally


def test_every_transaction_has_its_one_end_and_every_rare_state_is_reached() -> None:
    seconds = float(os.environ.get("POPMQ_SIM_TRANSACTION_SECONDS", "2"))
    assert not run(1, 100_000, seconds=seconds).never


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_every_transaction_has_its_one_end_in_a_thousand_seeds() -> None:
    assert not run(10_000, 1_000).never


@pytest.mark.parametrize(
    "planted", [pytest.param(one, id=one.name) for one in PLANTED_TRANSACTIONS]
)
def test_a_planted_mistake_in_transactions_is_found(planted: PlantedTransaction) -> None:
    for seed in range(1, planted.seeds + 1):
        with pytest.MonkeyPatch.context() as patch:
            planted.plant(patch)
            broken = bool(run_transaction_seed(seed).violations)
        if broken and not run_transaction_seed(seed).violations:
            return
    pytest.fail(f"{planted.name}: not seen in {planted.seeds} seeds")
