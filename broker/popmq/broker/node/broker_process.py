"""The broker as a process: files, flusher thread, step loop, frames, registration.

What it decides with replicas is in broker_node.py; here are its threads, sockets and its end.
"""

import asyncio
import fcntl
import logging
import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from popmq.broker.core.broker import Broker
from popmq.broker.ha.role import BrokerRole as HaRole
from popmq.broker.node.broker_incarnation import RETRY_MS
from popmq.broker.node.broker_node import BrokerNode
from popmq.broker.node.metrics import broker_readings
from popmq.broker.node.pacing import BUSY_MS, Pacing
from popmq.broker.store.message_store import StoreThreads
from popmq.common.clock import Clock, SystemClock
from popmq.common.disk import Disk, RealDisk, is_shortage, no_room_text
from popmq.common.errors import ConfigError, PopmqError
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric, Readings
from popmq.common.protocol.frame_metrics import frame_metrics
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frame_server import FrameServer
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.settings.settings import Settings
from popmq.common.step_loop import FlusherThread, OwnFlusher, StepLoop, Work
from popmq.common.wire.controller_pb2 import FailoverRequest

logger = logging.getLogger(__name__)

QUIET_ROUNDS = 3  # some parts of a step look first and work in the next one
HAND_OVER_MS = 2_000  # a planned one, at a stop
# With replicas: orders, and what is told to others, wait for the next step too.
REPLICA_REST_MS = 25
SETTLE_MS = 2_000  # at a stop, for replicas to confirm what is on its way


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
        self._frame_settings = FrameSettings.of(settings)
        self._disk = disk or RealDisk()
        in_files = isinstance(self._disk, RealDisk)
        self._lock = DataLock(settings.broker.data) if in_files else None
        self._clock = clock or SystemClock()
        self._waits = waits
        self._make_flusher = make_flusher
        self._flushers: list[OwnFlusher] = []
        self._frames: FrameServer | None = None
        self._steps: asyncio.Task[None] | None = None
        self._peers: dict[str, FramePort] = {}  # other brokers of the group
        self._controllers: list[FramePort] = []
        self._started = False
        self._rest: Pacing | ReplicaPacing
        self.failed: asyncio.Future[None]
        self.node: BrokerNode

    @property
    def broker(self) -> Broker:
        """The one that runs now; with replicas another one after each change of roles."""
        return self.node.broker

    @property
    def port(self) -> Port:
        return self.node.port

    async def start(self) -> None:
        """Recover and serve; on return everything the log holds is confirmed."""
        loop = asyncio.get_running_loop()
        self.failed = loop.create_future()
        flusher, housekeeper, reader = self._flushers = [
            self._make_flusher(loop, name) for name in ("flusher", "housekeeper", "reader")
        ]
        steps = StepLoop(lambda: self.node.step(), lambda: self._rest.wait_ms(), idle_ms=BUSY_MS)

        def soon(work: Work) -> None:
            """A record was appended: what follows from it is not kept waiting."""
            loop.call_soon(work)
            steps.wake()

        threads = StoreThreads(flusher, housekeeper, reader, soon, self._disk_failed)
        while True:
            if self._begin(threads):
                break
            await asyncio.sleep(RETRY_MS / 1000)
        self._started = True
        store = self.broker.store
        if self.node.solo:
            self._rest = Pacing(self.broker, self._clock)
            await self._settled()
        else:
            self._rest = ReplicaPacing(self.node, self._clock)
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
        self._steps = loop.create_task(steps.run())
        self._steps.add_done_callback(self._steps_ended)

    def _begin(self, threads: StoreThreads) -> bool:
        """Recover; False while the machine of a replica has no room or descriptors for it. A broker
        alone raises the OSError: who started it reads why."""
        self.node = BrokerNode(
            self._settings,
            disk=self._disk,
            clock=self._clock,
            waits=self._waits,
            threads=threads,
            rng=random.SystemRandom(),  # keys and ids come from it
            open_port=self._peer,
            on_demoted=self._drop_clients,
        )
        try:
            self.node.start()
        except OSError as error:
            if not is_shortage(error) or self.node.solo:
                raise
            why = no_room_text(self._settings.broker.data, error.errno or 0)
            extra = {"error": str(error), "why": why}
            logger.error("not started, tried again each second", extra=extra)
            self.node.release_files()
            return False
        return True

    async def listen(self, *addresses: str) -> list[str]:
        """Serve frames at the addresses; returns them with the ports that were taken."""
        hello = self._hello()
        self._frames = FrameServer(
            self.port, hello, settings=self._frame_settings, on_lost=self._peer_lost
        )
        return [await self._frames.listen(address) for address in addresses]

    async def register_in_process(self, controller: Port, address: str = "in-process") -> None:
        """Tell the controller of this process for ever that the broker is here.

        `address` is for proxies in other processes.
        """
        self.node.address = address
        self.node.controllers.add_ports([controller])
        await asyncio.get_running_loop().create_future()  # until this task is cancelled

    async def register(self, address: str) -> None:
        """Tell every controller for ever where this broker is; one that is away does no harm.

        With replicas they tell it what it is to be, in return.
        """
        self.node.address = address
        ports = [
            FramePort(
                where,
                self._hello(),
                settings=self._frame_settings,
                peer_name=f"controller {where}",
                critical_replies=True,
            )
            for where in self._settings.controller.addresses
        ]
        for port in ports:
            port.start()
        self._controllers = ports
        try:
            self.node.controllers.add_ports(ports)
            await asyncio.get_running_loop().create_future()  # until this task is cancelled
        finally:
            for port in ports:
                await port.close()

    async def stop(self) -> None:
        """Answer who waits, let the disk catch up, leave a clean store."""
        well = self._started and not self.failed.done()
        if well and not self.node.solo and self.node.role is HaRole.MASTER:
            await _hand_over(self._settings, self._controllers)
        await self._stop_steps()
        if well:
            self.node.stop()
            await self._settled(SETTLE_MS)
            if self._frames is not None:
                await self._frames.stop()
            await self._settled(SETTLE_MS)
        for port in self._peers.values():
            await port.close()
        for flusher in self._flushers:
            flusher.stop()
        await asyncio.sleep(0)  # the news of their last work
        if well and not self.failed.done():
            self._close()
        if self._lock is not None:
            self._lock.release()

    def _close(self) -> None:
        """Everything that was answered is in the log: a full disk takes only time from the next
        start, which reads the log as after a crash."""
        try:
            self.node.close()
        except OSError as error:
            if not is_shortage(error):
                raise
            why = no_room_text(self._settings.broker.data, error.errno or 0)
            extra = {"error": str(error), "why": why}
            logger.warning("stopped without a last snapshot", extra=extra)
            self.node.release_files()

    def fail(self, error: BaseException) -> None:
        """Nothing more can be promised, so the process has to end (D2): `stop` leaves the store
        as a crash would."""
        failed: asyncio.Future[None] | None = getattr(self, "failed", None)  # None before `start`
        if failed is not None and not failed.done():
            failed.set_exception(error)
            failed.exception()  # it was logged: asyncio need not report it

    async def kill(self) -> None:
        """End like a process that is killed: nothing is answered, written or closed properly."""
        await self._stop_steps()
        if self._frames is not None:
            await self._frames.stop()
        for port in self._peers.values():
            await port.close()
        for flusher in self._flushers:
            flusher.stop()
        await asyncio.sleep(0)  # the news of their last work
        self.node.release_files()
        if self._lock is not None:
            self._lock.release()

    async def settle(self) -> None:
        """Return once nothing is left to do at this time: no step finds work, no thread has
        any, and everything is confirmed.  Raises what the disk failed with."""
        quiet = 0
        while quiet < QUIET_ROUNDS:
            done = self.node.step()
            end = self.broker.store.end
            for flusher in self._flushers:
                await _emptied(flusher)
            await self._settled()
            quiet = 0 if done or self.broker.store.end != end else quiet + 1

    def metrics(self) -> Readings:
        refused = [
            reading("broker_refused", count, str(code))
            for code, count in self.node.refused_by_code.items()
        ]
        frames = frame_metrics(self._frames, ProcessRole.BROKER) if self._frames is not None else []
        yield from broker_readings(self.broker)
        yield from (*refused, *replication_metrics(self.node), *frames)

    def _hello(self) -> Hello:
        return Hello(
            role=ProcessRole.BROKER,
            name=self._settings.node,
            cluster=self._settings.cluster.name,
            group=self._settings.broker.name,
            epoch=self.node.identity.epoch,
        )

    def _peer(self, address: str) -> FramePort:
        """The way to another broker of the group; one for each address, for good."""
        frame_port = self._peers.get(address)
        if frame_port is None:
            frame_port = self._peers[address] = FramePort(
                address,
                self._hello(),
                settings=self._frame_settings,
                peer_name=f"broker {address}",
                critical_replies=True,
            )
            frame_port.start()
        return frame_port

    def _peer_lost(self, peer: Hello, answered: Sequence[int]) -> None:
        """A slave that was killed says nothing more: its master need not wait for long."""
        self.node.answers_lost(answered)
        leadership = self.node.master_role
        if leadership is not None and peer.role is ProcessRole.BROKER:
            leadership.replication_server.lost(peer.name)

    def _drop_clients(self) -> None:
        """This broker is not the master any more: what its clients wait for never comes."""
        if self._frames is None:
            return
        for connection in list(self._frames.connections):
            peer = connection.peer
            if peer is not None and peer.role in (ProcessRole.PROXY, ProcessRole.TOOL):
                connection.close("this broker is not the master any more")

    async def _stop_steps(self) -> None:
        if self._steps is not None:
            self._steps.remove_done_callback(self._steps_ended)
            self._steps.cancel()
            with suppress(asyncio.CancelledError):
                await self._steps

    async def _settled(self, limit_ms: int = 0) -> None:
        """Wait until all that was appended is confirmed; not for ever where that takes others, or
        with `limit_ms`, as at a stop: a disk without room may never take it."""
        if not self.node.is_serving:
            return
        done = asyncio.Event()
        self.broker.buffer.when_acks_confirmed(done.set)
        self.failed.add_done_callback(lambda _: done.set())
        with suppress(TimeoutError):
            limit_ms = limit_ms or (0 if self.node.solo else SETTLE_MS)
            async with asyncio.timeout(limit_ms / 1000 if limit_ms else None):
                await done.wait()
        if self.failed.done():
            self.failed.result()

    def _disk_failed(self, error: BaseException) -> None:
        logger.critical("the disk failed, stopping", extra={"error": str(error)})
        self.fail(error)

    def _steps_ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("a broken invariant, stopping", exc_info=error)
            self.fail(error)


