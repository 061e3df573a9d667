"""Which signals end a process cleanly."""

import asyncio
import os
import signal

import pytest

from popmq.common.unhandled import on_end_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_of_them_ends_the_process(number: signal.Signals) -> None:
    async def live() -> None:
        ended = asyncio.Event()
        on_end_signal(ended.set)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(live())


def test_a_closed_terminal_does_not_end_what_nohup_started() -> None:
    async def live() -> None:
        on_end_signal(lambda: None)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(live())
    finally:
        signal.signal(signal.SIGHUP, before)
