"""Order per message group in random lives, with partial acks, expiries, changes and power cuts."""

import os
import random
from collections import Counter

import pytest
from fifo.fifo_history import History

SEEDS = 40  # in which each kind of event happens


def test_order_attempts_and_progress_hold_in_a_few_random_histories() -> None:
    run(5)


@pytest.mark.more
def test_order_attempts_and_progress_hold_in_random_histories() -> None:
    seen = run(SEEDS)
    if not os.environ.get("POPMQ_TEST_SEED"):
        kinds = ("again", "cut", "restart", "change", "dead", "RESUME", "SKIP", "DEAD_LETTER")
        assert all(seen[kind] for kind in kinds), dict(seen)


def run(seeds: int) -> Counter[str]:
    fixed = os.environ.get("POPMQ_TEST_SEED")
    first = int(fixed) if fixed else random.SystemRandom().randrange(1 << 32)
    seen: Counter[str] = Counter()
    for seed in range(first, first + (1 if fixed else seeds)):
        history = History(seed)
        try:
            history.run(250)
        except AssertionError as error:
            pytest.fail(f"{error} (POPMQ_TEST_SEED={seed} repeats it)")
        seen.update(history.counts)
    print(dict(seen))
    return seen
