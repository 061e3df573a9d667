"""Faults of a simulated cluster, one at a time; most end by themselves after a while."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import controller_pb2 as pb
from popmq.testing.cluster_world.broker import ClusterBroker
from popmq.testing.cluster_world.controller import ControllerNode
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.cluster_world.sim_metadata_store import SimMetadataStore
from popmq.testing.cluster_world.sim_network import SimNet
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes as States
from popmq.testing.cluster_world.timeline import Timeline
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.harness.sometimes import StateCounts

POWER = (Loss.ALL, Loss.KEPT, Loss.TORN, Loss.SCATTERED)
_DOWN_MS = (5, 400, 3_000, 8_000)

Kinds = Sequence[tuple[Callable[[], None], float]]  # with their weights


class FaultyWorld(Protocol):
    """What faults need of a world: that of one broker group, and that of several."""

    rng: random.Random
    time: Timeline
    net: SimNet
    records: SimMetadataStore
    tally: StateCounts
    brokers: list[ClusterBroker]
    controllers: list[ControllerNode]
    proxies: list[Host]
    names: list[str]  # of the broker groups
    healed: bool
    skewed: bool

    @property
    def masters(self) -> list[ClusterBroker]: ...

    def trace_line(self, line: str) -> None: ...

    def slow_or_not(self, broker: ClusterBroker) -> None: ...

    def clock_was_set(self, broker: ClusterBroker) -> None: ...

    def start_proxy(self, number: int) -> None: ...

    def kill_proxy(self, number: int) -> None: ...


class ClusterFaults:
    def __init__(self, world: FaultyWorld, more: Kinds) -> None:
        """`more` are kinds that this world has of its own."""
        self._world = world
        self._rng = world.rng
        wipes = world.brokers[0].settings.replication.effective_min_in_sync > 1
        clocks = 2.0 if world.skewed else 0.2
        network, services = NetworkMoves(world), ServiceFaults(world)
        self._kinds: list[tuple[Callable[[], None], float]] = [
            (self._crash, 6),
            (self._power_in_work, 3),
            (self._pause, 4),
            (network.isolate, 4),
            (network.cut_one_way, 3),
            (network.split, 1.5),
            *more,
            (network.heal, 4),
            (network.reset, 2),
            (services.hand_over, 4),
            (services.controller, 2),
            (services.no_controllers, 0.8),
            (services.store, 1.5),
            (services.proxy, 1.5),
            (self._all_down, 0.7),
            (self._stop, 1.5),
            (self._step_clock, clocks),
            (self._slow_disk, 1),
            (self._wipe, 2.0 if wipes else 0),
        ]

    def one(self) -> str:
        """Returns what was done, in a word or two."""
        kinds = [kind for kind, _ in self._kinds]
        weights = [weight for _, weight in self._kinds]
        kind = self._rng.choices(kinds, weights)[0]
        kind()
        return str(kind.__name__).strip("_").replace("_", " ")

    @property
    def _all(self) -> list[ClusterBroker]:
        return self._world.brokers

    def _start(self, broker: ClusterBroker) -> None:
        """Half of the starts are disturbed; then it tries again."""
        if broker.node is not None:
            return
        world, rng = self._world, self._rng
        if rng.random() < 0.2 and not world.healed:
            broker.disk.faults.cut_at(rng.randrange(rng.choice((5, 40))))
        began = broker.start()
        end = broker.node.broker.store.end if broker.node else 0
        world.trace_line(f"{broker.name} starts at {end}" if began else f"{broker.name} dies again")
        broker.disk.faults.heal()
        if not began:
            later(self._world, 20, lambda: self._start(broker))

    # -- brokers

    def _crash(self, broker: ClusterBroker | None = None, down_ms: int = 0) -> None:
        broker = broker or some_broker(self._world)
        if broker.node is None:
            return
        power = self._rng.random() < 0.5
        loss = self._rng.choice(POWER) if power else Loss.NOTHING
        down_ms = down_ms or self._rng.choice(_DOWN_MS)
        self._world.trace_line(f"{broker.name} dies, lost: {loss.value}, for {down_ms} ms")
        unsynced = int(broker.disk.unsynced)
        self._world.tally.hit(States.POWER, unsynced * power)
        self._world.tally.hit(States.CRASH, int(not power))
        broker.crash(loss)
        later(self._world, down_ms, lambda: self._start(broker))

    def _power_in_work(self) -> None:
        broker = some_broker(self._world)
        if broker.node is None:
            return
        operations = self._rng.randrange(self._rng.choice((3, 20, 80)))
        self._world.trace_line(
            f"{broker.name} will lose its power {operations} operations from now"
        )
        broker.disk.faults.cut_at(operations)

        def back() -> None:
            if broker.node is None:
                self._world.tally.hit(States.POWER_IN_WORK)
                self._start(broker)
            broker.disk.faults.heal()

        later(self._world, self._rng.choice((500, 4_000)), back)

    def _stop(self) -> None:
        broker = some_broker(self._world)
        if broker.node is None or broker.host.paused:
            return
        self._world.trace_line(f"{broker.name} is stopped")
        broker.stop(lambda: self._world.time.after(200, lambda: self._start(broker)))

    def _wipe(self) -> None:
        """Only where another member of the recorded set has its disk still, and only now."""
        world, broker = self._world, some_broker(self._world)
        record = world.records.newest(broker.group)
        if broker.node is None or record is None:
            return
        others = [item.node for item in self._all if item is not broker]
        whole = {broker_node.identity.store_id for broker_node in others if broker_node is not None}
        if not whole & set(record.sync_state_set):
            return
        world.trace_line(f"{broker.name} loses its disk")
        world.tally.hit(States.WIPED)
        broker.crash(Loss.ALL)
        broker.wipe()
        later(self._world, self._rng.choice((5, 1_000, 4_000)), lambda: self._start(broker))

    def _all_down(self) -> None:
        self._world.tally.hit(States.ALL_DOWN)
        for broker in self._all:
            self._crash(broker, self._rng.choice((5, 600, 3_000)))

    def _pause(self) -> None:
        broker, ms = some_broker(self._world), self._rng.choice((400, 2_000, 6_000, 20_000))
        self._world.trace_line(f"{broker.name} stands still for {ms} ms")
        self._world.tally.hit(States.PAUSE)
        broker.host.pause()
        later(self._world, ms, broker.host.resume)

    def _slow_disk(self) -> None:
        self._world.slow_or_not(some_broker(self._world))

    def _step_clock(self) -> None:
        world, broker = self._world, some_broker(self._world)
        large = (-6_000, 2_000, 9_000) if world.skewed else (-50, 80)
        ms = self._rng.choice(large)
        world.trace_line(f"the wall clock of {broker.name} is set by {ms} ms")
        world.tally.hit(States.CLOCK_STEP)
        broker.host.clock.step_wall(ms)
        world.clock_was_set(broker)


class NetworkMoves:
    """Hosts are cut off from each other; most cuts heal by themselves."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        self._rng = world.rng

    @property
    def _hosts(self) -> list[str]:
        world = self._world
        hosts = [broker.name for broker in self._world.brokers] + [
            controller.host.name for controller in world.controllers
        ]
        return hosts + [proxy.name for proxy in world.proxies]

    def _cut(self, source: str, targets: Sequence[str], *, both: bool = True) -> None:
        for target in targets:
            self._world.net.cut(source, target)
            if both:
                self._world.net.cut(target, source)

    def isolate(self) -> None:
        """One broker from the other brokers, the controllers, the proxies, or from all."""
        broker = some_broker(self._world)
        name = broker.name
        if broker in self._world.masters:
            self._world.tally.hit(States.ISOLATED_MASTER)
        parts = {"brokers": "abc", "controllers": "x", "proxies": "p"}
        part = self._rng.choice(("all", *parts))
        others = [host for host in self._hosts if host != name]
        if part != "all":
            others = [host for host in others if host[0] in parts[part]]
        self._world.trace_line(f"{name} is cut off from {others}")
        self._cut(name, others)
        later(self._world, self._rng.choice((1_000, 5_000, 15_000)), self._world.net.heal_all)

    def cut_one_way(self) -> None:
        source, target = self._rng.sample(self._hosts, 2)
        self._world.trace_line(f"nothing from {source} to {target}")
        self._cut(source, [target], both=False)
        later(self._world, self._rng.choice((1_000, 5_000, 15_000)), self._world.net.heal_all)

    def split(self) -> None:
        """Each side has a controller of its own."""
        alone = some_broker(self._world).name
        others = [broker.name for broker in self._world.brokers if broker.name != alone]
        self._world.trace_line(f"{alone} and x0 on one side, {others} and x1 on the other")
        self._world.tally.hit(States.SPLIT_CONTROLLERS)
        self._cut(alone, [*others, "x1"])
        for other in others:
            self._cut(other, ["x0"])
        later(self._world, self._rng.choice((4_000, 12_000)), self._world.net.heal_all)

    def heal(self) -> None:
        self._world.trace_line("the network is whole")
        self._world.net.heal_all()

    def reset(self) -> None:
        name = some_broker(self._world).name
        self._world.trace_line(f"connections of {name} break")
        self._world.net.break_some(
            lambda connection: name in connection.hosts and self._rng.random() < 0.6
        )


