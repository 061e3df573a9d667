"""Retention and timers: bodies move for as long as they are pending, and nothing else stays."""

from dataclasses import replace
from pathlib import Path

import pytest

from popmq.common.disk import RealDisk
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest, RecallResult
from popmq.common.record.message import HEADER_SIZE
from popmq.common.settings.settings import MessageSettings, StoreSettings
from popmq.common.topics import MessageType
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.disk.lying_disk import ResidentDisk, ResidentFile
from popmq.testing.harness.core_broker import SMALL, CoreBroker

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SHORT = replace(
    SMALL,
    store=StoreSettings(segment_bytes=64 << 10, snapshot_bytes=32 << 10, retention_hours=24),
    message=MessageSettings(max_body_bytes=16 << 10),
    timer=replace(SMALL.timer, wheel_slots=7 * 24 * 60, slot_ms=60_000),
)
NOISE = bytes(12_000)


class ColdFile(ResidentFile):
    """A real file of the log that is in memory only where `warm` has read it."""

    def __init__(self, path: str, *, create: bool, disk: "ColdDisk") -> None:
        super().__init__(path, create=create)
        self._disk = disk
        self._path = path

    def view_cached(self, size: int, offset: int) -> memoryview | None:
        if self._disk.cold and "commitlog" in self._path and self._path not in self._disk.warmed:
            return None
        return super().view_cached(size, offset)

    def read(self, size: int, offset: int) -> bytes:
        if self._disk.cold and "commitlog" in self._path and not self._disk.warming:
            self._disk.waits += size > HEADER_SIZE  # the age of a segment is in a header
        return super().read(size, offset)

    def warm(self, size: int, offset: int) -> None:
        self._disk.warming = True
        super().warm(size, offset)
        self._disk.warming = False
        self._disk.warmed.add(self._path)


class ColdDisk(RealDisk):
    def __init__(self) -> None:
        self.cold = self.warming = False
        self.warmed: set[str] = set()
        self.waits = 0

    def open(self, path: str, *, create: bool = False) -> ColdFile:
        return ColdFile(path, create=create, disk=self)


def on(folder: Path, disk: RealDisk | None = None, *, slot_limit: int = 0) -> CoreBroker:
    settings = replace(
        SHORT,
        broker=replace(SMALL.broker, data=str(folder)),
        timer=replace(SHORT.timer, slot_limit=slot_limit),
    )
    core = CoreBroker(disk=disk or ResidentDisk(), settings=settings)
    core.topic("orders", queues=1, type=MessageType.MIXED)
    core.topic("noise", queues=1)
    core.group("g")
    return core


def send_in(core: CoreBroker, body: bytes, delay_ms: int) -> None:
    name = body.decode()
    properties = SystemProperties(message_id=name).SerializeToString()
    entry = PutEntry(MessageType.DELAY, body, properties, 0, 0, -delay_ms, name)
    reply = core.reply(Kind.PUT, hop.encode_put(PutRequest("orders", [entry])))
    assert hop.decode_put_reply(reply)[0].code == Code.OK


def pass_days(core: CoreBroker, days: int) -> None:
    """With traffic that fills three segments a day."""
    for _ in range(days * 4):
        for _ in range(4):
            core.send("noise", NOISE)
        core.clock.advance(6 * HOUR_MS)
        core.run_steps()


def received(core: CoreBroker) -> list[bytes]:
    deliveries = core.receive("orders", "g")
    for delivery in deliveries:
        assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    return [entry.head for entry in deliveries]


def log_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "commitlog").iterdir())


def recall(core: CoreBroker, name: str) -> RecallResult:
    topic = core.broker.registry.topic("orders").id
    outcome = core.broker.timers.recall.recall(topic, name)
    core.run_until_idle()
    return outcome


def test_a_timer_outlives_many_retentions_and_the_disk_stays_bounded(tmp_path: Path) -> None:
    core = on(tmp_path)
    send_in(core, b"ten days", 10 * DAY_MS)
    send_in(core, b"thirty days", 30 * DAY_MS)
    sizes = []
    for day in range(31):
        pass_days(core, 1)
        sizes.append(log_bytes(tmp_path))
        if day % 5 == 0:
            core.broker.release_files()
            core.start()
        assert received(core) == {10: [b"ten days"], 30: [b"thirty days"]}.get(day + 1, [])
    assert sorted(file.name for file in (tmp_path / "commitlog").iterdir())[0] > "0" * 20
    assert max(sizes[5:]) <= 2 * sizes[4]


