"""OpenFiles: how many files of queues are open at once (docs/concepts/store.md).

Every queue has a file, and a broker may have more queues than the system lets a process open.
So a segment of a queue opens its file when it is used, and the one that was not used for longest
is closed for it.  A file is open while any thread works with it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from popmq.broker.log.segment_file import SegmentFile
from popmq.common.disk import NO_DESCRIPTORS, ColdRead, Disk, DiskFile

P = ParamSpec("P")
R = TypeVar("R")

_WARM_BYTES = 256 << 10


class OpenFiles:
    """Shared by the loop and by the threads that work with files. Not more than `limit` are open,
    unless more are in use."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[PooledSegment, DiskFile] = OrderedDict()  # least recent first
        self._users: dict[PooledSegment, int] = {}
        self.opened = 0

    @property
    def count(self) -> int:
        return len(self._open)

    def take(self, segment: "PooledSegment", open_file: Callable[[], DiskFile]) -> DiskFile:
        """The segment's file, open until `put_back`."""
        with self._lock:
            file = self._open.get(segment)
            if file is None:
                self._make_room(self._limit)
                file = self._open[segment] = self._opened(open_file)
                self.opened += 1
            else:
                self._open.move_to_end(segment)
            self._users[segment] = self._users.get(segment, 0) + 1
            return file

    def put_back(self, segment: "PooledSegment") -> None:
        with self._lock:
            users = self._users.pop(segment) - 1
            if users:
                self._users[segment] = users
            elif len(self._open) > self._limit:
                self._make_room(self._limit + 1)

    def close(self, segment: "PooledSegment") -> None:
        """Not before those that use it now are done: they leave it to be closed in its turn."""
        with self._lock:
            if segment not in self._users and segment in self._open:
                self._open.pop(segment).close()

    def _opened(self, open_file: Callable[[], DiskFile]) -> DiskFile:
        while True:
            try:
                return open_file()
            except OSError as error:
                before = len(self._open)
                if error.errno in NO_DESCRIPTORS:
                    self._make_room(before)
                if len(self._open) == before:
                    raise

    def _make_room(self, limit: int) -> None:
        """Fewer than `limit` are open then, unless more are in use."""
        while len(self._open) >= limit:
            idle = next((file for file in self._open if file not in self._users), None)
            if idle is None:
                return
            # What was written stays in the page cache; fdatasync of the file, opened again,
            # writes it and reports an error that was not reported yet.
            self._open.pop(idle).close()


def _opened(method: Callable[P, R]) -> Callable[P, R]:
    @wraps(method)
    def with_file(*args: P.args, **kwargs: P.kwargs) -> R:
        segment = args[0]
        assert isinstance(segment, PooledSegment)
        segment.take()
        try:
            return method(*args, **kwargs)
        finally:
            segment.put_back()

    return with_file


class PooledSegment(SegmentFile):
    """A segment whose file is open while it is used, and as long as others do not need the room."""

    def __init__(
        self,
        disk: Disk,
        path: str,
        *,
        start: int,
        size: int,
        create: bool,
        pool: OpenFiles,
    ) -> None:
        self.path = path
        self.start = start
        self.size = size
        self._disk = disk
        self._pool = pool
        self._removed = False
        self._file = pool.take(self, lambda: disk.open(path, create=create))
        pool.put_back(self)

    def take(self) -> None:
        self._file = self._pool.take(self, lambda: self._disk.open(self.path))

    def put_back(self) -> None:
        self._pool.put_back(self)

    file_bytes = _opened(SegmentFile.file_bytes)
    preallocate = _opened(SegmentFile.preallocate)
    read = _opened(SegmentFile.read)
    written_from = _opened(SegmentFile.written_from)
    write = _opened(SegmentFile.write)
    truncate = _opened(SegmentFile.truncate)
    _read_warm = _opened(SegmentFile.read_warm)
    _view_warm = _opened(SegmentFile.view_warm)
    _sync = _opened(SegmentFile.sync)

    @property
    def is_allocated(self) -> bool:
        self.take()
        try:
            return super().is_allocated
        finally:
            self.put_back()

    def read_warm(self, position: int, size: int) -> bytes:
        try:
            return self._read_warm(position, size)
        except ColdRead:
            raise self._cold(position, size) from None

    def view_warm(self, position: int, size: int) -> memoryview:
        try:
            return self._view_warm(position, size)
        except ColdRead:
            raise self._cold(position, size) from None

    def sync(self) -> None:
        if not self._removed:
            self._sync()

    def close(self) -> None:
        self._pool.close(self)

    def _cold(self, position: int, size: int) -> ColdRead:
        """Its file may be closed until the next wait for the disk."""
        return ColdRead(lambda: self.read(position, max(size, _WARM_BYTES)))
