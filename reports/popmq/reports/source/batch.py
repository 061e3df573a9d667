"""The batch reader: plans in the driver what is there now, reads it in tasks.

Ends are pinned when the query is planned, so a task that is tried again reads the same records.
grpc is imported where it is used, since Spark forks its workers.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from popmq.reports.source.filters import Filters
from popmq.reports.source.options import SourceOptions
from popmq.reports.source.planning import plan_shares
from popmq.reports.source.ranges import Share
from popmq.reports.source.reading import read_share


class SharePartition(InputPartition):
    def __init__(self, share: Share | None) -> None:
        super().__init__(share)
        self.share = share


class BatchReader(DataSourceReader):
    """Without push-down: Spark refuses readers that take filters unless it is set to."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.filters = Filters()

    def partitions(self) -> list[InputPartition]:
        share_partitions: list[InputPartition] = [
            SharePartition(share) for share in plan_shares(self.options, self.filters)
        ]
        # Of an empty list Spark makes a partition of its own.
        return share_partitions or [SharePartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        share = getattr(partition, "share", None)
        return iter(()) if share is None else read_share(self.options, share)


class FilteringBatchReader(BatchReader):
    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:
        """All are checked again by Spark."""
        self.filters.take(filters)
        return filters
