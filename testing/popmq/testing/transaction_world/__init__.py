"""The transactions' simulator.

Always holds: One seed gives one trace.

May import: disk, harness, oracle, sim, popmq.broker, popmq.common.
"""
