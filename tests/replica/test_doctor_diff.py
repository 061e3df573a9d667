"""`popmq doctor diff`: the first table and row in which two snapshots differ."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from replica import test_same_log_time as acts
from replica.pair import Pair

from popmq.broker.core.broker import Broker
from popmq.broker.persistence.snapshot import Snapshot, read_snapshot, snapshot_names
from popmq.cli.__main__ import main
from popmq.cli.local.doctor_diff import TABLES, first_difference
from popmq.common.disk import RealDisk
from popmq.testing.harness.core_broker import CoreBroker

ACTS = [
    acts.buffered_check_points,
    acts.changes,
    acts.parked_keys,
    acts.redrive,
    acts.timers,
    acts.transactions,
    acts.lite_topics,
]


def made(tmp_path: Path, act: Callable[[CoreBroker], None]) -> Pair:
    """Master and slave have the same records, and no snapshot yet."""
    pair = Pair(tmp_path, acts.SETTINGS)
    act(pair.master)
    pair.master.broker.buffer.write_all()
    pair.master.run_until_idle()
    pair.follow()
    return pair


def snapshots(pair: Pair) -> tuple[Snapshot, Snapshot]:
    for core in (pair.master, pair.slave):
        store = core.broker.store
        store.snapshots.make_now(store._snapshot_head())
    return newest(pair.folder / "master"), newest(pair.folder / "slave")


def newest(data: Path) -> Snapshot:
    folder = f"{data}/snapshot"
    snapshot = read_snapshot(RealDisk(), f"{folder}/{snapshot_names(RealDisk(), folder)[-1]}")
    assert snapshot is not None
    return snapshot


def a_check_point(broker: Broker) -> str:
    ck = next(iter(broker.table))
    ck.popped_at_ms += 1
    return f"check point {ck.epoch}/{ck.sequence}"


@pytest.mark.parametrize("act", ACTS)
def test_tables_of_the_same_records_are_equal(
    act: Callable[[CoreBroker], None], tmp_path: Path
) -> None:
    item, other = snapshots(made(tmp_path, act))
    assert item.state_hash == other.state_hash
    assert first_difference(item, other) is None


def test_a_check_point_that_differs_is_named_with_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = made(tmp_path, acts.buffered_check_points)
    row = a_check_point(pair.slave.broker)
    snapshot, other = snapshots(pair)
    assert snapshot.state_hash != other.state_hash
    difference = first_difference(snapshot, other)
    assert difference is not None
    assert (difference.table, difference.row, difference.rows) == ("check points", row, 1)
    assert difference.a is not None
    assert difference.b is not None
    assert list(difference.a) == list(difference.b) == ["popped_at_ms"]
    data = [str(tmp_path / name) for name in ("master", "slave")]
    assert main(["doctor", "diff", *data]) == 1
    output = capsys.readouterr().out
    assert row in output
    assert "popped_at_ms" in output
    assert main(["doctor", "diff", "--json", f"{data[0]}/snapshot", data[1]]) == 1
    assert json.loads(capsys.readouterr().out)["row"] == row
    assert main(["doctor", "diff", data[0], data[0]]) == 0


def test_a_row_that_only_one_has_is_named(tmp_path: Path) -> None:
    pair = made(tmp_path, acts.acks)
    pair.slave.broker.deliveries.redriven._add(77, 5)
    difference = first_difference(*snapshots(pair))
    assert difference is not None
    assert difference.table == "redriven dead letters"
    assert (difference.row, difference.a) == ("dead-letter topic 77, from offset 5", None)
    assert difference.b == {"end": 6}


def test_what_is_no_snapshot_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"no snapshot")
    for name in ("empty", "file", "missing"):
        assert main(["doctor", "diff", str(tmp_path / name), str(tmp_path / name)]) != 0
        assert str(tmp_path / name) in capsys.readouterr().err


def test_every_table_that_counts_in_the_state_hash_can_be_compared(tmp_path: Path) -> None:
    pair = Pair(tmp_path, acts.SETTINGS)
    tables = {table.table_number for table in pair.master.broker.store.snapshots.tables}
    assert tables - TABLES.keys() == {7, 12, 13}
