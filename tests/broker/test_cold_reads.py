"""Old messages come from the disk: on a thread that may wait, never on the event loop (D3)."""

import asyncio
import ctypes
import mmap
import os
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.broker.handlers import pull_requests as pulls_module
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.node.broker_process import BrokerProcess
from popmq.common.disk import ColdRead, DiskFile, PageResidency, RealDisk, RealFile, read_or_cold
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.protocol.pop_reply import DeliveryContent
from popmq.common.topics import GroupType, MessageType, SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb
from popmq.common.wire.lite_pb2 import SyncLite
from popmq.common.wire.pull_pb2 import PullReply, PullRequest
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.disk.lying_disk import ResidentDisk, ResidentFile
from popmq.testing.harness.core_broker import SMALL, WITHOUT_TAIL, CoreBroker, pop

PAGE = mmap.PAGESIZE
READ_TRIES = 20


def pages_in_memory(path: Path) -> set[int]:
    """Numbers of the file's pages that the kernel holds; asking reads none (mincore)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // PAGE))()
        start = ctypes.c_char.from_buffer(view)
        ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), pages
        )
        del start
        return {number for number, page in enumerate(pages) if page & 1}


class ColdFile(ResidentFile):
    """A real file whose pages are not in memory until a thread other than the loop's read it."""

    def __init__(self, path: str, *, create: bool, disk: "ColdDisk") -> None:
        super().__init__(path, create=create)
        self._disk = disk
        self._path = path

    def view_cached(self, size: int, offset: int) -> memoryview | None:
        if self._disk.cold and self._path not in self._disk.warmed:
            return None
        return super().view_cached(size, offset)

    def read(self, size: int, offset: int) -> bytes:
        if self._disk.cold:
            assert threading.current_thread() is not self._disk.loop_thread, "the loop waited"
            if self._disk.error is not None:
                raise self._disk.error
            self._disk.warmed.add(self._path)
        return super().read(size, offset)


class ColdDisk(RealDisk):
    def __init__(self) -> None:
        self.cold = False
        self.warmed: set[str] = set()
        self.loop_thread = threading.current_thread()
        self.error: OSError | None = None

    def open(self, path: str, *, create: bool = False) -> ColdFile:
        return ColdFile(path, create=create, disk=self)


async def broker_with_messages(
    folder: Path, disk: ColdDisk, count: int, group_type: GroupType = GroupType.NORMAL
) -> BrokerProcess:
    process = BrokerProcess(
        replace(WITHOUT_TAIL, broker=replace(SMALL.broker, data=str(folder))), disk=disk
    )
    await process.start()
    process.broker.registry.create_topic(TopicConfig(0, "orders", 1))
    process.broker.registry.create_group(SubscriptionGroup(0, "g", group_type))
    for number in range(count):
        entry = hop.PutEntry(MessageType.NORMAL, b"%04d" % number, b"")
        await call(process.port, Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), 5_000)
    deque(process.broker.store.dispatch.flush(), maxlen=0)
    return process


@pytest.mark.parametrize("group_type", GroupType)
@pytest.mark.parametrize("poll_ms", [0, 20_000])
async def test_a_pop_of_old_messages_waits_on_another_thread(
    tmp_path: Path, poll_ms: int, group_type: GroupType
) -> None:
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 10, group_type)
    disk.cold = True
    reply = await call(process.port, Kind.POP, pop("orders", "g", poll_ms=poll_ms), 5_000)
    deliveries = hop.decode_pop_reply(reply).deliveries
    assert [delivery.head for delivery in deliveries] == [b"%04d" % number for number in range(10)]
    assert process.broker.pop.service.metrics.cold_pops >= 1
    disk.cold = False
    await process.stop()


def pulls(poll_ms: int) -> bytes:
    return PullRequest(
        topic="orders", group="g", limit=32, reply_bytes=1 << 20, poll_ms=poll_ms
    ).SerializeToString()


