"""Small disks for tests, each a tmpfs of its own: this needs the right to mount."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from programs import run_program

HOW = "run as root: sudo .venv/bin/python -m pytest -m heavy tests/e2e"


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A new folder with a disk of its own; the test is skipped where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip(f"mounting a small disk needs root; {HOW}")
    if shutil.which("mount") is None:
        pytest.skip(f"there is no mount command; on Linux, {HOW}")
    folder.mkdir()
    if complaint := mount(folder, options):
        pytest.skip(f"mount is not allowed here ({complaint}); outside of a container, {HOW}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


@contextmanager
def filled_up(folder: Path) -> Iterator[None]:
    """Not a byte of the disk is free."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4_096))
    try:
        yield
    finally:
        filler.unlink()


def mount(folder: Path, options: str) -> str:
    """Mount a tmpfs, or change a mounted one; returns what went wrong."""
    done = run_program(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        stdin=subprocess.DEVNULL,
        timeout=30,
    )
    return done.stderr.strip() if done.returncode != 0 else ""
