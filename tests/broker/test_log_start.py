"""Where the log starts is durable before retention deletes: a first segment that somebody removed
is missed, and one that was deleted is not."""

import errno
import threading
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import pytest
from broker.index_pieces import index_files

from popmq.broker.log.store_checkpoint import (
    UNKNOWN,
    StoreCheckpoint,
    read_checkpoint,
    write_checkpoint,
)
from popmq.broker.persistence.checkpoint_scheduler import CheckpointScheduler
from popmq.common.disk import Disk
from popmq.common.errors import StoreDamaged
from popmq.common.settings.settings import MessageSettings, Settings, StoreSettings, TimerSettings
from popmq.common.step_loop import InlineFlusher
from popmq.testing.disk.lying_disk import LyingDisk, PowerCut
from popmq.testing.harness.core_broker import CoreBroker

SEGMENT = 16 << 10
SETTINGS = Settings(
    store=StoreSettings(
        segment_bytes=SEGMENT,
        snapshot_bytes=6 << 10,
        reserved_segments=1,
        retention_bytes=3 * SEGMENT,
    ),
    message=MessageSettings(max_body_bytes=4096, max_properties_bytes=64),
    timer=TimerSettings(wheel_slots=60, log_segment_bytes=16 << 10),
)
DATA = SETTINGS.broker.data
LOG, CHECKPOINT = f"{DATA}/commitlog", f"{DATA}/checkpoint"


def filled(count: int, broker: CoreBroker | None = None) -> CoreBroker:
    """`count` messages of 3 KB, a checkpoint and a look of retention behind each."""
    core = broker or CoreBroker(settings=SETTINGS)
    if broker is None:
        core.topic("orders", queues=1)
    for number in range(count):
        core.send("orders", b"%05d" % number + bytes(3_000))
        core.advance(11_000)
    return core


def disk_of(core: CoreBroker) -> LyingDisk:
    return cast(LyingDisk, core.disk)


def killed(core: CoreBroker) -> LyingDisk:
    core.broker.release_files()
    return disk_of(core)


def starts(disk: LyingDisk) -> list[int]:
    return [int(name) for name in disk.names(LOG)]


def said(disk: LyingDisk) -> StoreCheckpoint:
    checkpoint = read_checkpoint(disk, CHECKPOINT)
    assert checkpoint is not None
    return checkpoint


def test_a_first_segment_that_somebody_removed_is_refused_also_behind_retention() -> None:
    disk = killed(filled(60))
    first, second, *_ = starts(disk)
    assert first > 0
    assert said(disk).log_start == first
    disk.remove(f"{LOG}/{first:020d}")
    with pytest.raises(StoreDamaged) as refused:
        CoreBroker(disk=disk, settings=SETTINGS)
    text = str(refused.value)
    assert f"{LOG}/{first:020d} is missing: the log began at position {first}" in text
    assert f"its first segment begins at {second}" in text
    assert f"popmq doctor --data {DATA}" in text


def test_retention_is_interrupted_at_any_operation_twice_and_nothing_is_missed() -> None:
    """The second crash comes in the start behind the first, or in the retention behind that."""
    lying_disk = killed(filled(33))
    before = starts(lying_disk)[0]
    seen = set()
    operations, whole = 0, False
    while not whole:
        disk = deepcopy(lying_disk)
        core = CoreBroker(disk=disk, settings=SETTINGS)
        for _ in range(7):
            core.send("orders", bytes(3_000))
        disk.cut_at(operations)
        try:
            core.advance(11_000)
            whole = True
        except PowerCut:
            disk.restore_power()
        seen.add((starts(disk)[0] > before, said(disk).log_start > before))
        disk.cut_at(operations * 7 % 60)
        try:
            core.start()
            filled(1, core)
        except PowerCut:
            disk.restore_power()
        disk.survive()
        core.start()
        operations += 1
    assert seen == {(False, False), (False, True), (True, True)}


def test_a_segment_goes_also_when_there_is_no_room_for_a_checkpoint() -> None:
    """The one there is goes instead of saying what is not so."""
    core = filled(33)
    disk = disk_of(core)
    first = starts(disk)[0]
    for _ in range(7):
        core.send("orders", bytes(3_000))
    disk.capacity = 0
    core.advance(11_000)
    assert starts(disk)[0] > first
    assert not disk.exists(CHECKPOINT)
    disk.restore_power()  # that, too, was durable before it
    assert not disk.exists(CHECKPOINT)
    disk.capacity = 1 << 50
    core.start()
    filled(1, core)
    assert said(disk).log_start == starts(disk)[0]


