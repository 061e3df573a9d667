"""Exceptions that nothing handled end the process
(docs/reference/log-lines.md#what-ends-a-process).

asyncio logs an exception that escapes from a callback and goes on with the next one.  The failed
callback may have left its work half done, so a role that goes on can answer its health checks
and serve nothing.
"""

import asyncio
import logging
import math
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from popmq.common.disk import NO_DESCRIPTORS, descriptor_limit

logger = logging.getLogger(__name__)

_ABOUT = ("handle", "task", "future", "protocol", "transport", "socket", "thread")
MAX_LOGGED = 20  # a failure that repeats until the process has ended does not fill the disk


def on_end_signal(then: Callable[[], object]) -> None:
    """Call `then` in the running loop at each signal that ends a process cleanly: Ctrl-C, SIGTERM,
    and SIGHUP of a closed terminal. Under `nohup` SIGHUP stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, then)


class UnhandledExceptions:
    """Handles what escapes on one event loop and on the threads of its process.

    `end` gets the first exception, on the loop, after it was logged with its traceback.
    """

    def __init__(self, end: Callable[[BaseException], None]) -> None:
        self._end = end
        self._tolerated: tuple[type[BaseException], ...] = (OSError,)
        self._failures = 0
        self._logged_s = -math.inf
        self._loop: asyncio.AbstractEventLoop

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.set_exception_handler(lambda loop, context: self.handle(context))
        threading.excepthook = self._on_thread

    def tolerate(self, *kinds: type[BaseException]) -> None:
        """A library leaves exceptions of these kinds in futures that it does not await."""
        self._tolerated += kinds

    def handle(self, context: Mapping[str, Any]) -> None:
        """A context of `loop.call_exception_handler`."""
        error: BaseException | None = context.get("exception")
        if error is None:  # such as "Task was destroyed but it is pending!", mostly at the end
            logger.error("the event loop reports", extra={"why": _shown(context)})
        elif isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
            self._log_no_descriptors(context)
        elif self._is_external(context, error):
            logger.warning("a connection failed", extra={"why": f"{_shown(context)}: {error!r}"})
        else:
            self._fail(context, error)

    def _log_no_descriptors(self, context: Mapping[str, Any]) -> None:
        """Once a second: asyncio reports it for every connection that waits to be accepted."""
        now_s = self._loop.time()
        if now_s - self._logged_s >= 1:
            self._logged_s = now_s
            logger.warning(
                "no descriptors are left, connections wait",
                extra={"why": _shown(context), "limit": descriptor_limit()},
            )

    def _is_external(self, context: Mapping[str, Any], error: BaseException) -> bool:
        """Whether a peer or the system is the cause, and only one connection is lost."""
        if "transport" in context or "socket" in context:
            return isinstance(error, OSError)  # asyncio closed it, or accepts again in a second
        if "task" in context:
            return False
        if "future" in context:  # of a connection; nothing of ours leaves a result unread
            return isinstance(error, self._tolerated)
        # grpcio's poller finds its wake-up socket read by another loop.
        return isinstance(error, BlockingIOError)

    def _fail(self, context: Mapping[str, Any], error: BaseException) -> None:
        self._failures += 1
        try:
            if self._failures <= MAX_LOGGED:
                why = _shown(context)
                logger.critical(
                    "an unhandled exception, stopping", exc_info=error, extra={"why": why}
                )
        finally:
            if self._failures == 1:
                self._end(error)

    def _on_thread(self, failure: threading.ExceptHookArgs) -> None:
        error = failure.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        context = {"message": "a thread failed", "thread": failure.thread}
        try:
            self._loop.call_soon_threadsafe(self._fail, context, error)
        except RuntimeError:  # the loop is closed: the process ends already
            logger.critical("a thread failed at the end", exc_info=error)


def _shown(context: Mapping[str, Any]) -> str:
    """The message and what it is about, such as a handle, a task or a transport."""
    about = (f"{name}={context[name]!r}" for name in _ABOUT if name in context)
    return "; ".join((context["message"], *about))


def report_unhandled(message: str, error: BaseException) -> None:
    """Treat `error`, which was caught, as one that nothing handled."""
    loop = asyncio.get_running_loop()
    loop.call_exception_handler({"message": message, "exception": error})


def report_if_failed(task: "asyncio.Task[Any]") -> None:
    """A done callback for a task that is kept and that nothing awaits while the role runs.

    Without it asyncio reports the task's exception only when the task is deleted.
    """
    error = None if task.cancelled() else task.exception()
    if error is not None:
        context = {"message": "a background task failed", "exception": error, "task": task}
        task.get_loop().call_exception_handler(context)
