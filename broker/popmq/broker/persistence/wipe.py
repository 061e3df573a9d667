"""What is on the disk of a store, removed: one that cannot be brought to its master's log.

Whoever calls this has given the store a new identity first, durably (RULES R9): a crash in
between leaves a part of it, under an id that is in no set, and the next start wipes again.
"""

from collections.abc import Iterator

from popmq.common.disk import Disk

# By what depends on them: no part is left without what says how far it can be trusted.
_FILES = ("checkpoint", "checkpoint.new", "timercheckpoint", "timerwheel", "abort")
_FOLDERS = ("snapshot", "timerlog", "index", "commitlog")
_QUEUES = ("consumequeue", "system")


def wipe(disk: Disk, folder: str) -> int:
    """Remove the log and everything made from it, durably; returns how many files.

    Identity, epochs and the lock stay: they are not the store's.  Empty folders may, too.
    """
    paths = list(_paths(disk, folder))
    for path in paths:
        disk.remove(path)
    for parent in sorted({path.rpartition("/")[0] for path in paths}):
        disk.sync_folder(parent)
    return len(paths)


def _paths(disk: Disk, folder: str) -> Iterator[str]:
    there = set(disk.names(folder))
    yield from (f"{folder}/{name}" for name in _FILES if name in there)
    for room in _FOLDERS:
        yield from (f"{folder}/{room}/{name}" for name in reversed(disk.names(f"{folder}/{room}")))
    for room in _QUEUES:
        for topic in disk.names(f"{folder}/{room}"):
            for queue in disk.names(f"{folder}/{room}/{topic}"):
                place = f"{folder}/{room}/{topic}/{queue}"
                yield from (f"{place}/{name}" for name in reversed(disk.names(place)))
