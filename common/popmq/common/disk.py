"""The files under a store, behind a seam that a simulator can stand in for.

`RealDisk` is thin on purpose: every rule about order and durability lives in the callers,
so that a disk which lies (drops what was not synced, tears a write) proves them.
"""

import os
from collections.abc import Sequence
from typing import Protocol


class DiskFile(Protocol):
    def read(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`; shorter at the end of the file."""
        ...

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """All of `data` at `offset`, in the page cache; OSError when it does not fit."""
        ...

    def write_all(self, parts: Sequence[bytes], offset: int) -> None:
        """The parts one behind the other from `offset`."""
        ...

    def size(self) -> int: ...

    def allocate(self, size: int) -> None:
        """Make the file `size` bytes long with its blocks reserved; new bytes are zero."""
        ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """fdatasync: what was written is on the disk when this returns."""
        ...

    def close(self) -> None: ...


class Disk(Protocol):
    def open(self, path: str, *, create: bool = False) -> DiskFile:
        """Open for reading and writing; FileNotFoundError unless `create`."""
        ...

    def exists(self, path: str) -> bool: ...

    def names(self, folder: str) -> list[str]:
        """Sorted names in the folder; empty when there is none."""
        ...

    def make_folder(self, path: str) -> None:
        """The folder and its parents, durable in their own parents."""
        ...

    def remove(self, path: str) -> None: ...

    def replace(self, source: str, target: str) -> None:
        """Atomic rename over `target`, durable when this returns."""
        ...

    def sync_folder(self, path: str) -> None:
        """Make the names in the folder durable."""
        ...

    def space(self, folder: str) -> tuple[int, int]:
        """Bytes free for us, and bytes in all, of the file system that holds the folder."""
        ...


class RealFile:
    def __init__(self, path: str, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(path, flags, 0o640)

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view = view[written:]
            offset += written

    def write_all(self, parts: Sequence[bytes], offset: int) -> None:
        self.write(parts[0] if len(parts) == 1 else b"".join(parts), offset)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def allocate(self, size: int) -> None:
        os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class RealDisk:
    """The operating system's files."""

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        return RealFile(path, create=create)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def make_folder(self, path: str) -> None:
        missing = []
        while path and not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path) or "."
        for folder in reversed(missing):
            os.makedirs(folder, exist_ok=True)
            self.sync_folder(os.path.dirname(folder) or ".")

    def remove(self, path: str) -> None:
        os.unlink(path)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)
        self.sync_folder(os.path.dirname(target) or ".")

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def space(self, folder: str) -> tuple[int, int]:
        found = os.statvfs(folder)
        usable = found.f_blocks - found.f_bfree + found.f_bavail
        return found.f_bavail * found.f_frsize, usable * found.f_frsize


def write_atomically(disk: Disk, path: str, data: bytes) -> None:
    """Replace the file at `path` by `data`: after a crash it is the old or the new one whole."""
    scratch = path + ".new"
    file = disk.open(scratch, create=True)
    try:
        file.truncate(0)
        file.write(data, 0)
        file.sync()
    finally:
        file.close()
    disk.replace(scratch, path)
