"""The simulator: one seed, one run of a broker with its clients, its disk and its clock.

`python -m popmq.testing.simulator --seed N --trace` replays a run event by event; without
`--seed` it runs many and prints which rare states they reached (docs/concepts/simulator.md).
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from enum import Enum

from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.replica_worlds import ReplicaSimulator, TimerReplicaSimulator
from popmq.testing.sim.pushes import PushSimulator
from popmq.testing.sim.run import SeedResult, Simulator
from popmq.testing.sim.seed_runs import outcomes, silence
from popmq.testing.timer_world.crash_everywhere import OneCrash
from popmq.testing.timer_world.overtaken import OvertakenTimers
from popmq.testing.timer_world.run import TimerSimulator
from popmq.testing.timer_world.sometimes_states import TimerSometimes
from popmq.testing.timer_world.thousand_timers import CrashedAt, ThousandTimers
from popmq.testing.transaction_world.run import TransactionSimulator
from popmq.testing.transaction_world.sometimes_states import TransactionSometimes


def run_seed(seed: int) -> SeedResult:
    return Simulator(seed).run()


def run_push_seed(seed: int) -> SeedResult:
    return PushSimulator(seed).run()


def run_timer_seed(seed: int) -> SeedResult:
    return TimerSimulator(seed).run()


def run_overtaken_seed(seed: int) -> SeedResult:
    return OvertakenTimers(seed).run()


def run_thousand_timers(seed: int) -> SeedResult:
    return ThousandTimers(seed).run()


def run_one_crash(seed: int) -> SeedResult:
    return OneCrash(seed).run()


def run_transaction_seed(seed: int) -> SeedResult:
    return TransactionSimulator(seed).run()


def run_replica_seed(seed: int) -> SeedResult:
    return ReplicaSimulator(seed).run()


def run_timer_replica_seed(seed: int) -> SeedResult:
    return TimerReplicaSimulator(seed).run()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m popmq.testing.simulator")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds, from --first")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--timers", action="store_true", help="the timer's world")
    parser.add_argument("--overtaken-timers", action="store_true", help="one with a slow log")
    parser.add_argument("--thousand-timers", action="store_true", help="that dies all the time")
    parser.add_argument("--one-crash", action="store_true", help="that dies once")
    parser.add_argument("--transactions", action="store_true", help="that of transactions")
    parser.add_argument("--pushes", action="store_true", help="of push consumers that live on")
    parser.add_argument("--replica", action="store_true", help="with a slave that follows")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a violation")
    parser.add_argument("--processes", type=int, default=1, help="that share the seeds")
    chosen = parser.parse_args(arguments)
    silence()
    run, states = _world(chosen)
    if chosen.seed is not None:
        outcome = run(chosen.seed)
        if chosen.trace:
            print("\n".join(outcome.trace))
        print(outcome.history())
        return 1 if outcome.violations else 0
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    found = outcomes(run, seeds, processes=chosen.processes)
    return _tell(found, StateCounts(states), keep_going=chosen.keep_going)


def _world(chosen: argparse.Namespace) -> tuple[Callable[[int], SeedResult], type[Enum]]:
    if chosen.timers:
        return run_timer_replica_seed if chosen.replica else run_timer_seed, TimerSometimes
    if chosen.overtaken_timers:
        return run_overtaken_seed, TimerSometimes
    if chosen.thousand_timers:
        return run_thousand_timers, CrashedAt
    if chosen.one_crash:
        return run_one_crash, CrashedAt
    if chosen.transactions:
        return run_transaction_seed, TransactionSometimes
    if chosen.pushes:
        return run_push_seed, Sometimes
    return run_replica_seed if chosen.replica else run_seed, Sometimes


def _tell(found: Iterator[SeedResult], tally: StateCounts, *, keep_going: bool) -> int:
    done, failed, began = 0, 0, time.perf_counter()
    for outcome in found:
        done += 1
        tally.add(outcome.tally)
        if outcome.violations:
            failed += 1
            print(outcome.history())
            if not keep_going:
                break
    print(tally.table())
    seconds = time.perf_counter() - began
    print(f"{done} seeds, {done / seconds:.0f} a second, {failed} with violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
