"""Controllers under a clock that the test turns, and brokers that say what they are told to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from popmq.common.errors import PopmqError, Unavailable
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.controller import Controller, ControllerTimeouts
from popmq.controller.metadata_store import MemoryStore, MetadataStore
from popmq.testing.harness.clock import ManualClock

GROUP = "broker-a"
DEAD_MS = 2_000
HEARTBEAT_MS = 500
STEP_MS = 50
LONG_MS = 60_000

Serve = Callable[[Kind, bytes], bytes | PopmqError]


@dataclass
class Broker:
    """A replica's next heartbeat. `role` follows the record when it `obeys`."""

    node: str
    epoch: int = 0
    end: int = 0
    role: int = pb.NOBODY
    priority: int = 0
    store_id: str = ""
    replicas: int = 3
    min_in_sync: int = 0
    up: bool = True
    obeys: bool = True
    confirmed: int = 0
    group: str = GROUP
    address: str = ""
    owner: str = ""
    draining: bool = False
    changes: int = 0
    timers: pb.TimerCheckPoint | None = None
    reply: pb.GroupState = field(default_factory=pb.GroupState)

    def __post_init__(self) -> None:
        self.store_id = self.store_id or f"store-{self.node}"
        self.address = self.address or f"{self.node}:1"

    def heartbeat(self) -> bytes:
        request = pb.RegisterRequest(
            cluster="popmq",
            broker=pb.BrokerAddress(
                broker=self.group,
                address=self.address,
                epoch=self.epoch,
                store_id=self.store_id,
                node=self.node,
                draining=self.draining,
            ),
            replicas=self.replicas,
            min_in_sync=self.min_in_sync,
            role=pb.BrokerRole.ValueType(self.role),
            end=self.end,
            confirmed=self.confirmed,
            priority=self.priority,
            timer_check_point=self.timers,
            owner=self.owner,
            meta_version=self.changes,
        )
        return request.SerializeToString()

    def obey(self, state: pb.GroupState) -> None:
        """Take a newer epoch with the role that it has for us (R7)."""
        self.reply = state
        record = state.record
        if self.obeys and record.epoch > self.epoch:
            self.epoch = record.epoch
            self.role = pb.MASTER if record.leader == self.store_id else pb.SLAVE


class ScriptedPeer:
    """A way to a broker's address; `serve` decides, and without one nobody listens there."""

    def __init__(self, serve: Serve | None) -> None:
        self._serve = serve
        self.closed = False

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        if self._serve is None:
            on_reply(Unavailable("connection refused"))
        else:
            on_reply(self._serve(kind, body))
        return 1

    def cancel(self, request_id: int) -> None:
        return

    def close(self) -> None:
        self.closed = True


class Rig:
    """Some controllers on one store, and the brokers that register with all of them."""

    def __init__(
        self, *brokers: Broker, controllers: int = 1, store: MetadataStore | None = None
    ) -> None:
        self.clock = ManualClock()
        self.store = store or MemoryStore()
        self.brokers = list(brokers)
        self.peers: dict[str, Serve] = {}
        self.opened: list[str] = []
        self.deaf: set[tuple[int, str]] = set()  # (controller, node): not heard there
        self.controllers = [self.controller() for _ in range(controllers)]

    def controller(self, store: MetadataStore | None = None) -> Controller:
        def open_peer(address: str) -> ScriptedPeer:
            self.opened.append(address)
            return ScriptedPeer(self.peers.get(address))

        times = ControllerTimeouts(HEARTBEAT_MS, DEAD_MS)
        return Controller("popmq", store or self.store, self.clock, open_peer, times=times)

    def run(self, ms: int) -> None:
        """Heartbeats and steps for so long."""
        for _ in range(ms // STEP_MS):
            self.clock.advance(STEP_MS)
            if self.clock.boot_ms() % HEARTBEAT_MS == 0:
                self.beat()
            self.step()

    def step(self) -> None:
        for controller in self.controllers:
            controller.step(self.clock.boot_ms())

    def beat(self, *brokers: Broker) -> None:
        for number, controller in enumerate(self.controllers):
            for broker in brokers or self.brokers:
                if broker.up and (number, broker.node) not in self.deaf:
                    reply = ask(controller, Kind.REGISTER, broker.heartbeat())
                    broker.obey(pb.RegisterReply.FromString(reply).state)

    def broker(self, node: str) -> Broker:
        return next(broker for broker in self.brokers if broker.node == node)

    @property
    def record(self) -> GroupRecord | None:
        """As the store has it."""
        answers: list[GroupRecord | None] = []

        def take(answer: object) -> None:
            assert answer is None or isinstance(answer, GroupRecord)
            answers.append(answer)

        self.store.read(GROUP, take)
        return answers[0]

    @property
    def leader(self) -> str:
        record = self.record
        assert record is not None
        return record.leader.removeprefix("store-")

    @property
    def known(self) -> GroupRecord | None:
        return self.controllers[0].groups[GROUP].record

    @property
    def state(self) -> pb.GroupState:
        return self.controllers[0].groups[GROUP].state()


def ask(controller: Controller, kind: Kind, body: bytes) -> bytes:
    """The answer, which must have come at once; a refusal is raised."""
    answers: list[bytes | PopmqError] = []
    controller.request(kind, body, LONG_MS, answers.append)
    assert answers, f"{kind.name} was not answered"
    if isinstance(answers[0], PopmqError):
        raise answers[0]
    return answers[0]


def alter(controller: Controller, record: GroupRecord, *nodes: str) -> pb.AlterSyncStateSetReply:
    """The master of that record, which it knows, asks for another set."""
    request = pb.AlterSyncStateSetRequest(
        cluster="popmq",
        group=GROUP,
        leader=record.leader,
        epoch=record.epoch,
        expected_version=record.version,
        sync_state_set=[f"store-{node}" for node in nodes],
    )
    body = request.SerializeToString()
    return pb.AlterSyncStateSetReply.FromString(ask(controller, Kind.ALTER_SYNC_STATE_SET, body))


def failover(
    controller: Controller, node: str = "", *, unclean: bool = False, dry_run: bool = False
) -> pb.FailoverReply:
    request = pb.FailoverRequest(
        cluster="popmq", group=GROUP, node=node, unclean=unclean, dry_run=dry_run
    )
    return pb.FailoverReply.FromString(ask(controller, Kind.FAILOVER, request.SerializeToString()))


def members(record: GroupRecord | None) -> Sequence[str]:
    """Node names of the SyncStateSet."""
    assert record is not None
    return [name.removeprefix("store-") for name in record.sync_state_set]


def three(**changes: object) -> list[Broker]:
    """A new group of three."""
    return [Broker(f"node-{letter}", **changes) for letter in "abc"]  # type: ignore[arg-type]


def running(*, controllers: int = 1, store: MetadataStore | None = None, **changes: object) -> Rig:
    """Three brokers, of which node-a leads in epoch 1, all in the set."""
    rig = Rig(*three(**changes), controllers=controllers, store=store)
    rig.beat()
    rig.run(2 * DEAD_MS)
    assert rig.leader == "node-a"
    return rig
