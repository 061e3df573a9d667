"""Recovery of the store: torn tails, damage, and index files that say too little or too much."""

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from popmq.broker.log.store_checkpoint import StoreCheckpoint, read_checkpoint
from popmq.common.errors import StoreDamaged
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import HEADER_SIZE, check_record
from popmq.common.settings.settings import Settings, StoreSettings
from popmq.common.topics import MessageType
from popmq.testing.disk.lying_disk import LyingDisk, PowerCut, ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker


def small_on(folder: Path) -> Settings:
    return replace(SMALL, broker=replace(SMALL.broker, data=str(folder)))


def real_core(folder: Path) -> CoreBroker:
    return CoreBroker(disk=ResidentDisk(), settings=small_on(folder))


def kill(core: CoreBroker) -> None:
    """What kill -9 does to a store: its files stay as they are, nothing is closed properly."""
    core.broker.release_files()


def log_files(folder: Path) -> list[Path]:
    return sorted((folder / "commitlog").iterdir())


def bodies(core: CoreBroker, topic: str = "orders", group: str = "reader") -> list[bytes]:
    results: list[bytes] = []
    while batch := core.receive(topic, group):
        results += (delivery.head for delivery in batch)
    return sorted(results)


def last_record(folder: Path, end: int) -> tuple[Path, int, int]:
    """File, first and last byte (exclusive) of the newest record, found by walking the log."""
    file = log_files(folder)[-1]
    data = file.read_bytes()
    start = int(file.name)
    at = 0
    while start + at + (size := check_record(data, at, start + at).size) < end:
        at += size
    return file, at, at + size


def test_a_tail_cut_at_any_byte_of_its_last_record_loses_that_record_only(
    tmp_path: Path,
) -> None:
    broker = real_core(tmp_path / "made")
    broker.topic("orders", queues=1)
    broker.send("orders", b"kept")
    before = broker.broker.store.end
    broker.send("orders", b"torn")
    end = broker.broker.store.end
    kill(broker)
    file, first, last = last_record(tmp_path / "made", end)
    whole = file.read_bytes()
    (tmp_path / "made" / "checkpoint").unlink(missing_ok=True)
    for cut in range(first, last):
        file.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        core = real_core(tmp_path / "made")
        store = core.broker.store
        assert store.metrics.recovered_records > 0, cut
        assert store.end > before
        assert bodies(core, group=f"reader-{cut}") == [b"kept"], cut
        core.send("orders", b"next")
        kill(core)
        file.write_bytes(whole[:cut] + bytes(len(whole) - cut))


def test_a_flipped_bit_in_the_tail_record_is_never_read_as_a_message(tmp_path: Path) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    broker.send("orders", b"kept")
    broker.send("orders", b"flipped")
    kill(broker)
    file, first, last = last_record(tmp_path, broker.broker.store.end)
    (tmp_path / "checkpoint").unlink(missing_ok=True)
    whole = file.read_bytes()
    for at in range(first, last):
        flipped = bytearray(whole)
        flipped[at] ^= 0x10
        file.write_bytes(flipped)
        core = real_core(tmp_path)
        assert bodies(core, group=f"reader-{at}") == [b"kept"], at
        kill(core)


def test_what_was_cut_is_gone_from_the_disk(tmp_path: Path) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    broker.send("orders", b"cut me off")
    kill(broker)
    file, first, _ = last_record(tmp_path, broker.broker.store.end)
    data = bytearray(file.read_bytes())
    data[first + HEADER_SIZE] ^= 1
    file.write_bytes(data)
    core = real_core(tmp_path)
    assert core.broker.store.metrics.torn_bytes > 0
    kill(core)
    assert b"cut me off" not in file.read_bytes()


def test_damage_below_the_checkpoint_is_refused_with_file_and_position(tmp_path: Path) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    position = broker.broker.store.end
    broker.send("orders", b"precious")
    broker.send("orders", b"behind")
    broker.advance(11_000)  # a checkpoint
    kill(broker)
    file = log_files(tmp_path)[0]
    data = bytearray(file.read_bytes())
    data[position + HEADER_SIZE] ^= 1
    file.write_bytes(data)
    text = f"commitlog/{file.name}: no intact record at position {position}"
    with pytest.raises(StoreDamaged, match=text):
        real_core(tmp_path)
    assert file.read_bytes() == bytes(data), "the log was changed"


def remove_checkpoint(folder: Path) -> None:
    (folder / "checkpoint").unlink()


def remove_index(folder: Path) -> None:
    for file in [*folder.glob("consumequeue/*/*/*"), *folder.glob("system/*/*/*")]:
        file.unlink()


def remove_one_queue(folder: Path) -> None:
    next(folder.glob("consumequeue/orders@*/0/*")).unlink()


