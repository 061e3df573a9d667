"""A broker group with a controller, all in one process: time, messages and disks move by hand.

Connections break when a node dies: who waits for its answer hears so, and whom it asked too.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from ha.replicas import HeldFlusher

from popmq.broker.ha.role import BrokerRole
from popmq.broker.node.broker_node import BrokerNode
from popmq.broker.store.message_store import StoreThreads
from popmq.common.errors import DeadlineExceeded, PopmqError, Unavailable
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig
from popmq.controller.controller import Controller, ControllerTimeouts
from popmq.controller.metadata_store import MemoryStore
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.clock import MachineClock, ManualClock
from popmq.testing.harness.core_broker import SMALL, Answer, pop

CONTROLLER = "controller:1"
GROUP = "group-a"
TOPIC = "orders"


@dataclass(eq=False)
class Asked:
    """A request on its way, or being served."""

    source: str
    target: str
    due_ms: int
    on_reply: OnReply
    number: int = -1  # at the target
    over: bool = False

    def answer(self, reply: bytes | PopmqError) -> None:
        if not self.over:
            self.over = True
            self.on_reply(reply)


class Wire:
    """From one place of the rig to another."""

    def __init__(self, rig: "Rig", source: str, target: str) -> None:
        self._rig = rig
        self._source = source
        self._target = target
        self._asked: dict[int, Asked] = {}

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        rig = self._rig
        due_ms = rig.clock.boot_ms() + timeout_ms
        asked = Asked(self._source, self._target, due_ms, on_reply)
        number = len(self._asked) + 1
        self._asked[number] = asked
        rig.asked.append(asked)

        def reply(answer: bytes | PopmqError) -> None:
            if not rig.is_cut(self._target, self._source):
                rig.post(self._source, lambda: asked.answer(answer))

        def arrive() -> None:
            port = rig.port_of(self._target)
            if port is None:
                refused = Unavailable(f"{self._target} is not there")
                rig.post(self._source, lambda: asked.answer(refused))
            elif not asked.over:
                asked.number = port.request(kind, body, timeout_ms, reply)

        if not rig.is_cut(self._source, self._target):
            rig.calls.append(arrive)
        return number

    def cancel(self, request_id: int) -> None:
        asked = self._asked.get(request_id)
        if asked is not None and not asked.over:
            asked.over = True
            self._rig.cancel(asked)


class Node:
    """A broker of the group on a disk of its own."""

    def __init__(self, rig: "Rig", name: str) -> None:
        self.rig = rig
        self.name = name
        self.disk = LyingDisk()
        wall_ahead_ms, boot_ahead_ms = rig.machines.get(name, (0, 0))
        self.clock = MachineClock(
            rig.clock, wall_ahead_ms=wall_ahead_ms, boot_ahead_ms=boot_ahead_ms
        )
        self.alive = False
        self.life = 0
        self.failures: list[BaseException] = []
        self.drops = 0  # of its clients' connections
        self.node: BrokerNode

    @property
    def address(self) -> str:
        return f"{self.name}:1"

    def start(self) -> "Node":
        self.life += 1
        self.alive = True
        self.calls: deque[Callable[[], None]] = deque()
        self.flusher, self.housekeeper = HeldFlusher(self.calls), HeldFlusher(self.calls)
        settings = replace(
            self.rig.settings,
            broker=replace(self.rig.settings.broker, name=GROUP, node=self.name, data="data"),
        )
        self.node = BrokerNode(
            settings,
            disk=self.disk,
            clock=self.clock,
            threads=StoreThreads(
                self.flusher,
                self.housekeeper,
                readers=self.flusher,
                call_soon=self.calls.append,
                on_failure=self.failures.append,
            ),
            rng=random.Random(f"{self.name} {self.life}"),
            open_port=lambda address: Wire(self.rig, self.address, address),
            controllers=[Wire(self.rig, self.address, CONTROLLER)],
            on_demoted=self._demoted,
        )
        self.node.address = self.address
        self.node.start()
        return self

    def kill(self, *, power: bool = False) -> None:
        """End at once; with `power` what was not synced is lost."""
        self.alive = False
        self.calls.clear()
        self.rig.connections_lost(self.address)
        if power:
            self.disk.restore_power()

    @property
    def role(self) -> BrokerRole:
        return self.node.role

    @property
    def end(self) -> int:
        return self.node.broker.store.end

    def log(self) -> bytes:
        whole = b""
        for name in self.disk.names("data/commitlog"):
            file = self.disk.open(f"data/commitlog/{name}")
            whole += file.read(file.size(), 0)
        return whole[: self.end - self.node.broker.store.start]

    def _demoted(self) -> None:
        self.drops += 1


class Rig:
    def __init__(
        self,
        names: str = "abc",
        *,
        least: int = 0,
        settings: Settings = SMALL,
        replication: ReplicationSettings | None = None,
        machines: dict[str, tuple[int, int]] | None = None,
    ) -> None:
        """`machines` says of nodes how far their wall clocks and times since boot are ahead."""
        self.clock = ManualClock()
        self.machines = machines or {}
        self.calls: deque[Callable[[], None]] = deque()
        self.asked: list[Asked] = []
        self.cuts: set[tuple[str, str]] = set()
        expected = replication or ReplicationSettings(replicas=len(names), min_in_sync=least)
        self.settings = replace(settings, replication=expected)
        self.store = MemoryStore()
        self.start_controller()
        self.nodes = [Node(self, f"node-{name}").start() for name in names]

    # -- time and messages

    def start_controller(self) -> None:
        self.controller: Controller | None = Controller(
            self.settings.cluster.name,
            self.store,
            self.clock,
            lambda address: _Peer(self, address),
            times=ControllerTimeouts(),
        )

    def stop_controller(self) -> None:
        self.controller = None
        self.connections_lost(CONTROLLER)

    def settle(self, limit: int = 200_000) -> None:
        """Let everything happen that needs no time."""
        busy = True
        while busy:
            busy = False
            for calls in (self.calls, *(node.calls for node in self.nodes if node.alive)):
                while calls:
                    calls.popleft()()
                    busy = True
                    limit -= 1
                    assert limit, "it never comes to rest"

    def advance(self, ms: int, step_ms: int = 10) -> None:
        for _ in range(ms // step_ms):
            self.clock.advance(step_ms)
            self._deadlines()
            if self.controller is not None:
                self.controller.step(self.clock.boot_ms())
            for node in self.nodes:
                if node.alive:
                    while node.node.step():
                        self.settle()
            self.settle()

    def until(self, what: Callable[[], bool], *, limit_ms: int = 30_000) -> int:
        """Let time pass until it is so; returns how long that took."""
        passed = 0
        while not what():
            assert passed < limit_ms, "it never came true"
            self.advance(10)
            passed += 10
        return passed

    def post(self, target: str, call: Callable[[], None]) -> None:
        node = self._node(target)
        if node is None:
            self.calls.append(call)
        elif node.alive:
            node.calls.append(call)

    def port_of(self, address: str) -> Port | None:
        if address == CONTROLLER:
            return self.controller
        node = self._node(address)
        return node.node.port if node is not None and node.alive else None

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cuts

    def cut(self, *names: str) -> None:
        """These speak with nobody else any more, nor anybody with them."""
        inside = {self.node(name).address for name in names}
        outside = {node.address for node in self.nodes} - inside | {CONTROLLER}
        self.cuts |= {(name, other) for name in inside for other in outside}
        self.cuts |= {(other, name) for name in inside for other in outside}

    def heal(self) -> None:
        self.cuts.clear()

    def cancel(self, asked: Asked) -> None:
        def arrive() -> None:
            port = self.port_of(asked.target)
            if port is not None and asked.number >= 0:
                port.cancel(asked.number)

        if not self.is_cut(asked.source, asked.target):
            self.calls.append(arrive)

    def connections_lost(self, address: str) -> None:
        for asked in list(self.asked):
            if asked.over:
                continue
            if asked.target == address:
                lost = Unavailable(f"the connection to {address} was lost")
                self.post(asked.source, lambda asked=asked, lost=lost: asked.answer(lost))  # type: ignore[misc]
            elif asked.source == address:
                asked.over = True
                self.cancel(asked)

    def _deadlines(self) -> None:
        now_ms = self.clock.boot_ms()
        self.asked = [request for request in self.asked if not request.over]
        for asked in self.asked:
            if now_ms >= asked.due_ms:
                self.cancel(asked)
                asked.answer(DeadlineExceeded("nobody answered"))

    def _node(self, address: str) -> Node | None:
        return next((node for node in self.nodes if node.address == address), None)

    # -- the group

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name or node.name[-1] == name)

    @property
    def masters(self) -> list[Node]:
        """Who serves clients."""
        return [node for node in self.nodes if node.alive and node.node.gate.clients.is_open]

    @property
    def master(self) -> Node:
        newest = max(self.masters, key=lambda item: item.node.identity.epoch)
        return newest

    def ready(self, members: int = 0) -> Node:
        """Wait for a master with so many in its SyncStateSet; all, if it is not said."""
        expected = members or len(self.nodes)

        def is_ready() -> bool:
            return bool(self.masters) and len(self._set()) >= expected

        self.until(is_ready)
        return self.master

    def _set(self) -> frozenset[str]:
        leadership = self.master.node.master_role
        return leadership.replication_server.sync.members if leadership is not None else frozenset()

    # -- clients

    def ask(self, kind: Kind, body: bytes, *, of: Node | None = None) -> Answer:
        """Of the master, unless it is said; it may not have an answer yet."""
        answer = Answer()
        target = of or self.master
        port = target.node.port
        answer.id = port.request(kind, body, 10_000, answer.on_result)
        self.settle()
        return answer

    def make_topic(self) -> None:
        registry = self.master.node.broker.registry
        registry.create_topic(TopicConfig(0, TOPIC, 4, MessageType.NORMAL))
        registry.create_group(SubscriptionGroup(0, "g"))
        self.settle()

    def send(self, body: bytes, *, to: Node | None = None) -> Answer:
        entry = hop.PutEntry(MessageType.NORMAL, body, b"")
        return self.ask(Kind.PUT, hop.encode_put(hop.PutRequest(TOPIC, [entry])), of=to)

    def receive(self, *, limit: int = 32, invisible_ms: int = 60_000) -> list[hop.Delivery]:
        answer = self.ask(Kind.POP, pop(TOPIC, "g", limit=limit, invisible_ms=invisible_ms))
        self.until(lambda: answer.heard)
        assert answer.body is not None, answer.error
        return list(hop.decode_pop_reply(answer.body).deliveries)

    def ack(self, *handles: bytes) -> Answer:
        return self.ask(Kind.ACK, hop.encode_ack(hop.AckRequest(TOPIC, "g", handles)))


class _Peer:
    """The controller's way to a broker, for one question."""

    def __init__(self, rig: Rig, address: str) -> None:
        self._wire = Wire(rig, CONTROLLER, address)

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        return self._wire.request(kind, body, timeout_ms, on_reply)

    def cancel(self, request_id: int) -> None:
        self._wire.cancel(request_id)

    def close(self) -> None:
        return
