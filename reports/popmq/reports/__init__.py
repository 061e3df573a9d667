"""Reports over what brokers keep: lag, revive, delay (docs/concepts/reports.md).

Always holds: A value that is not known is UNKNOWN, never OK.

May import: jobs, records, source, popmq.common.
"""