def shorten_index(folder: Path) -> None:
    for file in folder.glob("consumequeue/orders@*/*/*"):
        file.write_bytes(file.read_bytes()[:-33])


def lengthen_index(folder: Path) -> None:
    for file in folder.glob("consumequeue/orders@*/*/*"):
        with file.open("ab") as units:
            units.write(b"\x7f" * 20 * 3)


def zero_index_tail(folder: Path) -> None:
    for file in folder.glob("consumequeue/orders@*/*/*"):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def garble_checkpoint(folder: Path) -> None:
    (folder / "checkpoint").write_bytes(b"popmqckp" + b"\xff" * 32)


def test_a_start_that_rebuilds_the_index_still_knows_what_was_durable(tmp_path: Path) -> None:
    """It lowers the checkpoint; a loss after a crash right then is a loss all the same."""
    broker = real_core(tmp_path)
    broker.topic("orders")
    for number in range(50):
        broker.send("orders", b"%03d" % number)
    broker.advance(11_000)  # a checkpoint
    kill(broker)
    vouched = broker.broker.store.checkpoints.position
    remove_index(tmp_path)
    kill(real_core(tmp_path))
    lowered = read_checkpoint(ResidentDisk(), f"{tmp_path}/checkpoint")
    assert lowered is not None
    assert (lowered.position, lowered.vouched) == (0, vouched)
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(b"")
    with pytest.raises(StoreDamaged, match=f"everything below {vouched} was durable"):
        real_core(tmp_path)


def test_a_checkpoint_of_version_1_vouches_for_records_but_not_for_the_index(
    tmp_path: Path,
) -> None:
    body = struct.pack(">QIIQ", 4711, 3, 0, 1_700_000_000_000)
    path = tmp_path / "checkpoint"
    path.write_bytes(struct.pack(">8sII", b"popmqckp", 1, crc32c(body)) + body)
    checkpoint = read_checkpoint(ResidentDisk(), str(path))
    assert checkpoint == StoreCheckpoint(0, 3, 1_700_000_000_000, durable=4711)
    path.write_bytes(path.read_bytes() + b"12345678")
    assert read_checkpoint(ResidentDisk(), str(path)) is None


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize(
    "damage",
    [
        remove_checkpoint,
        remove_index,
        remove_one_queue,
        shorten_index,
        lengthen_index,
        zero_index_tail,
        garble_checkpoint,
    ],
)
def test_index_files_are_rebuilt_from_the_log(
    tmp_path: Path, damage: Callable[[Path], None], clean: bool
) -> None:
    new_core = real_core(tmp_path)
    new_core.topic("orders", queues=3)
    sent = [b"%03d" % number for number in range(50)]
    for body in sent:
        new_core.send("orders", body)
    acked = new_core.receive("orders", "worker", limit=7)
    new_core.ack("orders", "worker", *(delivery.handle for delivery in acked))
    new_core.advance(11_000)  # a checkpoint
    if clean:
        new_core.stop()
    else:
        kill(new_core)
    damage(tmp_path)
    core = real_core(tmp_path)
    assert bodies(core) == sent
    rest = sorted(set(sent) - {delivery.head for delivery in acked})
    assert bodies(core, group="worker") == rest
    core.stop()


def test_records_cross_many_segments_and_all_come_back(tmp_path: Path) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    sent = [bytes([number]) * (190_000 + number) for number in range(20)]
    for body in sent:
        broker.send("orders", body)
    assert len(log_files(tmp_path)) >= 4
    assert all(file.stat().st_size == 1 << 20 for file in log_files(tmp_path))
    kill(broker)
    assert bodies(real_core(tmp_path)) == sent


@pytest.mark.parametrize("left", [0, 1, 55, 56, 57, 200])
def test_a_segment_that_ends_with_few_bytes_left_is_continued_in_the_next(
    tmp_path: Path, left: int
) -> None:
    new_core = real_core(tmp_path)
    new_core.topic("orders", queues=1)
    for _ in range(4):
        new_core.send("orders", bytes(200_000))
    overhead = 80
    room = (1 << 20) - new_core.broker.store.end - overhead - left
    new_core.send("orders", b"x" * room)
    (last,) = new_core.broker.store.queue(new_core.broker.registry.topic("orders").id, 0).units(
        4, 1
    )
    assert last.position + last.size == (1 << 20) - left
    assert new_core.broker.store.end == (1 << 20) - (left if left >= 56 else 0)
    new_core.send("orders", b"y" * 300)
    kill(new_core)
    core = real_core(tmp_path)
    assert bodies(core)[-1] == b"y" * 300
    assert len(bodies(core, group="again")) == 6


