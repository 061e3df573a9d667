"""The files under a store, behind a seam that a simulator can stand in for.

`RealDisk` is thin on purpose: every rule about order and durability lives in the callers,
so that a disk which lies (drops what was not synced, tears a write) proves them.
"""

import ctypes
import errno
import mmap
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, TypeGuard


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
        """fdatasync: what was written is on the disk when this returns; else SyncFailed."""
        ...

    def close(self) -> None: ...


_STAT_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's blocks are
_SCRATCH_BYTES = 1 << 20
_WARM_BYTES = 256 << 10
_RECENT_BYTES = 64 << 20  # written last by this process, so most likely in memory still
_LOCAL = threading.local()


class ColdRead(Exception):
    """The bytes are not in memory. `warm` reads them, on a thread that may wait."""

    def __init__(self, warm: Callable[[], object]) -> None:
        super().__init__("not in the page cache")
        self.warm = warm


class Disk(Protocol):
    def open(self, path: str, *, create: bool = False) -> DiskFile:
        """Open for reading and writing; FileNotFoundError unless `create`."""
        ...

    def exists(self, path: str) -> bool: ...

    def names(self, folder: str) -> list[str]:
        """Sorted names in the folder; empty when the folder is not there."""
        ...

    def make_folder(self, path: str) -> None:
        """The folder and its parents, durable in their own parents."""
        ...

    def add_folder(self, path: str) -> list[str]:
        """The same, durable once the folders that it returns are synced."""
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

    def free_files(self, folder: str) -> int:
        """How many files its file system can still make (f_favail); NO_FILE_LIMIT: as many as
        there are bytes for."""
        ...

    def open_limit(self) -> int:
        """How many files of queues may be open at once."""
        ...


NO_FILE_LIMIT = 1 << 60
QUEUE_FILES_SHARE = 4  # of the descriptors that the process may have
LEAST_QUEUE_FILES, MOST_QUEUE_FILES = 32, 16_384


class DescriptorReserve:
    """Descriptors that only the store uses, so that it can write when others took all the rest.

    They are held open, and closed when an `open` finds none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []
        self._lock = threading.Lock()

    def fill(self) -> None:
        """Take what is missing, as far as there is something."""
        with self._lock, suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> bool:
        """Make one descriptor free; False when none is left."""
        with self._lock:
            if not self._held:
                return False
            os.close(self._held.pop())
            return True


RESERVE = DescriptorReserve(32)
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_SHORTAGES = (errno.ENOSPC, errno.EDQUOT, *NO_DESCRIPTORS)


class SyncFailed(OSError):
    """A sync returned an error: which of the bytes are on the disk, nobody can say."""


def is_shortage(error: BaseException | None) -> TypeGuard[OSError]:
    """Whether the machine has no room, or no descriptor, for an operation now: nothing was lost,
    and the operation can be tried again."""
    if not isinstance(error, OSError) or isinstance(error, SyncFailed):
        return False
    return error.errno in _SHORTAGES


@contextmanager
def suppress_shortage() -> Iterator[None]:
    """For work that is tried again, or can be left out: an `is_shortage` ends it."""
    try:
        yield
    except OSError as error:
        if not is_shortage(error):
            raise


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def no_room_text(folder: str, number: int = errno.ENOSPC) -> str:
    """Why a write to that folder did not fit; `number` is that of its error."""
    if number == errno.EDQUOT:
        return f"a quota of the disk of {folder} is used up (quota -s, repquota)"
    free_bytes, free_files = RealDisk().space(folder)[0], RealDisk().free_files(folder)
    if not free_files:
        return (
            f"the disk of {folder} has no inode for another file (df -i), {free_bytes} bytes are "
            "free"
        )
    return f"the disk of {folder} is full: {free_bytes} bytes and {free_files} inodes are free"


def descriptor_limit() -> int:
    """How many descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_descriptor(path: str, flags: int) -> int:
    """As os.open; where there is no descriptor, one of the reserve is used."""
    while True:
        try:
            return os.open(path, flags, 0o640)
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS or not RESERVE.release():
                raise


