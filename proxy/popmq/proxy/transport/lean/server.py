"""The lean transport: a listener, its clients, and what only time tells.

Implements `seam.Transport`.  Callbacks only; no task per connection or call.
"""

import asyncio
import math
import random
from collections.abc import Callable, Iterable

from popmq.common.clock import Clock, SystemClock
from popmq.common.listener_close import stop_listening
from popmq.common.loop_iteration import LoopIteration
from popmq.common.settings.lean_settings import LeanSettings
from popmq.proxy.transport.interface import Method
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.certificates import Certificates
from popmq.proxy.transport.lean.client_socket import LINGER_S, ClientSocket
from popmq.proxy.transport.lean.connection import LeanConnection

TICK_S = 1.0
BACKLOG = 1_024
AGE_JITTER = 0.1
STOPS = "the server stops"


class LeanTransport:
    """Serves `methods` on host:port; implements `seam.Transport`.

    Plain text, and TLS where there are `certificates`; with `tls_only` nothing but TLS.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        host: str,
        port: int,
        *,
        limits: LeanSettings | None = None,
        clock: Clock | None = None,
        reuse_port: bool = False,
        certificates: Certificates | None = None,
        tls_only: bool = False,
        turn: LoopIteration | None = None,
    ) -> None:
        self.methods = {method.path: method for method in methods}
        self.limits = limits or LeanSettings()
        self.clock = clock or SystemClock()
        self.counters = LeanCounters()
        self.connections: set[ClientSocket] = set()
        self.stopping = False
        self.certificates = certificates
        self.tls_only = tls_only
        self.turn = turn or LoopIteration()
        self._chance = random.Random()
        self._host = host
        self._port = port
        self._reuse_port = reuse_port
        self._listener: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None

    async def start(self) -> int:
        """Raises RuntimeError when the address cannot be taken."""
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: ClientSocket(self, loop),
                self._host,
                self._port,
                backlog=BACKLOG,
                reuse_port=self._reuse_port or None,
            )
        except (OSError, OverflowError) as error:
            raise RuntimeError(f"cannot listen on {self._host}:{self._port}") from error
        self._ticking = loop.call_later(TICK_S, self._tick, loop)
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        if self._listener is None:
            return
        self.stopping = True
        await stop_listening(self._listener)
        self._emptied = asyncio.Event()
        await self._each(lambda core: core.retire(STOPS), grace_s / 2)
        await self._each(lambda core: core.drain(STOPS), grace_s / 2)
        for one in tuple(self.connections):
            one.cut()
        if self.connections:
            await self._wait(LINGER_S)
        if self._ticking is not None:
            self._ticking.cancel()
        await self._listener.wait_closed()
        self._listener = None

    def max_age_ms(self) -> int:
        """Of the next connection: not all that came together go together."""
        share = self._chance.uniform(1 - AGE_JITTER, 1 + AGE_JITTER)
        return math.ceil(self.limits.max_age_ms * share)

    def gone(self, one: "ClientSocket") -> None:
        self.connections.discard(one)
        self.counters.connections = len(self.connections)
        if self._emptied is not None and not self.connections:
            self._emptied.set()

    async def _each(self, end: Callable[[LeanConnection], None], limit_s: float) -> None:
        """Tell every connection, and wait until they are gone."""
        for one in tuple(self.connections):
            end(one.core)
            one.flush()
        if self.connections and limit_s > 0:
            await self._wait(limit_s)

    async def _wait(self, limit_s: float) -> None:
        assert self._emptied is not None
        try:
            async with asyncio.timeout(limit_s):
                await self._emptied.wait()
        except TimeoutError:
            return

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = loop.call_later(TICK_S, self._tick, loop)
        if self.certificates is not None:
            self.certificates.refresh()
        now_ms = self.clock.boot_ms()
        for one in tuple(self.connections):
            one.tick(now_ms)
