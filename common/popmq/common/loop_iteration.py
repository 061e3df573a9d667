"""The end of a turn of the event loop: what many callbacks of one turn leave to be done once.

A turn is everything that one look at the sockets found.  Work that may wait until all of it was
seen (one write instead of many, one frame instead of many) is left here; what such work leaves
in its turn is done in the same pass, so that a message crosses the process in one turn.
"""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

CallSoon = Callable[[Callable[[], None]], None]


class LoopIteration:
    """One for all that work together on one loop."""

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call it once behind the callbacks of this turn, in the order of asking."""
        if not self._callbacks:
            asyncio.get_running_loop().call_soon(self._run)
        self._callbacks.append(callback)

    def _run(self) -> None:
        callbacks = self._callbacks
        for callback in callbacks:  # those that are added meanwhile are met too
            try:
                callback()
            except Exception:
                logger.exception("the end of a turn failed")
        callbacks.clear()


def at_once(callback: Callable[[], None]) -> None:
    """A `CallSoon` for those who have no loop: nothing is gathered."""
    callback()
