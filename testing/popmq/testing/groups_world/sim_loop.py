"""An asyncio event loop on the virtual time of a simulated host.

It offers what the product's proxy and the nemesis' clients use: callbacks, timers, futures and
tasks. There are no sockets, threads or signals. Callbacks run in the order of `Host.post`.
"""

import asyncio
import math
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.timeline import Action, HostClock, Timeline

T = TypeVar("T")


class SimLoop(asyncio.AbstractEventLoop):
    """The loop of one process: when its host dies, nothing of it runs any more.

    `on_failure` gets the exceptions that end no task: of callbacks, and of tasks whose result no
    code reads.
    """

    def __init__(self, host: Host, on_failure: Callable[[BaseException], None]) -> None:
        self._host = host
        self._on_failure = on_failure

    def time(self) -> float:
        return self._host.clock.boot_ms() / 1000

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._host.post(lambda: _run(handle))
        return handle

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        # Not before: a float of milliseconds may be a little below the whole number it means.
        delay_ms = math.ceil((when - self.time()) * 1000 - 1e-6)
        self._host.after(max(0, delay_ms), lambda: _run(handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._on_failure(error)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer stays in the timeline and does nothing."""


class LoopHost(Host):
    """A host whose process runs on a `SimLoop`, which is the running loop in all that it does."""

    def __init__(
        self,
        name: str,
        timeline: Timeline,
        clock: HostClock,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name, timeline, clock)
        self._failed = on_failure
        self.on_error = on_failure
        self.loop = _loop(self, on_failure)

    def boot(self) -> None:
        super().boot()
        self.loop = _loop(self, self._failed)

    def run(self, action: Action) -> None:
        events._set_running_loop(self.loop)
        try:
            super().run(action)
        finally:
            events._set_running_loop(None)


def _loop(host: Host, on_failure: Callable[[BaseException], None]) -> SimLoop:
    # What it leaves out (sockets, threads, signals) has no meaning in a simulation.
    return SimLoop(host, on_failure)  # type: ignore[abstract]


def _run(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()
