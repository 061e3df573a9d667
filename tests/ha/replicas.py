"""Stores that replicate without brokers and without a network: time and messages move by hand.

Everything that would take time (a request, a reply, a write) is a call in one queue; a test lets
them happen with `settle`, or takes some of them away.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from popmq.broker.ha.catch_up_progress import CatchUpProgress
from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.identity import Identity
from popmq.broker.ha.replication_client import ReplicationClient
from popmq.broker.ha.replication_server import ReplicationServer
from popmq.broker.ha.snapshot_download import SnapshotDownload
from popmq.broker.ha.snapshot_source import SnapshotSource
from popmq.broker.ha.sync_state import AlterSyncStateSet, SyncState
from popmq.broker.persistence.epoch_start import EpochStart
from popmq.broker.persistence.snapshot_install import SnapshotInstall
from popmq.broker.persistence.state_hashes import Compared
from popmq.broker.store.message_store import MessageStore, StoreThreads
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import replication_payloads as replication
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.protocol.replication_payloads import EpochEntry, MasterTimers, TablesMark
from popmq.common.record.message import RecordKind
from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import (
    BrokerSettings,
    Settings,
    StoreSettings,
    TimerSettings,
)
from popmq.common.step_loop import Done, Work
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.clock import ManualClock

Calls = deque[Callable[[], None]]
STORE = StoreSettings(segment_bytes=16 << 10, snapshot_bytes=1 << 40)
SETTINGS = ReplicationSettings(replicas=3, fetch_bytes=4 << 10, laggard_ms=1_500)


class HeldFlusher:
    """A flusher that can be made to wait, as a slow disk does."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.held = False
        self._waiting: list[tuple[Work, Done]] = []

    def submit(self, work: Work, done: Done) -> None:
        self._waiting.append((work, done))
        if not self.held:
            self.release()

    def release(self) -> None:
        self.held = False
        waiting, self._waiting = self._waiting, []
        for work, done in waiting:
            self._calls.append(lambda work=work, done=done: _run(work, done))  # type: ignore[misc]


def _run(work: Work, done: Done) -> None:
    try:
        work()
    except OSError as error:
        done(error)
    else:
        done(None)


@dataclass
class DirectPort:
    """A way from a slave to a master; `held` keeps replies back, `cut` loses everything."""

    calls: Calls
    target: ReplicationServer
    cut: bool = False
    held: bool = False
    kept: list[Callable[[], None]] = field(default_factory=list)
    asked: list[tuple[Kind, bytes]] = field(default_factory=list)
    _last: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self._last += 1
        number = self._last
        self.asked.append((kind, body))

        def reply(answer: bytes | PopmqError) -> None:
            if self.held:
                self.kept.append(lambda: on_reply(answer))
            elif not self.cut:
                self.calls.append(lambda: on_reply(answer))

        def arrive() -> None:
            if not self.cut:
                self._numbers[number] = self.target.request(kind, body, timeout_ms, reply)

        self.calls.append(arrive)
        return number

    def cancel(self, request_id: int) -> None:
        if request_id in self._numbers and not self.cut:
            self.target.cancel(self._numbers[request_id])

    def deliver_kept(self) -> None:
        kept, self.kept, self.held = self.kept, [], False
        for item in kept:
            item()


