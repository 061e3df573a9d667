"""The data source `popmq` of Spark (docs/concepts/reports.md#the-data-source)."""
