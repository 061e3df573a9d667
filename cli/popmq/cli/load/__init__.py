"""A load generator that costs little beside what it measures (docs/benchmarks.md)."""