class RealFile:
    def __init__(self, path: str, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = open_descriptor(path, flags)
        self._read_ahead = True
        self._written_end = 0

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def view_cached(self, size: int, offset: int) -> memoryview | None:
        """Like `read`, but None where the disk would have to be waited for; what it gives is good
        until this thread reads again."""
        if self._read_ahead:
            # The kernel's would fetch up to 8 MiB at once, behind which a group commit waits.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            self._read_ahead = False
        recent = self._written_end - _RECENT_BYTES <= offset < self._written_end
        if not recent and not _residency().in_memory(self._fd, size, offset):
            return None  # a read would start to fetch it on this thread
        scratch = _scratch()
        view, done = memoryview(scratch if size <= len(scratch) else bytearray(size))[:size], 0
        try:
            while done < size:
                count = os.preadv(self._fd, [view[done:]], offset + done, os.RWF_NOWAIT)
                if count == 0:
                    return view[:done]
                done += count
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            return memoryview(self.read(size, offset))  # a file system that cannot tell
        return view

    def warm(self, size: int, offset: int) -> None:
        """Read the bytes, and some that who reads on will want, from the disk into memory."""
        self.read(max(size, _WARM_BYTES), offset)

    def next_data(self, offset: int) -> int | None:
        """The first byte from `offset` that was ever written; None when there is none.

        The rest of a page of which a part was read counts as written.
        """
        try:
            # Zeros that the kernel read ahead would count too, and who reads them reads ahead.
            os.posix_fadvise(self._fd, offset, 0, os.POSIX_FADV_DONTNEED)
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            return offset  # a file system that cannot tell

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, offset)
            view = view[written:]
            offset += written
        self._written_end = max(self._written_end, offset)

    def write_all(self, parts: Sequence[bytes], offset: int) -> None:
        self.write(parts[0] if len(parts) == 1 else b"".join(parts), offset)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def allocate(self, size: int) -> None:
        os.posix_fallocate(self._fd, 0, size)

    def allocated(self) -> int:
        """Bytes of the blocks that the file has; some file systems count a few of their own."""
        return os.fstat(self._fd).st_blocks * _STAT_BLOCK_BYTES

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def sync(self) -> None:
        _fsync(os.fdatasync, self._fd)

    def close(self) -> None:
        os.close(self._fd)


class RealDisk:
    """The operating system's files."""

    def __init__(self) -> None:
        RESERVE.fill()

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        return RealFile(path, create=create)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def names(self, folder: str) -> list[str]:
        try:
            fd = open_descriptor(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def make_folder(self, path: str) -> None:
        for folder in self.add_folder(path):
            self.sync_folder(folder)

    def add_folder(self, path: str) -> list[str]:
        missing = []
        parent = path
        while parent and not os.path.isdir(parent):
            missing.append(parent)
            parent = os.path.dirname(parent) or "."
        if missing:
            os.makedirs(path, exist_ok=True)
        return [os.path.dirname(folder) or "." for folder in reversed(missing)]

    def remove(self, path: str) -> None:
        os.unlink(path)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)
        self.sync_folder(os.path.dirname(target) or ".")

    def sync_folder(self, path: str) -> None:
        fd = open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _fsync(os.fsync, fd)
        finally:
            os.close(fd)

    def space(self, folder: str) -> tuple[int, int]:
        RESERVE.fill()  # a broker asks for the space once a second
        statvfs_result = os.statvfs(folder)
        usable = statvfs_result.f_blocks - statvfs_result.f_bfree + statvfs_result.f_bavail
        return statvfs_result.f_bavail * statvfs_result.f_frsize, usable * statvfs_result.f_frsize

    def free_files(self, folder: str) -> int:
        statvfs_result = os.statvfs(folder)
        return statvfs_result.f_favail if statvfs_result.f_files else NO_FILE_LIMIT

    def open_limit(self) -> int:
        share = descriptor_limit() // QUEUE_FILES_SHARE
        return max(LEAST_QUEUE_FILES, min(share, MOST_QUEUE_FILES))


