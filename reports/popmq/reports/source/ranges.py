"""Which records a task of Spark reads: ranges of a broker group's queues, packed and split."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from popmq.common.wire import report_pb2 as pb


@dataclass(frozen=True, slots=True)
class Range:
    """Records [first, end) of one queue. Plain values: Spark pickles it."""

    table: str
    layout: str
    topic: str
    topic_id: int
    queue_id: int
    first: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.first

    def to_wire(self) -> pb.Partition:
        return pb.Partition(
            table=self.table,
            layout=self.layout,
            topic=self.topic,
            topic_id=self.topic_id,
            queue_id=self.queue_id,
            min=self.first,
            next=self.end,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What one task reads of one broker group, and how its records are laid out."""

    broker: str
    epoch: int
    end_position: int
    layouts: tuple[bytes, ...]  # encoded Layouts
    ranges: tuple[Range, ...]


def range_of(partition: pb.Partition) -> Range:
    return Range(
        partition.table,
        partition.layout,
        partition.topic,
        partition.topic_id,
        partition.queue_id,
        partition.min,
        partition.next,
    )


def shares(tables: pb.BrokerTables, ranges: Iterable[Range], rows: int) -> Iterator[Share]:
    """About `rows` records each: a task costs a tenth of a second whatever it reads."""
    layouts = tuple(layout.SerializeToString() for layout in tables.layouts)
    for some in packed(ranges, rows):
        yield Share(tables.broker, tables.epoch, tables.end_position, layouts, tuple(some))


def packed(ranges: Iterable[Range], rows: int) -> Iterator[Sequence[Range]]:
    """Large ranges are split, small ones put together; none is empty."""
    held: list[Range] = []
    count = 0
    for whole in ranges:
        first = whole.first
        while first < whole.end:
            end = min(whole.end, first + rows - count)
            held.append(_part(whole, first, end))
            count += end - first
            first = end
            if count >= rows:
                yield held
                held, count = [], 0
    if held:
        yield held


def _part(whole: Range, first: int, end: int) -> Range:
    return Range(whole.table, whole.layout, whole.topic, whole.topic_id, whole.queue_id, first, end)
