"""Snapshots: one position, whatever goes on meanwhile; and a start that reads only the tail."""

import os
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from popmq.broker.deliveries import check_point_snapshot
from popmq.broker.persistence.snapshot import SnapshotHeader, SnapshotWriter, read_snapshot
from popmq.common.errors import Code, InvalidReceiptHandle
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import PopSettings, StoreSettings
from popmq.common.step_loop import InlineFlusher
from popmq.common.topics import GroupType, MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, WITHOUT_TAIL, CoreBroker, pop

NEVER = replace(
    SMALL,
    store=StoreSettings(segment_bytes=1 << 20, snapshot_bytes=1 << 40),
    pop=PopSettings(fifo_open_offsets=40, fifo_park_after_ms=1_000),
)


def real_core(folder: Path, *, snapshots: bool = True) -> CoreBroker:
    base = WITHOUT_TAIL if snapshots else NEVER
    return CoreBroker(
        disk=ResidentDisk(), settings=replace(base, broker=replace(SMALL.broker, data=str(folder)))
    )


def kill(core: CoreBroker) -> None:
    core.broker.release_files()


def snapshot_files(folder: Path) -> list[Path]:
    return sorted((folder / "snapshot").iterdir())


def bodies(core: CoreBroker, group: str = "reader") -> list[bytes]:
    results: list[bytes] = []
    while batch := core.receive("orders", group):
        results += (delivery.head for delivery in batch)
    return sorted(results)


def live(core: CoreBroker, rng: random.Random, number: int, handles: list[bytes]) -> None:
    """One random thing that changes a table."""
    actions = ["send", "pop", "ack", "change", "time", "meta", "reject", "redrive", "reset"]
    match rng.choices(actions, [12, 8, 8, 4, 2, 2, 2, 1, 1])[0]:
        case "send":
            core.send("orders", b"%06d" % number, message_group=f"k{number % 7}")
        case "pop":
            limit, attempt_id = rng.randrange(1, 9), f"attempt {number}"
            request = pop("orders", "g", limit=limit, attempt_id=attempt_id)
            reply = core.reply(Kind.POP, request)
            handles += (delivery.handle for delivery in hop.decode_pop_reply(reply).deliveries)
        case "ack" if handles:
            core.ack("orders", "g", handles.pop(rng.randrange(len(handles))))
        case "change" if handles:
            old = handles.pop(rng.randrange(len(handles)))
            with suppress(InvalidReceiptHandle):  # its time was over
                handles.append(core.change("orders", "g", old, rng.randrange(9_000)))
        case "reject" if handles:
            core.reject("orders", "g", handles.pop(rng.randrange(len(handles))))
        case "redrive":
            redrive = pb.RedriveRequest(group="g", from_offset=rng.randrange(20), limit=3)
            core.reply(Kind.REDRIVE, redrive.SerializeToString())
        case "reset":
            queue_id = rng.randrange(3)
            topic = core.broker.registry.topic("orders")
            offset = rng.randint(0, core.broker.store.queue(topic.id, queue_id).count)
            reset = pb.ResetOffsetRequest(
                group="g", topic="orders", queue_id=queue_id, offset=offset
            )
            core.reply(Kind.RESET_OFFSET, reset.SerializeToString())
        case "time":
            core.clock.advance(rng.randrange(3_000))
            core.broker.pop.revive.step()
            core.broker.fifo.parking.step()
            core.run_until_idle()
        case _:
            core.topic(f"topic-{number}")


