"""Every total of the lag and revive reports against random histories of a broker.

The histories are those of tests/report/report_histories.py. Each is a broker group of its own, with
names of its own, and all of them are one report: Spark plans and runs each table once.
POPMQ_TEST_SEED repeats the histories from that seed on; POPMQ_REPORT_HISTORIES says how many.
"""

import os
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from report.recount import Recount, rows_of
from report.report_histories import Life
from report.reports_rig import CoreReports, lag_of

from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as admin
from popmq.reports.records.id_names import IdNames
from popmq.reports.records.record_layout import RecordLayout
from popmq.reports.report import BrokerMoment, Report
from popmq.testing.harness.core_broker import CoreBroker

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

EVERYDAY, ALL = 20, 200
ACTIONS = 80
TABLES = ("revive", "offsets", "topics", "timers")
COUNTED = (
    *("delivered", "acked", "retried", "dead_lettered", "returned", "lost", "kept", "undone"),
    *("reset", "in_flight", "changed"),
)


@dataclass(slots=True)
class Recorded:
    """What reports read of many histories, and what they must say."""

    lives: list[Life] = field(default_factory=list)
    batches: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    moments: tuple[BrokerMoment, ...] = ()
    counts: Counter[str] = field(default_factory=Counter)

    def take(self, life: Life) -> None:
        recount = self.read(life.core, f"broker-{life.seed}")
        life.names = IdNames.from_wire(CoreReports(life.core).names()).clients
        _check_recount(life, recount)
        _check_model(life)
        self.lives.append(life)
        self.counts.update({name: count for name, count in life.counts.items() if count})
        self.counts[f"ends {life.how}"] += 1

    def read(self, core: CoreBroker, broker: str) -> Recount:
        """Everything that reports read of it, as a broker group of that name."""
        from popmq.reports.records.arrow_rows import record_batch
        from popmq.reports.records.message_fields import Source
        from popmq.reports.records.tables import SAMPLES, TableSchema

        reports = CoreReports(core)
        tables = reports.describe(*TABLES)
        names = IdNames.from_wire(reports.names())
        layouts = {layout.name: RecordLayout.from_wire(layout) for layout in tables.layouts}
        recount = Recount(tables.end_position)
        takes = {"revive": recount.take_revive, "head": recount.take_heads}
        takes["offset"] = recount.take_offsets
        for partition in sorted(tables.partitions, key=lambda item: _ORDER.index(item.layout)):
            data = reports.read(partition)
            if partition.table == "revive":
                takes[partition.layout](rows_of(layouts[partition.layout], data))
            end = 0 if partition.table in SAMPLES else tables.end_position
            source = Source(broker, partition.topic, partition.queue_id, names, end)
            schema = TableSchema.of(partition.table)
            self.batches[partition.table].append(
                record_batch(schema, layouts[partition.layout], data, source)
            )
        moment = (tables.epoch, tables.end_position, tables.wall_ms, tables.log_ms, tables.sample)
        self.moments += (BrokerMoment(broker, *moment),)
        return recount


_ORDER = ("revive", "head", "offset", "offsets", "topics", "timers")


@dataclass(slots=True)
class FrameInputs:
    """The tables of all histories."""

    spark: Any
    recorded: Recorded
    folder: Path
    source: str = "histories"
    incomplete: str = ""

    @property
    def moments(self) -> tuple[BrokerMoment, ...]:
        return self.recorded.moments

    def table(self, name: str, columns: Sequence[str] = (), since: object = None) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_batches(self.recorded.batches[name]), path)
        frame = self.spark.read.parquet(str(path))
        return frame.select(*columns) if columns else frame


def _check_model(life: Life) -> None:
    """Before Spark has its say: the account and the broker's own tables agree."""
    rows = {
        key: {"ready": entry[0], "in_flight": entry[1], "lag": sum(entry[:3]), "retries": entry[3]}
        for key, entry in lag_of(life.core).items()
    }
    expected = life.lag_rows()
    assert rows.keys() == expected.keys()
    for key, row in expected.items():
        shared = row.keys() & rows[key].keys()
        assert {name: rows[key][name] for name in shared} == {name: row[name] for name in shared}


