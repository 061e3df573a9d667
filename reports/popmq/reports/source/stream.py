"""The stream reader: goes on where it was, and outlives brokers that are away.

An exception here would end the query, and Spark does not notice offsets that go back: so a
broker that does not answer stays where it was, and one whose records are gone, or whose log was
begun anew, is an error by name (option `failOnDataLoss`).

Offsets are `{"broker": {"table/topic id/queue": next}}`, with the broker's epoch for samples.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from popmq.common.errors import PopmqError
from popmq.common.wire import report_pb2 as pb
from popmq.reports.records.endpoint import RecordsGone, ReportEndpoint
from popmq.reports.source.batch import SharePartition
from popmq.reports.source.options import SourceOptions
from popmq.reports.source.progress import Progress, advanced, planned
from popmq.reports.source.reading import read_share

_LOOK_S = 2.0  # how long one batch waits for a broker that is away


class StreamReader(DataSourceStreamReader):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        # As they were said to be last.
        self._tables: dict[str, pb.BrokerTables] = {
            pinned_broker.broker: pinned_broker for pinned_broker in options.pinned_brokers()
        }

    def initialOffset(self) -> Progress:
        """The oldest record of each queue; what is not there yet begins at 0."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        rows = self._options.max_rows
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def latestOffset(self, start: Progress, limit: ReadLimit) -> Progress:
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        self._look()
        return advanced(start or {}, list(self._tables.values()), self._options.schema.table, rows)

    def partitions(self, start: Progress, end: Progress) -> list[InputPartition]:
        self._learn(end)
        shares, gone = planned(
            start or {},
            end,
            self._tables,
            self._options.schema.table,
            self._options.rows_per_partition,
        )
        if gone and self._options.fail_on_data_loss:
            raise RecordsGone(f"{'; '.join(gone)}: say failOnDataLoss=false to go on without them")
        share_partitions: list[InputPartition] = [SharePartition(share) for share in shares]
        return share_partitions

    def read(self, partition: InputPartition) -> Iterator[Any]:
        share = getattr(partition, "share", None)
        return iter(()) if share is None else read_share(self._options, share)

    def _look(self) -> None:
        """Who answers is known anew; the others stay where they were. What was pinned is all."""
        if self._options.pinned:
            return
        try:
            with ReportEndpoint(self._options.endpoint, patience_s=_LOOK_S) as endpoint:
                tables, _ = endpoint.describe(
                    [self._options.schema.table],
                    topics=self._options.topics,
                    sample=False,
                    partial=True,
                )
        except PopmqError:
            return  # nobody answers: the next trigger asks again
        self._tables |= {table.broker: table for table in tables}

    def _learn(self, end: Progress) -> None:
        """A batch that is repeated after a restart: layouts are asked for again, patiently."""
        if all(broker in self._tables for broker in end):
            return
        with ReportEndpoint(
            self._options.endpoint, patience_s=self._options.patience_s
        ) as endpoint:
            tables, _ = endpoint.describe(
                [self._options.schema.table], topics=self._options.topics, sample=False
            )
        self._tables |= {table.broker: table for table in tables}
