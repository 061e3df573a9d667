"""Light replicas: a model of the log without messages, for many seeds of elections.

Always holds: One seed gives one trace.

May import: cluster_world, disk, harness, oracle, sim, popmq.broker, popmq.common.
"""
