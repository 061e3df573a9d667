"""The simulated cluster: one seed, one run of brokers, controllers, proxies and clients.

`python -m popmq.testing.cluster --seed N --trace` replays a run event by event; without `--seed`
it runs many and prints which rare states they reached.  `--shortages N` refuses room or
descriptors to N of the file operations of a scenario, one by one (cluster_world/shortages.py).
"""

import sys

from popmq.testing.cluster_world.run import run_cluster_seed
from popmq.testing.cluster_world.shortages import run_shortages
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes, NetSometimes
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.seed_runs import run_command, seed_options, silence


def main(arguments: list[str] | None = None) -> int:
    parser = seed_options("cluster", seeds=100)
    parser.add_argument(
        "--shortages", type=int, metavar="N", help="N shortages of room and descriptors, one by one"
    )
    chosen = parser.parse_args(arguments)
    if chosen.shortages:
        silence()
        return run_shortages(chosen.seed or chosen.first, chosen.shortages)
    return run_command(chosen, run_cluster_seed, StateCounts(ClusterSometimes, NetSometimes))


if __name__ == "__main__":
    sys.exit(main())
