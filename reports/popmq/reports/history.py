"""History: what brokers kept, appended to Parquet as it comes, put together by day, deleted by age.

    <folder>/<table>/new-<batch>/      rows of one batch of a stream
    <folder>/<table>/day-<date>-<n>/   rows of one day, put together
    <folder>/<table>/manifest.json     which of them count
    <folder>/checkpoint/<table>/       how far the stream is (Spark's)
    <folder>/moments.json              how far all tables are

A batch is written under its number, so one that is repeated after a crash replaces itself.
Compaction writes new folders, then the manifest by rename, then deletes: a crash leaves either the
old rows or the new ones, and each row once.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from popmq.common.errors import Code, Refused
from popmq.common.wire import report_pb2 as pb
from popmq.reports.atomic_file import write_json
from popmq.reports.history_progress import HistoryProgress
from popmq.reports.records.endpoint import ReportEndpoint
from popmq.reports.records.tables import TABLES, TableSchema
from popmq.reports.source.options import pin

# What a history keeps; messages themselves are for whoever reads them as a stream.
KEPT = tuple(name for name in TABLES if name != "messages")
_NEW = re.compile(r"new-(\d+)")


@dataclass(slots=True)
class TableHistory:
    """The folder of one table. One process at a time writes."""

    folder: Path
    compacted: int = -1  # batches up to this one are in days
    days: dict[str, str] = field(default_factory=dict)  # date -> folder's name

    @classmethod
    def open(cls, folder: Path) -> "TableHistory":
        history = cls(folder)
        manifest = folder / "manifest.json"
        if manifest.exists():
            document = json.loads(manifest.read_text())
            history.compacted, history.days = document["compacted"], document["days"]
        return history

    def batches(self) -> dict[int, Path]:
        """Those that are in no day yet, by number."""
        paths = {}
        for path in self.folder.glob("new-*"):
            match = _NEW.fullmatch(path.name)
            if match and int(match[1]) > self.compacted and (path / "_SUCCESS").exists():
                paths[int(match[1])] = path
        return dict(sorted(paths.items()))

    def paths(self) -> list[str]:
        """Everything that counts."""
        return [
            *(str(self.folder / name) for _, name in sorted(self.days.items())),
            *map(str, self.batches().values()),
        ]

    def publish(self, *, compacted: int, days: dict[str, str]) -> None:
        """From now on these count; what does not is deleted."""
        write_json(self.folder / "manifest.json", {"compacted": compacted, "days": days})
        self.compacted, self.days = compacted, days
        for path in self._dead():
            shutil.rmtree(path)

    def _dead(self) -> Iterator[Path]:
        for path in self.folder.glob("new-*"):
            match = _NEW.fullmatch(path.name)
            if match and int(match[1]) <= self.compacted:
                yield path
        for path in self.folder.glob("day-*"):
            if path.name not in self.days.values():
                yield path


def append(
    spark: Any, endpoint: str, folder: Path, *, patience_s: float, tables: Sequence[str] = KEPT
) -> dict[str, int]:
    """Add what came since the last time; rows by table. Every table ends at the same moment, and
    a broker group that does not answer then stays where it was."""
    with ReportEndpoint(endpoint, patience_s=patience_s) as asked:
        brokers, _ = asked.describe(tables, partial=True)
    return append_pinned(spark, asked, folder, brokers, tables=tables)


def append_pinned(
    spark: Any,
    asked: ReportEndpoint,
    folder: Path,
    brokers: Sequence[pb.BrokerTables],
    *,
    tables: Sequence[str],
) -> dict[str, int]:
    """The same, up to what was `brokers`."""
    rows = dict.fromkeys(tables, 0)
    queries = [_start(spark, asked, folder, name, pin(list(brokers)), rows) for name in tables]
    try:
        for query in queries:
            query.awaitTermination()
    finally:
        for query in queries:
            query.stop()
    HistoryProgress.load(folder).add(tables, brokers)
    return rows


def _start(
    spark: Any,
    asked: ReportEndpoint,
    folder: Path,
    name: str,
    pinned: str,
    rows: dict[str, int],
) -> Any:
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)

    def write(frame: Any, number: int) -> None:
        path = place / f"new-{number}"
        frame.coalesce(1).write.mode("overwrite").option("compression", "zstd").parquet(str(path))
        rows[name] += sum(pq.read_metadata(path).num_rows for path in path.glob("*.parquet"))

    stream = (
        spark.readStream.format("popmq")
        .option("endpoint", asked.address)
        .option("patienceSeconds", str(asked.patience_s))
        .option("pinned", pinned)
        .load(name)
    )
    return (
        stream.writeStream.foreachBatch(write)
        .option("checkpointLocation", str(folder / "checkpoint" / name))
        .trigger(availableNow=True)
        .start()
    )


def compact(spark: Any, folder: Path, *, keep_days: int, today: str) -> dict[str, int]:
    """Put batches together by day (of `wall_time`, UTC), and drop days older than `keep_days`.

    `today` as 2026-11-22. Returns the number of days that are kept, by table.
    """
    oldest = datetime.fromisoformat(today).replace(tzinfo=UTC) - timedelta(days=keep_days)
    kept = {}
    for name in KEPT:
        if (folder / name).is_dir():
            table = TableHistory.open(folder / name)
            _compact_table(spark, table, oldest.date().isoformat())
            kept[name] = len(table.days)
    return kept


def _compact_table(spark: Any, table: TableHistory, oldest: str) -> None:
    from pyspark.sql import functions as F

    batches = table.batches()
    days = {day: name for day, name in table.days.items() if day >= oldest}
    if not batches and days == table.days:
        return
    if batches:
        fresh = _read(spark, table.folder.name, *map(str, batches.values()))
        fresh = fresh.withColumn("day", F.date_format("wall_time", "yyyy-MM-dd"))
        new_days = [row["day"] for row in fresh.select("day").distinct().collect()]
        for day in sorted(new_days):
            if day < oldest:
                continue
            rows = fresh.where(F.col("day") == day).drop("day")
            if day in days:
                before = _read(spark, table.folder.name, str(table.folder / days[day]))
                rows = rows.unionByName(before)
            name = f"day-{day}-{max(batches)}"
            ordered = rows.repartition(1).sortWithinPartitions("broker", "wall_time")
            place = str(table.folder / name)
            ordered.write.mode("overwrite").option("compression", "zstd").parquet(place)
            days[day] = name
    table.publish(compacted=max(batches, default=table.compacted), days=days)


def read_history(spark: Any, folder: Path, name: str) -> Any:
    paths = TableHistory.open(folder / name).paths() if (folder / name).is_dir() else []
    if not paths:
        raise Refused(
            Code.NOT_FOUND,
            f"{folder} has no history of {name}: popmq report history --history {folder}",
        )
    return _read(spark, name, *paths)


def _read(spark: Any, name: str, *paths: str) -> Any:
    """Columns that the table got after a file was written are NULL there."""
    return spark.read.schema(TableSchema.of(name).ddl()).parquet(*paths)
