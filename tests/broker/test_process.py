"""The broker as a process: threads, sockets and real files in one test process."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.broker.node.broker_process import BrokerProcess
from popmq.common.disk import DiskFile, RealDisk
from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig
from popmq.testing.harness.clock import SkippingClock
from popmq.testing.harness.core_broker import SMALL, pop


class HeldFile:
    """A real file whose `sync` waits while the gate is shut."""

    def __init__(self, file: DiskFile, disk: "HeldDisk") -> None:
        self._file = file
        self._disk = disk
        self.read, self.write, self.size = file.read, file.write, file.size
        self.allocate, self.truncate, self.close = file.allocate, file.truncate, file.close

    def write_all(self, parts: Sequence[bytes], offset: int) -> None:
        self._file.write_all(parts, offset)

    def sync(self) -> None:
        self._disk.reached.set()
        self._disk.gate.wait()
        if self._disk.error is not None:
            raise self._disk.error
        self._file.sync()


class HeldDisk(RealDisk):
    """The real disk with a gate before every fdatasync, and an error for the taking."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.error: OSError | None = None

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        return HeldFile(super().open(path, create=create), self)


class IndexHeldDisk(HeldDisk):
    """The gate is before the syncs of queue files only."""

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        if "consumequeue" in path:
            return super().open(path, create=create)
        return RealDisk.open(self, path, create=create)


def settings_of(folder: Path) -> Settings:
    return replace(SMALL, broker=replace(SMALL.broker, data=str(folder)))


def hello() -> Hello:
    return Hello(role=ProcessRole.PROXY, name="test", cluster="popmq")


def with_broker(
    folder: Path, disk: HeldDisk, test: Callable[[BrokerProcess, Port], Awaitable[None]]
) -> None:
    """Run `test` against a broker that serves frames over TCP."""

    async def run() -> None:
        process = BrokerProcess(settings_of(folder), disk=disk)
        await process.start()
        (address,) = await process.listen("127.0.0.1:0")
        process.broker.registry.create_topic(TopicConfig(0, "orders", 1))
        port = FramePort(address, hello())
        port.start()
        try:
            await test(process, port)
        finally:
            disk.gate.set()
            await port.close()
            await process.stop()

    asyncio.run(run())


def put(body: bytes) -> bytes:
    return hop.encode_put(hop.PutRequest("orders", [hop.PutEntry(MessageType.NORMAL, body, b"")]))


async def answered_at_once(port: Port) -> None:
    """Say something that is answered without the disk: all replies sent before have come."""
    await call(port, Kind.CLIENTS, hop.encode_clients(hop.ClientsReport()), 5_000)


async def stays_unanswered_while_held(disk: HeldDisk, port: Port, kind: Kind, body: bytes) -> bytes:
    """The reply, after it was seen that it does not come while the fdatasync is held."""
    disk.reached.clear()
    disk.gate.clear()
    reply = asyncio.ensure_future(call(port, kind, body, 10_000))
    await asyncio.to_thread(disk.reached.wait)
    await answered_at_once(port)
    assert not reply.done(), f"{kind.name} was answered before its fdatasync returned"
    disk.gate.set()
    return await reply


def test_no_ok_leaves_before_the_fdatasync_that_covers_it_returned(tmp_path: Path) -> None:
    """For send, receive and ack, over a real socket and real files."""
    disk = HeldDisk()

    async def check(process: BrokerProcess, port: Port) -> None:
        sent = await stays_unanswered_while_held(disk, port, Kind.PUT, put(b"one"))
        assert hop.decode_put_reply(sent)[0].code == Code.OK
        popped = await stays_unanswered_while_held(disk, port, Kind.POP, pop("orders", "g"))
        (delivery,) = hop.decode_pop_reply(popped).deliveries
        body = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
        acked = await stays_unanswered_while_held(disk, port, Kind.ACK, body)
        assert hop.decode_ack_reply(acked)[0].code == Code.OK
        body = hop.encode_ack(hop.AckRequest("orders", "g", [delivery.handle]))
        assert hop.decode_ack_reply(await call(port, Kind.ACK, body, 5_000))[0].code == Code.OK

    with_broker(tmp_path, disk, check)


def test_what_was_sent_during_an_fdatasync_waits_for_the_next_one(tmp_path: Path) -> None:
    disk = HeldDisk()

    async def check(process: BrokerProcess, port: Port) -> None:
        disk.reached.clear()
        disk.gate.clear()
        first = asyncio.ensure_future(call(port, Kind.PUT, put(b"one"), 10_000))
        await asyncio.to_thread(disk.reached.wait)
        before = process.broker.store.metrics.flushes
        others = [
            asyncio.ensure_future(call(port, Kind.PUT, put(b"later"), 10_000)) for _ in range(20)
        ]
        await answered_at_once(port)
        disk.gate.set()
        await asyncio.gather(first, *others)
        assert process.broker.store.metrics.flushes == before + 2

    with_broker(tmp_path, disk, check)


def test_a_checkpoint_delays_no_send(tmp_path: Path) -> None:
    """Its many syncs run beside the group commits, not before them."""
    disk = IndexHeldDisk()

    async def check(process: BrokerProcess, port: Port) -> None:
        await call(port, Kind.PUT, put(b"one"), 5_000)
        disk.gate.clear()
        process.broker.store.checkpoints._due_ms = 0
        process.broker.step()
        await asyncio.to_thread(disk.reached.wait)
        for _ in range(3):
            await call(port, Kind.PUT, put(b"beside"), 5_000)
        disk.gate.set()

    with_broker(tmp_path, disk, check)