class ServiceFaults:
    """Of controllers, of their metadata store and of proxies."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        self._rng = world.rng

    def controller(self) -> None:
        world, controller = self._world, self._rng.choice(self._world.controllers)
        away_ms = self._rng.choice((100, 4_000, 12_000))
        if not controller.host.up:
            return
        if self._rng.random() < 0.5:
            world.trace_line(f"{controller.host.name} stands still for {away_ms} ms")
            controller.host.pause()
            later(self._world, away_ms, controller.host.resume)
            return
        world.trace_line(f"{controller.host.name} dies for {away_ms} ms")
        controller.stop(off=self._rng.random() < 0.5)
        later(self._world, away_ms, lambda: _start_controller(controller))

    def no_controllers(self) -> None:
        """Those that serve go on without."""
        world, away_ms = self._world, self._rng.choice((3_000, 12_000))
        world.trace_line(f"no controller for {away_ms} ms")
        world.tally.hit(States.CONTROLLERS_AWAY)
        for controller in world.controllers:
            if controller.host.up:
                controller.stop(off=False)
            later(self._world, away_ms, partial(_start_controller, controller))

    def store(self) -> None:
        manners = self._world.records.manners
        self._world.trace_line("the metadata store is away")
        self._world.tally.hit(States.STORE_AWAY)
        manners.away = True

        def back() -> None:
            manners.away = False

        self._world.time.after(self._rng.choice((500, 4_000)), back)

    def proxy(self) -> None:
        world, number = self._world, self._rng.randrange(len(self._world.proxies))
        if not world.proxies[number].up:
            return
        world.trace_line(f"proxy{number} dies")
        world.kill_proxy(number)

        def back() -> None:
            if not world.proxies[number].up:
                world.start_proxy(number)

        later(self._world, self._rng.choice((50, 1_000)), back)

    def hand_over(self) -> None:
        """As `popmq failover` asks."""
        world, host = self._world, self._world.proxies[0]
        if not host.up:
            return
        port = SimPort(world.net, host, self._rng.choice(world.controllers).address)
        group = world.names[0] if len(world.names) == 1 else self._rng.choice(world.names)
        body = pb.FailoverRequest(group=group).SerializeToString()
        world.trace_line("a hand-over is asked for")

        def heard(answer: bytes | PopmqError) -> None:
            port.close()
            if isinstance(answer, PopmqError):
                world.tally.hit(States.HAND_OVER_FAILED)
                world.trace_line(f"no hand-over: {answer}")
                return
            reply = pb.FailoverReply.FromString(answer)
            world.tally.hit(States.HANDED_OVER, int(reply.handed_over))
            world.trace_line(f"handed over to {reply.to_node}")

        port.request(Kind.FAILOVER, body, 5_000, heard)


def _start_controller(controller: ControllerNode) -> None:
    if not controller.host.up:
        controller.start()


def some_broker(world: FaultyWorld) -> ClusterBroker:
    """The master more often than others."""
    masters = world.masters
    return world.rng.choice(masters if masters and world.rng.random() < 0.5 else world.brokers)


def later(world: FaultyWorld, ms: int, action: Callable[[], None]) -> None:
    """Unless the world is healed by then."""
    world.time.after(ms, lambda: None if world.healed else action())
