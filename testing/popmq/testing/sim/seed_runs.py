"""Many seeds in a row, on one core or on several: what each gave, in the order of the seeds."""

import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from popmq.testing.sim.run import SeedResult

_SEEDS_A_TASK = 8  # also from one collection of garbage to the next


def outcomes(
    run: Callable[[int], SeedResult], seeds: range, *, processes: int = 1
) -> Iterator[SeedResult]:
    """Of clean seeds without their traces, which nobody reads. `run` is a module's function."""
    tasks = [seeds[at : at + _SEEDS_A_TASK] for at in range(0, len(seeds), _SEEDS_A_TASK)]
    if processes == 1:
        for task in tasks:
            yield from _run_task(run, task)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=silence) as pool:
        try:
            for done in pool.map(partial(_run_all, run), tasks):
                yield from done
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def silence() -> None:
    """Brokers say what breaks, and in these worlds everything does."""
    logging.getLogger("popmq").setLevel(logging.CRITICAL)


def _run_all(run: Callable[[int], SeedResult], seeds: range) -> list[SeedResult]:
    return list(_run_task(run, seeds))


def _run_task(run: Callable[[int], SeedResult], seeds: range) -> Iterator[SeedResult]:
    """A world is made and dropped with each seed: collecting in between costs a sixth more."""
    on = gc.isenabled()
    gc.disable()
    try:
        for seed in seeds:
            outcome = run(seed)
            if not outcome.violations:
                outcome.trace.clear()
            yield outcome
    finally:
        if on:
            gc.enable()
        gc.collect()
