"""What the doctor finds, and the few things it can do about it (docs/concepts/doctor.md).

A repair has two halves. `save` puts every byte that will go into the repair folder and makes
it durable; `cut` then changes the store.  All repairs save before the first one cuts, so a
crash between any two operations leaves the bytes in at least one place.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from popmq.broker.log.store_checkpoint import read_checkpoint, write_checkpoint
from popmq.common.disk import Disk, RealDisk

_COPY_BYTES = 4 << 20


class RequiredAction(Enum):
    """What a finding asks for."""

    NOTHING = "nothing"  # the next start mends it, or nobody reads it
    REPAIR = "--repair"
    ACCEPT_LOSS = "--repair --accept-loss"
    HUMAN = "an administrator"


class SavingDisk(Disk, Protocol):
    def link(self, source: str, target: str) -> None:
        """A second name for the same file; durable after `sync_folder`."""
        ...


class RealSavingDisk(RealDisk):
    def link(self, source: str, target: str) -> None:
        os.link(source, target)


class Repair(Protocol):
    def save(self, disk: SavingDisk, data: str, room: str) -> None:
        """Keep what `cut` takes away in the folder `room`, durable when this returns."""
        ...

    def cut(self, disk: Disk, data: str) -> None:
        """Do it. Cutting again what is cut already does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    path: str  # below the data folder
    position: int  # in the log, in the queue (units), or in the file: `detail` says which
    detail: str
    consequence: str
    proposal: str
    need: RequiredAction
    repairs: tuple[Repair, ...] = ()


@dataclass(frozen=True, slots=True)
class MoveFiles:
    """Move files into the repair folder, the last first, so that what is left has no hole."""

    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"move {', '.join(self.paths)} to the repair folder"

    def save(self, disk: SavingDisk, data: str, room: str) -> None:
        for path in self.paths:
            target = f"{room}/{path}"
            disk.make_folder(os.path.dirname(target))
            disk.link(f"{data}/{path}", target)
            disk.sync_folder(os.path.dirname(target))

    def cut(self, disk: Disk, data: str) -> None:
        for path in sorted(self.paths, reverse=True):
            if disk.exists(f"{data}/{path}"):
                disk.remove(f"{data}/{path}")
                disk.sync_folder(os.path.dirname(f"{data}/{path}"))


@dataclass(frozen=True, slots=True)
class TruncateSegment:
    """Cut one segment file at `at` bytes, physically: `size` bytes again, but zeros from there."""

    path: str
    at: int
    size: int

    def __str__(self) -> str:
        return f"copy {self.path} from byte {self.at} to the repair folder, then cut it there"

    def save(self, disk: SavingDisk, data: str, room: str) -> None:
        pieces = _filled_pieces(disk, f"{data}/{self.path}", self.at)
        _write_pieces(disk, f"{room}/{self.path}.from-{self.at}", pieces)

    def cut(self, disk: Disk, data: str) -> None:
        file = disk.open(f"{data}/{self.path}")
        try:
            file.truncate(self.at)
            file.allocate(self.size)
            file.sync()
        finally:
            file.close()


@dataclass(frozen=True, slots=True)
class RepairPadding:
    """Write the size of a PADDING record anew: no crc covers it, and only one value is right."""

    path: str
    at: int
    size: int

    def __str__(self) -> str:
        return f"write size {self.size} into the padding at byte {self.at} of {self.path}"

    def save(self, disk: SavingDisk, data: str, room: str) -> None:
        file = disk.open(f"{data}/{self.path}")
        try:
            old = file.read(4, self.at)
        finally:
            file.close()
        _write_pieces(disk, f"{room}/{self.path}.size-at-{self.at}", iter([old]))

    def cut(self, disk: Disk, data: str) -> None:
        file = disk.open(f"{data}/{self.path}")
        try:
            file.write(self.size.to_bytes(4, "big"), self.at)
            file.sync()
        finally:
            file.close()


@dataclass(frozen=True, slots=True)
class AcceptStart:
    """Let the checkpoint say that the log starts at `position`; all else in it stays."""

    position: int

    def __str__(self) -> str:
        return f"copy the checkpoint to the repair folder, then let it begin at {self.position}"

    def save(self, disk: SavingDisk, data: str, room: str) -> None:
        checkpoint = read_checkpoint(disk, f"{data}/checkpoint")
        if checkpoint is not None:
            _write_pieces(disk, f"{room}/checkpoint.before", iter([checkpoint.encode()]))

    def cut(self, disk: Disk, data: str) -> None:
        checkpoint = read_checkpoint(disk, f"{data}/checkpoint")
        if checkpoint is not None:
            accepted = replace(checkpoint, log_start=self.position)
            write_checkpoint(disk, f"{data}/checkpoint", accepted)


def _filled_pieces(disk: Disk, path: str, start: int) -> Iterator[bytes]:
    """The file from `start` up to its last byte that is not zero."""
    file = disk.open(path)
    try:
        end = file.size()
        while end > start:
            first = max(start, end - _COPY_BYTES)
            kept = file.read(end - first, first).rstrip(b"\0")
            end = first + len(kept)
            if kept:
                break
        for at in range(start, end, _COPY_BYTES):
            yield file.read(min(_COPY_BYTES, end - at), at)
    finally:
        file.close()


def _write_pieces(disk: Disk, path: str, pieces: Iterator[bytes]) -> None:
    disk.make_folder(os.path.dirname(path))
    file = disk.open(path, create=True)
    try:
        at = 0
        for piece in pieces:
            file.write(piece, at)
            at += len(piece)
        file.sync()
    finally:
        file.close()
    disk.sync_folder(os.path.dirname(path))
