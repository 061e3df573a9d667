"""popmq as a data source of Spark, which finds it by this module's name.

Spark imports every module `pyspark_*` when a data source is used for the first time.
"""

from popmq.reports.source.data_source import PopmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
