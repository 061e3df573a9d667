"""What there is to read, at the moment that a query is planned."""

from collections.abc import Callable

from popmq.common.wire import report_pb2 as pb
from popmq.reports.records.endpoint import ReportEndpoint
from popmq.reports.source.filters import Filters
from popmq.reports.source.options import SourceOptions
from popmq.reports.source.ranges import Range, Share, range_of, shares

_LOG_MS_AT = 24  # of a record's header (common/record/message.py)


def plan_shares(options: SourceOptions, filters: Filters) -> list[Share]:
    table = options.schema.table
    with ReportEndpoint(options.endpoint, patience_s=options.patience_s) as endpoint:
        descriptions = _described(options, endpoint)
        planned: list[Share] = []
        for tables in descriptions:
            if not filters.wants_broker(tables.broker):
                continue
            ranges = [
                _in_time(endpoint, tables, partition, filters)
                for partition in tables.partitions
                if partition.table == table
                and filters.wants_partition(table, partition.layout, partition.topic)
                and (not options.topics or not partition.topic or partition.topic in options.topics)
            ]
            planned += shares(tables, ranges, options.rows_per_partition)
    return planned


def _described(options: SourceOptions, endpoint: ReportEndpoint) -> list[pb.BrokerTables]:
    if options.pinned:
        return options.pinned_brokers()
    tables, _ = endpoint.describe(
        [options.schema.table], topics=options.topics, partial=options.skip_down
    )
    return tables


def _in_time(
    endpoint: ReportEndpoint, tables: pb.BrokerTables, partition: pb.Partition, filters: Filters
) -> Range:
    """The partition, cut to the log times that are asked for; they never go back in a queue."""
    whole = range_of(partition)
    if partition.layout != "revive" or whole.rows < 2:
        return whole
    first, end = whole.first, whole.end

    def stands_before(offset: int, log_ms: int) -> bool:
        item = pb.Partition()
        item.CopyFrom(partition)
        item.min, item.next = offset, offset + 1
        data = b"".join(piece.data for piece in endpoint.read(tables.broker, item))
        return int.from_bytes(data[_LOG_MS_AT : _LOG_MS_AT + 8], "big") < log_ms

    if filters.from_log_ms:
        first = _search(first, end, lambda offset: stands_before(offset, filters.from_log_ms))
    if filters.before_log_ms is not None:
        before = filters.before_log_ms
        end = _search(first, end, lambda offset: stands_before(offset, before))
    return Range(whole.table, whole.layout, whole.topic, whole.topic_id, whole.queue_id, first, end)


def _search(low: int, high: int, before: Callable[[int], bool]) -> int:
    """The first offset that is not `before`."""
    while low < high:
        middle = (low + high) // 2
        if before(middle):
            low = middle + 1
        else:
            high = middle
    return low
