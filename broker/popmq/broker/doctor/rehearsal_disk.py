"""RehearsalDisk: the real files to read, and a memory of its own for every change.

The doctor lets the product's own start run on it, so what it says about a start is what the
start does, and nothing on the real disk can change: files are opened read-only here.
"""

import os
from collections.abc import Sequence

from popmq.common.disk import NO_FILE_LIMIT, DiskFile

_PAGE = 64 << 10


class RehearsalDisk:
    """A popmq.common.disk.Disk; sync means nothing, `close` forgets all changes."""

    def __init__(self) -> None:
        self._files: dict[str, RehearsalFile] = {}
        self._removed: set[str] = set()

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        known = self._files.get(path)
        if known is not None:
            return known
        if path in self._removed or not os.path.exists(path):
            if not create:
                raise FileNotFoundError(path)
            file = RehearsalFile(-1)
        else:
            file = RehearsalFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._removed.discard(path)
        self._files[path] = file
        return file

    def exists(self, path: str) -> bool:
        return path in self._files or (path not in self._removed and os.path.exists(path))

    def names(self, folder: str) -> list[str]:
        try:
            names = {name for name in os.listdir(folder) if f"{folder}/{name}" not in self._removed}
        except (FileNotFoundError, NotADirectoryError):
            names = set()
        prefix = folder + "/"
        paths = (path for path in self._files if path.startswith(prefix))
        return sorted(names | {path[len(prefix) :].split("/")[0] for path in paths})

    def make_folder(self, path: str) -> None:
        return

    def add_folder(self, path: str) -> list[str]:
        return []

    def remove(self, path: str) -> None:
        if not self.exists(path):
            raise FileNotFoundError(path)
        self._forget(path)
        self._removed.add(path)

    def replace(self, source: str, target: str) -> None:
        self.open(source)
        self._forget(target)
        self._files[target] = self._files.pop(source)
        self._removed.discard(target)
        self._removed.add(source)

    def sync_folder(self, path: str) -> None:
        return

    def space(self, folder: str) -> tuple[int, int]:
        return 1 << 50, 1 << 50  # a full disk is not what a rehearsal looks for

    def free_files(self, folder: str) -> int:
        return NO_FILE_LIMIT

    def open_limit(self) -> int:
        return 1000

    def close(self) -> None:
        for path in list(self._files):
            self._forget(path)

    def _forget(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            file.release()


class RehearsalFile:
    """`_shown` bytes of the real file can still be seen; pages that were written cover them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._shown = self._size = os.fstat(fd).st_size if fd >= 0 else 0
        self._pages: dict[int, bytearray] = {}

    def read(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self._size)
        if end <= offset:
            return b""
        if not self._pages:
            return self._beneath(offset, end)
        parts = []
        while offset < end:
            number, at = divmod(offset, _PAGE)
            length = min(_PAGE - at, end - offset)
            page = self._pages.get(number)
            parts.append(
                bytes(page[at : at + length]) if page else self._beneath(offset, offset + length)
            )
            offset += length
        return b"".join(parts)

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            number, at = divmod(offset, _PAGE)
            length = min(_PAGE - at, len(view))
            page = self._pages.get(number)
            if page is None:
                first = number * _PAGE
                page = self._pages[number] = bytearray(self._beneath(first, first + _PAGE))
            page[at : at + length] = view[:length]
            view = view[length:]
            offset += length
        self._size = max(self._size, offset)

    def write_all(self, parts: Sequence[bytes], offset: int) -> None:
        self.write(b"".join(parts), offset)

    def size(self) -> int:
        return self._size

    def allocate(self, size: int) -> None:
        self._size = max(self._size, size)

    def truncate(self, size: int) -> None:
        self._shown = min(self._shown, size)
        number, at = divmod(size, _PAGE)
        for later in [page for page in self._pages if page > number]:
            del self._pages[later]
        if number in self._pages:
            self._pages[number][at:] = bytes(_PAGE - at)
        self._size = size

    def sync(self) -> None:
        return

    def close(self) -> None:
        return

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _beneath(self, offset: int, end: int) -> bytes:
        """What the real file still shows of [offset, end); the rest is zeros."""
        length = min(end, self._shown) - offset
        data = os.pread(self._fd, length, offset) if length > 0 else b""
        return data + bytes(end - offset - len(data))
