"""`popmq doctor` from the command line: what it prints, what it changes, how it ends."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.broker.node.broker_process import DataLock
from popmq.cli.__main__ import main
from popmq.common.topics import GroupType, MessageType
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker


def core_on(folder: Path) -> CoreBroker:
    settings = replace(
        SMALL,
        broker=replace(SMALL.broker, data=str(folder)),
        store=replace(SMALL.store, snapshot_bytes=1 << 40),
    )
    return CoreBroker(disk=ResidentDisk(), settings=settings)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two messages of a stopped broker, without a snapshot to fall back to."""
    core = core_on(tmp_path / "data")
    core.topic("orders", queues=1)
    for body in (b"first message", b"second message"):
        core.send("orders", body)
    core.stop()
    shutil.rmtree(tmp_path / "data" / "snapshot")
    return tmp_path / "data"


def damage(folder: Path) -> None:
    """In the second message, below the checkpoint."""
    file = folder / "commitlog" / f"{0:020d}"
    file.write_bytes(file.read_bytes().replace(b"second message", b"second messagf"))


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_healthy_store_is_called_healthy(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(data)
    assert main(["doctor", "--data", str(data)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("healthy\n")
    assert "orders" in out
    assert "2 messages" in out
    assert main(["doctor", "--data", str(data), "--repair"]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    assert contents(data) == before


def test_a_group_that_loses_the_order_of_a_topic_is_shown_in_a_healthy_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = core_on(tmp_path / "data")
    core.topic("steps", type=MessageType.FIFO)
    core.group("plain")
    core.group("ordered", type=GroupType.FIFO)
    core.send("steps", b"x", message_group="k")
    for group in ("plain", "ordered"):
        core.receive("steps", group)
    core.stop()
    assert main(["doctor", "--data", str(tmp_path / "data")]) == 0
    out = capsys.readouterr().out
    assert "group plain is normal, and reads steps, where messages have an order" in out
    assert "group ordered" not in out


def test_damage_below_the_checkpoint_is_shown_with_position_and_way_out(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(data)
    before = contents(data)
    assert main(["doctor", "--data", str(data)]) == 1
    out = capsys.readouterr().out
    for text in (
        "DAMAGE BELOW THE CHECKPOINT",
        f"commitlog/{0:020d}",
        "crc32c does not match",
        "the broker refuses to start",
        "needs --repair --accept-loss",
    ):
        assert text in out
    assert contents(data) == before


def test_a_loss_is_not_accepted_by_repair_alone(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(data)
    before = contents(data)
    assert main(["doctor", "--data", str(data), "--repair"]) == 1
    assert "which needs --accept-loss" in capsys.readouterr().out
    assert contents(data) == before


def test_an_accepted_loss_is_cut_saved_and_leaves_a_store_that_starts(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(data)
    assert main(["doctor", "--data", str(data), "--repair", "--accept-loss"]) == 0
    out = capsys.readouterr().out
    assert "gives up no intact record, and those in the damaged bytes" in out
    assert f"what was taken away is in {data}/repair-1" in out
    saved = b"".join(contents(data / "repair-1").values())
    assert b"second messagf" in saved
    assert main(["doctor", "--data", str(data)]) == 0
    core = core_on(data)
    core.group("reader")
    assert [delivery.head for delivery in core.receive("orders", "reader")] == [b"first message"]


def test_json_has_one_object_a_line_the_summary_last(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(data)
    assert main(["doctor", "--data", str(data), "--json"]) == 1
    *findings, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert findings[0]["what"] == "damage below the checkpoint"
    assert findings[0]["need"] == "--repair --accept-loss"
    assert not summary["healthy"]
    assert not summary["starts"]
    assert summary["starts_after_repair"]
    assert summary["messages"] == {"orders": 1}


def test_json_of_a_repair_names_the_repair_folder(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(data)
    assert main(["doctor", "--data", str(data), "--repair", "--accept-loss", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"repaired": "repair-1"} in lines
    assert lines[-1]["healthy"]


@pytest.mark.parametrize("more", [[], ["--repair"]])
def test_a_directory_in_use_is_refused(
    data: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lock = DataLock(str(data))
    assert main(["doctor", "--data", str(data), *more]) == 1
    assert "is used by process" in capsys.readouterr().err
    lock.release()


def test_a_directory_that_is_not_there_is_refused_and_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--data", str(tmp_path / "none"), "--repair"]) == 1
    assert "is no data directory" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_accept_loss_without_repair_is_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--data", str(data), "--accept-loss"]) == 2
    assert "--repair only" in capsys.readouterr().err


def test_a_folder_that_holds_no_store_is_not_called_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("nothing of ours")
    assert main(["doctor", "--data", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("holds no store: it has no folder commitlog\n")


def test_the_folder_of_a_cluster_names_its_brokers_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("broker-b-0", "broker-a-0"):
        (tmp_path / name / "commitlog").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    assert main(["doctor", "--data", str(tmp_path)]) == 1
    errors = capsys.readouterr().err
    assert errors.endswith(f"stores: {tmp_path}/broker-a-0, {tmp_path}/broker-b-0\n")
