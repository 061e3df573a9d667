"""The load generator of `popmq bench`, cheap beside what it measures (docs/benchmarks.md).

May import: terminal, popmq.cli, popmq.common, popmq.proxy.
"""