def test_a_timer_that_was_moved_can_be_recalled_and_rescheduled(tmp_path: Path) -> None:
    core = on(tmp_path)
    for name in (b"recalled", b"rescheduled", b"kept"):
        send_in(core, name, 9 * DAY_MS)
    pass_days(core, 4)
    assert core.broker.timers.bodies.relocated >= 3
    assert recall(core, "recalled") is RecallResult.DONE
    topic = core.broker.registry.topic("orders").id
    outcome, _ = core.broker.timers.recall.reschedule(topic, "rescheduled", -DAY_MS)
    assert outcome is RecallResult.DONE
    pass_days(core, 1)
    assert received(core) == [b"rescheduled"]
    pass_days(core, 5)
    assert received(core) == [b"kept"]


@pytest.mark.parametrize("days", [6, 9])
def test_a_timer_whose_body_moved_counts_once_for_the_limit_of_its_slot(
    tmp_path: Path, days: int
) -> None:
    """Its slot, or one on the way to it, has a unit for each place of its body."""
    core = on(tmp_path, slot_limit=2)
    core.run_steps()
    due_ms = core.clock.wall_ms() + days * DAY_MS
    send_in(core, b"moved", days * DAY_MS)
    pass_days(core, 4)
    assert core.broker.timers.bodies.relocated >= 1
    for _ in range(2):
        admission = core.broker.timers.admission
        admission._counts.clear()
        assert admission._counted(due_ms - due_ms % 60_000).total() == 1
        core.broker.release_files()
        core.start()
        core.run_steps()


def test_a_timer_that_is_about_to_be_moved_can_be_recalled(tmp_path: Path) -> None:
    core = on(tmp_path)
    send_in(core, b"recalled", 9 * DAY_MS)
    retention = core.broker.store.retention
    for _ in range(8 * 4):
        core.send("noise", NOISE)
        core.clock.advance(6 * HOUR_MS)
        while not retention.is_relocating and core.broker.step():
            core.run_until_idle()
        if retention.is_relocating:
            break
    assert retention.is_relocating
    assert core.broker.timers.bodies.relocated == 0
    assert recall(core, "recalled") is RecallResult.DONE
    pass_days(core, 10)
    assert core.broker.timers.bodies.relocated == 0
    assert received(core) == []


def test_fired_and_recalled_timers_are_not_moved(tmp_path: Path) -> None:
    core = on(tmp_path)
    send_in(core, b"fires", HOUR_MS)
    send_in(core, b"recalled", 9 * DAY_MS)
    recall(core, "recalled")
    pass_days(core, 4)
    assert core.broker.store.retention.deleted_segments > 0
    assert core.broker.timers.bodies.relocated == 0


def test_bodies_that_are_on_the_disk_only_are_moved_without_a_wait_on_the_loop(
    tmp_path: Path,
) -> None:
    disk = ColdDisk()
    core = on(tmp_path, disk)
    for number in range(20):
        send_in(core, b"%d" % number, 9 * DAY_MS + number)
    pass_days(core, 1)
    disk.cold = True
    for _ in range(4):
        disk.warmed.clear()
        pass_days(core, 1)
    assert core.broker.timers.bodies.relocated >= 20
    assert disk.waits == 0
    disk.cold = False
    pass_days(core, 5)
    assert received(core) == [b"%d" % number for number in range(20)]


def test_the_wheel_is_built_anew_from_bodies_that_were_moved(tmp_path: Path) -> None:
    core = on(tmp_path)
    for number in range(5):
        send_in(core, b"%d" % number, 9 * DAY_MS)
    pass_days(core, 5)
    core.stop()
    (tmp_path / "timerwheel").unlink()
    core.start()
    assert core.broker.timers.files.rebuilt
    pass_days(core, 5)
    assert received(core) == [b"%d" % number for number in range(5)]
