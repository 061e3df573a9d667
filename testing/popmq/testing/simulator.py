"""The simulator: one seed, one run of a broker with its clients, its disk and its clock.

`python -m popmq.testing.simulator --seed N --trace` replays a run event by event; without
`--seed` it runs many and prints which rare states they reached (docs/concepts/simulator.md).
"""

import sys
from functools import partial

from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.replica_worlds import ReplicaSimulator, TimerReplicaSimulator
from popmq.testing.sim.lives import Lives, SeedResult
from popmq.testing.sim.pushes import PushSimulator
from popmq.testing.sim.run import Simulator
from popmq.testing.sim.seed_runs import run_command, seed_options
from popmq.testing.timer_world.crash_everywhere import OneCrash
from popmq.testing.timer_world.run import OvertakenTimers, TimerSimulator
from popmq.testing.timer_world.thousand_timers import ThousandTimers
from popmq.testing.transaction_world.run import TransactionSimulator

_WORLDS: tuple[tuple[type[Lives], str], ...] = (
    (TimerSimulator, "the timer's world"),
    (OvertakenTimers, "one with a slow log"),
    (ThousandTimers, "that dies all the time"),
    (OneCrash, "that dies once"),
    (TransactionSimulator, "that of transactions"),
    (PushSimulator, "of push consumers that live on"),
)


def run_world(world: type[Lives], seed: int) -> SeedResult:
    return world(seed).run()


run_seed = partial(run_world, Simulator)
run_timer_seed = partial(run_world, TimerSimulator)
run_one_crash_seed = partial(run_world, OneCrash)
run_overtaken_seed = partial(run_world, OvertakenTimers)
run_transaction_seed = partial(run_world, TransactionSimulator)


def main(arguments: list[str] | None = None) -> int:
    parser = seed_options("simulator", seeds=200)
    for world, text in _WORLDS:
        parser.add_argument(
            world.option, action="store_const", const=world, dest="world", help=text
        )
    parser.add_argument("--replica", action="store_true", help="with a slave that follows")
    chosen = parser.parse_args(arguments)
    world = chosen.world or Simulator
    if chosen.replica:
        replicated = {Simulator: ReplicaSimulator, TimerSimulator: TimerReplicaSimulator}
        world = replicated.get(world, world)
    return run_command(chosen, partial(run_world, world), StateCounts(world.states))


if __name__ == "__main__":
    sys.exit(main())