def _check_recount(life: Life, recount: Recount) -> None:
    """The third opinion, from the same records in plain Python."""
    table = life.core.broker.table
    places = dict(table.progress_items())
    counted = recount.finish()
    for place, progress in places.items():
        ends = counted.get(place)
        assert (ends.in_flight if ends else 0) == progress.in_flight, place


def _recorded(seeds: range) -> Recorded:
    recorded = Recorded()
    for seed in seeds:
        try:
            life = Life(seed)
            life.run(ACTIONS)
            recorded.take(life)
        except AssertionError as error:
            raise AssertionError(f"{error} (POPMQ_TEST_SEED={seed} repeats it)") from error
    print(f"seeds {seeds.start} to {seeds.stop - 1}: {dict(sorted(recorded.counts.items()))}")
    return recorded


def _run(spark: Any, folder: Path, count: int, first: int = 0) -> Recorded:
    from popmq.reports.report_builder import ReportOptions, make_report

    fixed = os.environ.get("POPMQ_TEST_SEED", first)
    first = int(fixed) if fixed else random.SystemRandom().randrange(1 << 20)
    count = int(os.environ.get("POPMQ_REPORT_HISTORIES", 1 if fixed else count))
    recorded = _recorded(range(first, first + count))
    inputs = FrameInputs(spark, recorded, folder)
    lag = make_report("lag", inputs, ReportOptions())
    revive = make_report("revive", inputs, ReportOptions())
    verdicts = {(row["group"], row["topic"]): row["status"] for row in lag.first.rows}
    statuses = {(row["group"], row["topic"]): row["status"] for row in revive.first.rows}
    assert {pair: verdicts.get(pair, "UNKNOWN") for pair in statuses} == statuses
    assert verdicts.keys() <= statuses.keys()
    wrong = [
        line
        for life in recorded.lives
        for line in (*_wrong_lag(life, lag), *_wrong_revive(life, revive))
    ]
    totals = _totals(lag, revive)
    print(f"{len(recorded.lives)} histories, totals of the reports: {totals}")
    assert not wrong, "\n".join(wrong[:40])
    return recorded


def _rows_of(life: Life, report: Report, table: str, *key: str) -> dict[Any, dict[str, Any]]:
    """The rows of one history, by their key; its groups and topics end with its seed."""
    rows = {}
    for row in report.table(table).rows:
        mine = row.get("group") or row.get("topic") or ""
        if mine[1:] == str(life.seed) or mine in life.topics:
            rows[tuple(row[name] for name in key) if len(key) > 1 else row[key[0]]] = dict(row)
    return rows


def _wrong_lag(life: Life, report: Report) -> list[str]:
    rows = _rows_of(life, report, "groups", "group", "topic")
    expected = life.lag_rows()
    wrong = _differences(life, "lag", rows, expected)
    moment = next(moment for moment in report.moments if moment.broker == f"broker-{life.seed}")
    for (group, topic), row in rows.items():
        if (group, topic) in expected:
            wrong += _wrong_age(life, row, moment.wall_ms)
    dead = _rows_of(life, report, "dead_letters", "group")
    letters = {name: {"dead_letters": count} for name, count in life.letter_rows().items()}
    wrong += _differences(life, "dead letters", dead, letters)
    kept = {
        topic.name: {"stored": sum(map(len, topic.queues.values())), "queues": len(topic.queues)}
        for topic in life.topics.values()
    }
    wrong += _differences(life, "topics", _rows_of(life, report, "topics", "topic"), kept)
    queues: Counter[tuple[str, str]] = Counter()
    for item in report.table("queues").rows:
        queues[item["group"], item["topic"]] += item["lag"]
    summed = {key: {"lag": queues[key]} for key in rows}
    return wrong + _differences(life, "sum of queues", summed, expected, only=("lag",))


