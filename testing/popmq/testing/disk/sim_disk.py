"""A disk under a seed: what was not synced survives a crash in whole, in part, or not at all.

Every file holds what programs see (`now`), what is on the platter (`kept`), and the operations
between the two.  Names count from `sync_folder` (or `replace`), contents from `sync`.  How much
of the rest is there after a crash, the crash's `Loss` and the seed decide
(docs/concepts/simulator.md).
"""

import errno
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b

from popmq.common.disk import NO_FILE_LIMIT, SyncFailed
from popmq.testing.disk.crash_loss import FileContent, Loss, Losses, apply
from popmq.testing.disk.disk_faults import Demand, FailedPages, Faults


class SimDisk:
    """Implements `popmq.common.disk.Disk`. `before` runs before each operation, and once more
    inside those that take long (`sync`, `replace`): there a job may be stopped."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names: dict[str, FileContent] = {}
        self._kept_names: dict[str, FileContent] = {}
        self.losses = Losses(rng)
        self.faults = Faults()
        self.before: Callable[[], None] = go_ahead
        # Where the scheduler's own thread has to do something in the middle of an operation.
        self.on_main: Callable[[Callable[[], None]], None] = at_once

    # -- what happens to a computer

    def crash(self, loss: Loss) -> None:
        """The machine (or with `Loss.NOTHING` the process) starts anew; faults are disarmed."""
        self.faults.heal()
        self.faults.sick = False
        if loss is Loss.NOTHING:
            return
        names: dict[str, FileContent] = {}
        for path in sorted(self._names.keys() | self._kept_names.keys()):
            new, old = self._names.get(path), self._kept_names.get(path)
            file_content = new if new is old or self.losses.name_survives(loss) else old
            if file_content is not None:
                names[path] = file_content
        for content in {id(content): content for content in names.values()}.values():
            if content.pending:
                self.losses.drop_replies(content, loss)
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
        """Somebody removes a folder, or a file, while the broker is down."""
        for names in (self._names, self._kept_names):
            for path in [name for name in names if name == folder or name.startswith(folder + "/")]:
                del names[path]

    def durable(self, path: str) -> bytes:
        """What the platter holds of a file, wherever its name points."""
        return bytes(self._names[path].kept)

    def contents(self, folder: str) -> list[tuple[str, bytearray]]:
        """Path and content, as programs see it, of every file below a folder."""
        paths = [path for path in self._names if path.startswith(folder)]
        return [(path, self._names[path].now) for path in paths]

    def copy_of_durable(self) -> "SimDisk":
        """Another disk with what would be there if the power went now and nothing more lasted."""
        disk = SimDisk(random.Random(0))
        for path, content in self._kept_names.items():
            copied = disk._names[path] = disk._kept_names[path] = FileContent()
            copied.now[:] = copied.kept[:] = content.kept
        return disk

    def image(self) -> bytes:
        """A hash of all that programs see, of what is on the platter, and of what is between."""
        digest = blake2b(digest_size=16)
        for names in (self._names, self._kept_names):
            for path in sorted(names):
                content = names[path]
                same = self._names.get(path) is content
                parts = [content.now, content.kept, *(data for _, data in content.pending)]
                if path.endswith("/abort"):  # begins with the number of this process
                    parts = [part and part.lstrip(b"0123456789") for part in parts]
                digest.update(
                    f"{path}\0{same}\0{[offset for offset, _ in content.pending]}".encode()
                )
                for part in parts:
                    digest.update(f"{-1 if part is None else len(part)}\0".encode())
                    digest.update(part or b"")
        return digest.digest()

    @property
    def unsynced(self) -> bool:
        return any(content.pending for content in self._names.values())

    # -- popmq.common.disk.Disk

    def open(self, path: str, *, create: bool = False) -> "SimFile":
        self.before()
        self.faults.demand(Demand.DESCRIPTOR, path)
        content = self._names.get(path)
        if content is None:
            if not create:
                raise FileNotFoundError(path)
            self.faults.demand(Demand.SPACE, path)
            content = self._names[path] = FileContent()
            self.faults.started(path)
            self.faults.touch(path)
        return SimFile(self, content, path)

    def exists(self, path: str) -> bool:
        self.before()
        return path in self._names

    def names(self, folder: str) -> list[str]:
        self.before()
        self.faults.demand(Demand.DESCRIPTOR, folder)
        prefix = folder + "/"
        start = len(prefix)
        names = {path[start:].split("/", 1)[0] for path in self._names if path.startswith(prefix)}
        return sorted(names)

    def make_folder(self, path: str) -> None:
        return

    def add_folder(self, path: str) -> list[str]:
        return []

    def remove(self, path: str) -> None:
        self.before()
        if path not in self._names:
            raise FileNotFoundError(path)
        del self._names[path]
        self.faults.touch(path)

    def replace(self, source: str, target: str) -> None:
        self.before()
        self.faults.demand(Demand.SPACE, target)
        self._names[target] = self._names.pop(source)
        self.faults.touch(target)
        self.before()  # the rename was seen, and is not durable
        self.faults.demand(Demand.DESCRIPTOR, target.rpartition("/")[0])
        for path in (source, target):
            self._kept_names.pop(path, None)
            if path in self._names:
                self._kept_names[path] = self._names[path]

    def sync_folder(self, path: str) -> None:
        self.before()
        self.faults.demand(Demand.DESCRIPTOR, path)
        self.faults.touch(path)
        start = len(path) + 1
        for name in [name for name in self._kept_names if name.startswith(path)]:
            if name not in self._names and name.rfind("/") + 1 == start:
                del self._kept_names[name]
        for name, content in self._names.items():
            if name.startswith(path) and name.rfind("/") + 1 == start:
                self._kept_names[name] = content

    def space(self, folder: str) -> tuple[int, int]:
        budget = self.faults.budget
        if budget is None:
            return 1 << 40, 1 << 40
        used = sum(len(content.now) for content in self._names.values())
        return budget, used + budget

    def free_files(self, folder: str) -> int:
        return NO_FILE_LIMIT

    def open_limit(self) -> int:
        return 1_000  # seeds keep their meaning: opening a file again may fail in a new place

    def part_of(self, size: int) -> int:
        """How much of a write that fails was written."""
        return self._rng.randrange(size + 1)


class SimFile:
    """An open file of a SimDisk."""

    def __init__(self, disk: SimDisk, content: FileContent, path: str) -> None:
        self._disk = disk
        self._path = path
        self._content = content

    def read(self, size: int, offset: int) -> bytes:
        self._disk.before()
        return bytes(self._content.now[offset : offset + size])

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._disk.before()
        faults = self._disk.faults
        faults.spend(offset + len(data) - len(self._content.now), self._path)
        if offset == 0:
            faults.started(self._path)
        failed = faults.write_fails()
        if failed:
            data = data[: self._disk.part_of(len(data))]
        self._do(offset, bytes(data))
        if failed:
            faults.sick = True
            raise OSError(errno.EIO, "the simulated disk failed a write")

    def write_all(self, parts: Sequence[bytes], offset: int) -> None:
        self.write(b"".join(parts), offset)

    def size(self) -> int:
        return len(self._content.now)

    def allocate(self, size: int) -> None:
        self._disk.before()
        self._disk.faults.spend(size - len(self._content.now), self._path)
        if size > len(self._content.now):
            self._do(size, None)
        else:
            self._disk.faults.touch(self._path)

    def truncate(self, size: int) -> None:
        self._disk.before()
        self._do(size, None)

    def sync(self) -> None:
        """What is written while it runs may miss it."""
        self._disk.before()
        faults, content = self._disk.faults, self._content
        faults.touch(self._path)
        end = content.synced + len(content.pending)
        self._disk.before()
        count = max(0, end - content.synced)  # unless another sync was faster
        covered, content.pending = content.pending[:count], content.pending[count:]
        content.synced += count
        if faults.sync_fails(self._path):
            faults.sick = True
            if faults.failed_pages is FailedPages.DROPPED:
                content.now[:] = content.kept
                apply(content.now, content.pending)
            raise SyncFailed(errno.EIO, "the simulated disk failed a sync")
        apply(content.kept, covered)

    def close(self) -> None:
        return

    def _do(self, offset: int, data: bytes | None) -> None:
        # The operation is under way when the power goes: it may yet reach the platter.
        apply(self._content.now, [(offset, data)])
        self._content.pending.append((offset, data))
        self._disk.faults.touch(self._path)


def go_ahead() -> None:
    return


def at_once(work: Callable[[], None]) -> None:
    work()
