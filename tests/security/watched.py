"""Runs popmq with a number of descriptors, and notes the longest turn of its event loop.

    python watched.py TURNS FILES up --port 0

A turn is what happens between two looks at the sockets, in CPU time of the loop's thread.  In the
folder TURNS a file, whose name is the number of the process, holds the longest one as a double, in
seconds.  Whoever writes a 0 there starts anew.  Processes that `up --replicas` starts are watched,
too.
"""

import mmap
import os
import resource
import selectors
import shlex
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

SECONDS = struct.Struct("d")


class WatchedSelector(selectors.DefaultSelector):
    """Only the loop of the main thread is watched."""

    turns: mmap.mmap
    _since_s: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return super().select(timeout)
        if self._since_s is not None:
            took_s = time.thread_time() - self._since_s
            if took_s > SECONDS.unpack_from(self.turns)[0]:
                SECONDS.pack_into(self.turns, 0, took_s)
        events = super().select(timeout)
        self._since_s = time.thread_time()
        return events


def main() -> int:
    turns, files, *arguments = sys.argv[1:]
    if arguments[:2] == ["-m", "popmq.cli"]:
        arguments = arguments[2:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
    path = Path(turns, str(os.getpid()))
    path.write_bytes(SECONDS.pack(0))
    with path.open("r+b") as file:
        WatchedSelector.turns = mmap.mmap(file.fileno(), SECONDS.size)
    selectors.DefaultSelector = WatchedSelector  # type: ignore[misc]
    sys.executable = str(_python(Path(turns), files))
    from popmq.cli.__main__ import main as popmq

    return popmq(arguments)


def _python(turns: Path, files: str) -> Path:
    """Runs what this process starts, watched."""
    path = turns.with_name("watched-python")
    if not path.exists():
        command = shlex.join([sys.executable, __file__, str(turns), files])
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)
    return path


if __name__ == "__main__":
    sys.exit(main())
