"""Snapshots: all tables at one log position, so that a start need not read the whole log (D1).

A file `snapshot/<20-digit position>` (big-endian):

    magic "popmqsnp" | version u32 = 1 | epoch u32 | position u64 | log_ms u64 | wall_ms u64 |
    last_position u64   of the record that ends at position: a log without it is another log
    pieces: crc32c u32 over what follows | table u8 | size u32 | content
    first piece: table 0, content = crc32c u32 over all that is before it
    last piece: table 255, content = 16 bytes state hash | pieces u64

An older popmq wrote no piece of table 0, and passes over one that it reads.

Pieces are made in bounded steps on the loop and written by the flusher.  A table that changes
meanwhile keeps its pre-images, so every piece states the position at which the
snapshot began.  The file gets its name only when that position is confirmed and the queue
files are synced up to it; two are kept.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crc32c import crc32c

from popmq.broker.log.snapshot_table import SnapshotTable
from popmq.common.disk import Disk, DiskFile
from popmq.common.step_loop import Flusher

KEPT = 2
_MAGIC = b"popmqsnp"
_HEAD = struct.Struct(">8sIIQQQQ")
_PIECE = struct.Struct(">IBI")
_HEAD_CHECK = 0
_LAST = 255
_WRITE_BYTES = 256 << 10
_HASH_MASK = (1 << 128) - 1


def _check_of_head(data: bytes | bytearray) -> bytes:
    return crc32c(bytes(data[: _HEAD.size])).to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    position: int
    epoch: int
    log_ms: int
    wall_ms: int
    last_position: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole, intact snapshot file."""

    head: SnapshotHeader
    state_hash: int
    data: bytes
    places: list[tuple[int, int, int]]  # of the pieces: table, start and end of the content

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Table and content of each.  One at a time: copies of all of them would leave holes in
        the process's memory that it never gives back."""
        for number, start, end in self.places:
            yield number, self.data[start:end]


class SnapshotWriter:
    """One snapshot on its way to the disk; `step` until `finished`."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        head: SnapshotHeader,
        tables: Sequence[SnapshotTable],
        flusher: Flusher,
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._flusher = flusher
        self._sources = [(table.table_number, table.begin_snapshot()) for table in tables]
        self._buffer = bytearray(
            _HEAD.pack(
                _MAGIC,
                1,
                head.epoch,
                head.position,
                head.log_ms,
                head.wall_ms,
                head.last_position,
            )
        )
        self._file: DiskFile | None = None
        self._written = 0
        self._jobs = 0
        self._pieces = 0
        self._complete = False
        self._append(_HEAD_CHECK, _check_of_head(self._buffer))
        self.head = head
        self.state_hash = 0
        self.finished = False
        self.error: BaseException | None = None  # it cannot be finished any more

    @property
    def path(self) -> str:
        return f"{self._folder}/{self.head.position:020d}"

    def step(self, publishable: bool) -> int:
        """Make one piece, or publish what is whole once `publishable`. Returns 1 for work done."""
        if self.finished or self.error is not None:
            return 0
        if not self._complete:
            self._make_piece()
            return 1
        if publishable and not self._jobs:
            self._publish()
            return 1
        return 0

    def run_to_end(self) -> None:
        """Everything at once on this thread: at a clean stop, with an idle flusher."""
        while not self._complete:
            self._make_piece(write=False)
        self._disk.make_folder(self._folder)
        self._write(bytes(self._buffer), 0)
        self._rename()
        self.finished = True

    def _make_piece(self, *, write: bool = True) -> None:
        if self._sources:
            number, pieces = self._sources[0]
            new_pieces = next(pieces, None)
            if new_pieces is None:
                self._sources.pop(0)
                return
            content, hash_part = new_pieces
            self.state_hash = (self.state_hash + hash_part) & _HASH_MASK
            self._append(number, content)
        else:
            tail = self.state_hash.to_bytes(16, "big") + self._pieces.to_bytes(8, "big")
            self._append(_LAST, tail)
            self._complete = True
        if write and (self._complete or len(self._buffer) >= _WRITE_BYTES):
            self._hand_over()

    def _append(self, number: int, content: bytes) -> None:
        front = _PIECE.pack(0, number, len(content))[4:]
        self._buffer += crc32c(content, crc32c(front)).to_bytes(4, "big") + front + content
        self._pieces += 1

    def _hand_over(self) -> None:
        data, offset = bytes(self._buffer), self._written
        self._buffer.clear()
        self._written += len(data)
        self._jobs += 1
        self._flusher.submit(lambda: self._write(data, offset), self._job_done)

    def _write(self, data: bytes, offset: int) -> None:
        if self._file is None:
            self._disk.make_folder(self._folder)
            self._file = self._disk.open(self.path + ".new", create=True)
            self._file.truncate(0)
        self._file.write(data, offset)

    def _publish(self) -> None:
        self._jobs += 1

        def done(error: BaseException | None) -> None:
            self._job_done(error)
            self.finished = self.error is None

        self._flusher.submit(self._rename, done)

    def _rename(self) -> None:
        assert self._file is not None
        self._file.sync()
        self._file.close()
        self._disk.sync_folder(self._folder)
        self._disk.replace(self.path + ".new", self.path)
        kept = snapshot_names(self._disk, self._folder)[-KEPT:]
        for name in self._disk.names(self._folder):
            if name not in kept:
                self._disk.remove(f"{self._folder}/{name}")
        self._disk.sync_folder(self._folder)

    def _job_done(self, error: BaseException | None) -> None:
        self._jobs -= 1
        self.error = self.error or error


def snapshot_names(disk: Disk, folder: str) -> list[str]:
    """Finished snapshots, oldest first."""
    return [name for name in disk.names(folder) if len(name) == 20 and name.isdigit()]


def read_snapshot(disk: Disk, path: str) -> Snapshot | None:
    """The snapshot at `path`; None when it is not whole and intact."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        data = file.read(file.size(), 0)
    finally:
        file.close()
    if len(data) < _HEAD.size:
        return None
    magic, version, epoch, position, log_ms, wall_ms, last_position = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != 1:
        return None
    places: list[tuple[int, int, int]] = []
    view, at = memoryview(data), _HEAD.size
    while at + _PIECE.size <= len(data):
        crc, number, size = _PIECE.unpack_from(data, at)
        start = at + _PIECE.size
        end = start + size
        if end > len(data) or crc32c(view[at + 4 : end]) != crc:
            return None
        if number == _HEAD_CHECK and data[start:end] != _check_of_head(data):
            return None
        if number == _LAST:
            last = data[start:end]
            if len(last) != 24 or int.from_bytes(last[16:], "big") != len(places):
                return None
            head = SnapshotHeader(position, epoch, log_ms, wall_ms, last_position)
            return Snapshot(head, int.from_bytes(last[:16], "big"), data, places)
        places.append((number, start, end))
        at = end
    return None