@pytest.mark.more
@pytest.mark.parametrize("group_type", GroupType)
def test_a_snapshot_made_beside_traffic_states_exactly_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_type: GroupType
) -> None:
    """Its hash equals that of a broker which replayed the log up to that position."""
    monkeypatch.setattr(check_point_snapshot, "_PER_PIECE", 1)  # so that it takes many steps
    seed = int(os.environ.get("POPMQ_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"seed {seed} (POPMQ_TEST_SEED={seed} repeats it)")
    rng = random.Random(seed)
    core = real_core(tmp_path / "a", snapshots=False)
    core.topic("orders", queues=3, type=MessageType.MIXED)
    core.group("g", type=group_type, max_attempts=10_000)
    handles: list[bytes] = []
    for number in range(1500):
        live(core, rng, number, handles)
    store = core.broker.store
    writer = store.snapshots._begin(store._snapshot_head())
    pieces = 0
    for number in range(1500, 2500):
        live(core, rng, number, handles)
        pieces += writer.step(publishable=False)
        core.run_until_idle()
    while not writer.finished:
        writer.step(publishable=True)
        core.run_until_idle()
    kill(core)
    position = writer.head.position
    assert pieces > 50
    if group_type is GroupType.FIFO:
        assert core.broker.fifo.parking.parked > 0
    assert position < store.end - 10_000
    shutil.copytree(tmp_path / "a" / "commitlog", tmp_path / "b" / "commitlog")
    cut_log(tmp_path / "b", position)
    replayed = real_core(tmp_path / "b", snapshots=False)
    # Two records of its own start (epoch) stand behind; neither is in a table.
    assert state_hash(replayed) == writer.state_hash


@pytest.mark.parametrize("group_type", GroupType)
def test_a_first_look_at_a_queue_that_expired_is_no_part_of_the_state(
    group_type: GroupType,
) -> None:
    """Seed 102255: no record says where it began, so no replay can know."""
    core = CoreBroker(settings=NEVER)
    topic = core.topic("orders", queues=1)
    core.group("g", type=group_type)
    core.send("orders", b"one")
    before = state_hash(core)
    core.broker.store.queue(topic.id, 0).raise_minimum(1)
    assert core.receive("orders", "g") == []
    assert core.broker.table.progress(core.broker.registry.group("g").id, topic.id, 0)
    assert state_hash(core) == before


def state_hash(core: CoreBroker) -> int:
    """Of a snapshot that is made now, and given up."""
    store = core.broker.store
    writer = store.snapshots._begin(store._snapshot_head())
    writer.run_to_end()
    return writer.state_hash


def cut_log(folder: Path, position: int) -> None:
    for file in sorted((folder / "commitlog").iterdir()):
        start = int(file.name)
        if start >= position:
            file.unlink()
        elif start + file.stat().st_size > position:
            data = file.read_bytes()
            file.write_bytes(data[: position - start] + bytes(len(data) - (position - start)))


def test_a_start_reads_only_what_stands_behind_the_snapshot(tmp_path: Path) -> None:
    core = real_core(tmp_path)
    core.topic("orders", queues=2)
    for number in range(300):
        core.send("orders", b"%03d" % number)
    taken = core.receive("orders", "g", limit=32)
    core.ack("orders", "g", *(entry.handle for entry in taken[:16]))
    core.stop()
    again = real_core(tmp_path)
    assert again.broker.store.metrics.recovered_records == 0
    assert len(bodies(again)) == 300
    for delivery in taken[16:]:
        assert again.ack("orders", "g", delivery.handle)[0].code == Code.OK
    assert len(bodies(again, group="g")) == 300 - 32
    assert again.ack("orders", "g", taken[0].handle)[0].code == Code.OK


def test_after_a_kill_only_the_tail_is_read(tmp_path: Path) -> None:
    core = real_core(tmp_path)
    core.topic("orders", queues=1)
    for number in range(1000):
        core.send("orders", b"%04d" % number)
        core.run_steps()
    kill(core)
    again = real_core(tmp_path)
    assert 0 < again.broker.store.metrics.recovered_records < 400
    assert len(bodies(again)) == 1000


def test_two_snapshots_are_kept(tmp_path: Path) -> None:
    core = real_core(tmp_path)
    core.topic("orders")
    for number in range(2000):
        core.send("orders", b"%04d" % number)
        core.run_steps()
    assert core.broker.store.snapshots.made >= 4
    assert len(snapshot_files(tmp_path)) == 2


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_snapshot_is_passed_over_for_the_older_one_and_then_for_the_log(
    tmp_path: Path, damaged: int
) -> None:
    core = real_core(tmp_path)
    core.topic("orders")
    for number in range(1000):
        core.send("orders", b"%04d" % number)
        core.run_steps()
    taken = core.receive("orders", "g", limit=20)
    core.ack("orders", "g", *(delivery.handle for delivery in taken))
    kill(core)
    files = snapshot_files(tmp_path)
    for file in files[-damaged:]:
        flip(file)
        assert read_snapshot(ResidentDisk(), str(file)) is None
    again = real_core(tmp_path)
    expected = int(files[0].name) if damaged == 1 else 0
    assert again.broker.store.snapshots.position == expected
    assert len(bodies(again)) == 1000
    assert len(bodies(again, group="g")) == 980


def small_snapshot(folder: Path) -> Path:
    core = real_core(folder)
    core.topic("orders")
    core.stop()
    (file,) = snapshot_files(folder)
    return file


def test_a_snapshot_with_a_flipped_bit_anywhere_is_no_snapshot(tmp_path: Path) -> None:
    """In its head, too: log time goes on from there, and invisible times with it."""
    file = small_snapshot(tmp_path)
    whole = file.read_bytes()
    for at in range(len(whole)):
        wrong = bytearray(whole)
        wrong[at] ^= 1 << at % 8
        file.write_bytes(wrong)
        assert read_snapshot(ResidentDisk(), str(file)) is None, at


def test_a_snapshot_whose_head_an_older_popmq_did_not_check_is_good(tmp_path: Path) -> None:
    file = small_snapshot(tmp_path)
    whole = file.read_bytes()
    check, last = slice(48, 48 + 9 + 4), -24
    front = whole[last - 5 : last]
    end = whole[last:-8] + (int.from_bytes(whole[-8:], "big") - 1).to_bytes(8, "big")
    made_before = whole[: check.start] + whole[check.stop : last - 9]
    file.write_bytes(made_before + crc32c(front + end).to_bytes(4, "big") + front + end)
    snapshot = read_snapshot(ResidentDisk(), str(file))
    assert snapshot is not None
    assert snapshot.head.position == int(file.name)
    core = real_core(tmp_path)
    assert core.broker.store.snapshots.position == int(file.name)
    assert core.broker.registry.find_topic("orders") is not None


class Large:
    """A table of 200 pieces of 20,000 bytes."""

    table_number = 99

    def __init__(self) -> None:
        self.taken = 0

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        for number in range(200):
            yield bytes([number]) * 20_000, number

    def restore(self, content: bytes) -> None:
        assert content == bytes([self.taken]) * 20_000
        self.taken += 1

    def restored(self) -> None:
        return


def test_a_snapshot_is_restored_without_a_second_copy_of_it_in_memory(tmp_path: Path) -> None:
    table = Large()
    head = SnapshotHeader(4_096, 1, 2, 3, 4_000)
    writer = SnapshotWriter(ResidentDisk(), str(tmp_path), head, [table], InlineFlusher())
    writer.run_to_end()
    tracemalloc.start()
    try:
        snapshot = read_snapshot(ResidentDisk(), writer.path)
        assert snapshot is not None
        for number, content in snapshot.pieces():
            if number == table.table_number:
                table.restore(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (table.taken, snapshot.head, snapshot.state_hash) == (200, head, writer.state_hash)
    assert peak < 1.2 * 200 * 20_000


@pytest.mark.parametrize("size", [0, 10, 43, 44, 60])
def test_a_snapshot_that_ends_early_is_no_snapshot(tmp_path: Path, size: int) -> None:
    core = real_core(tmp_path)
    core.topic("orders")
    core.stop()
    (file,) = snapshot_files(tmp_path)
    file.write_bytes(file.read_bytes()[:size])
    assert read_snapshot(ResidentDisk(), str(file)) is None
    assert bodies(real_core(tmp_path)) == []


def test_a_missing_index_is_rebuilt_from_the_whole_log_beside_a_snapshot(tmp_path: Path) -> None:
    core = real_core(tmp_path)
    core.topic("orders", queues=2)
    for number in range(500):
        core.send("orders", b"%03d" % number)
        core.run_steps()
    core.stop()
    for file in tmp_path.glob("consumequeue/orders@*/1/*"):
        file.unlink()
    again = real_core(tmp_path)
    assert len(bodies(again)) == 500
    assert again.send("orders", b"next", queue_id=1).queue_offset == 250


def test_ids_are_not_given_again_after_a_snapshot(tmp_path: Path) -> None:
    core = real_core(tmp_path)
    core.topic("first")
    last = core.topic("last").id
    core.broker.registry.delete_topic("last")
    core.run_until_idle()
    core.stop()
    assert real_core(tmp_path).topic("last").id == last + 1


def test_a_damaged_message_harms_only_itself(tmp_path: Path) -> None:
    core = real_core(tmp_path)
    core.topic("orders", queues=1)
    core.send("orders", b"before")
    core.send("orders", b"damaged")
    core.send("orders", b"after")
    core.stop()
    file = next((tmp_path / "commitlog").iterdir())
    data = file.read_bytes()
    file.write_bytes(data.replace(b"damaged", b"damagEd"))
    again = real_core(tmp_path)
    assert bodies(again) == [b"after", b"before"]
    assert again.broker.store.reader.damaged == 1


def test_a_body_that_cannot_be_read_any_more_does_not_hold_the_queue_back(tmp_path: Path) -> None:
    core = real_core(tmp_path)
    core.topic("orders", queues=1)
    core.send("orders", b"damaged")
    core.send("orders", b"good")
    assert len(core.receive("orders", "g", invisible_ms=1_000)) == 2
    file = next((tmp_path / "commitlog").iterdir())
    with file.open("r+b") as log:
        at = log.read().find(b"damaged")
        log.seek(at)
        log.write(b"DAMAGED")
    core.advance(1_500)
    (delivery,) = core.receive("orders", "g")
    assert (delivery.head, delivery.attempt) == (b"good", 2)
    assert core.broker.pop.revive.lost == 1
    topic, group = core.broker.registry.topic("orders"), core.broker.registry.group("g")
    progress = core.broker.table.progress(group.id, topic.id, 0)
    assert progress is not None
    assert progress.committed == 2


def test_a_changed_delivery_of_a_deleted_topic_is_not_looked_at_after_a_snapshot(
    tmp_path: Path,
) -> None:
    """Seed 10666: its first check point waits for nothing, and came due all the same."""
    core = real_core(tmp_path)
    core.topic("orders")
    core.group("g")
    core.send("orders", b"one")
    (delivery,) = core.receive("orders", "g", invisible_ms=5_000)
    handle = core.change("orders", "g", delivery.handle, 20_000)
    core.stop()
    core = real_core(tmp_path)
    assert core.broker.store.snapshots.position
    assert core.ack("orders", "g", handle)[0].code == Code.OK
    core.broker.registry.delete_topic("orders")
    core.run_until_idle()
    core.advance(30_000)
    assert core.broker.table.in_flight == 0
