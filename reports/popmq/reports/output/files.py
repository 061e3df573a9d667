"""A report's tables as files: CSV, JSON, Parquet."""

import csv
import json
from datetime import UTC, datetime
from pathlib import Path

from popmq.reports.report import Report


def write_csv(report: Report, folder: Path) -> list[Path]:
    """One file for each table."""
    return [_write_csv(report, number, folder) for number in range(len(report.tables))]


def _write_csv(report: Report, number: int, folder: Path) -> Path:
    table = report.tables[number]
    path = _path(report, folder, table.name, "csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        writer.writerows([row[name] for name in table.columns] for row in table.rows)
    return path


def write_parquet(report: Report, folder: Path) -> list[Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = []
    for table in report.tables:
        path = _path(report, folder, table.name, "parquet")
        columns = {name: [row[name] for row in table.rows] for name in table.columns}
        pq.write_table(pa.table(columns), path, compression="zstd")
        written.append(path)
    return written


def save(report: Report, place: str) -> list[str]:
    """The page and the figures, as the newest of this report and with the time in their names.

    `place` is a folder, or the URL of one in an object store, as Arrow knows them.
    """
    from pyarrow import fs

    from popmq.reports.output.page import to_html

    if "://" in place:
        files, folder = fs.FileSystem.from_uri(place)
    else:
        files, folder = fs.LocalFileSystem(), str(Path(place).absolute())
    if isinstance(files, fs.LocalFileSystem):
        files.create_dir(folder, recursive=True)
    made = datetime.fromtimestamp(report.made_ms / 1_000, UTC).strftime("%Y%m%dT%H%M%SZ")
    written = []
    for ending, text in (("html", to_html(report)), ("json", to_json(report))):
        for name in (f"{report.name}-{made}", report.name):
            path = f"{folder.rstrip('/')}/{name}.{ending}"
            with files.open_output_stream(path) as stream:
                stream.write(text.encode())
            written.append(path)
    return written


def to_json(report: Report) -> str:
    """One object; times that are no numbers are written as text."""
    return json.dumps(report.to_json(), default=str)


def _path(report: Report, folder: Path, table: str, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{report.name}-{table}.{kind}"
