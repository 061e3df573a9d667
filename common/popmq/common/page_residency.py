"""Which bytes of a file are in memory, asked without reading any of them.

A read with RWF_NOWAIT answers that too, but the kernel starts to fetch what is missing on the
asking thread: on an event loop that is 4 to 20 ms for some hundred KiB (docs/benchmarks.md).
cachestat(2) looks only; it is there from Linux 6.5 on.
"""

import ctypes
import errno
import mmap
import os

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
    """Asks the kernel; `in_memory` is True for everything where it cannot be asked.

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
