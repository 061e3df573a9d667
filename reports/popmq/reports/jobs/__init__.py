"""What reports calculate: pure functions of data frames (docs/concepts/reports.md).

May import: popmq.common.
"""
