"""No room and no descriptor: what was asked for waits, and nothing that was promised is lost."""

import errno
import os
import random
from pathlib import Path

import pytest
from lite.lites import TOPIC, put, sync
from lite.lites import receive as lite_receive

from popmq.broker.log.segment_file import SegmentFiles
from popmq.common.disk import RealDisk, SyncFailed, is_shortage
from popmq.common.errors import PopmqError, TooManyRequests
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import GroupType, MessageType
from popmq.testing.disk.disk_faults import Demand
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.core_broker import CoreBroker, grouped

SEGMENT = 4096


def refuse(disk: SimDisk, refused: Demand, part: str = "", end: str = "") -> None:
    """No operation gets it on a path that has `part` in it and ends so."""
    number = errno.ENOSPC if refused is Demand.SPACE else errno.EMFILE

    def demanded(demand: Demand, path: str) -> None:
        if demand is refused and part in path and path.endswith(end):
            raise OSError(number, os.strerror(number))

    disk.faults.at_demand = demanded


def test_a_queue_that_cannot_be_opened_keeps_its_own_messages_waiting_and_no_others() -> None:
    disk = SimDisk(random.Random(1))
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=2)
    core.group("g")
    refuse(disk, Demand.DESCRIPTOR, "orders@", "/1")
    for number in range(6):
        entry = hop.PutEntry(MessageType.NORMAL, b"%d" % number, b"", 0, number % 2)
        core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
    bodies = [bytes(delivery.head) for delivery in core.receive("orders", "g", limit=16)]
    assert bodies == [b"0", b"2", b"4"]
    with pytest.raises(PopmqError, match="Too many open files; try again") as refusal:
        core.receive("orders", "g", limit=16)
    assert isinstance(refusal.value, TooManyRequests), "an empty answer would be a lie"
    disk.faults.at_demand = None
    core.advance(100)
    late = [bytes(delivery.head) for delivery in core.receive("orders", "g", limit=16)]
    assert late == [b"1", b"3", b"5"]


@pytest.mark.parametrize("queues", [2, 4])
def test_an_ordered_receive_delivers_what_other_queues_gave(queues: int) -> None:
    """A refusal would count an attempt that no client saw."""
    disk = SimDisk(random.Random(1))
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=queues, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO, max_attempts=2)
    refuse(disk, Demand.DESCRIPTOR, "orders@", "/1")
    for number in range(2 * queues):
        key = grouped(b"k%d" % (number % queues))
        entry = hop.PutEntry(MessageType.FIFO, b"%d" % number, key, 0, number % queues)
        core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
    heads = [bytes(delivery.head) for delivery in core.receive("orders", "g", limit=16)]
    assert sorted(heads) == [b"%d" % number for number in range(2 * queues) if number % queues != 1]
    with pytest.raises(TooManyRequests, match="Too many open files; try again"):
        core.receive("orders", "g", limit=16)
    disk.faults.at_demand = None
    core.advance(100)
    late = core.receive("orders", "g", limit=16)
    assert [(bytes(delivery.head), delivery.attempt) for delivery in late] == [
        (b"1", 1),
        (b"%d" % (queues + 1), 1),
    ]


def test_the_current_segment_takes_records_while_a_reserved_one_has_no_durable_name() -> None:
    disk = SimDisk(random.Random(1))
    files = SegmentFiles(disk, "data/log", segment_bytes=SEGMENT, preallocate=True)
    files.segment_for_write(0)
    refuse(disk, Demand.DESCRIPTOR, end="data/log")
    with pytest.raises(OSError, match="Too many open files"):
        files.reserve(0, 1)
    assert files.reserved_after(0) == 1
    segment = files.segment_for_write(0)
    segment.write(0, [b"a" * 300])
    with pytest.raises(OSError, match="Too many open files"):
        files.segment_for_write(SEGMENT)
    disk.faults.at_demand = None
    assert files.segment_for_write(SEGMENT).start == SEGMENT
    assert not files.names