@pytest.mark.parametrize("poll_ms", [0, 20_000])
async def test_a_pull_of_old_messages_waits_on_another_thread(tmp_path: Path, poll_ms: int) -> None:
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 10)
    disk.cold = True
    result = PullReply.FromString(await call(process.port, Kind.PULL, pulls(poll_ms), 5_000))
    assert [message.head for message in result.messages] == [
        b"%04d" % number for number in range(10)
    ]
    assert disk.warmed
    disk.cold = False
    await process.stop()


@pytest.mark.parametrize("poll_ms", [0, 20_000])
async def test_pulls_that_wait_for_the_disk_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poll_ms: int
) -> None:
    monkeypatch.setattr(pulls_module, "COLD_LIMIT", 0)
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 3)
    disk.cold = True
    with pytest.raises(Exception, match="0 pulls wait for old messages from the disk"):
        await call(process.port, Kind.PULL, pulls(poll_ms), 5_000)
    disk.cold = False
    assert process.broker.polling.count == 0
    await process.stop()


async def test_a_pull_from_a_disk_that_cannot_be_read_is_answered(tmp_path: Path) -> None:
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 3)
    disk.cold = True
    disk.error = OSError(5, "Input/output error")
    with pytest.raises(Exception, match="old messages cannot be read"):
        await call(process.port, Kind.PULL, pulls(0), 5_000)
    disk.cold = False
    await process.stop()


async def test_a_subscription_that_begins_at_an_old_time_waits_on_another_thread(
    tmp_path: Path,
) -> None:
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 0)
    process.broker.registry.create_topic(TopicConfig(0, "chats", 1, MessageType.LITE))
    name = SystemProperties(lite_topic="one").SerializeToString()
    for number in range(10):
        entry = hop.PutEntry(MessageType.LITE, b"%04d" % number, name)
        put = hop.encode_put(hop.PutRequest("chats", [entry]))
        await call(process.port, Kind.PUT, put, 5_000)
    deque(process.broker.store.dispatch.flush(), maxlen=0)
    disk.cold = True
    sync = SyncLite(topic="chats", group="g", client_id="c", names=["one"], stored_ms=1)
    await call(process.port, Kind.SYNC_LITE, sync.SerializeToString(), 5_000)
    assert disk.warmed
    disk.cold = False
    reply = await call(process.port, Kind.POP, pop("chats", "g", client_id="c"), 5_000)
    assert len(hop.decode_pop_reply(reply).deliveries) == 10
    await process.stop()


async def test_a_revival_of_an_old_message_waits_on_another_thread(tmp_path: Path) -> None:
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 1)
    await call(process.port, Kind.POP, pop("orders", "g", invisible_ms=50), 5_000)
    disk.cold = True
    reply = await call(process.port, Kind.POP, pop("orders", "g", poll_ms=4_000), 5_000)
    assert [delivery.attempt for delivery in hop.decode_pop_reply(reply).deliveries] == [2]
    disk.cold = False
    await process.stop()


async def test_a_disk_that_cannot_be_read_is_an_answer_and_no_endless_loop(tmp_path: Path) -> None:
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 3)
    disk.cold = True
    disk.error = OSError(5, "Input/output error")
    with pytest.raises(Exception, match="old messages cannot be read"):
        await call(process.port, Kind.POP, pop("orders", "g"), 5_000)
    disk.cold = False
    reply = await call(process.port, Kind.POP, pop("orders", "g"), 5_000)
    assert len(hop.decode_pop_reply(reply).deliveries) == 3
    await process.stop()


async def test_a_receive_whose_client_left_while_the_disk_was_read_takes_no_message(
    tmp_path: Path,
) -> None:
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 3)
    disk.cold = True
    answers: list[object] = []
    number = process.port.request(Kind.POP, pop("orders", "g"), 5_000, answers.append)
    process.port.cancel(number)
    reply = await call(process.port, Kind.POP, pop("orders", "g"), 5_000)
    assert len(hop.decode_pop_reply(reply).deliveries) == 3
    assert not answers
    disk.cold = False
    await process.stop()


