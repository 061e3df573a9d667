"""The controller as a process: frames, the metadata store's threads, and the step loop."""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from popmq.common.clock import Clock, SystemClock
from popmq.common.errors import ConfigError
from popmq.common.observability import Metric
from popmq.common.protocol.frame_metrics import frame_metrics
from popmq.common.protocol.frame_port import FramePort
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.settings.settings import Settings
from popmq.common.step_loop import StepLoop
from popmq.controller.controller import Controller, ControllerTimeouts
from popmq.controller.file_store import FileStore
from popmq.controller.metadata_store import (
    BlockingStore,
    MemoryStore,
    MetadataStore,
    MetadataStoreUnavailable,
    OnRead,
    OnSwapped,
    WriteOutcome,
    WriteResult,
)

logger = logging.getLogger(__name__)

STEPS_OF_SILENCE = 40  # so often is it looked whether a broker that is silent is dead by now
STEP_IDLE_MS = 50
STORE_TIMEOUT_S = 10.0
STORE_THREADS = 4

T = TypeVar("T")


class ControllerProcess:
    """`port` is what a broker or a proxy in this process calls."""

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._hello = Hello(
            role=ProcessRole.CONTROLLER, name="controller", cluster=settings.cluster.name
        )
        self._frame_settings = FrameSettings.of(settings)
        self._closing: set[asyncio.Task[None]] = set()
        self._store = make_store(settings)
        times = settings.controller
        self.port = Controller(
            settings.cluster.name,
            self._store,
            self._clock,
            self._open_peer,
            times=ControllerTimeouts(times.heartbeat_ms, times.dead_after_ms),
            first_version=1 + secrets.randbits(48),
            on_request=lambda: self._loop.wake(),
            settings=settings,
        )
        self._loop = StepLoop(
            lambda: self.port.step(self._clock.boot_ms()),
            lambda: self.port.wait_ms(self._clock.boot_ms()),
            idle_ms=max(1, min(STEP_IDLE_MS, times.dead_after_ms // STEPS_OF_SILENCE)),
        )
        self._frames = FrameServer(self.port, self._hello, settings=self._frame_settings)
        self._steps: asyncio.Task[None] | None = None

    def start(self) -> "asyncio.Task[None]":
        """Elect, and end long polls, from now on; the task ends only with a fault."""
        self._steps = asyncio.get_running_loop().create_task(self._loop.run())
        return self._steps

    async def listen(self, address: str = "") -> str:
        """Serve frames at `address`, or where the settings say; returns it with its port."""
        return await self._frames.listen(address or self._settings.controller.listen)

    async def stop(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
            with suppress(asyncio.CancelledError):
                await self._steps
        self.port.stop()
        await self._frames.stop()
        if self._closing:
            await asyncio.wait(self._closing)
        if isinstance(self._store, ThreadedStore):
            self._store.stop()

    def metrics(self) -> list[Metric]:
        return [*self.port.metrics(), *frame_metrics(self._frames, ProcessRole.CONTROLLER)]

    def _open_peer(self, address: str) -> "_Peer":
        port = FramePort(
            address,
            self._hello,
            settings=self._frame_settings,
            peer_name="the broker",
            critical_replies=True,
        )
        port.start()
        return _Peer(port, self._closing)


class _Peer:
    """A connection for one question."""

    def __init__(self, port: FramePort, closing: "set[asyncio.Task[None]]") -> None:
        self._port = port
        self._closing = closing

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        return self._port.request(kind, body, timeout_ms, on_reply)

    def cancel(self, request_id: int) -> None:
        self._port.cancel(request_id)

    def close(self) -> None:
        task = asyncio.get_running_loop().create_task(self._port.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def make_store(settings: Settings) -> MetadataStore:
    """The store that `controller.store` names. Raises ConfigError when it cannot be used."""
    requested = settings.controller
    match requested.store:
        case "file":
            return ThreadedStore(FileStore(requested.data))
        case "kubernetes":
            # Only here: every start would pay for the official client, which is of an extra.
            try:
                from popmq.controller.lease_store import ApiServer, LeaseStore
            except ImportError as error:
                raise ConfigError(
                    f"controller.store = kubernetes needs {error.name}: "
                    "pip install 'popmq[kubernetes]'"
                ) from error

            server = ApiServer.of_pod(os.environ, requested.namespace)
            return ThreadedStore(LeaseStore(server, settings.cluster.name))
    return MemoryStore()


class ThreadedStore:
    """A blocking store on threads of its own; one that hangs is answered for as UNKNOWN."""

    def __init__(self, store: BlockingStore, *, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(STORE_THREADS, "metadata-store")

    def read(self, key: str, then: OnRead) -> None:
        def work() -> GroupRecord | MetadataStoreUnavailable | None:
            try:
                return self._store.read(key)
            except MetadataStoreUnavailable as error:
                return error

        self._run(work, then, lambda why: MetadataStoreUnavailable(why))

    def swap(self, key: str, expected_version: int, record: GroupRecord, then: OnSwapped) -> None:
        self._run(
            lambda: self._store.swap(key, expected_version, record),
            then,
            lambda why: WriteResult(WriteOutcome.UNKNOWN, None, why),
        )

    def stop(self) -> None:
        """What hangs is left to hang."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(
        self, work: Callable[[], T], then: Callable[[T], None], lost: Callable[[str], T]
    ) -> None:
        """`then` is called once, on the loop, in time."""
        loop = asyncio.get_running_loop()
        answered = False

        def end(answer: T) -> None:
            nonlocal answered
            if not answered:
                answered = True
                timer.cancel()
                then(answer)

        def done() -> None:
            try:
                answer = work()
            except Exception as error:  # of the store, not of the record: the loop goes on
                logger.exception("the metadata store failed")
                answer = lost(f"the metadata store failed: {error}")
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(end, answer)

        why = f"the metadata store did not answer within {self._timeout_s:g} s"
        timer = loop.call_later(self._timeout_s, lambda: end(lost(why)))
        self._threads.submit(done)
