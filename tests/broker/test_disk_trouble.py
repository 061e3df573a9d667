"""A disk that is full, slow, read-only or broken: each has its behaviour (D10)."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.broker.node.broker_process import BrokerProcess
from popmq.broker.node.metrics import broker_readings
from popmq.common.disk import NO_FILE_LIMIT, DiskFile, RealDisk
from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.settings import Settings, StoreSettings
from popmq.common.topics import MessageType, SubscriptionGroup
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker, pop

SEGMENT = 1 << 20
SMALL_GROUP = SubscriptionGroup(0, "a-group")


def fill(core: CoreBroker, *, body: int = 50_000) -> tuple[list[bytes], PopmqError]:
    """Send until it is refused: what was answered OK, and the refusal."""
    sent: list[bytes] = []
    while True:
        data = b"%08d" % len(sent) + bytes(body)
        core.clock.advance(50)
        core.run_steps()
        try:
            result = core.send("orders", data)
        except PopmqError as refusal:
            return sent, refusal
        assert result.code == Code.OK
        sent.append(data)


def small_disk(
    capacity: int,
    *,
    disk_stop_percent: int = 90,
    reserved_segments: int = 2,
    max_pending_bytes: int = 256 << 20,
) -> CoreBroker:
    disk = LyingDisk()
    disk.capacity = capacity
    store = replace(
        SMALL.store,
        disk_stop_percent=disk_stop_percent,
        reserved_segments=reserved_segments,
        max_pending_bytes=max_pending_bytes,
    )
    settings = replace(SMALL, store=store)
    core = CoreBroker(disk=disk, settings=settings)
    core.topic("orders", queues=2)
    core.group("g")
    return core


def drain(core: CoreBroker) -> list[bytes]:
    heads: list[bytes] = []
    while batch := core.receive("orders", "g"):
        for delivery in batch:
            heads.append(delivery.head)
            assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    return sorted(heads)


def test_sends_stop_at_the_percentage_and_the_refusal_names_value_limit_and_setting() -> None:
    core = small_disk(20 * SEGMENT, disk_stop_percent=60)
    sent, refusal = fill(core)
    assert refusal.code == Code.TOO_MANY_REQUESTS
    assert "store.disk_stop_percent" in str(refusal)
    assert "60 %" in str(refusal)
    assert len(sent) > 100
    assert core.broker.store.guard.sends_refused == 1
    assert drain(core) == sent


def test_a_disk_filled_to_the_last_segment_is_drained_and_nothing_acknowledged_is_lost() -> None:
    core = small_disk(8 * SEGMENT + 700_000, disk_stop_percent=100)
    sent, refusal = fill(core)
    assert refusal.code == Code.TOO_MANY_REQUESTS
    assert "store.segment_bytes" in str(refusal)
    assert core.broker.store.guard.full
    with pytest.raises(PopmqError, match="too few"):
        core.send("orders", b"refused")
    assert drain(core) == sent


def test_sends_go_on_when_there_is_room_again() -> None:
    core = small_disk(8 * SEGMENT, disk_stop_percent=100)
    sent, _ = fill(core)
    disk = core.disk
    assert isinstance(disk, LyingDisk)
    disk.capacity = 16 * SEGMENT
    core.advance(3_000)
    assert core.send("orders", b"more").code == Code.OK
    assert drain(core) == sorted([*sent, b"more"])


def test_a_broker_that_starts_on_a_full_disk_serves_what_it_has() -> None:
    core = small_disk(8 * SEGMENT, disk_stop_percent=100)
    sent, _ = fill(core)
    for power_cut in (False, True):
        disk = core.disk
        assert isinstance(disk, LyingDisk)
        if power_cut:
            disk.restore_power()
        core.start()
        core.advance(2_000)
        with pytest.raises(PopmqError):
            core.send("orders", b"refused")
    assert drain(core) == sent


def test_when_even_the_reserve_is_used_up_writes_are_refused_and_nothing_breaks() -> None:
    core = small_disk(5 * SEGMENT, disk_stop_percent=100, reserved_segments=1)
    sent, _ = fill(core, body=200_000)
    taken = core.receive("orders", "g", limit=8, invisible_ms=1_000)
    guard = core.broker.store.guard
    # Revivals copy bodies; they stop in time, and acks still count.
    for _ in range(50):
        core.advance(2_000)
        answer = core.ask(Kind.POP, pop("orders", "g", limit=8, invisible_ms=1_000))
        if answer.error is not None:
            assert answer.error.code == Code.TOO_MANY_REQUESTS
    assert guard.full
    disk = core.disk
    assert isinstance(disk, LyingDisk)
    disk.capacity = 100 * SEGMENT
    core.advance(5_000)
    rest = {body for body in drain(core) if body}
    assert rest == set(sent)
    assert taken


def test_a_refusal_names_inodes_that_are_used_up_instead_of_bytes() -> None:
    core = small_disk(1 << 40)
    core.send("orders", b"before")
    disk = core.disk
    assert isinstance(disk, LyingDisk)
    assert core.broker.store.guard.free_files == NO_FILE_LIMIT
    disk.most_files = 0
    refusal = ""
    for number in range(200):
        core.clock.advance(200)
        core.run_steps()
        entry = hop.PutEntry(MessageType.NORMAL, b"%03d" % number, b"")
        answer = core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
        refusal = str(answer.error or "")
        if refusal:
            break
    assert "has no inode for another file (df -i), " in refusal
    assert core.broker.store.guard.free_files == 0


def test_a_quota_that_is_used_up_is_named_and_measured_until_there_is_room() -> None:
    core = small_disk(8 * SEGMENT, disk_stop_percent=100)
    disk, guard = core.disk, core.broker.store.guard
    assert isinstance(disk, LyingDisk)
    disk.no_room = errno.EDQUOT
    fill(core)
    assert guard.over_quota
    with pytest.raises(PopmqError, match=r"a quota of the disk of .* is used up \(quota -s"):
        core.send("orders", b"refused")
    values = {metric.name: metric.value for metric in broker_readings(core.broker) if metric}
    assert values["store_disk_over_quota"] == 1
    disk.capacity = 100 * SEGMENT
    core.advance(5_000)
    assert not guard.over_quota
    assert core.send("orders", b"more").code == Code.OK


def test_index_files_that_do_not_fit_stop_sends_and_harm_nothing() -> None:
    core = small_disk(1 << 40)
    core.send("orders", b"before")
    disk = core.disk
    assert isinstance(disk, LyingDisk)
    # Room for what the log has allocated, and for not one byte more.
    disk.capacity = disk.capacity - disk.space("")[0]
    sent = []
    for number in range(200):
        core.clock.advance(200)
        core.run_steps()
        entry = hop.PutEntry(MessageType.NORMAL, b"%03d" % number, b"")
        answer = core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])))
        if answer.error is not None:
            break
        sent.append(b"%03d" % number)
    assert answer.error is not None, "sends went on although the index could not be written"
    assert answer.error.code == Code.TOO_MANY_REQUESTS
    assert sorted(drain(core)) == sorted([b"before", *sent])
    disk.capacity = 1 << 40
    core.advance(15_000)
    assert core.send("orders", b"after").code == Code.OK
    core.stop()
    core.start()
    assert drain(core) == [b"after"]


class BrokenFile:
    """A real file whose write or sync fails when its disk says so."""

    def __init__(self, file: DiskFile, disk: "BrokenDisk", path: str) -> None:
        self._file, self._disk, self._path = file, disk, path
        self.read, self.size, self.close = file.read, file.size, file.close
        self.allocate, self.truncate = file.allocate, file.truncate

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._disk.fail("write", self._path)
        self._file.write(data, offset)

    def write_all(self, parts: list[bytes], offset: int) -> None:
        self._disk.fail("write", self._path)
        self._file.write_all(parts, offset)

    def sync(self) -> None:
        self._disk.fail("sync", self._path)
        self._file.sync()


class BrokenDisk(RealDisk):
    def __init__(self) -> None:
        self.fails: Callable[[str, str], bool] = lambda operation, path: False
        self.failures = 0
        self.errno = errno.EIO

    def fail(self, operation: str, path: str) -> None:
        if self.fails(operation, path):
            self.failures += 1
            raise OSError(self.errno, os.strerror(self.errno))

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        return BrokenFile(super().open(path, create=create), self, path)  # type: ignore[return-value]


def shown(process: BrokerProcess, name: str) -> float:
    (values,) = (metric.value for metric in process.metrics() if metric and metric.name == name)
    return values


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("write", errno.EIO),
        ("sync", errno.EIO),
        # What ext4 does to itself after an error (errors=remount-ro).
        ("write", errno.EROFS),
    ],
)
async def test_an_error_of_the_disk_of_the_log_stops_the_process_without_another_try(
    tmp_path: Path, operation: str, error: int
) -> None:
    disk = BrokenDisk()
    disk.errno = error

    process = BrokerProcess(settings_of(tmp_path), disk=disk)
    await process.start()
    process.broker.step()
    await all_handed_over_is_done(process)
    assert shown(process, "store_last_stop_clean") == 1
    assert shown(process, "store_disk_failed") == 0
    disk.fails = lambda what, path: what == operation and "commitlog" in path
    process.broker.registry.create_group(SMALL_GROUP)
    with pytest.raises(OSError, match=os.strerror(error)):
        await asyncio.shield(process.failed)
    assert shown(process, "store_disk_failed") == 1
    process.broker.registry.create_group(replace(SMALL_GROUP, name="another"))
    await asyncio.sleep(0)
    assert disk.failures == 1
    await process.stop()

    disk.fails = lambda what, path: False
    assert await start_and_stop(tmp_path, disk) == 0
    assert await start_and_stop(tmp_path, disk) == 1


async def all_handed_over_is_done(process: BrokerProcess) -> None:
    """The flusher works in order: when it comes to this, it has done what was before."""
    done = asyncio.get_running_loop().create_future()
    process.broker.store.guard._flusher.submit(lambda: None, done.set_result)
    await done


async def start_and_stop(folder: Path, disk: RealDisk) -> float:
    """Whether the stop before was clean, says its metric."""
    process = BrokerProcess(settings_of(folder), disk=disk)
    await process.start()
    clean = shown(process, "store_last_stop_clean")
    await process.stop()
    return clean


def settings_of(folder: Path) -> Settings:
    return replace(SMALL, broker=replace(SMALL.broker, data=str(folder)))


async def test_nothing_is_confirmed_after_a_segment_could_not_be_synced_ahead(
    tmp_path: Path,
) -> None:
    """The error comes from a reservation, not from a flush; it ends the confirming all the same."""
    disk = BrokenDisk()

    process = BrokerProcess(settings_of(tmp_path), disk=disk)
    await process.start()
    await all_handed_over_is_done(process)
    disk.fails = lambda what, path: what == "sync" and path.endswith("3145728")
    log = process.broker.store._log
    process.broker.store.guard._reserving = True
    process.broker.store.guard._flusher.submit(
        lambda: log.reserve(0, 3), process.broker.store.guard._reserved
    )
    with pytest.raises(OSError, match="Input/output"):
        await asyncio.shield(process.failed)
    disk.fails = lambda what, path: False
    process.broker.registry.create_group(SMALL_GROUP)
    confirmed = process.broker.store.confirmed
    await all_handed_over_is_done(process)
    assert process.broker.store.confirmed == confirmed < process.broker.store.end
    await process.stop()


@pytest.mark.parametrize("part", ["snapshot", "timer", "index"])
async def test_a_broker_that_stops_on_a_full_disk_stops_well_and_says_what_it_could_not_write(
    tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk = BrokenDisk()
    disk.errno = errno.ENOSPC
    process = BrokerProcess(settings_of(tmp_path), disk=disk)
    await process.start()
    process.broker.registry.create_group(SMALL_GROUP)
    process.broker.step()
    await all_handed_over_is_done(process)
    disk.fails = lambda what, path: what == "write" and part in path
    with caplog.at_level(logging.WARNING, logger="popmq"):
        await process.stop()
    assert disk.failures > 0
    assert not process.failed.done()
    (line,) = [
        record for record in caplog.records if record.message == "stopped without a last snapshot"
    ]
    assert "space" in str(line.__dict__["error"])

    disk.fails = lambda what, path: False
    process = BrokerProcess(settings_of(tmp_path), disk=disk)
    await process.start()
    assert shown(process, "store_last_stop_clean") == 0
    assert process.broker.registry.find_group("a-group") is not None
    await process.stop()


def test_a_data_directory_that_cannot_be_written_is_refused_with_its_name(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(ConfigError, match=r"data directory .*file/data cannot be written"):
        BrokerProcess(settings_of(blocked / "data"))


def test_a_slow_fdatasync_is_counted_and_only_delays() -> None:
    core = small_disk(1 << 40)
    store = core.broker.store
    before = store.metrics.slow_flushes
    entry = hop.PutEntry(MessageType.NORMAL, b"slow", b"")
    answer = core.ask(Kind.PUT, hop.encode_put(hop.PutRequest("orders", [entry])), settle=False)
    core.tick()  # handed to the flusher
    core.clock.advance(5_000)
    assert not answer.heard
    core.run_until_idle()
    assert answer.heard
    assert store.metrics.slow_flushes == before + 1


def test_what_waits_for_a_stuck_disk_is_bounded() -> None:
    core = small_disk(1 << 40, max_pending_bytes=600 << 10)
    entry = hop.PutEntry(MessageType.NORMAL, bytes(100_000), b"")
    body = hop.encode_put(hop.PutRequest("orders", [entry]))
    core.ask(Kind.PUT, body, settle=False)
    core.tick()
    answers = [core.ask(Kind.PUT, body, settle=False) for _ in range(20)]
    refused = [answer for answer in answers if answer.error is not None]
    assert refused
    assert all("store.max_pending_bytes" in str(answer.error) for answer in refused)
    core.run_until_idle()
    assert all(answer.heard for answer in answers)


def test_settings_of_the_disk_are_checked() -> None:
    with pytest.raises(ConfigError, match="disk_stop_percent"):
        StoreSettings(disk_stop_percent=101)
