"""A disk in memory that keeps only what was synced, and can lose its power at any operation.

File contents count from `sync`, names from `sync_folder` (or `replace`, or `make_folder`),
as POSIX promises no more.  After `cut_power` every file holds exactly what counted.
And real files that do not depend on what the kernel keeps in memory.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from popmq.common.disk import NO_FILE_LIMIT, RealDisk, RealFile


class PowerCut(Exception):
    """The disk's power went away in the middle of an operation."""


@dataclass(slots=True)
class _Content:
    now: bytearray = field(default_factory=bytearray)
    kept: bytearray = field(default_factory=bytearray)
    dirty: list[tuple[int, int]] = field(default_factory=list)
    resized: bool = False


class LyingDisk:
    """`cut_at(n)` makes the n-th following write or sync raise PowerCut; so does every later
    one, until `restore_power`."""

    def __init__(self) -> None:
        self._files: dict[str, _Content] = {}
        self._kept_names: dict[str, _Content] = {}
        self._left: int | None = None
        self.operations = 0
        self.capacity = 1 << 50  # bytes; beyond them every growth ends in `no_room`
        self.no_room = errno.ENOSPC
        self.most_files = NO_FILE_LIMIT  # so does each new file beyond those

    def cut_at(self, operations: int) -> None:
        self._left = operations

    def survive(self) -> None:
        """Only the process died: what it wrote is still there, though not all of it counts."""
        self._left = None

    def restore_power(self) -> None:
        """What was not synced is gone; the disk works again."""
        self._left = None
        self._files = dict(self._kept_names)
        for content in self._files.values():
            content.now[:] = content.kept
            content.dirty.clear()
            content.resized = False

    def space(self, folder: str) -> tuple[int, int]:
        used = sum(len(content.now) for content in self._files.values())
        return max(0, self.capacity - used), self.capacity

    def free_files(self, folder: str) -> int:
        return max(0, self.most_files - len(self._files))

    def open_limit(self) -> int:
        return 8  # files are closed and opened again all the time

    def claim(self, size: int) -> None:
        """Room for `size` more bytes, or `no_room`."""
        if size > 0 and size > self.space("")[0]:
            raise OSError(self.no_room, os.strerror(self.no_room))

    def touch(self) -> None:
        self.operations += 1
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise PowerCut

    # -- popmq.common.disk.Disk

    def open(self, path: str, *, create: bool = False) -> "LyingFile":
        content = self._files.get(path)
        if content is None:
            if not create:
                raise FileNotFoundError(path)
            if not self.free_files(""):
                raise OSError(errno.ENOSPC, "No space left on device")
            self.touch()
            content = self._files[path] = _Content()
        return LyingFile(self, content)

    def exists(self, path: str) -> bool:
        return path in self._files

    def names(self, folder: str) -> list[str]:
        prefix = folder + "/"
        names = {path[len(prefix) :].split("/")[0] for path in self._files if _in(path, prefix)}
        return sorted(names)

    def make_folder(self, path: str) -> None:
        return

    def add_folder(self, path: str) -> list[str]:
        return []

    def remove(self, path: str) -> None:
        self.touch()
        del self._files[path]

    def replace(self, source: str, target: str) -> None:
        self.touch()
        self._files[target] = self._kept_names[target] = self._files.pop(source)
        self._kept_names.pop(source, None)

    def sync_folder(self, path: str) -> None:
        self.touch()
        prefix = path + "/"
        for name in [name for name in self._kept_names if _directly_in(name, prefix)]:
            if name not in self._files:
                del self._kept_names[name]
        for name, content in self._files.items():
            if _directly_in(name, prefix):
                self._kept_names[name] = content


class LyingFile:
    def __init__(self, disk: LyingDisk, content: _Content) -> None:
        self._disk = disk
        self._content = content

    def read(self, size: int, offset: int) -> bytes:
        return bytes(self._content.now[offset : offset + size])

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._disk.touch()
        now = self._content.now
        end = offset + len(data)
        self._disk.claim(end - len(now))
        if end > len(now):
            now.extend(bytes(end - len(now)))
        now[offset:end] = data
        self._content.dirty.append((offset, end))

    def write_all(self, parts: Sequence[bytes], offset: int) -> None:
        self.write(b"".join(parts), offset)

    def size(self) -> int:
        return len(self._content.now)

    def allocate(self, size: int) -> None:
        self._disk.touch()
        now = self._content.now
        self._disk.claim(size - len(now))
        if size > len(now):
            now.extend(bytes(size - len(now)))
            self._content.resized = True

    def truncate(self, size: int) -> None:
        self._disk.touch()
        now = self._content.now
        del now[size:]
        now.extend(bytes(size - len(now)))
        self._content.resized = True

    def sync(self) -> None:
        self._disk.touch()
        content = self._content
        if content.resized:
            content.kept[:] = content.now
        else:
            for start, end in content.dirty:
                if start > len(content.kept):
                    content.kept.extend(bytes(start - len(content.kept)))
                content.kept[start:end] = content.now[start:end]
        content.dirty.clear()
        content.resized = False

    def close(self) -> None:
        return


def _in(path: str, prefix: str) -> bool:
    return path.startswith(prefix)


def _directly_in(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and "/" not in path[len(prefix) :]


class ResidentFile(RealFile):
    """A real file of which every page counts as in memory."""

    def view_cached(self, size: int, offset: int) -> memoryview | None:
        return memoryview(RealFile.read(self, size, offset))


class ResidentDisk(RealDisk):
    """Real files, apart from what else the machine does: the kernel may drop a page at any time,
    and a read on the loop would then raise ColdRead; others may fill the disk."""

    def open(self, path: str, *, create: bool = False) -> RealFile:
        return ResidentFile(path, create=create)

    def space(self, folder: str) -> tuple[int, int]:
        return 1 << 50, 1 << 51
