"""The life of a role's process: from its ready line to the signal, or the failure, that ends it."""

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable

from popmq.cli.terminal.output import folded
from popmq.common.unhandled import UnhandledExceptions, report_if_failed

STOP_S = 10.0  # how long the stop of a failed role may take; then its process exits at once


class RoleRunner:
    """One for each process; made on its event loop."""

    def __init__(self) -> None:
        self.serving = False
        self.code = 0
        self.ready_line = ""
        self.ended_again = asyncio.Event()  # a signal came while the role was stopping
        self.unhandled = UnhandledExceptions(self._crash)
        self.unhandled.install(asyncio.get_running_loop())
        self._crash_callbacks: list[Callable[[BaseException], None]] = []
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def announce(self, line: str) -> None:
        # What start-up made lives as long as the process: the collector need not look again.
        gc.collect()
        gc.freeze()
        self.serving = True
        self.ready_line = line
        # Programs read one line; a terminal would break it in the middle of a word.
        print(folded(line) if sys.stdout.isatty() else line, flush=True)

    def track_task(self, task: "asyncio.Task[None]") -> None:
        """Keep the task; when it fails the role ends."""
        self._tasks.add(task)
        task.add_done_callback(report_if_failed)

    def on_crash(self, callback: Callable[[BaseException], None]) -> None:
        """Call it with the exception that nothing handled, before the role begins to stop."""
        self._crash_callbacks.append(callback)

    def end(self, code: int) -> None:
        """Begin to stop. `code` is the exit status; unless it is 0 the stop has STOP_S seconds."""
        if code:
            self._exit_after_stop_s(code)
        self.code = max(self.code, code)
        if self._ended.is_set():
            self.ended_again.set()
        self._ended.set()

    async def first(self, starting: "asyncio.Task[None]") -> bool:
        """Wait for the start, whose failure is raised; False when the end came before it."""
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return False

    async def wait(self) -> None:
        await self._ended.wait()
        self.serving = False

    async def stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _crash(self, error: BaseException) -> None:
        """End with 1, whatever waits for work that never ends now."""
        self._exit_after_stop_s(1)
        self.code = 1
        self._ended.set()
        for callback in self._crash_callbacks:
            callback(error)

    def _exit_after_stop_s(self, code: int) -> None:
        """Whatever the stop waits for may never come."""
        timer = threading.Timer(STOP_S, os._exit, (code,))
        timer.daemon = True
        timer.start()