def _fsync(fsync: Callable[[int], None], fd: int) -> None:
    try:
        fsync(fd)
    except OSError as error:
        raise SyncFailed(*error.args) from error


def _scratch() -> bytearray:
    """Where a thread's reads go first: a fresh one would be zeroed for each read."""
    scratch: bytearray | None = getattr(_LOCAL, "scratch", None)
    if scratch is None:
        scratch = _LOCAL.scratch = bytearray(_SCRATCH_BYTES)
    return scratch


def _residency() -> "PageResidency":
    page_residency: PageResidency | None = getattr(_LOCAL, "residency", None)
    if page_residency is None:
        page_residency = _LOCAL.residency = PageResidency()
    return page_residency


def read_or_cold(file: DiskFile, size: int, offset: int) -> bytes:
    """The bytes if they are in memory; else ColdRead. Disks other than the real one are warm."""
    return bytes(view_or_cold(file, size, offset))


def view_or_cold(file: DiskFile, size: int, offset: int) -> memoryview:
    """Like `read_or_cold`, without a copy: the view is good until this thread reads again."""
    if not isinstance(file, RealFile):
        return memoryview(file.read(size, offset))
    view = file.view_cached(size, offset)
    if view is None:
        raise ColdRead(lambda: file.warm(size, offset))
    return view


def skip_unwritten(file: DiskFile, offset: int) -> int | None:
    """Where to look on for bytes that are not zero, from `offset`; None when all are zero.

    Allocated segments are long; those who look for a torn tail need not read what was never
    written.
    """
    return file.next_data(offset) if isinstance(file, RealFile) else offset


def is_allocated(file: DiskFile, size: int) -> bool:
    """Whether the file is `size` bytes long and its blocks are its own, so that no write in it can
    end in ENOSPC. Disks other than the real one have no holes."""
    if file.size() < size:
        return False
    return not isinstance(file, RealFile) or file.allocated() >= size


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


_CACHESTAT = 451  # the same number on every architecture
_PAGE = mmap.PAGESIZE


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class PageResidency:
    """Asks the kernel which bytes of a file are in memory, without reading any of them;
    `in_memory` is True for everything where it cannot be asked.

    A read with RWF_NOWAIT answers that too, but the kernel starts to fetch what is missing on the
    asking thread: on an event loop that is 4 to 20 ms for some hundred KiB (docs/benchmarks.md).
    cachestat(2) looks only; it is there from Linux 6.5 on.

    One thread uses one of these: the arguments of the call are made once.
    """

    def __init__(self) -> None:
        # PyDLL keeps the interpreter's lock: the call takes microseconds and waits for nothing.
        self._syscall = ctypes.PyDLL(None, use_errno=True).syscall
        self._range, self._pages = _Range(), _Pages()
        self._arguments = (ctypes.byref(self._range), ctypes.byref(self._pages), 0)
        self.available = True

    def in_memory(self, fd: int, size: int, offset: int) -> bool:
        """Whether each page that the bytes touch, up to the file's end, is held or on its way."""
        if not self.available or size <= 0:
            return True
        if self._held(fd, size, offset):
            return True
        within = os.fstat(fd).st_size - offset  # behind its end a file has no pages
        return within <= 0 or (within < size and self._held(fd, within, offset))

    def _held(self, fd: int, size: int, offset: int) -> bool:
        self._range.offset, self._range.size = offset, size
        if self._syscall(_CACHESTAT, fd, *self._arguments) != 0:
            if ctypes.get_errno() in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
                self.available = False
            return True
        pages = (offset + size - 1) // _PAGE - offset // _PAGE + 1
        return bool(self._pages.cached >= pages)
