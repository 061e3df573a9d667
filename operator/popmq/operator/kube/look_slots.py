"""How many looks at clusters ask the API server at once.

A look that waits for an answer of its cluster holds no slot meanwhile: clusters that hang cost the
others nothing.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

_HELD: ContextVar[asyncio.Semaphore | None] = ContextVar("held", default=None)


@asynccontextmanager
async def look_slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    async with slots:
        token = _HELD.set(slots)
        try:
            yield
        finally:
            _HELD.reset(token)


@asynccontextmanager
async def outside_slot() -> AsyncIterator[None]:
    """Around a wait for a cluster: without the slot that this task holds, if it holds one."""
    slots = _HELD.get()
    if slots is None:
        yield
        return
    slots.release()
    try:
        yield
    finally:
        await slots.acquire()
