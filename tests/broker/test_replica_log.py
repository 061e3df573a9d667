"""The seam between a store and replication: what is durable and what is confirmed are two things,
and a log is copied record by record into one that is equal byte by byte."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.broker.persistence.state_hashes import Compared
from popmq.broker.store.message_store import MessageStore, ReplicaListener, StoreThreads
from popmq.common.errors import StoreDamaged
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.record.message import BadRecord
from popmq.common.settings.settings import StoreSettings
from popmq.common.topics import MessageType
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.core_broker import SMALL, CoreBroker, QueuedFlusher

SEGMENT = 16 << 10


class Node(ReplicaListener):
    """One that confirms nothing by itself."""

    def __init__(self) -> None:
        self.durable: list[int] = []

    def open_epoch(self, epoch: int, position: int) -> int:
        return epoch

    def epoch_starts(self) -> Sequence[int]:
        return ()

    def on_batch(self) -> None:
        return

    def on_durable(self, position: int) -> None:
        self.durable.append(position)

    def on_tail_lost(self, position: int, proof: int) -> None:
        return

    def on_tables_compared(self, compared: Compared) -> None:
        return


class Copy:
    """A store that only takes blocks."""

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self.store = MessageStore(
            ResidentDisk(),
            str(folder),
            settings,
            ManualClock(),
            StoreThreads.of_one(QueuedFlusher(self._calls), self._calls.append),
            node=Node(),
        )
        self.store.open()
        self.store.recover(lambda record: None)

    def settle(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def take(self, data: bytes) -> None:
        self.store.replicas.append_block(self.store.end, data)


def master(folder: Path, *, segment_bytes: int = SEGMENT, tail: int = 1 << 20) -> CoreBroker:
    settings = replace(
        SMALL,
        store=StoreSettings(segment_bytes=segment_bytes, snapshot_bytes=1 << 30, tail_bytes=tail),
        message=replace(SMALL.message, max_body_bytes=4096, max_properties_bytes=64),
        broker=replace(SMALL.broker, data=str(folder)),
    )
    broker = CoreBroker(disk=ResidentDisk(), settings=settings)
    broker.topic("orders", queues=2)
    return broker


def copy_all(source: MessageStore, target: Copy, rng: random.Random) -> None:
    while target.store.end < source.end:
        tail = source.replicas.read_tail(target.store.end, rng.choice((1, 60, 500, 5000, 1 << 20)))
        if not tail:
            assert tail is not None
            break
        target.take(tail)
        if rng.random() < 0.5:
            target.settle()
    target.settle()


def log_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "commitlog").iterdir())}


@pytest.mark.parametrize("tail", [0, 3000, 1 << 20])
@pytest.mark.parametrize("seed", range(3))
def test_a_log_copied_in_blocks_is_equal_byte_by_byte(tmp_path: Path, seed: int, tail: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    new_master = master(tmp_path / "a", tail=tail)
    copy = Copy(tmp_path / "b", new_master.settings.store)
    for _ in range(120):
        left = SEGMENT - new_master.broker.store.end % SEGMENT - 80
        size = left - rng.choice((0, 1, 55, 56, 57)) if 60 < left < 3000 else rng.randrange(3000)
        new_master.send("orders", rng.randbytes(size))
        if rng.random() < 0.2:
            copy_all(new_master.broker.store, copy, rng)
    copy_all(new_master.broker.store, copy, rng)
    assert copy.store.end == copy.store.durable == new_master.broker.store.end
    ours, theirs = log_bytes(tmp_path / "a"), log_bytes(tmp_path / "b")
    assert len(theirs) > 5
    assert all(ours[name] == content for name, content in theirs.items())
    copy.store.release_files()
    again = Copy(tmp_path / "b", new_master.settings.store)
    assert again.store.end == new_master.broker.store.end
    assert again.store.metrics.torn_bytes == 0


def test_what_waits_for_the_disk_is_there_for_replicas_already(tmp_path: Path) -> None:
    broker = master(tmp_path / "a")
    before = broker.broker.store.end
    body = hop.encode_put(
        hop.PutRequest("orders", [hop.PutEntry(MessageType.NORMAL, b"early", b"")])
    )
    broker.ask(Kind.PUT, body, settle=False)
    assert broker.broker.store.durable == before < broker.broker.store.end
    tail = broker.broker.store.replicas.read_tail(before, 1 << 20)
    assert tail is not None
    assert b"early" in tail
    broker.run_until_idle()
    assert broker.broker.store.replicas.read_tail(before, 1 << 20) == tail


def test_a_position_that_is_not_in_the_log_is_told_from_one_with_nothing_behind(
    tmp_path: Path,
) -> None:
    store = master(tmp_path / "a").broker.store
    assert store.replicas.read_tail(store.end, 100) == b""
    assert store.replicas.read_tail(store.end + 1, 100) is None


def test_a_block_that_is_damaged_or_of_another_position_changes_nothing(tmp_path: Path) -> None:
    broker = master(tmp_path / "a")
    broker.send("orders", b"one")
    tail = broker.broker.store.replicas.read_tail(0, 1 << 20)
    assert tail
    copy = Copy(tmp_path / "b", broker.settings.store)
    broken = bytearray(tail)
    broken[len(tail) // 2] ^= 1
    for data in (bytes(broken), tail[:-1], tail[:10], b"", tail + b"\0" * 60):
        with pytest.raises(BadRecord):
            copy.take(data)
    copy.take(tail)
    with pytest.raises(BadRecord):
        copy.take(tail)  # it says position 0
    copy.settle()
    assert copy.store.durable == copy.store.end == broker.broker.store.end


def test_replies_wait_for_the_confirmation_not_for_this_disk(tmp_path: Path) -> None:
    broker = master(tmp_path / "a")
    broker.stop()
    broker.node = node = Node()
    broker.start()
    store = broker.broker.store
    store.confirm(store.end)
    broker.run_until_idle()
    node.durable.clear()
    body = hop.encode_put(hop.PutRequest("orders", [hop.PutEntry(MessageType.NORMAL, b"x", b"")]))
    before = store.confirmed
    answer = broker.ask(Kind.PUT, body)
    assert node.durable == [store.end] == [store.durable]
    assert store.confirmed == before
    assert not answer.heard
    assert broker.broker.store.queue(broker.broker.registry.topic("orders").id, 1).count == 0
    store.confirm(store.durable)
    assert answer.body is not None
    store.confirm(before)  # an older one changes nothing
    assert store.confirmed == store.end


def test_what_was_cut_is_gone_from_the_disk_and_others_follow(tmp_path: Path) -> None:
    broker = master(tmp_path / "a")
    for number in range(40):
        broker.send("orders", b"%d" % number * 300)
    store = broker.broker.store
    copy = Copy(tmp_path / "b", broker.settings.store)
    ends = [0]
    while copy.store.end < store.end:
        tail = store.replicas.read_tail(copy.store.end, 1)
        assert tail
        copy.take(tail)
        ends.append(copy.store.end)
    done = []
    cut_at = ends[7]
    copy.store.confirm(ends[3])
    copy.store.replicas.truncate(cut_at, known=ends[3], done=lambda: done.append(copy.store.end))
    assert not done  # off the loop, behind what was on its way
    copy.settle()
    assert done == [cut_at]
    assert copy.store.durable == cut_at
    files = log_bytes(tmp_path / "b")
    whole = log_bytes(tmp_path / "a")
    assert list(files) == ["00000000000000000000"]
    first = files["00000000000000000000"]
    assert first[:cut_at] == whole["00000000000000000000"][:cut_at]
    assert not first[cut_at:].strip(b"\0")
    copy_all(store, copy, random.Random(1))
    assert log_bytes(tmp_path / "b").items() <= whole.items()


def test_a_cut_below_the_confirmed_position_or_inside_a_record_breaks_a_rule(
    tmp_path: Path,
) -> None:
    broker = master(tmp_path / "a")
    broker.send("orders", b"x" * 100)
    copy = Copy(tmp_path / "b", broker.settings.store)
    copy_all(broker.broker.store, copy, random.Random(1))
    copy.store.replicas.truncate(copy.store.end - 3, known=0, done=lambda: None)
    with pytest.raises(AssertionError, match="inside the record"):
        copy.settle()
    copy = Copy(tmp_path / "c", broker.settings.store)
    copy_all(broker.broker.store, copy, random.Random(1))
    copy.store.confirm(copy.store.end)
    with pytest.raises(AssertionError, match="confirmed"):
        copy.store.replicas.truncate(0, known=0, done=lambda: None)


def test_a_cut_behind_a_damaged_record_removes_nothing_and_names_it(tmp_path: Path) -> None:
    broker = master(tmp_path / "a")
    for _ in range(4):
        broker.send("orders", b"x" * 100)
    copy = Copy(tmp_path / "b", broker.settings.store)
    copy_all(broker.broker.store, copy, random.Random(1))
    (log,) = (tmp_path / "b").glob("**/commitlog/*")
    whole = log.read_bytes()
    at = whole.index(b"x" * 100)
    with log.open("r+b") as file:
        file.seek(at)
        file.write(b"y")
    copy.store.replicas.truncate(copy.store.end, known=0, done=lambda: None)
    with pytest.raises(
        StoreDamaged, match=rf"{log.name}.*cut at \d+ .*damaged: run `popmq doctor`"
    ):
        copy.settle()
    assert log.read_bytes() == whole[:at] + b"y" + whole[at + 1 :]
