"""How far a stream has read, by broker group and queue; pure, without Spark and without a clock."""

from collections.abc import Mapping, Sequence

from popmq.common.wire import report_pb2 as pb
from popmq.reports.source.ranges import Range, Share, shares

# Broker group -> queue -> the first record that was not read; Spark keeps it as JSON.
Progress = dict[str, dict[str, int]]
EPOCH = "epoch"  # beside the queues: of the start whose samples were read
_SAMPLES = ("offsets", "topics", "timers")


def key_of(partition: pb.Partition) -> str:
    return f"{partition.layout}/{partition.topic_id}/{partition.queue_id}"


def advanced(
    start: Progress, tables: Sequence[pb.BrokerTables], table: str, max_rows: int = 0
) -> Progress:
    """Where the next batch ends: what there is, or about a fair share of `max_rows` of it.

    A broker that is not among `tables` stays where it was, as does a queue that is behind what
    was read of it: `planned` says so.
    """
    end: Progress = {broker: dict(queues) for broker, queues in start.items()}
    found_tables = [
        (tables, partition)
        for tables in tables
        for partition in tables.partitions
        if partition.table == table
    ]
    share = -(-max_rows // len(found_tables)) if max_rows and found_tables else 0
    left = max_rows
    for found_table, partition in found_tables:
        queues = end.setdefault(found_table.broker, {})
        key = key_of(partition)
        first = _first(queues, found_table, partition)
        ahead = max(0, partition.next - first)
        if first > partition.next and partition.layout not in _SAMPLES:
            # Back, so that Spark plans a batch at all, and `planned` can say what is wrong.
            queues[key] = partition.next
            continue
        if max_rows:
            ahead = min(ahead, share, left)
            left -= ahead
        queues[key] = first + ahead
    for found_table in tables:
        if table in _SAMPLES:
            end.setdefault(found_table.broker, {})[EPOCH] = found_table.epoch
    return end


def planned(
    start: Progress,
    end: Progress,
    tables: Mapping[str, pb.BrokerTables],
    table: str,
    rows: int,
) -> tuple[list[Share], list[str]]:
    """What tasks read between the two, and what of it is not there any more."""
    found_shares: list[Share] = []
    gone: list[str] = []
    for broker, queues in end.items():
        known = tables.get(broker)
        if known is None:
            continue
        ranges = []
        for partition in known.partitions:
            if partition.table != table or key_of(partition) not in queues:
                continue
            before = start.get(broker, {})
            first = _first(before, known, partition)
            last = queues[key_of(partition)]
            gone += _missing(known, partition, before, first)
            if last > first:
                ranges.append(_range(partition, first, last))
        # What is described is confirmed, so a stream takes records beyond the position of then.
        unbounded = pb.BrokerTables()
        unbounded.CopyFrom(known)
        unbounded.end_position = 0
        found_shares += shares(unbounded, ranges, rows)
    return found_shares, gone


def _first(queues: Mapping[str, int], tables: pb.BrokerTables, partition: pb.Partition) -> int:
    """Samples of a later start are numbered from 0 again."""
    if partition.layout in _SAMPLES and queues.get(EPOCH, tables.epoch) != tables.epoch:
        return partition.min
    known = queues.get(key_of(partition))
    if known is None:
        return partition.min
    return known if partition.layout not in _SAMPLES else max(known, partition.min)


def _missing(
    tables: pb.BrokerTables, partition: pb.Partition, before: Mapping[str, int], first: int
) -> list[str]:
    """Samples leave by design; records of the log leave by retention, or with a lost disk."""
    if partition.layout in _SAMPLES or key_of(partition) not in before:
        return []
    what = f"broker {tables.broker}, {key_of(partition)}"
    if first > partition.next:
        return [f"{what}: read up to {first}, and there are {partition.next} now"]
    if first < partition.min:
        return [f"{what}: records {first} to {partition.min - 1} are deleted"]
    return []


def _range(partition: pb.Partition, first: int, end: int) -> Range:
    return Range(
        partition.table,
        partition.layout,
        partition.topic,
        partition.topic_id,
        partition.queue_id,
        max(first, partition.min),
        end,
    )
