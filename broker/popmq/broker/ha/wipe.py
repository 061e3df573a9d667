"""Wiping a store: everything goes that it was made of, and the broker begins as a new one (R9)."""

from contextlib import suppress

from popmq.broker.ha import epoch_file, identity
from popmq.common.disk import Disk

KEPT = (identity.FILE_NAME, epoch_file.FILE_NAME, "lock", "frames.sock")


def wipe(disk: Disk, folder: str) -> None:
    """Remove all files below the data folder but those that say who this is. Folders stay."""
    for name in disk.names(folder):
        if name not in KEPT:
            _remove(disk, f"{folder}/{name}")
    disk.sync_folder(folder)


def _remove(disk: Disk, path: str) -> None:
    try:
        inside = disk.names(path)
    except NotADirectoryError:
        inside = []
    for name in inside:
        _remove(disk, f"{path}/{name}")
    if inside:
        disk.sync_folder(path)
    else:
        with suppress(IsADirectoryError, FileNotFoundError, PermissionError):
            disk.remove(path)
