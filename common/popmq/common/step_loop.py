"""The only loops that wait: the step loop and the flusher thread (D2, D3).

Code that decides is called from here with the time and never waits itself.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from popmq.common.errors import PopmqError

Work = Callable[[], None]
Done = Callable[[BaseException | None], None]
Step = Callable[[], int]


class Flusher(Protocol):
    """Does blocking disk work elsewhere, one piece at a time, in the order it was handed over."""

    def submit(self, work: Work, done: Done) -> None:
        """Run `work`; then call `done` on the loop with its exception, or None."""
        ...


class OwnFlusher(Flusher, Protocol):
    def stop(self) -> None:
        """Finish what was handed over, then end."""
        ...


class FlusherThread:
    """One thread for fdatasync. A batch is handed over whole, on the loop's thread (D2)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str = "flusher") -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Work, Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work, done: Done) -> None:
        self._jobs.put((work, done))

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, done = job
            try:
                work()
            except (OSError, PopmqError) as error:  # handed to the loop, which decides
                self._loop.call_soon_threadsafe(done, error)
            except BaseException as error:
                self._loop.call_soon_threadsafe(_end_of_bug, done, error)
            else:
                self._loop.call_soon_threadsafe(done, None)


def _end_of_bug(done: Done, error: BaseException) -> None:
    """No disk is to blame: whatever `done` makes of it, the loop's exception handler gets it."""
    done(error)
    raise error


class InlineFlusher:
    """Runs the work at once on the caller's thread: for tools, and tests under virtual time."""

    def submit(self, work: Work, done: Done) -> None:
        try:
            work()
        except OSError as error:
            done(error)
        else:
            done(None)


class StepLoop:
    """Calls `step` for ever: again at once while it moved something, else after `idle_ms`.

    Or it rests: `wait_ms` says for how long there is nothing to do; more than `idle_ms` is a
    rest, which ends with `wake`.
    """

    def __init__(self, step: Step, wait_ms: Callable[[], int], *, idle_ms: int) -> None:
        self._step = step
        self._wait_ms = wait_ms
        self._idle_ms = idle_ms
        self._rest: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._rest is not None and not self._rest.done():
            self._rest.set_result(None)

    async def run(self) -> None:
        while True:
            if self._step():
                await asyncio.sleep(0)
            elif (wait_ms := self._wait_ms()) <= self._idle_ms:
                await asyncio.sleep(self._idle_ms / 1000)
            else:
                await self._resting(wait_ms)

    async def _resting(self, wait_ms: int) -> None:
        loop = asyncio.get_running_loop()
        self._rest = loop.create_future()
        timer = loop.call_later(wait_ms / 1000, self.wake)
        try:
            await self._rest
        finally:
            timer.cancel()
            self._rest = None
