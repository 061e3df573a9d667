"""`popmq doctor diff A B`: the first table and row in which two snapshots differ.

Only what counts in the state hash is compared.  Exit status: 0 equal, 1 they differ.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from popmq.broker.deliveries import check_point_snapshot, parked_keys
from popmq.broker.deliveries import redriven_dead_letters as redrive
from popmq.broker.doctor.rehearsal_disk import RehearsalDisk
from popmq.broker.log import dispatch
from popmq.broker.log.snapshot_table import Row
from popmq.broker.meta import lite_topics, registry
from popmq.broker.persistence.snapshot import Snapshot, read_snapshot, snapshot_names
from popmq.broker.timer import incoming_timers as arrivals
from popmq.broker.timer import outgoing_timers as departures
from popmq.broker.timer import timer_state
from popmq.broker.transaction import transaction_table
from popmq.cli.metadata import columns
from popmq.common.disk import Disk
from popmq.common.errors import ConfigError

Rows = Callable[[bytes], Iterator[Row]]

# By `table_number`. Of first receipts (7) nothing counts: they fade with time.
TABLES: dict[int, tuple[str, Rows]] = {
    1: ("topics and groups", registry.snapshot_rows),
    2: ("check points", check_point_snapshot.snapshot_rows),
    3: ("next offsets of queues", dispatch.snapshot_rows),
    4: ("redriven dead letters", redrive.snapshot_rows),
    5: ("parked keys", parked_keys.snapshot_rows),
    6: ("timers", timer_state.snapshot_rows),
    8: ("transactions", transaction_table.snapshot_rows),
    9: ("lite topics", lite_topics.snapshot_rows),
    10: ("departures of timers", departures.snapshot_rows),
    11: ("arrivals of timers", arrivals.snapshot_rows),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first row that differs. `a` and `b` are its fields that differ; None: there is no row."""

    table: str
    row: str
    a: dict[str, object] | None
    b: dict[str, object] | None
    rows: int  # that differ in that table
    tables: tuple[str, ...]  # all tables that differ


def add_parser(parsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = parsers.add_parser("diff", help="name the first row in which two snapshots differ")
    parser.add_argument("a", metavar="A", help="a snapshot file, or a folder of snapshots")
    parser.add_argument(
        "b",
        metavar="B",
        help="another one; of two folders the newest position that both have is compared",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run_diff)


def run_diff(args: argparse.Namespace) -> int:
    disk = RehearsalDisk()
    try:
        paths = chosen(disk, args.a, args.b)
        one, other = (_read(disk, path) for path in paths)
    finally:
        disk.close()
    found = first_difference(one, other)
    print(_json(paths, found) if args.json else _text(paths, (one, other), found))
    return 0 if found is None else 1


def chosen(disk: Disk, a: str, b: str) -> tuple[str, str]:
    """The two files. ConfigError for what is neither a snapshot nor a folder of some."""
    names = [_names(disk, path) for path in (a, b)]
    both = set(names[0]) & set(names[1])
    if not both:
        raise ConfigError(
            f"{a} has snapshots of positions {_list(names[0])}, {b} of {_list(names[1])}: two "
            "snapshots of the same position are needed"
        )
    position = max(both)
    return names[0][position], names[1][position]


def _names(disk: Disk, path: str) -> dict[int, str]:
    """Position -> file of a snapshot, a folder of them, or a data directory."""
    if os.path.isfile(path):
        return {_read(disk, path).head.position: path}
    for folder in (f"{path}/snapshot", path):
        found = snapshot_names(disk, folder)
        if found:
            return {int(name): f"{folder}/{name}" for name in found}
    raise ConfigError(f"{path} is neither a snapshot nor a folder with snapshots")


def _list(positions: dict[int, str]) -> str:
    return ", ".join(map(str, sorted(positions)))


def _read(disk: Disk, path: str) -> Snapshot:
    snapshot = read_snapshot(disk, path)
    if snapshot is None:
        raise ConfigError(f"{path} is no whole snapshot")
    return snapshot


def first_difference(one: Snapshot, other: Snapshot) -> Difference | None:
    """By the tables' numbers, then by the rows' names."""
    sides = _tables(one), _tables(other)
    differing = [number for number in TABLES if sides[0].get(number) != sides[1].get(number)]
    if not differing:
        return None
    number = differing[0]
    a, b = (side.get(number, {}) for side in sides)
    rows = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    fields = _differing(a.get(rows[0]), b.get(rows[0]))
    tables = tuple(TABLES[one][0] for one in differing)
    return Difference(TABLES[number][0], rows[0], *fields, len(rows), tables)


def _tables(snapshot: Snapshot) -> dict[int, dict[str, dict[str, object]]]:
    tables: dict[int, dict[str, dict[str, object]]] = {}
    for number, content in snapshot.pieces():
        if number in TABLES:
            rows = TABLES[number][1](content)
            tables.setdefault(number, {}).update({row.name: row.fields for row in rows})
    return {number: rows for number, rows in tables.items() if rows}


def _differing(
    a: dict[str, object] | None, b: dict[str, object] | None
) -> tuple[dict[str, object] | None, dict[str, object] | None]:
    """The fields that differ; all of a row that only one side has."""
    if a is None or b is None:
        return a, b
    names = [name for name in a if a[name] != b.get(name)]
    return {name: a[name] for name in names}, {name: b.get(name) for name in names}


def _json(paths: tuple[str, str], found: Difference | None) -> str:
    if found is None:
        return json.dumps({"a": paths[0], "b": paths[1], "equal": True})
    values = {name: getattr(found, name) for name in Difference.__slots__}
    named = {"file_a": paths[0], "file_b": paths[1], "equal": False}
    return json.dumps({**named, **values}, default=str)


def _text(
    paths: tuple[str, str], snapshots: tuple[Snapshot, Snapshot], found: Difference | None
) -> str:
    heads = [
        (name, f"{path}, position {one.head.position}, state hash {one.state_hash:032x}")
        for name, path, one in zip("AB", paths, snapshots, strict=True)
    ]
    if found is None:
        return columns(("SNAPSHOTS", "equal in all that counts"), heads)
    rows = [
        *heads,
        ("table", found.table),
        ("row", found.row),
        *((f"A {name}", value) for name, value in (found.a or {"": "no such row"}).items()),
        *((f"B {name}", value) for name, value in (found.b or {"": "no such row"}).items()),
        ("rows that differ", f"{found.rows} in this table"),
        ("tables that differ", ", ".join(found.tables)),
    ]
    return columns(("SNAPSHOTS", "they differ"), rows)
