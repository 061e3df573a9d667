"""Runs popmq with a number of descriptors, and notes the longest turn of its event loop.

    python watched.py TURNS FILES up --port 0

A turn is what happens between two looks at the sockets, in CPU time of the loop's thread; TURNS
holds the longest one as a double, in seconds.  Whoever writes a 0 there starts anew.
"""

import mmap
import resource
import selectors
import struct
import sys
import threading
import time
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
    path, files, *arguments = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), int(files)))
    with open(path, "r+b") as file:
        WatchedSelector.turns = mmap.mmap(file.fileno(), SECONDS.size)
    selectors.DefaultSelector = WatchedSelector  # type: ignore[misc]
    from popmq.cli.__main__ import main as popmq

    return popmq(arguments)


if __name__ == "__main__":
    sys.exit(main())
