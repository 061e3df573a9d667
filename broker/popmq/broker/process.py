"""The broker as a process: files, flusher thread, step loop, frames, registration."""

import asyncio
import fcntl
import logging
import os
import random
from collections.abc import Callable
from contextlib import suppress

from popmq.broker.broker import Broker
from popmq.broker.metrics import broker_metrics
from popmq.broker.server import BrokerServer
from popmq.common.clock import Clock, SystemClock
from popmq.common.config import Settings
from popmq.common.disk import Disk, RealDisk
from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.frame_port import FramePort, call
from popmq.common.frame_server import FrameServer
from popmq.common.frames import FrameSettings, Hello, Role
from popmq.common.hop import Kind, Port
from popmq.common.observe import Metric
from popmq.common.steps import FlusherThread, OwnFlusher, run_steps
from popmq.common.wire.controller_pb2 import BrokerAddress, RegisterReply, RegisterRequest

logger = logging.getLogger(__name__)

STEP_IDLE_MS = 5
QUIET_ROUNDS = 3  # some parts of a step look first and work in the next one


class DataLock:
    """One process per data directory: an flock on `<data>/lock`, which holds the pid."""

    def __init__(self, folder: str) -> None:
        path = f"{folder}/lock"
        try:
            os.makedirs(folder, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(
                f"data directory {folder} cannot be written: {error.strerror} (broker.data, --data)"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise ConfigError(
                f"data directory {folder} is used by process {owner}: stop it first, or name "
                "another directory (broker.data, --data)"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


class BrokerProcess:
    """A broker with its threads and sockets. `port` is what a proxy in this process calls.

    Tests may give it other files, another time, and another way to do blocking work; `waits`
    is what long polls wait on where that is not `clock`.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        waits: Clock | None = None,
        make_flusher: Callable[[asyncio.AbstractEventLoop, str], OwnFlusher] = FlusherThread,
    ) -> None:
        self._settings = settings
        self._disk = disk or RealDisk()
        in_files = isinstance(self._disk, RealDisk)
        self._lock = DataLock(settings.broker.data) if in_files else None
        self._clock = clock or SystemClock()
        self._waits = waits
        self._make_flusher = make_flusher
        self._flushers: list[OwnFlusher] = []
        self._frames: FrameServer | None = None
        self._steps: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[None]
        self.broker: Broker
        self.port: BrokerServer

    async def start(self) -> None:
        """Recover and serve; on return everything the log holds is confirmed."""
        loop = asyncio.get_running_loop()
        self.failed = loop.create_future()
        flusher, housekeeper, reader = self._flushers = [
            self._make_flusher(loop, name) for name in ("flusher", "housekeeper", "reader")
        ]
        self.broker = Broker(
            self._settings,
            disk=self._disk,
            clock=self._clock,
            waits=self._waits,
            flusher=flusher,
            housekeeper=housekeeper,
            rng=random.Random(int.from_bytes(os.urandom(16), "big")),
        )
        store = self.broker.store
        store.soon = loop.call_soon
        store.readers = reader
        store.on_failure = self._fail
        self.broker.start()
        self.port = BrokerServer(self.broker)
        await self._settled()
        logger.info(
            "recovered",
            extra={
                "records": store.metrics.recovered_records,
                "end_bytes": store.end,
                "torn_bytes": store.metrics.torn_bytes,
                "clean": store.stopped_cleanly,
                "epoch": store.epoch,
            },
        )
        self._steps = loop.create_task(run_steps(self.broker.step, idle_ms=STEP_IDLE_MS))
        self._steps.add_done_callback(self._steps_ended)

    async def listen(self, *addresses: str) -> list[str]:
        """Serve frames at the addresses; returns them with the ports that were taken."""
        hello = self._hello()
        self._frames = FrameServer(self.port, hello, settings=frame_settings(self._settings))
        return [await self._frames.listen(address) for address in addresses]

    async def register_in_process(self, controller: Port, address: str = "in-process") -> None:
        """Tell the controller of this process for ever that the broker is here.

        `address` is for proxies in other processes.
        """
        await self._beat(controller, self._registration(address))

    async def register(self, address: str) -> None:
        """Tell every controller for ever where this broker is; one that is away does no harm."""
        request = self._registration(address)
        ports = [
            FramePort(
                where,
                self._hello(),
                settings=frame_settings(self._settings),
                peer_name=f"controller {where}",
            )
            for where in self._settings.controller.addresses
        ]
        for port in ports:
            port.start()
        try:
            async with asyncio.TaskGroup() as group:
                for port in ports:
                    group.create_task(self._beat(port, request))
        finally:
            for port in ports:
                await port.close()

    async def stop(self) -> None:
        """Answer who waits, let the disk catch up, leave a clean store."""
        await self._stop_steps()
        if hasattr(self, "port") and not self.failed.done():
            self.broker.stop()
            await self._settled()
            if self._frames is not None:
                await self._frames.stop()
            await self._settled()
        for flusher in self._flushers:
            flusher.stop()
        if hasattr(self, "port") and not self.failed.done():
            self.broker.close()
        self._release_lock()

    async def kill(self) -> None:
        """End like a process that is killed: nothing is answered, written or closed properly."""
        await self._stop_steps()
        if self._frames is not None:
            await self._frames.stop()
        for flusher in self._flushers:
            flusher.stop()
        await asyncio.sleep(0)  # the news of their last work
        self.broker.release_files()
        self._release_lock()

    async def settle(self) -> None:
        """Return once nothing is left to do at this time: no step finds work, no thread has
        any, and everything is confirmed.  Raises what the disk failed with."""
        quiet = 0
        while quiet < QUIET_ROUNDS:
            done = self.broker.step()
            end = self.broker.store.end
            for flusher in self._flushers:
                await _emptied(flusher)
            await self._settled()
            quiet = 0 if done or self.broker.store.end != end else quiet + 1

    def metrics(self) -> list[Metric]:
        refused = [
            Metric("broker_refused", "Refusals by code.", count, labels={"code": str(code)})
            for code, count in self.port.refused_by_code.items()
        ]
        return [*broker_metrics(self.broker), *refused]

    def _hello(self) -> Hello:
        return Hello(
            role=Role.BROKER,
            name=self._settings.broker.name,
            cluster=self._settings.cluster.name,
            epoch=self.broker.store.epoch,
        )

    def _registration(self, address: str) -> bytes:
        return RegisterRequest(
            cluster=self._settings.cluster.name,
            broker=BrokerAddress(
                broker=self._settings.broker.name,
                address=address,
                epoch=self.broker.store.epoch,
                store_id=self.broker.registry.store_id,
            ),
        ).SerializeToString()

    async def _beat(self, port: Port, request: bytes) -> None:
        heartbeat_ms = self._settings.controller.heartbeat_ms
        refused: Code | None = None  # said once, not at every beat
        while True:
            try:
                reply = RegisterReply.FromString(await call(port, Kind.REGISTER, request, 2_000))
                heartbeat_ms = reply.heartbeat_ms or heartbeat_ms
                refused = None
            except PopmqError as error:
                away = error.code in (Code.HA_NOT_AVAILABLE, Code.PROXY_TIMEOUT)
                if not away and error.code is not refused:
                    logger.warning("registration refused", extra={"reason": str(error)})
                refused = None if away else error.code
            await asyncio.sleep(heartbeat_ms / 1000)

    async def _stop_steps(self) -> None:
        if self._steps is not None:
            self._steps.remove_done_callback(self._steps_ended)
            self._steps.cancel()
            with suppress(asyncio.CancelledError):
                await self._steps

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    async def _settled(self) -> None:
        """Wait until all that was appended is confirmed."""
        done = asyncio.Event()
        self.broker.when_confirmed(done.set)
        self.failed.add_done_callback(lambda _: done.set())
        await done.wait()
        if self.failed.done():
            self.failed.result()

    def _fail(self, error: BaseException) -> None:
        """The disk failed: nothing more can be promised, so the process has to end (D2)."""
        logger.critical("the disk failed, stopping", extra={"error": str(error)})
        if not self.failed.done():
            self.failed.set_exception(error)

    def _steps_ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("a broken invariant, stopping", exc_info=error)
            if not self.failed.done():
                self.failed.set_exception(error)


async def _emptied(flusher: OwnFlusher) -> None:
    """Wait until the flusher did what it was given, and said so."""
    emptied = asyncio.get_running_loop().create_future()
    flusher.submit(lambda: None, lambda error: emptied.set_result(None))
    await emptied


def frame_settings(settings: Settings) -> FrameSettings:
    return FrameSettings(
        max_frame_bytes=settings.frames.max_frame_bytes,
        max_buffered_bytes=settings.frames.max_buffered_bytes,
        max_in_flight=settings.frames.max_in_flight,
    )
