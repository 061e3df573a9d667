"""The command of a simulator: one seed with its trace, or many, on one core or on several."""

import argparse
import gc
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.lives import SeedResult

_SEEDS_A_TASK = 8  # also from one collection of garbage to the next


def seed_options(program: str, *, seeds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m popmq.testing.{program}")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--seeds", type=int, default=seeds, help="how many seeds, from --first")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a violation")
    parser.add_argument("--processes", type=int, default=1, help="that share the seeds")
    return parser


def run_command(
    chosen: argparse.Namespace, run: Callable[[int], SeedResult], tally: StateCounts
) -> int:
    """The exit status: 1 when something was violated."""
    silence()
    if chosen.seed is not None:
        outcome = run(chosen.seed)
        if chosen.trace:
            print("\n".join(outcome.trace))
        print(outcome.history())
        return 1 if outcome.violations else 0
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    done, failed, began = 0, 0, time.perf_counter()
    for outcome in outcomes(run, seeds, processes=chosen.processes):
        done += 1
        tally.add(outcome.tally)
        if outcome.violations:
            failed += 1
            print(outcome.history())
            if not chosen.keep_going:
                break
    print(tally.table())
    seconds = time.perf_counter() - began
    print(f"{done} seeds, {done / seconds:.1f} a second, {failed} with violations")
    return 1 if failed else 0


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
    logging.getLogger("popmq").setLevel(logging.CRITICAL + 1)


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
