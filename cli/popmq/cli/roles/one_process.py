"""Controller, broker and proxy in one process: what `popmq up` and the test broker run."""

import asyncio
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path

from popmq.broker.node.broker_process import BrokerProcess
from popmq.common.clock import Clock
from popmq.common.observability import Readings
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.settings.settings import Settings
from popmq.common.unhandled import report_if_failed
from popmq.controller.process import ControllerProcess
from popmq.proxy.process import ProxyProcess

UP_DEFAULTS = {"store.segment_bytes": "64MiB", "topic.auto_create": True}


class OneProcess:
    """`start`, then `stop` or `kill`, once each. `beating` and `broker.failed` tell of trouble."""

    def __init__(
        self,
        settings: Settings,
        broker: BrokerProcess,
        *,
        proxy_clock: Clock | None = None,
        tls_folder: Path | None = None,
    ) -> None:
        self.broker = broker
        self.controller = ControllerProcess(settings)
        self.proxy = ProxyProcess(
            settings,
            [self.controller.port],
            lambda name, address: LocalPort(broker.port),
            clock=proxy_clock,
            tls_folder=tls_folder,
        )
        self.endpoint = ""
        self.controller_heartbeat: asyncio.Task[None]
        self._stack = AsyncExitStack()

    async def start(self, *frames: str) -> None:
        """Serve clients; also other processes that speak frames, at the addresses given."""
        async with AsyncExitStack() as stack:
            self.controller.start().add_done_callback(report_if_failed)
            stack.push_async_callback(self.controller.stop)
            stack.push_async_callback(self.broker.stop)
            await self.broker.start()
            await self.broker.listen(*frames)
            self.controller_heartbeat = asyncio.create_task(
                self.broker.register_in_process(self.controller.port)
            )
            stack.push_async_callback(self._stop_beating)
            stack.push_async_callback(self.proxy.stop)
            self.endpoint = await self.proxy.listen()
            await self.proxy.routed()
            stack.callback(self.broker.broker.stop)
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Answer who waits, and leave a clean store."""
        await self._stack.aclose()

    async def kill(self) -> None:
        """End as kill -9 would end it, as far as clients and the disk can tell."""
        self._stack.pop_all()
        await self.proxy.kill()
        await self._stop_beating()
        await self.broker.kill()
        await self.controller.stop()

    def metrics(self) -> Readings:
        return chain(self.controller.metrics(), self.broker.metrics(), self.proxy.metrics())

    async def _stop_beating(self) -> None:
        self.controller_heartbeat.cancel()
        await asyncio.gather(self.controller_heartbeat, return_exceptions=True)


class LocalPort:
    """The broker of this process as a proxy sees it; closing it closes nothing."""

    def __init__(self, port: Port) -> None:
        self._port = port

    @property
    def usable(self) -> bool:
        return True

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        return self._port.request(kind, body, timeout_ms, on_reply)

    def cancel(self, request_id: int) -> None:
        self._port.cancel(request_id)

    async def close(self) -> None:
        return
