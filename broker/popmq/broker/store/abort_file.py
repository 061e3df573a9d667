"""The abort file: there while the broker runs, so that a start knows of a stop that was none."""

import os

from popmq.common.disk import Disk

ABORT = "abort"


def mark_running(disk: Disk, folder: str) -> None:
    """Durable when this returns."""
    file = disk.open(f"{folder}/{ABORT}", create=True)
    try:
        file.truncate(0)
        file.write(str(os.getpid()).encode(), 0)
        file.sync()
    finally:
        file.close()
    disk.sync_folder(folder)