def test_a_log_is_cut_without_giving_up_its_blocks() -> None:
    """Others would take them, and a slave that has to cut its log could not go on."""
    disk = SimDisk(random.Random(1))
    files = SegmentFiles(disk, "data/log", segment_bytes=SEGMENT, preallocate=True)
    segment = files.segment_for_write(0)
    segment.write(0, [b"a" * 300])
    segment.sync()
    refuse(disk, Demand.SPACE)
    files.truncate(100)
    content = disk.durable(segment.path)
    assert content == b"a" * 100 + bytes(SEGMENT - 100)


def test_a_segment_is_removed_from_the_list_when_its_file_is_gone() -> None:
    disk = SimDisk(random.Random(1))
    files = SegmentFiles(disk, "data/log", segment_bytes=SEGMENT, preallocate=True)
    for start in range(0, 3 * SEGMENT, SEGMENT):
        files.segment_for_write(start)
    disk.sync_folder("data/log")
    syncs = 0

    def demanded(demand: Demand, path: str) -> None:
        nonlocal syncs
        syncs += demand is Demand.DESCRIPTOR
        if syncs == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    disk.faults.at_demand = demanded
    with pytest.raises(OSError, match="Too many open files"):
        files.truncate(100)
    files.truncate(100)
    assert [file.start for file in files] == [0]
    assert len(disk.names("data/log")) == 1


def test_a_sync_that_finds_no_room_has_failed_and_is_no_shortage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have dropped the pages: nothing can be tried again."""
    file = RealDisk().open(str(tmp_path / "file"), create=True)

    def without_room(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", without_room)
    with pytest.raises(SyncFailed) as failure:
        file.sync()
    file.close()
    assert not is_shortage(failure.value)
    assert is_shortage(OSError(errno.ENOSPC, ""))
    assert not is_shortage(OSError(errno.EIO, ""))


class NarrowDisk(SimDisk):
    """A file of a queue is opened again each time when another queue was used before."""

    def open_limit(self) -> int:
        return 1


def test_a_client_of_lite_topics_gets_those_that_can_be_opened() -> None:
    disk = NarrowDisk(random.Random(1))
    core = CoreBroker(disk=disk)
    core.topic(TOPIC, queues=1, type=MessageType.LITE)
    for name in ("a", "b", "c"):
        put(core, name, name.encode())
    made = core.broker.store.checkpoints.made
    while core.broker.store.checkpoints.made == made:  # the index leaves the memory
        core.advance(1_000)
    sync(core, ["a", "b", "c"])
    refuse(disk, Demand.DESCRIPTOR, f"{TOPIC}@64/1/")
    assert sorted(bytes(delivery.head) for delivery in lite_receive(core)) == [b"a", b"c"]
    with pytest.raises(TooManyRequests, match="Too many open files; try again"):
        lite_receive(core)
    disk.faults.at_demand = None
    core.advance(100)
    assert [(bytes(late.head), late.attempt) for late in lite_receive(core)] == [(b"b", 1)]


def test_chosen_messages_leave_when_an_ordered_queue_cannot_be_read_further() -> None:
    """They were out of the order of their keys, and nothing would have delivered them."""
    disk = NarrowDisk(random.Random(1))
    core = CoreBroker(disk=disk)
    core.topic("orders", queues=2, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO)

    def put_in_order(number: int, queue_id: int) -> None:
        key = grouped(b"k%d" % number)
        entry = hop.PutEntry(MessageType.FIFO, b"%d" % number, key, 0, queue_id)
        core.reply(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))

    for number in (0, 1):
        put_in_order(number, 0)
    assert [bytes(got.head) for got in core.receive("orders", "g", limit=1)] == [b"0"]
    put_in_order(2, 0)
    put_in_order(3, 1)
    made = core.broker.store.checkpoints.made
    while core.broker.store.checkpoints.made == made:  # the index leaves the memory
        core.advance(1_000)
    assert [bytes(got.head) for got in core.receive("orders", "g", queue_id=1)] == [b"3"]
    refuse(disk, Demand.DESCRIPTOR, "orders@64/0/")
    assert [bytes(got.head) for got in core.receive("orders", "g", queue_id=0)] == [b"1"]
    disk.faults.at_demand = None
    assert [bytes(got.head) for got in core.receive("orders", "g")] == [b"2"]
