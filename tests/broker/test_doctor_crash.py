"""A repair that dies half way, twice; and the disk on which starts are rehearsed."""

import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from popmq.broker.doctor.finding import RealSavingDisk
from popmq.broker.doctor.rehearsal_disk import RehearsalDisk
from popmq.broker.doctor.repair import chosen, repair
from popmq.cli.local.doctor import examine
from popmq.common.disk import DiskFile
from popmq.testing.disk.lying_disk import ResidentDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

NEVER = 1 << 40


def core_on(folder: Path) -> CoreBroker:
    settings = replace(
        SMALL,
        broker=replace(SMALL.broker, data=str(folder)),
        store=replace(SMALL.store, snapshot_bytes=NEVER),
    )
    return CoreBroker(disk=ResidentDisk(), settings=settings)


def made_damaged_store(folder: Path) -> None:
    """30 messages in several segments, killed; the fourth is damaged, below the checkpoint."""
    core = core_on(folder)
    core.topic("orders", queues=1)
    for number in range(30):
        core.send("orders", b"orders-%03d-" % number + bytes(120_000))
        if number == 20:
            core.advance(11_000)
    core.broker.release_files()
    file = folder / "commitlog" / f"{0:020d}"
    data = file.read_bytes()
    at = data.index(b"orders-003-") + 50
    file.write_bytes(data[:at] + b"\x40" + data[at + 1 :])


def delivered(folder: Path) -> list[bytes]:
    core = core_on(folder)
    core.group("fresh")
    results = []
    while batch := core.receive("orders", "fresh"):
        results += [delivery.head[:11] for delivery in batch]
    core.stop()
    core.broker.release_files()
    return results


def test_an_examination_leaves_no_file_open(tmp_path: Path) -> None:
    made_damaged_store(tmp_path / "made")
    before = len(os.listdir("/proc/self/fd"))
    assert not examine(str(tmp_path / "made")).healthy
    assert len(os.listdir("/proc/self/fd")) == before


class CrashingDisk(RealSavingDisk):
    """The process dies before its `operations`-th change of the disk."""

    def __init__(self, operations: int) -> None:
        self.left = operations

    def touch(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        if create:
            self.touch()
        return CrashingFile(super().open(path, create=create), self)

    def make_folder(self, path: str) -> None:
        self.touch()
        super().make_folder(path)

    def link(self, source: str, target: str) -> None:
        self.touch()
        super().link(source, target)

    def remove(self, path: str) -> None:
        self.touch()
        super().remove(path)


class CrashingFile:
    def __init__(self, file: DiskFile, disk: CrashingDisk) -> None:
        self._file, self._disk = file, disk
        self.read, self.size, self.sync, self.close = file.read, file.size, file.sync, file.close
        self.allocate, self.write_all = file.allocate, file.write_all

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._disk.touch()
        self._file.write(data, offset)

    def truncate(self, size: int) -> None:
        self._disk.touch()
        self._file.truncate(size)


class Killed(BaseException):
    pass


def bodies_on_disk(folder: Path) -> set[bytes]:
    """Every message whose bytes are anywhere in the folder."""
    sets: set[bytes] = set()
    for file in folder.rglob("*"):
        if file.is_file():
            sets.update(re.findall(rb"orders-\d{3}-", file.read_bytes()))
    return sets


@pytest.mark.more
@pytest.mark.parametrize("second", [0, 4, 9])
def test_two_crashes_during_a_repair_lose_no_byte_and_the_third_try_finishes(
    tmp_path: Path, second: int
) -> None:
    made_damaged_store(tmp_path / "made")
    all_bodies = bodies_on_disk(tmp_path / "made")
    assert len(all_bodies) == 30
    operations = 0
    finished = False
    while not finished:
        folder = tmp_path / f"crash-{operations}"
        shutil.copytree(tmp_path / "made", folder)
        finished = repaired(folder, operations)
        for left in (second, NEVER):
            repaired(folder, left)
        assert bodies_on_disk(folder) == all_bodies, operations
        well = examine(str(folder))
        assert well.healthy, (operations, well.findings)
        assert delivered(folder) == [b"orders-%03d-" % number for number in range(3)], operations
        shutil.rmtree(folder)
        operations += 1
    assert operations > 15, "too few operations: the disk does not count them"


def repaired(folder: Path, operations: int) -> bool:
    """Repair until the process dies; whether it came to its end."""
    findings = chosen(examine(str(folder)), accept_loss=True)
    try:
        if findings:
            repair(str(folder), findings, CrashingDisk(operations))
    except Killed:
        return False
    return True


@pytest.mark.parametrize("seed", range(20))
def test_a_rehearsed_file_reads_like_a_real_one(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "file"
    path.write_bytes(rng.randbytes(200_000))
    twin = tmp_path / "twin"
    shutil.copy(path, twin)
    rehearsal = RehearsalDisk()
    item, two = rehearsal.open(str(path)), ResidentDisk().open(str(twin))
    for _ in range(60):
        size, offset = rng.randrange(90_000), rng.randrange(260_000)
        match rng.randrange(4):
            case 0:
                data = rng.randbytes(size)
                item.write(data, offset)
                two.write(data, offset)
            case 1:
                item.truncate(offset)
                two.truncate(offset)
            case 2 if offset:
                item.allocate(offset)
                two.allocate(offset)
        assert item.size() == two.size(), seed
        assert item.read(size, offset) == two.read(size, offset), seed
    assert item.read(400_000, 0) == two.read(400_000, 0), seed
    two.close()
    rehearsal.close()
    assert len(path.read_bytes()) == 200_000
