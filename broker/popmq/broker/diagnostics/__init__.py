"""What tells people where messages are: explain, lags, the live audit, and samples for reports.

Always holds: Reads only; what is not known is shown as unknown.

May import: deliveries, filter, log, meta, operations, pop, store, timer, popmq.common.
"""
