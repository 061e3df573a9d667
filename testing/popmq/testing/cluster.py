"""The simulated cluster: one seed, one run of brokers, controllers, proxies and clients.

`python -m popmq.testing.cluster --seed N --trace` replays a run event by event; without `--seed`
it runs many and prints which rare states they reached.  `--light` is the world of the light
replicas (docs/concepts/simulator.md).
"""

import argparse
import logging
import sys
import time

from popmq.testing.cluster_world.run import run_cluster_seed
from popmq.testing.cluster_world.sometimes_states import (
    ClusterSometimes,
    ModelSometimes,
    NetSometimes,
)
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.model.run import run_model_seed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m popmq.testing.cluster")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds, from --first")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--light", action="store_true", help="the light replicas' world")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a violation")
    chosen = parser.parse_args(arguments)
    logging.getLogger("popmq").setLevel(logging.CRITICAL)
    run = run_model_seed if chosen.light else run_cluster_seed
    if chosen.seed is not None:
        outcome = run(chosen.seed)
        if chosen.trace:
            print("\n".join(outcome.trace))
        print(outcome.history())
        return 1 if outcome.violations else 0
    tally = StateCounts(ModelSometimes if chosen.light else ClusterSometimes, NetSometimes)
    done, failed, began = 0, 0, time.perf_counter()
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        done += 1
        outcome = run(seed)
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


if __name__ == "__main__":
    sys.exit(main())
