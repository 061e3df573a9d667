"""An event loop on a thread of its own, and a way to run coroutines on it from outside."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from popmq.common.step_loop import Done, Work

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Its result; after `timeout_s` it is cancelled and TimeoutError raised."""

        async def limited() -> T:
            try:
                async with asyncio.timeout(timeout_s):
                    return await work
            except TimeoutError:
                raise TimeoutError(f"the broker was not done within {timeout_s:g} s") from None

        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result()

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


class ThreadServer(ABC):
    """A server of a test's own, there while entered, on a loop of its own thread."""

    _WITHIN_S = 30.0  # to open, to close

    def __init__(self, name: str) -> None:
        self._thread = LoopThread(name)

    def __enter__(self) -> Self:
        self._thread.call(self._open(), self._WITHIN_S)
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.call(self._close(), self._WITHIN_S)
        self._thread.stop()

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _close(self) -> None: ...


class LoopFlusher:
    """Disk work on the loop's own thread, for a disk in memory; the news comes a tick later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._stopped = False

    def submit(self, work: Work, done: Done) -> None:
        if self._stopped:
            return
        error: OSError | None = None
        try:
            work()
        except OSError as failure:
            error = failure
        self._loop.call_soon(done, error)

    def stop(self) -> None:
        self._stopped = True
