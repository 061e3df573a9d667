"""What there is to read, at the moment that a query is planned."""

from collections.abc import Callable

from popmq.common.wire import report_pb2 as pb
from popmq.reports.records.endpoint import ReportEndpoint
from popmq.reports.records.tables import SAMPLES
from popmq.reports.source.filters import Filters
from popmq.reports.source.options import SourceOptions
from popmq.reports.source.ranges import Range, Share, range_of, shares


def plan_shares(options: SourceOptions, filters: Filters) -> list[Share]:
    table = options.schema.table
    with ReportEndpoint(options.endpoint, patience_s=options.patience_s) as endpoint:
        descriptions = _described(options, endpoint)
        planned: list[Share] = []
        for tables in descriptions:
            if not filters.wants_broker(tables.broker):
                continue
            ranges = [
                in_time(endpoint, tables, partition, filters, options.since.get(tables.broker, 0))
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


def in_time(
    endpoint: ReportEndpoint,
    tables: pb.BrokerTables,
    partition: pb.Partition,
    filters: Filters,
    since_ms: int,
) -> Range:
    """The partition, cut to the times that are asked for; log times never go back in a queue."""
    whole = range_of(partition)
    begin_ms = max(since_ms, 0 if partition.table in SAMPLES else filters.from_log_ms)
    if whole.rows < 2 or not (begin_ms or filters.before_log_ms):
        return whole
    first, end = whole.first, whole.end
    time_at = _time_at(tables, partition)

    def stands_before(offset: int, ms: int) -> bool:
        item = pb.Partition()
        item.CopyFrom(partition)
        item.min, item.next = offset, offset + 1
        data = b"".join(piece.data for piece in endpoint.read(tables.broker, item))
        return int.from_bytes(data[time_at : time_at + 8], "big") < ms

    if begin_ms:
        first = _search(first, end, lambda offset: stands_before(offset, begin_ms))
    if filters.before_log_ms is not None and partition.table not in SAMPLES:
        before = filters.before_log_ms
        end = _search(first, end, lambda offset: stands_before(offset, before))
    return Range(whole.table, whole.layout, whole.topic, whole.topic_id, whole.queue_id, first, end)


def _time_at(tables: pb.BrokerTables, partition: pb.Partition) -> int:
    """At which byte of its records the time stands that they are in order of."""
    name = "wall_ms" if partition.table in SAMPLES else "log_ms"
    layout = next(layout for layout in tables.layouts if layout.name == partition.layout)
    return next(column.offset for column in layout.fields if column.name == name)


def _search(low: int, high: int, before: Callable[[int], bool]) -> int:
    """The first offset that is not `before`."""
    while low < high:
        middle = (low + high) // 2
        if before(middle):
            low = middle + 1
        else:
            high = middle
    return low
