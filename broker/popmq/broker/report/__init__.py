"""Samples of offsets, topics and timers, kept for reports (docs/concepts/reports.md)."""
