"""How often the asking end looks for requests whose time is over."""

import asyncio
from collections.abc import Callable

import pytest
from common.frame_peers import LONG_MS, Handler, asking, serving

from popmq.common.errors import DeadlineExceeded
from popmq.common.protocol.frame_port import QUIET_SWEEP_MS, SWEEP_MS, call
from popmq.common.protocol.messaging_payloads import Kind


async def test_a_port_with_nothing_pending_has_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    call_later, started = loop.call_later, []

    def noting(delay: float, callback: Callable[..., object], *args: object) -> object:
        started.append(callback)
        return call_later(delay, callback, *args)

    async with serving(Handler()) as bound, asking(bound) as port:
        monkeypatch.setattr(loop, "call_later", noting)
        await call(port, Kind.PUT, b"", LONG_MS)
        # A timer that is due later runs later, however slow the machine is.
        swept = asyncio.Event()
        call_later(3 * SWEEP_MS / 1000, swept.set)
        await swept.wait()
        assert started.count(port._sweep) == 1


async def test_a_port_that_only_waits_looks_rarely_until_it_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    waits: list[float] = []
    rare = asyncio.Event()

    def noting(delay: float, callback: Callable[..., object], *args: object) -> object:
        if getattr(callback, "__name__", "") == "_sweep":
            waits.append(delay * 1000)
            if delay * 1000 > SWEEP_MS:
                rare.set()
        return call_later(delay, callback, *args)

    handler = Handler()
    async with serving(handler) as bound, asking(bound) as port:
        monkeypatch.setattr(loop, "call_later", noting)
        waiting = asyncio.create_task(call(port, Kind.POP, b"", LONG_MS))
        await rare.wait()
        assert waits == [SWEEP_MS, SWEEP_MS, QUIET_SWEEP_MS]
        ended: asyncio.Future[object] = loop.create_future()
        port.request(Kind.POP, b"", 2 * SWEEP_MS, ended.set_result)
        assert waits[3:] == [SWEEP_MS]  # not with the rare look
        assert isinstance(await ended, DeadlineExceeded)
        waiting.cancel()
