"""A disk under a seed: what was not synced survives a crash in whole, in part, or not at all.

Every file holds what programs see (`now`), what is on the platter (`kept`), and the operations
between the two.  Names count from `sync_folder` (or `replace`), contents from `sync`.  How much
of the rest is there after a crash, the crash's `Loss` and the seed decide
(docs/concepts/simulator.md).
"""

import errno
import random
from collections.abc import Sequence
from enum import Enum

from popmq.testing.disk import PowerCut

# What the platter takes whole: a sector, or a cache line of persistent memory.
SECTOR_SIZES = (512, 64)


class Loss(Enum):
    """What a crash does to bytes and names that were not synced."""

    NOTHING = "nothing"  # only the process died: the page cache is still there
    ALL = "all"
    KEPT = "kept"  # the power went, but everything had reached the platter
    TORN = "torn"  # of each file the first operations, the last of them cut at a sector
    SCATTERED = "scattered"  # of each file any sectors, whatever was written first


class FailedPages(Enum):
    """What the page cache does with pages whose fsync failed; POSIX allows either."""

    DROPPED = "dropped"  # they read as before the write
    CLEAN = "clean"  # they read as written, and no later fsync writes them (ext4)


_Op = tuple[int, bytes | None]  # a write at an offset; None: the file got this size


class _Content:
    __slots__ = ("kept", "now", "pending")

    def __init__(self) -> None:
        self.now = bytearray()
        self.kept = bytearray()
        self.pending: list[_Op] = []


