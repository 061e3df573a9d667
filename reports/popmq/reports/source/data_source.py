"""PopmqDataSource: `spark.read.format("popmq")`, `readStream`, and `USING popmq` in SQL."""

from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

from popmq.reports.source.batch import BatchReader, FilteringBatchReader
from popmq.reports.source.options import SourceOptions
from popmq.reports.source.stream import StreamReader


class PopmqDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "popmq"

    def schema(self) -> str:
        return SourceOptions.read(self.options).schema.ddl()

    def reader(self, schema: Any) -> DataSourceReader:
        options = SourceOptions.read(self.options)
        return FilteringBatchReader(options) if options.pushdown else BatchReader(options)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return StreamReader(SourceOptions.read(self.options))
