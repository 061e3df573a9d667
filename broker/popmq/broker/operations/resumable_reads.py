"""Long looks at the store, written as one piece of code and done in steps.

A generator yields each read as a function.  Whoever drives it calls the function, as often as it
raises ColdRead, and sends the result in; so nothing here waits, and one read is one step.
"""

from collections.abc import Callable, Generator
from typing import TypeVar, cast

from popmq.broker.store.message_store import MessageStore

T = TypeVar("T")
ResumableRead = Generator[Callable[[], object], object, T]


def read(look: Callable[[], T]) -> ResumableRead[T]:
    """`result = yield from read(...)`; `look` may be called again, so it changes nothing."""
    result = yield look
    return cast(T, result)  # the driver sends what `look` returned


class Unconfirmed(Exception):
    """What memory says is not in the queues yet: look again when it is confirmed."""


def confirmed(store: MessageStore) -> ResumableRead[None]:
    """Wait until everything that memory knows now can be read."""
    end = store.end

    def look() -> None:
        if store.confirmed < end:
            raise Unconfirmed

    yield from read(look)


class ResumableRunner:
    """Runs one generator; `step` is one read."""

    def __init__(self, steps: ResumableRead[bytes]) -> None:
        self._steps = steps
        self._look: Callable[[], object] | None = None

    def step(self) -> bytes | None:
        """What the generator returned, at its end.

        Raises ColdRead and Unconfirmed: call again when the bytes are there.
        """
        result = self._look() if self._look is not None else None
        try:
            self._look = self._steps.send(result)
        except StopIteration as end:
            reply: bytes = end.value
            return reply
        return None