def test_pages_that_the_kernel_dropped_are_told_from_those_it_has(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    file = RealDisk().open(str(path))
    file.sync()
    assert read_warmed(file, 100, 0) == bytes(range(100))
    assert read_warmed(file, 100, (1 << 20) - 10) == bytes(range(246, 256))
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert read_warmed(file, 100, 0) == bytes(range(100))
    file.close()


def read_warmed(file: DiskFile, size: int, offset: int) -> bytes:
    """The kernel may drop a page that was just read: read again, within bounds."""
    for _ in range(READ_TRIES):
        try:
            return read_or_cold(file, size, offset)
        except ColdRead as cold:
            cold.warm()
    raise AssertionError(f"{size} bytes at {offset} were not in memory {READ_TRIES} times")


def test_a_resident_disk_reads_what_the_kernel_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    file = ResidentDisk().open(str(path))
    file.sync()
    for offset in range(0, 1 << 20, 64 << 10):
        with path.open("rb") as descriptor:
            os.posix_fadvise(descriptor.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert read_or_cold(file, 256, offset) == bytes(range(256))
    assert read_or_cold(file, 256, (1 << 20) - 2) == b"\xfe\xff"
    file.close()


def test_a_cold_read_brings_what_is_next_into_memory_and_not_megabytes_more(
    tmp_path: Path,
) -> None:
    """The kernel's own read-ahead of megabytes is what a group commit would wait behind."""
    path = tmp_path / "file"
    path.write_bytes(bytes(16 << 20))
    file = RealFile(str(path), create=False)
    file.sync()
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)

    before = pages_in_memory(path)
    for at in range(0, 2 << 20, 64 << 10):  # as a consumer reads on
        read_warmed(file, 64 << 10, at)
    fetched = pages_in_memory(path) - before
    assert max(fetched, default=0) * PAGE < 3 << 20
    file.close()


def test_asking_for_what_is_not_in_memory_fetches_none_of_it(tmp_path: Path) -> None:
    """A read that may not wait starts to fetch on the asking thread: the loop would stand still."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    file = RealFile(str(path), create=False)
    file.sync()
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    before = pages_in_memory(path)

    results = {at for at in range(0, 4 << 20, 256 << 10) if file.view_cached(9_000, at) is not None}
    kernel = PageResidency()
    kernel.in_memory(descriptor, PAGE, 0)
    if kernel.available:
        assert pages_in_memory(path) <= before
        assert {at // PAGE for at in results} <= before
    os.close(descriptor)
    file.close()


def test_what_a_file_has_behind_its_end_is_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5_000))
    residency = PageResidency()
    with path.open("rb") as file:
        assert any(
            file.seek(0) == 0 and file.read() and residency.in_memory(file.fileno(), 1 << 20, 0)
            for _ in range(READ_TRIES)
        )
        assert residency.in_memory(file.fileno(), 100, 1 << 20)
        assert residency.in_memory(file.fileno(), 0, 0)


async def test_a_queue_that_is_on_the_disk_is_fetched_while_others_deliver(tmp_path: Path) -> None:
    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 3)
    process.broker.registry.alter_topic(TopicConfig(0, "orders", 2))
    entry = hop.PutEntry(MessageType.NORMAL, b"there", b"", queue_id=1)
    put = hop.encode_put(hop.PutRequest("orders", [entry]))
    await call(process.port, Kind.PUT, put, 5_000)
    store = process.broker.store
    deque(store.dispatch.flush(), maxlen=0)
    fetched = asyncio.Event()
    loop = asyncio.get_running_loop()
    contents = store.reader.contents

    def cold_in_queue_0(units: list[QueueUnit]) -> list[DeliveryContent | None]:
        if not fetched.is_set() and units[0].position < last:
            raise ColdRead(lambda: loop.call_soon_threadsafe(fetched.set))
        return contents(units)

    (unit,) = store.queue(process.broker.registry.topic("orders").id, 1).units(0, 1)
    last = unit.position
    store.reader.contents = cold_in_queue_0  # type: ignore[method-assign]
    reply = await call(process.port, Kind.POP, pop("orders", "g"), 5_000)
    assert [delivery.head for delivery in hop.decode_pop_reply(reply).deliveries] == [b"there"]
    await asyncio.wait_for(fetched.wait(), 10)
    reply = await call(process.port, Kind.POP, pop("orders", "g"), 5_000)
    assert len(hop.decode_pop_reply(reply).deliveries) == 3
    await process.stop()


def test_a_start_does_not_read_the_part_of_a_segment_that_was_never_written(
    tmp_path: Path,
) -> None:
    """The kernel reads ahead of the scan; what it brought into memory looks like data."""
    settings = replace(
        SMALL,
        broker=replace(SMALL.broker, data=str(tmp_path)),
        store=replace(WITHOUT_TAIL.store, segment_bytes=64 << 20),
    )
    core = CoreBroker(disk=ResidentDisk(), settings=settings)
    core.topic("orders")
    for _ in range(90):
        core.send("orders", bytes(100_000))
    core.broker.release_files()
    end = core.broker.store.end
    first = min((tmp_path / "commitlog").iterdir())
    descriptor = os.open(first, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)

    core = CoreBroker(disk=ResidentDisk(), settings=settings)
    assert core.broker.store.end >= end
    # Of the 55 MB that follow, at most what the kernel reads ahead: 8 MiB on some disks.
    assert max(pages_in_memory(first)) * PAGE < end + (9 << 20)
    core.broker.release_files()


async def test_what_operators_ask_about_old_messages_waits_on_another_thread(
    tmp_path: Path,
) -> None:
    """Explain, lag, dead letters, redrive, reset to a time, and a consumer's reject."""

    disk = ColdDisk()
    process = await broker_with_messages(tmp_path, disk, 3)
    stored_ms = process.broker.clock.wall_ms()
    properties = SystemProperties(message_id="A").SerializeToString()
    entry = hop.PutEntry(MessageType.NORMAL, b"named", properties)

    async def ask(kind: Kind, request: bytes) -> bytes:
        """Everything is on the disk alone when the question comes."""
        deque(process.broker.store.dispatch.flush(), maxlen=0)
        disk.warmed.clear()
        disk.cold = True
        reply = await call(process.port, kind, request, 5_000)
        disk.cold = False
        assert disk.warmed, f"{kind.name} read nothing"
        return reply

    put = hop.encode_put(hop.PutRequest("orders", [entry]))
    await call(process.port, Kind.PUT, put, 5_000)
    lag = pb.LagReply.FromString(
        await ask(
            Kind.LAG,
            pb.LagRequest(
                group=process.broker.metadata_resolver.group("g").name, topic="orders"
            ).SerializeToString(),
        )
    )
    assert (lag.lags[0].ready, lag.lags[0].oldest_ready_ms <= stored_ms) == (4, True)
    popped = await call(process.port, Kind.POP, pop("orders", "g"), 5_000)
    for delivery in hop.decode_pop_reply(popped).deliveries:
        body = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
        (result,) = hop.decode_ack_reply(await ask(Kind.REJECT, body))
        assert result.code == 20000
    listed = pb.ListDeadLettersReply.FromString(
        await ask(Kind.LIST_DEAD_LETTERS, pb.ListDeadLettersRequest(group="g").SerializeToString())
    )
    assert len(listed.letters) == 4
    explain = pb.ExplainRequest(message_id="A").SerializeToString()
    explained = pb.ExplainReply.FromString(await ask(Kind.EXPLAIN, explain))
    assert explained.messages[0].groups[0].state == "DEAD_LETTERED"
    redriven = pb.RedriveReply.FromString(
        await ask(Kind.REDRIVE, pb.RedriveRequest(group="g").SerializeToString())
    )
    assert redriven.progress[0].redriven == 4
    reset = pb.ResetOffsetRequest(group="g", topic="orders", stored_ms=1)
    done = pb.ResetOffsetReply.FromString(await ask(Kind.RESET_OFFSET, reset.SerializeToString()))
    assert done.queues[0].after == 0
    disk.error = OSError(5, "Input/output error")
    with pytest.raises(Exception, match="old messages cannot be read"):
        await ask(Kind.EXPLAIN, explain)
    disk.cold, disk.error = False, None
    await process.stop()