class Stubborn(LyingDisk):
    """Removes nothing of the log while it is `stuck`, and says so."""

    stuck = False

    def remove(self, path: str) -> None:
        if self.stuck and path.startswith(LOG):
            raise OSError(errno.EIO, "Input/output error")
        super().remove(path)


def test_what_could_not_be_deleted_goes_before_what_is_behind_it() -> None:
    disk = Stubborn()
    core = CoreBroker(disk=disk, settings=SETTINGS)
    core.topic("orders", queues=1)
    filled(33, core)
    retention, before = core.broker.store.retention, starts(disk)
    disk.stuck = True
    filled(7, core)
    assert isinstance(retention.error, OSError)
    assert starts(disk)[: len(before)] == before
    disk.stuck = False
    filled(7, core)
    assert retention.error is None
    assert starts(disk)[0] > before[0]
    killed(core)
    CoreBroker(disk=disk, settings=SETTINGS)


def test_a_checkpoint_that_is_being_written_meanwhile_says_the_same_start() -> None:
    disk, jobs = LyingDisk(), InlineFlusher()
    keeper = CheckpointScheduler(disk, DATA, jobs, lambda error: None)
    keeper.log_start = 0
    checkpoint = StoreCheckpoint(150, 3, 4)
    keeper.log_starts_at(SEGMENT)
    keeper.step(index_files(), lambda: checkpoint, now_ms=20_000, requested=True)
    assert said(disk) == replace(checkpoint, durable=150, log_start=SEGMENT)
    keeper.lower()
    assert said(disk).log_start == SEGMENT


def test_a_checkpoint_without_a_start_of_the_log_is_believed_for_the_rest() -> None:
    """As an older popmq wrote it; which in its turn reads no further."""
    checkpoint = StoreCheckpoint(150, 3, 4, 200, SEGMENT, log_ms=5)
    older = replace(checkpoint, log_ms=0)
    for size, expected in ((48, replace(older, log_start=UNKNOWN)), (60, older), (72, checkpoint)):
        assert read_checkpoint(disk_with(checkpoint.encode()[:size]), CHECKPOINT) == expected
    for size in set(range(49, 72)) - {60}:
        assert read_checkpoint(disk_with(checkpoint.encode()[:size]), CHECKPOINT) is None


def test_a_flipped_bit_of_the_start_of_the_log_is_found() -> None:
    data = StoreCheckpoint(150, 3, 4, 200, SEGMENT, log_ms=5).encode()
    for at in range(len(data)):
        wrong = bytearray(data)
        wrong[at] ^= 4
        assert read_checkpoint(disk_with(bytes(wrong)), CHECKPOINT) is None, at


def test_a_store_whose_checkpoint_does_not_say_where_the_log_starts_says_it_from_then_on() -> None:
    disk = killed(filled(60))
    old = disk_with(said(disk).encode()[:48])
    disk._files[CHECKPOINT] = disk._kept_names[CHECKPOINT] = old._files[CHECKPOINT]
    assert said(disk).log_start == UNKNOWN
    core = CoreBroker(disk=disk, settings=SETTINGS)
    filled(1, core)
    assert said(disk).log_start == starts(disk)[0] > 0


def disk_with(checkpoint: bytes) -> LyingDisk:
    disk = LyingDisk()
    file = disk.open(CHECKPOINT, create=True)
    file.write(checkpoint, 0)
    file.sync()
    return disk


class SlowDisk:
    """Stands still within its first rename until it is let go."""

    def __init__(self, disk: LyingDisk) -> None:
        self._disk = disk
        self.there, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def replace(self, source: str, target: str) -> None:
        if not self.there.is_set():
            self.there.set()
            assert self.go_on.wait(30)
        self._disk.replace(source, target)


def test_a_checkpoint_that_is_lowered_while_retention_writes_another_stays_low() -> None:
    """On a slave the loop lowers it, and a thread says where the log starts."""
    disk = LyingDisk()
    disk.make_folder(DATA)
    write_checkpoint(disk, CHECKPOINT, StoreCheckpoint(900, 1, 5, durable=900, log_start=0))
    slow = SlowDisk(disk)
    keeper = CheckpointScheduler(cast(Disk, slow), DATA, InlineFlusher(), lambda error: None)
    keeper.read()
    retention = threading.Thread(target=lambda: keeper.log_starts_at(100))
    lowers = threading.Thread(target=keeper.lower)
    retention.start()
    assert slow.there.wait(30)
    lowers.start()
    lowers.join(0.2)  # it waits for the other, or was done long ago
    slow.go_on.set()
    retention.join(30)
    lowers.join(30)
    checkpoint = said(disk)
    assert (checkpoint.position, checkpoint.durable, checkpoint.log_start) == (0, 900, 100)
