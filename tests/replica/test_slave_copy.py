"""An empty slave begins with its master's snapshot; a store that is of no use is wiped."""

from collections.abc import Callable
from pathlib import Path

import pytest
from replica.pair import SHORT, Pair, Slave, fill
from timer.timer_client import HOUR, MINUTE, SECOND, received, send_all

from popmq.broker.log.store_checkpoint import read_checkpoint
from popmq.broker.persistence.wipe import wipe
from popmq.common.errors import Code
from popmq.common.topics import MessageType
from popmq.testing.disk.lying_disk import LyingDisk


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    new_pair = Pair(tmp_path)
    new_pair.master.topic("orders", queues=2)
    new_pair.master.group("g")
    return new_pair


def copied(
    pair: Pair,
    change: Callable[[bytes], bytes] = lambda data: data,
    slave: Slave | None = None,
) -> tuple[Slave, str]:
    """A new, empty slave, with the master's newest snapshot given to it in pieces."""
    slave = slave or pair.core(Slave, "new")
    master = pair.master.broker.store
    path = pair.folder / "master" / "snapshot" / f"{master.snapshots.position:020d}"
    data = change(path.read_bytes())
    install = slave.broker.records.slave_lifecycle.begin_install(master.start)
    for at in range(0, len(data), 1_000):
        install.append_chunk(data[at : at + 1_000])
    results: list[str] = []
    install.finish(results.append)
    slave.run_until_idle()
    while not results:
        assert slave.broker.step()
        slave.run_until_idle()
    return slave, results[0]


def long_lived(tmp_path: Path) -> tuple[Pair, bytes]:
    """A master whose log does not begin at 0 any more; and a handle of a message in flight."""
    pair = Pair(tmp_path, settings=SHORT)
    pair.master.topic("orders", queues=2)
    pair.master.topic("later", queues=1, type=MessageType.MIXED)
    pair.master.topic("gone", queues=1)
    pair.master.group("g")
    pair.master.send("gone", b"of a topic that is deleted")
    pair.master.broker.registry.delete_topic("gone")
    send_all(pair.master, {"far": 40 * HOUR}, topic="later")
    pair.master.send("orders", b"in flight")
    (held,) = pair.master.receive("orders", "g", invisible_ms=11 * HOUR)
    for _ in range(8):
        fill(pair.master, 30, size=50_000)
        pair.master.advance(30 * MINUTE)
    assert pair.master.broker.store.start > 0
    return pair, held.handle


def test_an_empty_slave_begins_with_a_snapshot_and_copies_the_log_from_its_start(
    tmp_path: Path,
) -> None:
    pair, handle = long_lived(tmp_path)
    slave, text = copied(pair)
    assert text == ""
    store, master = slave.broker.store, pair.master.broker.store
    assert store.slave is not None
    assert store.start == store.end == master.start
    assert store.slave.apply.rebuilding
    fill(pair.master, 5)
    slave.follow(pair.master)
    assert not store.slave.apply.rebuilding
    assert slave.broker.store.snapshots.position > 0
    for topic in pair.master.broker.registry.topics():
        for queue in range(topic.queues):
            ours, theirs = store.queue(topic.id, queue), master.queue(topic.id, queue)
            assert (ours.count, ours.min_offset) == (theirs.count, theirs.min_offset)
    # What it is now survives a crash.
    slave.broker.release_files()
    slave.start()
    slave.follow(pair.master)
    pair.slave = slave
    promoted = pair.fail_over()
    assert [result.code for result in promoted.ack("orders", "g", handle)] == [Code.OK]
    promoted.advance(41 * HOUR)
    assert received(promoted, "later") == [b"far"]


def test_after_a_checkpoint_a_slave_whose_log_began_later_is_not_taken_for_damaged(
    tmp_path: Path,
) -> None:
    pair, _ = long_lived(tmp_path)
    disk = LyingDisk()
    fresh = pair.core(Slave, "late", disk)
    fresh.advance(11 * SECOND)
    slave, _ = copied(pair, slave=fresh)
    slave.follow(pair.master)
    slave.advance(11 * SECOND)
    checkpoint = read_checkpoint(disk, f"{tmp_path}/late/checkpoint")
    assert checkpoint is not None
    assert checkpoint.log_start == pair.master.broker.store.start
    slave.broker.release_files()
    disk.restore_power()
    slave.start()
    assert slave.broker.store.start == checkpoint.log_start


def test_a_snapshot_that_is_damaged_is_not_installed(tmp_path: Path) -> None:
    pair, _ = long_lived(tmp_path)
    _, text = copied(pair, lambda data: data[:-30] + bytes(30))
    assert "not whole" in text


def test_a_store_that_is_wiped_has_nothing_left_but_who_it_is(pair: Pair, tmp_path: Path) -> None:
    fill(pair.master, 300, size=400)
    pair.master.advance(30 * SECOND)
    pair.follow()
    pair.slave.advance(30 * SECOND)
    folder = tmp_path / "slave"
    (folder / "identity").write_text("who it is")
    pair.slave.broker.release_files()
    wipe(pair.slave.broker.disk, pair.slave.broker.settings.broker.data)
    left = sorted(path.name for path in folder.rglob("*") if path.is_file())
    assert left == ["identity"]
    pair.slave.start()
    assert pair.slave.broker.store.end == 0
    pair.follow()
    assert len(pair.fail_over().receive("orders", "g")) == 32