def _wrong_age(life: Life, row: dict[str, Any], now_ms: int) -> list[str]:
    """The age is right, or it is unknown and the status says so."""
    key = (life.seed, row["group"], row["topic"])
    if not row["ready"]:
        quiet = row["waits_ms"] is None and not row["unknown_ages"]
        return [] if quiet else [f"{key}: nothing is ready, and yet {row}"]
    if row["unknown_ages"]:
        if life.ages_known or row["status"] == "OK":
            return [f"{key}: an age is unknown ({life.how}): {row}"]
        return []
    oldest = life.oldest(row["group"], life.topics[row["topic"]])
    assert oldest is not None, key
    if not oldest[0] <= row["oldest_ready_ms"] <= oldest[1]:
        return [f"{key}: stored at {row['oldest_ready_ms']}, not in {oldest}"]
    if row["waits_ms"] != now_ms - row["oldest_ready_ms"]:
        return [f"{key}: waits {row['waits_ms']} since {row['oldest_ready_ms']}"]
    if life.stopped and row["status"] != "STOPPED":
        return [f"{key}: stopped an hour ago ({life.how}), and {row['status']}: {row}"]
    return []


def _wrong_revive(life: Life, report: Report) -> list[str]:
    expected = life.revive_rows()
    groups = {
        pair: row
        for pair, row in _rows_of(life, report, "groups", "group", "topic").items()
        if pair in expected or any(row[name] for name in COUNTED)  # others have a verdict alone
    }
    wrong = _differences(life, "revive", groups, expected)
    consumers = _rows_of(life, report, "consumers", "group", "client")
    holders = life.consumer_rows(life.names, life.log_ms())
    for row in holders.values():
        if row["stuck"] is None:
            del row["stuck"]
    wrong += _differences(life, "consumers", consumers, holders)
    attempts = {
        key: {"messages": row["messages"]}
        for key, row in _rows_of(life, report, "attempts", "group", "attempts").items()
        if not key[0].startswith("f")
    }
    counts = {key: {"messages": count} for key, count in life.attempts_rows().items()}
    return wrong + _differences(life, "attempts", attempts, counts)


def _differences(
    life: Life,
    what: str,
    rows: dict[Any, Any],
    expected: dict[Any, Any],
    only: Sequence[str] = (),
) -> list[str]:
    wrong = []
    if rows.keys() != expected.keys():
        wrong.append(
            f"{life.seed} {what}: rows {sorted(rows.keys() - expected.keys())} too many, "
            f"{sorted(expected.keys() - rows.keys())} missing"
        )
    for key in rows.keys() & expected.keys():
        for name in only or expected[key]:
            if rows[key][name] != expected[key][name]:
                wrong.append(
                    f"{life.seed} {what} {key}: {name} is {rows[key][name]}, "
                    f"not {expected[key][name]}"
                )
    return wrong


def _totals(lag: Report, revive: Report) -> dict[str, int]:
    names = ("delivered", "acked", "retried", "dead_lettered", "returned", "undone", "reset")
    results = {name: sum(row[name] for row in revive.table("groups").rows) for name in names}
    groups = lag.table("groups").rows
    results |= {name: sum(row[name] for row in groups) for name in ("lag", "ready", "in_flight")}
    statuses = Counter(row["status"] for row in groups)
    return (
        results
        | {"stuck": sum(row["stuck"] for row in revive.table("consumers").rows)}
        | {f"status {name}": count for name, count in sorted(statuses.items())}
    )


