"""Long reads of the store, written as one piece of code and done in steps.

A generator yields what it waits for: a ColdRead until the bytes are in memory, Unconfirmed until
what memory knows is confirmed, None until the loop has done other work.  Whoever runs it resumes
it then, so nothing here waits.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

from popmq.broker.store.message_store import MessageStore
from popmq.common.disk import ColdRead

T = TypeVar("T")


class Unconfirmed(Exception):
    """What memory says is not in the queues yet: look again when it is confirmed."""


ResumableRead = Generator[ColdRead | Unconfirmed | None, None, T]


def read(look: Callable[[], T]) -> ResumableRead[T]:
    """`result = yield from read(...)` in the next step, so that one read is one step."""
    yield None
    return (yield from read_now(look))


def read_now(look: Callable[[], T]) -> ResumableRead[T]:
    """The result of `look`, which is called again after ColdRead and Unconfirmed: a call that
    raises them must have changed nothing that counts."""
    while True:
        missing: ColdRead | Unconfirmed
        try:
            return look()
        except (ColdRead, Unconfirmed) as error:
            missing = error
        yield missing


def confirmed(store: MessageStore) -> ResumableRead[None]:
    """Wait until everything that memory knows now can be read."""
    end = store.end

    def look() -> None:
        if store.confirmed < end:
            raise Unconfirmed

    yield from read(look)
