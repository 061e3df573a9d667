"""The abort file: there while the broker runs, so that a start knows of a stop that was none.

It holds the process's number, and for one of several replicas what it was: `follows`, or `leads`
and the epoch.  A record says how much of the log was confirmed before it (message.py), which
proves that those bytes were on the disk of the master that wrote it, and on no other.
"""

import os

from popmq.common.disk import Disk

ABORT = "abort"
FOLLOWS = "follows"
NO_EPOCH = 1 << 32  # behind every epoch


def mark_running(disk: Disk, folder: str, role: str = "") -> None:
    """Durable when this returns. `role` is "" for a broker alone."""
    file = disk.open(f"{folder}/{ABORT}", create=True)
    try:
        file.truncate(0)
        file.write(f"{os.getpid()} {role}".rstrip().encode(), 0)
        file.sync()
    finally:
        file.close()
    disk.sync_folder(folder)


def leads(epoch: int) -> str:
    return f"leads {epoch}"


def own_from_epoch(disk: Disk, folder: str) -> int:
    """Records from this epoch on were written by the last process that ran here."""
    words = _words(disk, folder)
    if len(words) < 2:
        return 0
    return int(words[2]) if len(words) == 3 and words[2].isdigit() else NO_EPOCH


def has_abort(disk: Disk, folder: str) -> bool:
    """Whether the last process that ran here did not stop cleanly."""
    return disk.exists(f"{folder}/{ABORT}")


def owner(disk: Disk, folder: str) -> str:
    """The number of the process that runs, or ran, here."""
    return "".join(_words(disk, folder)[:1])


def _words(disk: Disk, folder: str) -> list[str]:
    try:
        file = disk.open(f"{folder}/{ABORT}")
    except FileNotFoundError:
        return []
    try:
        return file.read(64, 0).decode(errors="replace").split()
    finally:
        file.close()
