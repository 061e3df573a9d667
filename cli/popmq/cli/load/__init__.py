"""The load generator of `popmq bench`, cheap beside what it measures (docs/benchmarks.md).

May import: popmq.cli, popmq.common, popmq.proxy.
"""