def test_what_a_reset_or_a_deletion_ended_is_in_flight_no_more(spark: Any, tmp_path: Path) -> None:
    """Half an hour after the last receive; each group has one client of the same name."""
    from popmq.reports.report_builder import ReportOptions, make_report

    core = CoreBroker()
    core.topic("orders", queues=1)
    core.topic("old", queues=1)
    for name in ("reset", "rejects", "holds", "done", "gone"):
        core.group(name)
    for number in range(5):
        core.send("orders", b"%d" % number)
        core.send("old", b"%d" % number)

    def receive(name: str, topic: str = "orders") -> list[bytes]:
        deliveries = core.receive(topic, name, invisible_ms=3_600_000, client_id=name)
        return [delivery.handle for delivery in deliveries]

    receive("reset")
    again = admin.ResetOffsetRequest(group="reset", topic="orders", newest=True)
    core.reply(Kind.RESET_OFFSET, again.SerializeToString())
    for handle in receive("rejects"):
        core.reject("orders", "rejects", handle)
    first, second, *others = receive("holds")
    core.change("orders", "holds", first, 7_200_000)
    core.ack("orders", "holds", second, *others[1:])
    core.ack("orders", "done", *receive("done"))
    receive("done", "old")
    receive("gone")
    core.reply(Kind.DELETE_GROUP, admin.DeleteGroupRequest(name="gone").SerializeToString())
    core.reply(Kind.DELETE_TOPIC, admin.DeleteTopicRequest(name="old").SerializeToString())
    core.advance(35 * 60_000)
    recorded = Recorded()
    recorded.read(core, "broker")
    report = make_report("revive", FrameInputs(spark, recorded, tmp_path), ReportOptions())
    consumers = {row["group"]: row for row in report.table("consumers").rows}
    shown = {name: (row["in_flight"], row["stuck"]) for name, row in consumers.items()}
    assert shown == {
        **{"reset": (0, False), "rejects": (0, False), "done": (0, False)},
        "holds": (2, True),
    }
    assert consumers["holds"]["held_s"] == pytest.approx(35 * 60, abs=5)
    rows = {row["group"]: row for row in report.table("groups").rows}
    ends = ("delivered", "acked", "dead_lettered", "reset", "in_flight")
    assert {name: tuple(row[end] for end in ends) for name, row in rows.items()} == {
        "reset": (5, 0, 0, 5, 0),
        "rejects": (5, 0, 5, 0, 0),
        "holds": (5, 3, 0, 0, 2),
        "done": (5, 5, 0, 0, 0),
    }


def test_a_dead_letter_that_is_kept_is_no_lost_message(spark: Any, tmp_path: Path) -> None:
    """A group that reads its own dead letters: one that fails again stays where it is."""
    from popmq.reports.report_builder import ReportOptions, make_report

    core = CoreBroker()
    core.topic("orders", queues=1)
    core.group("g", max_attempts=1)
    for number in range(3):
        core.send("orders", b"%d" % number)
    for delivery in core.receive("orders", "g"):
        core.reject("orders", "g", delivery.handle)
    core.advance(1_000)
    first, *others = core.receive("%DLQ%g", "g")
    core.reject("%DLQ%g", "g", first.handle)
    core.ack("%DLQ%g", "g", *(delivery.handle for delivery in others))
    core.advance(1_000)
    recorded = Recorded()
    recorded.read(core, "broker")
    report = make_report("revive", FrameInputs(spark, recorded, tmp_path), ReportOptions())
    rows = {row["topic"]: row for row in report.table("groups").rows}
    ends = ("delivered", "acked", "dead_lettered", "kept", "lost", "undone")
    assert {topic: tuple(row[end] for end in ends) for topic, row in rows.items()} == {
        "orders": (3, 0, 3, 0, 0, 0),
        "%DLQ%g": (3, 2, 0, 1, 0, 0),
    }


def test_parked_messages_of_a_deleted_group_are_no_dead_letters_of_a_later_one(
    spark: Any, tmp_path: Path
) -> None:
    """In this history three of them became dead letters before their group was deleted, and one of
    the same name was made."""
    recorded = _run(spark, tmp_path, 1, first=737426)
    assert recorded.counts["group deleted"] == 2


def test_every_total_of_the_reports_is_that_of_random_histories(spark: Any, tmp_path: Path) -> None:
    _run(spark, tmp_path, EVERYDAY)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_every_total_of_the_reports_is_that_of_two_hundred_histories(
    spark: Any, tmp_path: Path
) -> None:
    recorded = _run(spark, tmp_path, ALL)
    if len(recorded.lives) >= ALL:
        kinds = (
            *("restart", "failover", "topic deleted", "group deleted", "oldest", "newest"),
            *("offset", "redriven", "parked", "resume", "skip", "dead-letter", "taken back"),
            *("ends busy", "ends warm", "ends cold", "ends dark", "ends dark until the report"),
        )
        missing = [kind for kind in kinds if not recorded.counts[kind]]
        assert not missing, f"no history had {missing}: {dict(recorded.counts)}"