def test_an_older_segment_that_was_written_but_not_synced_is_synced_at_the_next_start() -> None:
    """The process dies between the writes and the syncs of a batch that spans two segments."""
    disk = LyingDisk()
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=1)
    for _ in range(3):
        core.send("orders", bytes(250_000))
    core.topic("other")  # settles everything so far
    entries = [hop.PutEntry(MessageType.NORMAL, bytes(240_000), b"") for _ in range(2)]
    core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", entries)), settle=False)
    # Write one, create + allocate + sync + name the next segment, write two: then the syncs.
    disk.cut_at(6)
    with suppress(PowerCut):
        core.run_until_idle()
    disk.survive()
    core.start()
    count = len(bodies(core))
    assert count >= 4
    disk.restore_power()
    core.start()
    assert len(bodies(core, group="after-the-power-cut")) == count


def test_settings_that_do_not_fit_the_files_are_refused(tmp_path: Path) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    for _ in range(6):
        broker.send("orders", bytes(200_000))
    broker.stop()
    other = replace(small_on(tmp_path), store=StoreSettings(segment_bytes=3 << 19))
    with pytest.raises(StoreDamaged, match=r"store\.segment_bytes"):
        CoreBroker(disk=ResidentDisk(), settings=other)


def test_a_store_of_one_segment_is_not_cut_to_a_smaller_segment_size(tmp_path: Path) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    broker.send("orders", b"kept")
    kill(broker)
    for file in log_files(tmp_path)[1:]:
        file.unlink()  # reserved ones
    whole = log_files(tmp_path)[0].read_bytes()
    other = replace(small_on(tmp_path), store=StoreSettings(segment_bytes=1 << 19))
    with pytest.raises(StoreDamaged, match=r"store\.segment_bytes was changed"):
        CoreBroker(disk=ResidentDisk(), settings=other)
    assert log_files(tmp_path)[0].read_bytes() == whole


def test_a_missing_segment_in_the_middle_is_refused(tmp_path: Path) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    for _ in range(12):
        broker.send("orders", bytes(200_000))
    broker.stop()
    log_files(tmp_path)[1].unlink()
    with pytest.raises(StoreDamaged, match="one is missing"):
        real_core(tmp_path)


def test_a_clean_stop_is_told_from_a_kill(tmp_path: Path) -> None:
    core = real_core(tmp_path)
    core.stop()
    core = real_core(tmp_path)
    assert core.broker.store.stopped_cleanly
    kill(core)
    assert not real_core(tmp_path).broker.store.stopped_cleanly


def test_each_start_has_its_own_epoch(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        core = real_core(tmp_path)
        epochs.append(core.broker.store.epoch)
        kill(core)
    assert epochs == [1, 2, 3]


def test_damage_with_later_confirmed_records_behind_it_is_refused_even_without_a_checkpoint(
    tmp_path: Path,
) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    position = broker.broker.store.end
    for body in (b"damaged", b"one", b"two"):
        broker.send("orders", body)
    kill(broker)
    (tmp_path / "checkpoint").unlink(missing_ok=True)
    file = log_files(tmp_path)[0]
    data = bytearray(file.read_bytes())
    data[position + HEADER_SIZE] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreDamaged, match=f"record at position {position} is damaged"):
        real_core(tmp_path)
    assert file.read_bytes() == bytes(data)


def test_a_padding_of_the_wrong_size_is_not_believed(tmp_path: Path) -> None:
    broker = real_core(tmp_path)
    broker.topic("orders", queues=1)
    for _ in range(6):
        broker.send("orders", bytes(200_000))
    broker.stop()
    file = log_files(tmp_path)[0]
    data = bytearray(file.read_bytes())
    at = 0
    while data[at + 9] != 2:
        at += check_record(bytes(data), at, at).size
    data[at + 3] ^= 1
    file.write_bytes(data)
    for path in (tmp_path / "snapshot").iterdir():
        path.unlink()
    with pytest.raises(StoreDamaged, match="no intact record"):
        real_core(tmp_path)


def test_a_snapshot_of_another_log_is_not_used(tmp_path: Path) -> None:
    first = real_core(tmp_path / "first")
    first.topic("orders", queues=1)
    for number in range(50):
        first.send("orders", b"first %d" % number)
    first.stop()
    second = real_core(tmp_path / "second")
    second.topic("orders", queues=1)
    for number in range(200):
        second.send("orders", b"the second log %d" % number)
    second.stop()
    for path in (tmp_path / "second" / "snapshot").iterdir():
        path.unlink()
    (snapshot,) = (tmp_path / "first" / "snapshot").iterdir()
    (tmp_path / "second" / "snapshot" / snapshot.name).write_bytes(snapshot.read_bytes())
    again = real_core(tmp_path / "second")
    assert again.broker.store.snapshots.position == 0
    assert len(bodies(again)) == 200
