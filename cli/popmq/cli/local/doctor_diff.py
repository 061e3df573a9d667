"""`popmq doctor diff A B`: the first table and row in which two snapshots differ.

Only what counts in the state hash is compared.  Exit status: 0 equal, 1 they differ.
"""

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
from popmq.cli.terminal.command_line import Args, argument, command
from popmq.cli.terminal.output import columns, print_rows
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


def run_diff(args: Args) -> int:
    disk = RehearsalDisk()
    try:
        paths = chosen(disk, args.a, args.b)
        snapshot, other = (_read(disk, path) for path in paths)
    finally:
        disk.close()
    difference = first_difference(snapshot, other)
    print_rows(args, [_fields(paths, difference)], [_text(paths, (snapshot, other), difference)])
    return 0 if difference is None else 1


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
        found_snapshot_names = snapshot_names(disk, folder)
        if found_snapshot_names:
            return {int(name): f"{folder}/{name}" for name in found_snapshot_names}
    raise ConfigError(f"{path} is neither a snapshot nor a folder with snapshots")


def _list(positions: dict[int, str]) -> str:
    return ", ".join(map(str, sorted(positions)))


def _read(disk: Disk, path: str) -> Snapshot:
    snapshot = read_snapshot(disk, path)
    if snapshot is None:
        raise ConfigError(f"{path} is no whole snapshot")
    return snapshot


def first_difference(snapshot: Snapshot, other: Snapshot) -> Difference | None:
    """By the tables' numbers, then by the rows' names."""
    sides = _tables(snapshot), _tables(other)
    differing = [number for number in TABLES if sides[0].get(number) != sides[1].get(number)]
    if not differing:
        return None
    number = differing[0]
    a, b = (side.get(number, {}) for side in sides)
    rows = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    fields = _differing(a.get(rows[0]), b.get(rows[0]))
    tables = tuple(TABLES[value][0] for value in differing)
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


def _fields(paths: tuple[str, str], difference: Difference | None) -> dict[str, object]:
    if difference is None:
        return {"a": paths[0], "b": paths[1], "equal": True}
    values = {name: getattr(difference, name) for name in Difference.__slots__}
    named = {"file_a": paths[0], "file_b": paths[1], "equal": False}
    plain: dict[str, object] = json.loads(json.dumps({**named, **values}, default=str))
    return plain


def _text(
    paths: tuple[str, str], snapshots: tuple[Snapshot, Snapshot], difference: Difference | None
) -> str:
    heads = [
        (name, f"{path}, position {snapshot.head.position}, state hash {snapshot.state_hash:032x}")
        for name, path, snapshot in zip("AB", paths, snapshots, strict=True)
    ]
    if difference is None:
        return columns(("SNAPSHOTS", "equal in all that counts"), heads)
    rows = [
        *heads,
        ("table", difference.table),
        ("row", difference.row),
        *((f"A {name}", value) for name, value in (difference.a or {"": "no such row"}).items()),
        *((f"B {name}", value) for name, value in (difference.b or {"": "no such row"}).items()),
        ("rows that differ", f"{difference.rows} in this table"),
        ("tables that differ", ", ".join(difference.tables)),
    ]
    return columns(("SNAPSHOTS", "they differ"), rows)


diff = command(
    "diff",
    run_diff,
    argument("a"),
    argument("b"),
    help="Name the first row in which two snapshots differ. A and B are snapshot files or folders "
    "of snapshots; of two folders the newest position that both have is compared.",
    examples=("popmq doctor diff ./a/snapshot ./b/snapshot",),
    connects=False,
)
