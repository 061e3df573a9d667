"""What the data source decides without Spark: ranges, filters, how far a stream is, options."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from popmq.common.errors import PopmqError
from popmq.common.record.report_layouts import LAYOUTS
from popmq.common.wire import report_pb2 as pb
from popmq.reports.records.endpoint import Piece
from popmq.reports.records.tables import TABLES, TableSchema
from popmq.reports.source.filters import Filters
from popmq.reports.source.options import SourceOptions, pin, since_option
from popmq.reports.source.planning import in_time
from popmq.reports.source.progress import EPOCH, Progress, advanced, planned
from popmq.reports.source.ranges import Range, packed

ROOT = Path(__file__).parents[2]


def whole(first: int, end: int, queue: int = 0) -> Range:
    return Range("revive", "revive", "", 3, queue, first, end)


def broker(
    name: str, *queues: tuple[int, int], table: str = "revive", epoch: int = 1
) -> pb.BrokerTables:
    return pb.BrokerTables(
        broker=name,
        epoch=epoch,
        end_position=77,
        partitions=[
            pb.Partition(table=table, layout=table, topic_id=3, queue_id=number, min=low, next=high)
            for number, (low, high) in enumerate(queues)
        ],
    )


def test_large_ranges_are_split_and_small_ones_put_together() -> None:
    parts = list(packed([whole(0, 25), whole(5, 8, 1), whole(7, 7, 2), whole(0, 4, 3)], 10))
    assert [sum(item.rows for item in some) for some in parts] == [10, 10, 10, 2]
    assert [(item.queue_id, item.first, item.end) for some in parts for item in some] == [
        (0, 0, 10),
        (0, 10, 20),
        (0, 20, 25),
        (1, 5, 8),
        (3, 0, 2),
        (3, 2, 4),
    ]


def test_a_stream_reads_on_where_it_was() -> None:
    tables = [broker("a", (0, 10), (5, 5))]
    first = advanced({}, tables, "revive")
    assert first == {"a": {"revive/3/0": 10, "revive/3/1": 5}}
    shares, gone = planned({}, first, {"a": tables[0]}, "revive", 100)
    assert ([(r.first, r.end) for s in shares for r in s.ranges], gone) == ([(0, 10)], [])
    assert shares[0].end_position == 0, "a stream is not of one moment"
    later = broker("a", (0, 12), (5, 6))
    second = advanced(first, [later], "revive")
    shares, gone = planned(first, second, {"a": later}, "revive", 100)
    assert [(r.queue_id, r.first, r.end) for s in shares for r in s.ranges] == [
        (0, 10, 12),
        (1, 5, 6),
    ]


def test_a_broker_that_is_away_stays_where_it_was() -> None:
    both = [broker("a", (0, 10)), broker("b", (0, 20))]
    start = advanced({}, both, "revive")
    end = advanced(start, [broker("a", (0, 11))], "revive")
    assert end == {"a": {"revive/3/0": 11}, "b": {"revive/3/0": 20}}


def test_a_batch_of_a_stream_has_a_bound_and_still_goes_on() -> None:
    tables = [broker("a", (0, 100), (0, 100)), broker("b", (0, 3))]
    end: Progress = {}
    sizes = []
    while True:
        before, end = end, advanced(end, tables, "revive", 30)
        if end == before:
            break
        shares, _ = planned(before, end, {table.broker: table for table in tables}, "revive", 1_000)
        sizes.append(sum(r.rows for s in shares for r in s.ranges))
    assert sum(sizes) == 203
    assert max(sizes) <= 30


def test_offsets_that_went_back_are_noticed() -> None:
    start: Progress = {"a": {"revive/3/0": 50}}
    now = broker("a", (0, 20))
    end = advanced(start, [now], "revive")
    assert end != start, "or Spark would plan nothing"
    shares, gone = planned(start, end, {"a": now}, "revive", 100)
    assert (shares, gone) == ([], ["broker a, revive/3/0: read up to 50, and there are 20 now"])


def test_records_that_retention_took_are_noticed() -> None:
    start: Progress = {"a": {"revive/3/0": 5}}
    now = broker("a", (9, 20))
    shares, gone = planned(start, advanced(start, [now], "revive"), {"a": now}, "revive", 100)
    assert gone == ["broker a, revive/3/0: records 5 to 8 are deleted"]
    assert [(r.first, r.end) for s in shares for r in s.ranges] == [(9, 20)]


def test_samples_of_a_new_start_are_read_from_the_beginning() -> None:
    old = broker("a", (0, 50), table="offsets", epoch=1)
    start = advanced({}, [old], "offsets")
    assert start["a"][EPOCH] == 1
    new = broker("a", (0, 3), table="offsets", epoch=2)
    end = advanced(start, [new], "offsets")
    shares, gone = planned(start, end, {"a": new}, "offsets", 100)
    assert ([(r.first, r.end) for s in shares for r in s.ranges], gone) == ([(0, 3)], [])
    assert shares[0].epoch == 2


@dataclass
class EqualTo:
    """As pyspark's, which these tests do without: told by its name."""

    attribute: tuple[str, ...]
    value: object


@dataclass
class In:
    attribute: tuple[str, ...]
    value: tuple[object, ...]


