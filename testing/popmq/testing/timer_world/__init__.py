"""The timer's simulator: its clients, model and oracle.

Always holds: One seed gives one trace.

May import: disk, harness, oracle, sim, popmq.broker, popmq.common.
"""