class Replica:
    """A log with its identity and epochs, as master or slave of one epoch at a time."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.disk = LyingDisk()
        self.lives = 0
        self.side: ReplicationServer | None = None
        self.slave: ReplicationClient | None = None
        self.port: DirectPort | None = None
        self.rebuilds: list[str] = []
        self.broken: list[BaseException] = []
        self.alters: list[AlterSyncStateSet] = []
        self.reachable = True
        self.copying = CatchUpProgress(16 << 10)
        self.tables_mark = TablesMark.EQUAL
        self.timers: list[MasterTimers] = []
        self.boot()

    def boot(self) -> None:
        """Begin on what the disk holds."""
        self.lives += 1
        self.side = self.slave = None
        self.flusher = HeldFlusher(self.world.calls)
        self.store = MessageStore(
            self.disk,
            "data",
            STORE,
            self.world.clock,
            StoreThreads.of_one(self.flusher, self.world.calls.append),
            node=self,
        )
        self.store.open()
        self.store.follow(lambda record: None)
        rng = random.Random(f"{self.name} {self.lives}")
        self.identity = Identity(self.disk, "data/identity", rng, cluster=ClusterSettings())
        self.epochs = EpochFile(self.disk, "data/epochs")
        self.epochs.cut_suffix(self.store.end)

    def lead(
        self, epoch: int, *members: "Replica", least: int = 1, version: int = 1
    ) -> ReplicationServer:
        """Be the master from here on; who was one begins on its disk again first."""
        if self.side is not None:
            self.world.settle()
            self.boot()
        self.world.settle()
        self.identity.accept(epoch)
        self.slave = None
        start = self.store.end
        self.epochs.append(epoch, start)
        sync = SyncState(
            self.id,
            epoch=epoch,
            epoch_start=start,
            members={self.id, *(member.id for member in members)},
            version=version,
            min_in_sync=least,
            confirmed=self.store.confirmed,
        )
        self.side = ReplicationServer(
            self.store,
            sync,
            self.epochs,
            SnapshotSource(self.disk, "data", self.flusher),
            self.world.settings,
            self,
            controllers=self,
            now_ms=self.world.clock.boot_ms,
            rng=random.Random(epoch),
        )
        self.store.lead(epoch, EpochStart().encode())
        self.side.durable(self.store.durable)
        return self.side

    def follow(self, master: "Replica", *, members: tuple["Replica", ...] = ()) -> DirectPort:
        assert master.side is not None
        if self.side is not None:
            self.world.settle()
            self.boot()
        self.identity.accept(master.side.sync.epoch)
        if self.slave is not None:
            self.slave.stop()
        self.port = DirectPort(self.world.calls, master.side)
        self.copying = CatchUpProgress(16 << 10)
        self.slave = ReplicationClient(
            self.store,
            self.identity,
            self.epochs,
            self.port,
            Settings(
                broker=BrokerSettings(node=self.name),
                timer=TimerSettings(checkpoint_sync_ms=3_000),
                replication=self.world.settings,
            ),
            self,
            members=frozenset(member.id for member in members),
            now_ms=self.world.clock.boot_ms,
            snapshot=SnapshotDownload(_no_install),
        )
        self.slave.step()
        return self.port

    @property
    def log_id(self) -> str:
        return "the-log" if self.store.end else ""

    def timer_check_point(self) -> MasterTimers:
        return MasterTimers(self.identity.epoch, 111, 222, 333)

    def alter(self, alter: AlterSyncStateSet) -> None:
        self.alters.append(alter)

    def on_useless_log(self, reason: str) -> None:
        self.rebuilds.append(reason)

    def on_broken(self, broken: BaseException) -> None:
        self.broken.append(broken)

    def on_timers(self, timers: MasterTimers) -> None:
        self.timers.append(timers)

    @property
    def id(self) -> str:
        return self.identity.store_id

    @property
    def entries(self) -> list[EpochEntry]:
        return self.epochs.entries

    def append(self, count: int = 1, size: int = 100) -> int:
        for _ in range(count):
            body = random.Random(self.store.end).randbytes(size)
            self.store.put_record(RecordKind.META, topic_id=0, queue_id=0, body=body)
        return self.store.end

    def crash(self) -> None:
        """The power goes: what was not synced is lost."""
        self.world.calls.clear()
        self.disk.restore_power()
        self.boot()

    def log(self) -> bytes:
        start, end = self.store.start, self.store.end
        names = [name for name in self.disk.names("data/commitlog") if name.isdigit()]
        whole = b""
        for name in names:
            file = self.disk.open(f"data/commitlog/{name}")
            whole += file.read(file.size(), 0)
        return whole[: end - start]

    def open_epoch(self, epoch: int, position: int) -> int:
        return epoch

    def epoch_starts(self) -> Sequence[int]:
        return ()

    def on_tail_lost(self, position: int, proof: int) -> None:
        return

    def on_tables_compared(self, compared: Compared) -> None:
        return

    def on_batch(self) -> None:
        if self.side is not None:
            self.side.grown()

    def on_durable(self, position: int) -> None:
        if self.side is not None:
            self.side.durable(position)
        elif self.slave is not None:
            self.slave.durable(position)


class World:
    def __init__(self, names: str = "abc", settings: ReplicationSettings = SETTINGS) -> None:
        self.calls: Calls = deque()
        self.clock = ManualClock()
        self.settings = settings
        self.replicas = [Replica(self, name) for name in names]

    def settle(self, limit: int = 100_000) -> None:
        """Let everything happen that needs no time."""
        while self.calls:
            self.calls.popleft()()
            limit -= 1
            assert limit, "it never comes to rest"

    def advance(self, ms: int, step_ms: int = 10) -> None:
        for _ in range(ms // step_ms):
            self.clock.advance(step_ms)
            self.step()

    def step(self) -> None:
        for replica in self.replicas:
            if replica.side is not None:
                replica.side.step()
            if replica.slave is not None:
                replica.slave.step()
            self.settle()


def trio(*, follows: bool = False) -> tuple[World, Replica, Replica, Replica]:
    """With `follows`, the first leads epoch 1 and the others follow it."""
    world = World()
    a, b, c = world.replicas
    if follows:
        _follow(world, a, b, c)
    return world, a, b, c


def pair(*, follows: bool = False) -> tuple[World, Replica, Replica]:
    world = World("ab")
    a, b = world.replicas
    if follows:
        _follow(world, a, b)
    return world, a, b


def _follow(world: World, master: Replica, *slaves: Replica) -> None:
    master.lead(1, *slaves)
    for slave in slaves:
        slave.follow(master)
    world.settle()


def ask(world: World, to: Replica, kind: Kind, body: bytes) -> bytes | PopmqError:
    answers: list[bytes | PopmqError] = []
    assert to.side is not None
    to.side.request(kind, body, 1_000, answers.append)
    world.settle()
    (answer,) = answers
    return answer


def hello_to(
    master: Replica,
    epoch: int,
    store_id: str,
    node: str,
    log_id: str,
    end: int,
    *,
    segment_bytes: int = 0,
) -> bytes:
    """A HANDSHAKE, with segments as large as the master's unless they are to be others."""
    size = segment_bytes or master.store.replicas.segment_bytes
    return replication.encode_handshake(
        replication.Handshake(epoch, store_id, node, log_id, end, size)
    )


def refusal(answer: bytes | PopmqError) -> Code:
    assert isinstance(answer, PopmqError)
    return answer.code


def _no_install(start: int) -> SnapshotInstall:
    raise AssertionError("stores of these tests begin with the log")
