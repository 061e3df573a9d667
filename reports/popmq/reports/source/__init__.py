"""The data source `popmq` of Spark (docs/how-to/reports.md#the-data-source).

Always holds: A task that is repeated reads the same records.

May import: records, popmq.common.
"""