class SimDisk:
    """Implements `popmq.common.disk.Disk`.

    Faults are armed one at a time: `cut_at` (power or process, which `crash` decides),
    `fail_write_at`, `fail_sync_at`, `budget` (bytes that files may still grow by).
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names: dict[str, _Content] = {}
        self._kept_names: dict[str, _Content] = {}
        self._cut_in: int | None = None
        self._cut_after: tuple[str, int] | None = None
        self.sector_bytes = rng.choice(SECTOR_SIZES)
        self._fail_write_in: int | None = None
        self._fail_sync_in: int | None = None
        self.failed_pages = FailedPages.DROPPED
        self.budget: int | None = None
        self.operations = 0
        self.sick = False  # an EIO was raised since the last crash

    # -- faults

    def cut_at(self, operations: int, *, after_start_of: str = "") -> None:
        """The n-th following operation raises PowerCut, and so does every later one until
        `crash`; with `after_start_of` the count starts when a file in such a folder is made,
        or written from its first byte on."""
        if after_start_of:
            self._cut_after = (after_start_of, operations)
        else:
            self._cut_in = operations

    def fail_write_at(self, writes: int) -> None:
        """The n-th following write puts down a part of its bytes and raises EIO."""
        self._fail_write_in = writes

    def fail_sync_at(self, syncs: int) -> None:
        """The n-th following sync of a file raises EIO: its bytes never reach the platter."""
        self._fail_sync_in = syncs

    def heal(self) -> None:
        """Disarm every fault."""
        self._cut_in = self._cut_after = None
        self._fail_write_in = self._fail_sync_in = self.budget = None

    def crash(self, loss: Loss) -> None:
        """The machine (or with `Loss.NOTHING` the process) starts anew; faults are disarmed."""
        self.heal()
        self.sick = False
        if loss is Loss.NOTHING:
            return
        names: dict[str, _Content] = {}
        for path in sorted(self._names.keys() | self._kept_names.keys()):
            new, old = self._names.get(path), self._kept_names.get(path)
            found = new if new is old or self._survives(loss) else old
            if found is not None:
                names[path] = found
        for content in {id(content): content for content in names.values()}.values():
            if content.pending:
                self._lose(content, loss)
            content.now[:] = content.kept
        self._names, self._kept_names = names, dict(names)

    def flip_bit(self, folder: str) -> str:
        """Damage one durable bit of a file below `folder`; returns where, or "" if none is."""
        paths = [path for path in sorted(self._names) if path.startswith(folder)]
        places = [(path, self._names[path]) for path in paths]
        used = [(path, content, len(content.kept.rstrip(b"\0"))) for path, content in places]
        used = [(path, content, size) for path, content, size in used if size]
        if not used:
            return ""
        path, content, size = self._rng.choice(used)
        at = self._rng.randrange(size)
        content.kept[at] ^= 1 << self._rng.randrange(8)
        content.now[at : at + 1] = content.kept[at : at + 1]
        return f"{path}:{at}"

    def lose_folder(self, folder: str) -> None:
        """Somebody removes a folder while the broker is down."""
        for names in (self._names, self._kept_names):
            for path in [path for path in names if _in(path, folder + "/")]:
                del names[path]

    def durable(self, path: str) -> bytes:
        """What the platter holds of a file, wherever its name points."""
        return bytes(self._names[path].kept)

    @property
    def off(self) -> bool:
        """Whether the power is gone."""
        return self._cut_in is not None and self._cut_in < 0

    @property
    def unsynced(self) -> bool:
        return any(content.pending for content in self._names.values())

    # -- popmq.common.disk.Disk

    def open(self, path: str, *, create: bool = False) -> "SimFile":
        content = self._names.get(path)
        if content is None:
            if not create:
                raise FileNotFoundError(path)
            content = self._names[path] = _Content()
            self.started(path)
            self.touch()
        return SimFile(self, content, path)

    def exists(self, path: str) -> bool:
        return path in self._names

    def names(self, folder: str) -> list[str]:
        prefix = folder + "/"
        found = {path[len(prefix) :].split("/")[0] for path in self._names if _in(path, prefix)}
        return sorted(found)

    def make_folder(self, path: str) -> None:
        return

    def remove(self, path: str) -> None:
        if path not in self._names:
            raise FileNotFoundError(path)
        del self._names[path]
        self.touch()

    def replace(self, source: str, target: str) -> None:
        self._names[target] = self._names.pop(source)
        self.touch()
        self._kept_names[target] = self._names[target]
        self._kept_names.pop(source, None)

    def sync_folder(self, path: str) -> None:
        self.touch()
        prefix = path + "/"
        for name in [name for name in self._kept_names if _directly_in(name, prefix)]:
            if name not in self._names:
                del self._kept_names[name]
        for name, content in self._names.items():
            if _directly_in(name, prefix):
                self._kept_names[name] = content

    def space(self, folder: str) -> tuple[int, int]:
        if self.budget is None:
            return 1 << 40, 1 << 40
        used = sum(len(content.now) for content in self._names.values())
        return self.budget, used + self.budget

    # -- for SimFile

    def started(self, path: str) -> None:
        """A file was made, or written from its first byte on."""
        if self._cut_after is not None and self._cut_after[0] in path:
            self._cut_in = self._cut_after[1]
            self._cut_after = None

    def touch(self) -> None:
        self.operations += 1
        if self._cut_in is not None:
            self._cut_in -= 1
            if self._cut_in < 0:
                raise PowerCut

    def write_fails(self) -> bool:
        if self._fail_write_in is None:
            return False
        self._fail_write_in -= 1
        return self._fail_write_in == -1

    def sync_fails(self) -> bool:
        if self._fail_sync_in is None:
            return False
        self._fail_sync_in -= 1
        return self._fail_sync_in == -1

    def spend(self, size: int) -> None:
        """Raise ENOSPC when the files may not grow by `size` any more."""
        if self.budget is None or size <= 0:
            return
        if size > self.budget:
            raise OSError(errno.ENOSPC, "no space left on the simulated disk")
        self.budget -= size

    def part_of(self, size: int) -> int:
        return self._rng.randrange(size + 1)

    # -- inside

    def _survives(self, loss: Loss) -> bool:
        if loss is Loss.KEPT:
            return True
        return loss is not Loss.ALL and self._rng.random() < 0.5

    def _lose(self, content: _Content, loss: Loss) -> None:
        """Bring to the platter what the crash spares of the pending operations."""
        pending, content.pending = content.pending, []
        match loss:
            case Loss.KEPT:
                _apply(content.kept, pending)
            case Loss.TORN:
                self._tear(content.kept, pending)
            case Loss.SCATTERED if len(pending) > 1 or self._rng.random() < 0.8:
                self._scatter(content, pending)
            case _:
                pass

    def _tear(self, kept: bytearray, pending: list[_Op]) -> None:
        whole = self._rng.randrange(len(pending) + 1)
        _apply(kept, pending[:whole])
        if whole == len(pending):
            return
        offset, data = pending[whole]
        if data is not None:
            size = self.sector_bytes
            first = size - offset % size
            sectors = self._rng.randrange(1 + max(0, len(data) - first) // size + 1)
            cut = first + (sectors - 1) * size if sectors else 0
            _apply(kept, [(offset, data[:cut])])

    def _scatter(self, content: _Content, pending: list[_Op]) -> None:
        """Each sector shows the state after some of the writes that touched it, or before all."""
        share = self._rng.choice((0.2, 0.5, 0.8))
        seen: dict[int, int] = {}  # sector -> number of operations that it shows
        for number, (offset, data) in enumerate(pending):
            if data is None:
                _apply(content.kept, [(offset, None)])
                continue
            at = 0
            while at < len(data):
                sector = (offset + at) // self.sector_bytes
                end = min(len(data), (sector + 1) * self.sector_bytes - offset)
                if sector not in seen:
                    seen[sector] = self._version(share, len(pending))
                if number < seen[sector]:
                    _apply(content.kept, [(offset + at, data[at:end])])
                at = end
        if len(content.kept) < len(content.now) and self._rng.random() < 0.4:
            content.kept.extend(bytes(len(content.now) - len(content.kept)))

    def _version(self, share: float, newest: int) -> int:
        if self._rng.random() < 0.15:
            return self._rng.randrange(newest + 1)
        return newest if self._rng.random() < share else 0


class SimFile:
    """An open file of a SimDisk."""

    def __init__(self, disk: SimDisk, content: _Content, path: str) -> None:
        self._disk = disk
        self._path = path
        self._content = content

    def read(self, size: int, offset: int) -> bytes:
        return bytes(self._content.now[offset : offset + size])

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        disk = self._disk
        disk.spend(offset + len(data) - len(self._content.now))
        if offset == 0:
            disk.started(self._path)
        failed = disk.write_fails()
        if failed:
            data = data[: disk.part_of(len(data))]
        self._do(offset, bytes(data))
        if failed:
            disk.sick = True
            raise OSError(errno.EIO, "the simulated disk failed a write")

    def write_all(self, parts: Sequence[bytes], offset: int) -> None:
        self.write(b"".join(parts), offset)

    def size(self) -> int:
        return len(self._content.now)

    def allocate(self, size: int) -> None:
        self._disk.spend(size - len(self._content.now))
        if size > len(self._content.now):
            self._do(size, None)
        else:
            self._disk.touch()

    def truncate(self, size: int) -> None:
        self._do(size, None)

    def sync(self) -> None:
        self._disk.touch()
        content = self._content
        if self._disk.sync_fails():
            self._disk.sick = True
            content.pending.clear()
            if self._disk.failed_pages is FailedPages.DROPPED:
                content.now[:] = content.kept
            raise OSError(errno.EIO, "the simulated disk failed a sync")
        _apply(content.kept, content.pending)
        content.pending.clear()

    def close(self) -> None:
        return

    def _do(self, offset: int, data: bytes | None) -> None:
        # The operation is under way when the power goes: it may yet reach the platter.
        _apply(self._content.now, [(offset, data)])
        self._content.pending.append((offset, data))
        self._disk.touch()


def _apply(target: bytearray, operations: Sequence[_Op]) -> None:
    for offset, data in operations:
        if data is None:
            del target[offset:]
            target.extend(bytes(offset - len(target)))
        elif data:
            if offset > len(target):
                target.extend(bytes(offset - len(target)))
            target[offset : offset + len(data)] = data


def _in(path: str, prefix: str) -> bool:
    return path.startswith(prefix)


def _directly_in(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and "/" not in path[len(prefix) :]
