"""What a report's reader would see of a broker without a network."""

from collections.abc import Iterator
from typing import Any

from report.recount import Row, rows_of

from popmq.common.disk import ColdRead
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.report_layouts import OffsetFlag
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import report_pb2 as pb
from popmq.reports.records.record_layout import RecordLayout
from popmq.testing.harness.core_broker import CoreBroker

Counts = dict[tuple[str, str], tuple[int, ...]]


class CoreReports:
    """Asks the broker as a proxy would, and reads everything that was pinned."""

    def __init__(self, core: CoreBroker) -> None:
        self.core = core

    def describe(self, *tables: str, topics: tuple[str, ...] = ()) -> pb.BrokerTables:
        request = pb.DescribeRequest(tables=tables, topics=topics, sample=True, offset_records=True)
        reply = self.core.reply(Kind.DESCRIBE_TABLES, request.SerializeToString())
        (broker,) = pb.DescribeReply.FromString(reply).brokers
        return broker

    def read_once(self, partition: pb.Partition, first: int, epoch: int = 0) -> pb.ReadRawReply:
        request = pb.ReadRawRequest(
            layout=partition.layout,
            table=partition.table,
            topic_id=partition.topic_id,
            queue_id=partition.queue_id,
            next=partition.next,
            epoch=epoch,
        )
        setattr(request, "from", first)
        return pb.ReadRawReply.FromString(
            self.core.reply(Kind.READ_RAW, request.SerializeToString())
        )

    def read(self, partition: pb.Partition) -> bytes:
        parts, at = [], partition.min
        while at < partition.next:
            reply = self.read_once(partition, at)
            if reply.retry_after_ms:
                self.core.advance(reply.retry_after_ms)
                continue
            assert reply.next > at, "no progress"
            parts.append(reply.data)
            at = reply.next
        return b"".join(parts)

    def rows(
        self, tables: pb.BrokerTables, table: str, *, layout: str = ""
    ) -> Iterator[tuple[pb.Partition, Row]]:
        layouts = {layout.name: RecordLayout.from_wire(layout) for layout in tables.layouts}
        for partition in tables.partitions:
            if partition.table == table and layout in ("", partition.layout):
                for row in rows_of(layouts[partition.layout], self.read(partition)):
                    yield partition, row

    def names(self) -> pb.BrokerNames:
        reply = self.core.reply(Kind.NAMES, pb.NamesRequest().SerializeToString())
        (names,) = pb.NamesReply.FromString(reply).brokers
        return names


class ColdTimes:
    """From now on the times of messages are on the disk alone: each read of one is cold once more
    after it was warmed.  `dark`: the disk fails to read them."""

    def __init__(self, core: CoreBroker, *, dark: bool = False) -> None:
        self.dark = dark
        self.warmings = 0
        reader = core.broker.store.reader
        stored_ms = reader.stored_ms
        warm: set[int] = set()

        def cold(unit: Any, *, wait: bool = True) -> int:
            def read() -> None:
                self.warmings += 1
                if self.dark:
                    raise OSError("the disk is in the dark")
                warm.add(unit.position)

            if not wait and unit.position not in warm:
                raise ColdRead(read)
            warm.discard(unit.position)  # the kernel drops it again
            return stored_ms(unit, wait=wait)

        reader.stored_ms = cold  # type: ignore[method-assign]


def lag_of(core: CoreBroker) -> Counts:
    """By group and topic: ready, in flight, blocked, retries, expired."""
    reply = pb_lag(core)
    return {
        (lag.group, lag.topic): (lag.ready, lag.in_flight, lag.blocked, lag.retries, lag.expired)
        for lag in reply.lags
    }


def pb_lag(core: CoreBroker) -> admin.LagReply:
    return admin.LagReply.FromString(core.reply(Kind.LAG, admin.LagRequest().SerializeToString()))


def newest_offsets(reports: CoreReports, tables: pb.BrokerTables) -> Counts:
    """The same from the rows of the newest sample."""
    registry = reports.core.broker.registry
    counts: Counts = {}
    for _, row in reports.rows(tables, "offsets"):
        if row["sample"] != tables.sample:
            continue
        group, topic = registry.group_by_id(row["group_id"]), registry.topic_by_id(row["topic_id"])
        assert group is not None
        assert topic is not None
        ready, retry = row["ready"], row["flags"] & OffsetFlag.RETRY
        values = (ready, row["in_flight"], row["blocked"], ready if retry else 0, row["expired"])
        before = counts.get((group.name, topic.name), (0,) * 5)
        counts[group.name, topic.name] = tuple(map(sum, zip(before, values, strict=True)))
    return counts
