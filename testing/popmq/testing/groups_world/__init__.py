"""Several broker groups with real proxies, simulated (docs/concepts/cluster-simulator.md).

It owns an event loop on virtual time, the proxies on it, and the cluster around them. Clients and
checker are those of the nemesis (tests/e2e/nemesis), run by tests/cluster/groups.py.

Always holds: One seed gives one trace.

May import: cluster_world, disk, harness, oracle, sim, popmq.broker, popmq.common, popmq.proxy.
"""
