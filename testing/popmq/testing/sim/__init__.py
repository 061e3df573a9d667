"""The broker's simulator: one broker, clients and operators, driven by a seed.

Always holds: One seed gives one trace.

May import: disk, harness, oracle, popmq.broker, popmq.common.
"""