async def _hand_over(settings: Settings, controllers: list[FramePort]) -> None:
    """A master that stops lets another take over first: clients wait for a moment only."""
    request = FailoverRequest(
        cluster=settings.cluster.name, group=settings.broker.name
    ).SerializeToString()
    for port in controllers:
        try:
            await call(port, Kind.FAILOVER, request, HAND_OVER_MS)
        except PopmqError as refusal:
            logger.info("not handed over", extra={"reason": str(refusal)})
        else:
            return


async def _emptied(flusher: OwnFlusher) -> None:
    """Wait until the flusher did what it was given, and said so."""
    emptied = asyncio.get_running_loop().create_future()
    flusher.submit(lambda: None, lambda error: emptied.set_result(None))
    await emptied


class ReplicaPacing:
    """The same for a broker of several; while its role changes, or it copies, it does not rest."""

    def __init__(self, node: BrokerNode, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._broker: Broker | None = None
        self._rest: Pacing

    def wait_ms(self) -> int:
        node = self._node
        if node.changing or node.role not in (HaRole.MASTER, HaRole.SLAVE):
            return BUSY_MS
        broker = node.broker
        if broker is not self._broker:  # another one after each change of roles
            self._broker, self._rest = broker, Pacing(broker, self._clock)
        slave = broker.store.slave
        if slave is not None and slave.applied < broker.store.confirmed:
            return BUSY_MS
        return min(self._rest.wait_ms(), REPLICA_REST_MS)


def replication_metrics(node: BrokerNode) -> Iterable[Metric]:
    """Plain numbers, read at each scrape; a broker alone has only its role and epoch."""
    status = node.status()
    for role in HaRole:
        yield reading("replication_role", role is status.role, role.name)
    yield reading("replication_epoch", status.epoch)
    if node.solo:
        return
    settings = node.settings.replication
    yield reading("replication_in_sync_replicas", len(status.members))
    yield reading("replication_min_in_sync_replicas", settings.effective_min_in_sync)
    yield reading("replication_confirmed_bytes", status.confirmed)
    yield reading("replication_lag_bytes", status.lag_bytes)
    for slave in status.slaves:
        lag = max(0, status.end - slave.acked)
        yield reading("replication_slave_lag_bytes", lag, slave.node)
    yield reading("replication_elections", node.elections)
    yield reading("replication_truncations", node.slave_role.truncations)
    yield reading("replication_truncated_bytes", node.slave_role.truncated_bytes)
    tables = node.slave_role.tables
    yield reading("store_rebuilds", node.rebuilds)
    yield reading("replication_diverged", tables.diverged)
    yield reading("replication_differs", tables.differs)
    yield reading("replication_copying", status.role is HaRole.COPYING)
    yield reading("replication_copied_percent", node.slave_role.copying.percent)
    yield reading("replication_copying_bytes", node.slave_role.copying.position)
    if status.timers is not None:
        age_ms = max(0, status.now_ms - status.timers.taken_ms)
        yield reading("timer_checkpoint_age_seconds", age_ms / 1000)
