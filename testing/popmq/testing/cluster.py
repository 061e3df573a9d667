"""The simulated cluster: one seed, one run of brokers, controllers, proxies and clients.

`python -m popmq.testing.cluster --seed N --trace` replays a run event by event; without `--seed`
it runs many and prints which rare states they reached.  `--light` is the world of the light
replicas (docs/concepts/simulator.md).
"""

import sys

from popmq.testing.cluster_world.run import run_cluster_seed
from popmq.testing.cluster_world.sometimes_states import (
    ClusterSometimes,
    ModelSometimes,
    NetSometimes,
)
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.model.run import run_model_seed
from popmq.testing.sim.seed_runs import run_command, seed_options


def main(arguments: list[str] | None = None) -> int:
    parser = seed_options("cluster", seeds=100)
    parser.add_argument("--light", action="store_true", help="the light replicas' world")
    chosen = parser.parse_args(arguments)
    run = run_model_seed if chosen.light else run_cluster_seed
    states = ModelSometimes if chosen.light else ClusterSometimes
    return run_command(chosen, run, StateCounts(states, NetSometimes))


if __name__ == "__main__":
    sys.exit(main())