async def test_a_failed_fdatasync_stops_the_broker_and_is_not_tried_again(tmp_path: Path) -> None:
    disk = HeldDisk()

    process = BrokerProcess(settings_of(tmp_path), disk=disk)
    await process.start()
    process.broker.registry.create_topic(TopicConfig(0, "orders", 1))
    await call(process.port, Kind.PUT, put(b"kept"), 5_000)
    disk.error = OSError(5, "Input/output error")
    lost = asyncio.ensure_future(call(process.port, Kind.PUT, put(b"lost"), 5_000))
    with pytest.raises(OSError, match="Input/output"):
        await asyncio.shield(process.failed)
    assert not lost.done()
    lost.cancel()
    await process.stop()

    assert (tmp_path / "abort").exists(), "the next start must not take this for a clean stop"


def test_a_second_process_on_the_data_directory_is_refused_and_names_the_first(
    tmp_path: Path,
) -> None:
    disk = HeldDisk()

    async def check(process: BrokerProcess, port: Port) -> None:
        with pytest.raises(ConfigError, match=f"used by process {os.getpid()}"):
            BrokerProcess(settings_of(tmp_path))
        await call(port, Kind.PUT, put(b"goes on"), 5_000)

    with_broker(tmp_path, disk, check)


def test_an_unknown_kind_of_request_is_refused_and_the_connection_goes_on(tmp_path: Path) -> None:
    disk = HeldDisk()

    async def check(process: BrokerProcess, port: Port) -> None:
        with pytest.raises(PopmqError) as refused:
            await call(port, Kind.FAILOVER, b"", 5_000)
        assert refused.value.code == Code.UNSUPPORTED
        await call(port, Kind.PUT, put(b"goes on"), 5_000)

    with_broker(tmp_path, disk, check)


def test_requests_that_make_no_sense_are_bad_requests(tmp_path: Path) -> None:
    disk = HeldDisk()
    odd = hop.encode_put(hop.PutRequest("orders", [hop.PutEntry(77, b"x", b"")]))

    async def check(process: BrokerProcess, port: Port) -> None:
        (result,) = hop.decode_put_reply(await call(port, Kind.PUT, odd, 5_000))
        assert result.code == Code.BAD_REQUEST
        assert "77" in result.message
        with pytest.raises(PopmqError, match="no CREATE_TOPIC") as refused:
            await call(port, Kind.CREATE_TOPIC, b"\xff\xff", 5_000)
        assert refused.value.code == Code.BAD_REQUEST

    with_broker(tmp_path, disk, check)


@pytest.mark.parametrize("kind", [Kind.PUT, Kind.POP, Kind.ACK, Kind.CHANGE])
def test_a_payload_that_ends_early_is_refused_at_every_byte(tmp_path: Path, kind: Kind) -> None:
    disk = HeldDisk()
    whole = {
        Kind.PUT: put(b"body"),
        Kind.POP: pop("orders", "g"),
        Kind.ACK: hop.encode_ack(hop.AckRequest("orders", "g", [b"handle"])),
        Kind.CHANGE: hop.encode_change(hop.ChangeRequest("orders", "g", b"handle", 5)),
    }[kind]

    async def check(process: BrokerProcess, port: Port) -> None:
        for size in range(len(whole)):
            with pytest.raises(PopmqError) as refused:
                await call(port, kind, whole[:size], 5_000)
            assert refused.value.code == Code.BAD_REQUEST, size
        await call(port, Kind.PUT, put(b"goes on"), 5_000)

    with_broker(tmp_path, disk, check)


def test_a_waiting_pop_is_given_up_when_its_asker_is_gone(tmp_path: Path) -> None:
    disk = HeldDisk()

    async def check(process: BrokerProcess, port: Port) -> None:
        waiting = asyncio.ensure_future(
            call(port, Kind.POP, pop("orders", "g", poll_ms=60_000), 70_000)
        )
        while process.broker.polling.count == 0:  # the frame is on its way
            await answered_at_once(port)
        waiting.cancel()
        while process.broker.polling.count:
            await answered_at_once(port)

    with_broker(tmp_path, disk, check)


async def test_a_push_consumers_delivery_is_not_renewed_when_the_connection_of_its_proxy_broke(
    tmp_path: Path,
) -> None:
    clock = SkippingClock(frozen=True)
    process = BrokerProcess(settings_of(tmp_path), clock=clock)
    await process.start()
    process.broker.registry.create_topic(TopicConfig(0, "orders", 1, MessageType.NORMAL))
    process.broker.registry.create_group(SubscriptionGroup(0, "g"))
    await process.settle()
    (address,) = await process.listen("127.0.0.1:0")
    other = FramePort(address, hello())
    other.start()
    entry = hop.PutEntry(MessageType.NORMAL, b"one", b"")
    await call(other, Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), 10_000)

    proxy = FramePort(address, replace(hello(), role=ProcessRole.PROXY))
    proxy.start()
    receive = pop("orders", "g", auto_renew=True, invisible_ms=0)
    reply = await call(proxy, Kind.POP, receive, 10_000)
    assert [delivery.attempt for delivery in hop.decode_pop_reply(reply).deliveries] == [1]
    await proxy.close()
    (check_point,) = process.broker.table
    async with asyncio.timeout(30):
        while not check_point.doubted:  # noqa: ASYNC110 - the broker notices the lost connection
            await asyncio.sleep(0)
    alive = hop.encode_clients(hop.ClientsReport(alive=["a-client"]))
    for _ in range(process.broker.settings.pop.invisible_default_ms // 10_000 + 1):
        clock.advance(10_000)
        await call(other, Kind.CLIENTS, alive, 10_000)
        await process.settle()
    reply = await call(other, Kind.POP, receive, 10_000)
    assert [delivery.attempt for delivery in hop.decode_pop_reply(reply).deliveries] == [2]
    await other.close()
    await process.stop()
