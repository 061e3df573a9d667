"""Segment files: the pieces that a log or a queue is made of (docs/concepts/store.md).

The noun is RocketMQ's.  Ours are read with `pread`, not mapped: a page that is not in memory
would stop the event loop in the middle of an instruction (D3).  A file is named by the
20-digit position of its first byte, so a folder listing is the index.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, pairwise
from typing import Protocol

from popmq.common.disk import (
    Disk,
    DiskFile,
    is_allocated,
    is_shortage,
    read_or_cold,
    skip_unwritten,
    view_or_cold,
)
from popmq.common.errors import StoreDamaged

logger = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20


class Syncable(Protocol):
    """What the flusher makes durable."""

    def sync(self) -> None: ...


class SegmentFile:
    """One segment: `size` bytes of the whole, from position `start`."""

    def __init__(self, disk: Disk, path: str, *, start: int, size: int, create: bool) -> None:
        self.path = path
        self.start = start
        self.size = size
        self._disk = disk
        self._file: DiskFile = disk.open(path, create=create)
        self._removed = False

    @property
    def end(self) -> int:
        return self.start + self.size

    def file_bytes(self) -> int:
        return self._file.size()

    def bytes_present(self) -> int:
        return min(self.file_bytes(), self.size)

    def preallocate(self) -> None:
        self._file.allocate(self.size)

    @property
    def is_allocated(self) -> bool:
        return is_allocated(self._file, self.size)

    def read(self, position: int, size: int) -> bytes:
        return self._file.read(min(size, self.end - position), position - self.start)

    def read_warm(self, position: int, size: int) -> bytes:
        """Like `read`, but raises ColdRead instead of waiting for the disk."""
        return read_or_cold(self._file, min(size, self.end - position), position - self.start)

    def view_warm(self, position: int, size: int) -> memoryview:
        """Like `read_warm`, without a copy: the view is good until this thread reads again."""
        return view_or_cold(self._file, min(size, self.end - position), position - self.start)

    def written_from(self, position: int) -> int | None:
        """The first position from `position` that may hold something but zeros."""
        offset = skip_unwritten(self._file, position - self.start)
        return None if offset is None or offset >= self.size else self.start + offset

    def write(self, position: int, parts: Sequence[bytes]) -> None:
        self._file.write_all(parts, position - self.start)

    def truncate(self, position: int, *, preallocate: bool) -> None:
        """Drop all bytes from `position`, on the disk too: what was cut reads as zeros.

        With `preallocate` the file keeps its blocks: on a full disk others would take them.
        """
        if preallocate:
            self._write_zeros(position)
        else:
            self._file.truncate(position - self.start)
        self._file.sync()

    def _write_zeros(self, position: int) -> None:
        end = self.start + self.bytes_present()
        at: int | None = position
        while at is not None and at < end and (at := self.written_from(at)) is not None:
            data = self.read(at, min(_PIECE_BYTES, end - at))
            if data.count(0) < len(data):
                self.write(at, [bytes(len(data))])
            at += max(1, len(data))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def delete(self) -> None:
        """Gone for good when this returns, so that files which go one by one leave no gap.  Where
        that fails it can be tried again."""
        if not self._removed:
            self._disk.remove(self.path)
            self._removed = True
            self.close()
        self._disk.sync_folder(self.path.rpartition("/")[0])


class OpenSegment(Protocol):
    def __call__(
        self, disk: Disk, path: str, *, start: int, size: int, create: bool
    ) -> SegmentFile: ...


class SegmentFiles:
    """The segments of one folder, in order, without gaps."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        *,
        segment_bytes: int,
        preallocate: bool,
        names_later: bool = False,
        open_segment: OpenSegment | None = None,
    ) -> None:
        """With `names_later` a new segment's name is durable once `names` was synced: a folder is
        not synced on the loop.  `open_segment` makes segments that share their open files."""
        self._open_segment = open_segment or SegmentFile
        self._disk = disk
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._preallocate = preallocate
        self._names_later = names_later
        self._files: dict[int, SegmentFile] = {}
        self._unnamed: dict[int, str] = {}  # folders that hold names which are not durable yet
        self._numbers = count()
        self._new: set[int] = set()  # starts of segments whose names are not durable yet

    def load(self) -> None:
        """Open what is there. Raises StoreDamaged when names are odd or a segment is missing."""
        for name in self._disk.names(self._folder):
            path = f"{self._folder}/{name}"
            if len(name) != 20 or not name.isdigit():
                raise StoreDamaged(
                    f"{path} is no segment: a segment is named by 20 digits; move it away"
                )
            start = int(name)
            if start % self._segment_bytes:
                raise StoreDamaged(
                    f"{path} does not start at a multiple of {self._segment_bytes} bytes: "
                    "store.segment_bytes was changed; set it back"
                )
            previous = self.last
            if previous and previous.end != start:
                raise StoreDamaged(
                    f"{path} follows a segment that ends at {previous.end}: one is missing; "
                    "bring it back from a copy"
                )
            segment = self._open(start, create=False)
            if segment.file_bytes() > self._segment_bytes:
                raise StoreDamaged(
                    f"{path} has {segment.file_bytes()} bytes, a segment has "
                    f"{self._segment_bytes}: store.segment_bytes was changed; set it back"
                )
        if self._files and self._names_later:
            parent = os.path.dirname(self._folder)
            self._name_later([os.path.dirname(parent) or ".", parent])

    @property
    def names(self) -> Sequence[Syncable]:
        """What is to be synced for the names, if anything is."""
        return [SegmentNameSync(self)] if self._unnamed else []

    def sync_names(self) -> None:
        """On the flusher, or on the loop; either may find the other one at it."""
        new = set(self._new)
        for number, folder in list(self._unnamed.items()):
            self._disk.sync_folder(folder)
            self._unnamed.pop(number, None)
        self._new -= new

    @property
    def first(self) -> SegmentFile | None:
        files = list(self._files.values())  # in one go: the flusher adds some
        return files[0] if files else None

    @property
    def last(self) -> SegmentFile | None:
        files = list(self._files.values())
        return files[-1] if files else None

    def __iter__(self) -> Iterator[SegmentFile]:
        return iter(list(self._files.values()))

    def at(self, position: int) -> SegmentFile | None:
        return self._files.get(position - position % self._segment_bytes)

    def segment_for_write(self, position: int) -> SegmentFile:
        """The segment that holds `position`, made if it is missing; its name is then durable,
        unless `names_later`. The name of a later segment, which was reserved, may be not."""
        segment = self.at(position)
        if segment is not None:
            if segment.start in self._new and not self._names_later:
                self.sync_names()
            return segment
        if not self._files:
            self._name_later(self._disk.add_folder(self._folder))
        # Never with a gap: a crash in between must not look like a lost segment.
        last = self.last
        target = position - position % self._segment_bytes
        for start in range(last.end if last else target, target + 1, self._segment_bytes):
            if self._folder in self._unnamed.values():
                self.sync_names()
            new_segment = self._open(start, create=True)
            self._new.add(start)
            if self._preallocate:
                try:
                    new_segment.preallocate()
                except OSError:
                    with suppress(OSError):  # then its name may come back, which a start can mend
                        self._files.pop(start).delete()
                    raise
                new_segment.sync()
            self._name_later([self._folder])
            if not self._names_later:
                self.sync_names()
        return new_segment

    def reserve(self, position: int, segments: int) -> None:
        """Allocate the `segments` segments behind the one of `position`; ENOSPC when full."""
        if not self._files:
            self.segment_for_write(0)  # what will be written first may lie before `position`
        self.segment_for_write(position + segments * self._segment_bytes)

    def reserved_after(self, position: int) -> int:
        """Segments that are allocated behind the one of `position`."""
        last = self.last
        start = position - position % self._segment_bytes
        return max(0, (last.start - start) // self._segment_bytes) if last else 0

    def detach_before(self, position: int) -> list[SegmentFile]:
        """Forget the segments that end at or below `position`; the caller deletes the files.

        The oldest first, so that a crash in between leaves no gap.
        """
        gone = [file for file in self if file.end <= position]
        for file in gone:
            del self._files[file.start]
        return gone

    def truncate(self, position: int) -> None:
        """Drop every byte from `position`; whole segments beyond it are removed."""
        # From the end, each made durable: a crash in between must not leave a gap.  Nor must one
        # that an earlier process removed come back when it was not made durable any more.
        beyond = sorted((start for start in self._files if start > position), reverse=True)
        if beyond:
            self._disk.sync_folder(self._folder)
        for start in beyond:
            self._files[start].delete()
            del self._files[start]
        kept = self.at(position)
        if kept is not None:
            kept.truncate(position, preallocate=self._preallocate)
        self._disk.sync_folder(self._folder)

    def allocate_again(self, position: int) -> None:
        """Allocate what segments from that of `position` on lack of their blocks, durably.
        Nothing may stand behind `position`.

        Where the disk is too full for it the last ones are given up for those before them.
        OSError when that does not help either.
        """
        lacking = [file for file in self if file.end > position and not file.is_allocated]
        for file in lacking:
            while file.start in self._files:
                try:
                    file.preallocate()
                    file.sync()
                    break
                except OSError as error:
                    last = self.last
                    if not is_shortage(error) or last is None or last.start <= position:
                        raise
                    self._files.pop(last.start).delete()
        if lacking:
            kept = sum(file.start in self._files for file in lacking)
            logger.info(
                "segments allocated again",
                extra={"folder": self._folder, "segments": kept, "removed": len(lacking) - kept},
            )

    def sync(self) -> None:
        """Contents and names: the name of a new segment may be in the page cache only."""
        for file in self:
            file.sync()
        if self._files:
            self._disk.sync_folder(self._folder)

    def write_again(self, start: int, end: int) -> None:
        """Make what is read between two positions dirty, so that `sync` writes it.

        After an fsync that failed the kernel may hold pages that are clean and yet not on the
        disk; a process that starts again would read them, and its fsync would do nothing.
        """
        for file in self:
            position = max(start, file.start)
            while position < min(end, file.end):
                data = file.read(position, min(_PIECE_BYTES, min(end, file.end) - position))
                if not data:
                    break
                file.write(position, [data])
                position += len(data)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def delete_all(self) -> None:
        """From the end, so that no gap is left where that fails; it can be tried again."""
        for start in sorted(self._files, reverse=True):
            self._files[start].delete()
            del self._files[start]

    def take_all(self) -> list[SegmentFile]:
        """Forget every segment; the caller deletes the files."""
        gone = list(self)
        self._files.clear()
        return gone

    def _name_later(self, folders: Sequence[str]) -> None:
        self._unnamed.update((next(self._numbers), folder) for folder in folders)

    def _open(self, start: int, *, create: bool) -> SegmentFile:
        path = f"{self._folder}/{start:020d}"
        size = self._segment_bytes
        segment = self._open_segment(self._disk, path, start=start, size=size, create=create)
        self._files[start] = segment
        return segment


class SegmentNameSync:
    """The names of a queue's segments, as something to sync."""

    def __init__(self, files: SegmentFiles) -> None:
        self._files = files

    def sync(self) -> None:
        self._files.sync_names()


def segment_bytes_of(disk: Disk, data: str) -> int:
    """The distance of two segments' names, or the size of the only one; 0 when there is none."""
    names = [name for name in disk.names(f"{data}/commitlog") if len(name) == 20 and name.isdigit()]
    starts = sorted(map(int, names))
    if len(starts) > 1:
        return min(two - start for start, two in pairwise(starts))
    if not names:
        return 0
    file = disk.open(f"{data}/commitlog/{names[0]}")
    size = file.size()
    file.close()
    # A segment that was cut short has an odd size; which one it had does not matter then.
    return size if size % 8192 == 0 else max(8192, 1 << size.bit_length())