@dataclass
class GreaterThan:
    attribute: tuple[str, ...]
    value: int


@dataclass
class LessThanOrEqual:
    attribute: tuple[str, ...]
    value: int


def test_filters_choose_brokers_partitions_and_times() -> None:
    filters = Filters()
    filters.take(
        [
            EqualTo(("broker",), "a"),
            In(("kind",), ("RETRY", "DEAD")),
            GreaterThan(("log_ms",), 100),
            LessThanOrEqual(("log_ms",), 200),
            EqualTo(("unknown",), 1),
            EqualTo(("nested", "field"), 1),
        ]
    )
    assert (filters.wants_broker("a"), filters.wants_broker("b")) == (True, False)
    assert filters.wants_partition("revive", "head", "%DLQ%g")
    assert not filters.wants_partition("revive", "revive", "")
    assert (filters.from_log_ms, filters.before_log_ms) == (101, 201)


def test_filters_that_exclude_each_other_want_nothing() -> None:
    filters = Filters()
    filters.take([EqualTo(("kind",), "ACK"), EqualTo(("kind",), "DEAD")])
    assert not filters.wants_partition("revive", "head", "")
    assert not filters.wants_partition("revive", "revive", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "which table"),
        ({"path": "offset"}, "a table is one of revive"),
        ({"path": "revive", "columns": "kind,nothing"}, "no column 'nothing'"),
        ({"path": "revive", "onBrokerDown": "wait"}, "fail or skip"),
        ({"path": "revive", "rowsPerPartition": "0"}, "from 1 on"),
        ({"path": "revive", "endpiont": "x"}, "'endpiont' is unknown"),
    ],
)
def test_options_that_are_wrong_are_refused_by_name(options: dict[str, str], message: str) -> None:
    with pytest.raises(PopmqError, match=message):
        SourceOptions.read(options)


def test_options_are_read_in_any_case_and_columns_keep_the_tables_order() -> None:
    options = SourceOptions.read(
        {"path": "revive", "Columns": "log_ms, kind", "onbrokerdown": "skip", "maxRows": "5"}
    )
    assert options.schema.ddl() == "`kind` string, `log_ms` bigint"
    assert (options.skip_down, options.max_rows) == (True, 5)


def test_the_page_of_tables_has_every_column() -> None:
    page = (ROOT / "docs/reference/report-tables.md").read_text(encoding="utf-8")
    columns_of_page = set()
    for line in page.splitlines():
        if line.startswith("| `"):
            names, tables = (re.findall(r"`(\w+)`", cell) for cell in line.split("|")[1:3])
            every = [] if tables and "all but" not in line.split("|")[2] else list(TABLES)
            chosen = set(every) - set(tables) if every else set(tables)
            columns_of_page |= {(table, name) for table in chosen for name in names}
    assert columns_of_page == {
        (table, name) for table, columns in TABLES.items() for name, _ in columns
    }


def test_times_from_which_records_are_read_are_given_by_broker_group() -> None:
    options = SourceOptions.read({"path": "revive", "since": since_option({"b": 2, "a=b": 1})})
    assert options.since == {"a=b": 1, "b": 2}
    with pytest.raises(PopmqError, match="BROKER=MILLISECONDS"):
        SourceOptions.read({"path": "revive", "since": "a=yesterday"})


class Endpoint:
    """Queues of records whose times are given."""

    def __init__(self, times: Sequence[int], time_at: int) -> None:
        self.times, self.time_at, self.reads = times, time_at, 0

    def read(self, broker: str, partition: pb.Partition) -> Iterator[Piece]:
        self.reads += 1
        record = bytes(self.time_at) + self.times[partition.min].to_bytes(8, "big")
        yield Piece(partition.min, partition.next, record)


@pytest.mark.parametrize(("table", "layout"), [("revive", "head"), ("offsets", "offsets")])
def test_a_queue_is_cut_to_the_time_that_is_asked_for(table: str, layout: str) -> None:
    times = [*range(0, 20_000, 10), *[20_000] * 5, *range(20_001, 21_000)]
    clock = "wall_ms" if table == "offsets" else "log_ms"
    fields = {field.name: field.offset for field in LAYOUTS[layout].fields}
    item = pb.Field(name=clock, type="u64", offset=fields[clock])
    tables = pb.BrokerTables(broker="a", layouts=[pb.Layout(name=layout, fields=[item])])
    partition = pb.Partition(table=table, layout=layout, min=0, next=len(times))
    endpoint = Endpoint(times, fields[clock])
    span = in_time(endpoint, tables, partition, Filters(), 20_000)  # type: ignore[arg-type]
    assert (span.first, span.end) == (times.index(20_000), len(times))
    assert endpoint.reads <= 13, "by halves"


def test_what_was_pinned_comes_out_again() -> None:
    tables = [broker("a", (0, 10))]
    options = SourceOptions.read({"path": "revive", "pinned": pin(tables)})
    assert options.pinned_brokers() == tables


def test_every_layout_has_a_place_for_each_field() -> None:
    for layout in LAYOUTS.values():
        for field in layout.fields:
            width = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}[field.type]
            assert not layout.size or field.offset + width <= layout.size, (layout.name, field)
    assert TableSchema.of("revive").columns[0] == ("broker", "string")
