"""The doctor on the store of a replica: nothing of replication is a finding, and a slave's torn
tail is called what it is (docs/concepts/doctor.md)."""

from dataclasses import replace
from pathlib import Path

from replica.pair import OF_TWO, Pair
from timer.timer_client import SECOND

from popmq.broker.doctor.finding import RequiredAction
from popmq.cli.local.doctor import examine
from popmq.common.settings.settings import StoreSettings

SMALL_SEGMENTS = replace(
    OF_TWO, store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=64 << 10)
)


def followed(tmp_path: Path) -> Pair:
    pair = Pair(tmp_path, settings=SMALL_SEGMENTS)
    pair.master.topic("orders", queues=2)
    pair.master.group("g")
    for _ in range(6):
        for number in range(40):
            pair.master.send("orders", b"%d" % number * 300)
        pair.master.advance(11 * SECOND)
        pair.follow()
        pair.slave.advance(11 * SECOND)
    return pair


def test_stores_of_replicas_are_healthy(tmp_path: Path) -> None:
    pair = followed(tmp_path)
    assert pair.slave.broker.store.slave is not None
    assert pair.slave.broker.store.slave.hashes.compared > 0
    pair.master.stop()
    pair.slave.stop()
    for name in ("master", "slave"):
        diagnosis = examine(str(tmp_path / name))
        assert diagnosis.healthy, diagnosis.findings


def test_the_torn_tail_of_a_slave_is_no_loss(tmp_path: Path) -> None:
    pair = followed(tmp_path)
    before = pair.slave.broker.store.end
    for _ in range(40):
        pair.master.send("orders", bytes(3_000))
    pair.slave.take(pair.master)
    pair.slave.broker.release_files()
    path = tmp_path / "slave" / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[before : before + 60_000] = bytes(60_000)
    path.write_bytes(data)
    findings = examine(str(tmp_path / "slave")).findings
    torn = [finding for finding in findings if finding.what == "torn tail of a slave"]
    assert len(torn) == 1
    assert "its master has them" in torn[0].consequence
    assert all(finding.need is RequiredAction.NOTHING for finding in findings), findings


def test_a_copy_that_was_not_finished_is_told(tmp_path: Path) -> None:
    pair = followed(tmp_path)
    pair.slave.broker.release_files()
    (tmp_path / "slave" / "snapshot" / "copied.new").write_bytes(b"a part")
    findings = examine(str(tmp_path / "slave")).findings
    assert [finding.what for finding in findings if finding.path == "snapshot/copied.new"] == [
        "leftover"
    ]
