"""A cluster of several broker groups: brokers, controllers and proxies of the product.

The first group by name owns topics and consumer groups, the others copy them. Clients are not part
of it: they call the proxies (`proxy`). Faults are those of the world of one group.
"""

import random
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from popmq.broker.ha.role import BrokerRole
from popmq.broker.meta.registry import Registry
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.settings.lean_settings import LeanSettings
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import (
    GroupSettings,
    MessageSettings,
    ProxySettings,
    Settings,
    StoreSettings,
    TopicSettings,
)
from popmq.testing.cluster_world.broker import ClusterBroker
from popmq.testing.cluster_world.controller import ControllerNode
from popmq.testing.cluster_world.drain import Judge
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.sim_metadata_store import SimMetadataStore
from popmq.testing.cluster_world.sim_network import NetworkFaults, SimNet
from popmq.testing.cluster_world.sometimes_states import NetSometimes
from popmq.testing.cluster_world.timeline import HostClock, Timeline
from popmq.testing.groups_world.divergence import Divergence
from popmq.testing.groups_world.late_frames import HELD_MS, Change, LateFrames
from popmq.testing.groups_world.proxy import ProxyNode
from popmq.testing.groups_world.sim_loop import LoopHost
from popmq.testing.groups_world.sometimes_states import GroupsSometimes
from popmq.testing.harness.clock import ManualClock
from popmq.testing.harness.invariants import broken_invariant
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.oracle.client_history import Violation
from popmq.testing.sim.replay import ReplayCheck

PROXIES = 2
LOOK_MS = 700  # from one look at the tables to the next
OWNER_MS = 100  # and at whether the owner of the topics is in reach
CLIENT = "clients"
_FAR_MS = (-360_000_000, 0, 360_000_000)  # 100 hours
_SYNC_MS = ((1,), (1, 2, 8), (2, 30, 120))
# of broker groups, and how many brokers each has
_SHAPES = ((2, 2), (2, 3), (3, 1), (3, 2), (2, 1))


class GroupsWorld:
    """`violations` are of the brokers: broken invariants and what ended a process.

    `lanes`: the proxies serve ordinary calls in lanes (docs/concepts/transport.md).
    """

    def __init__(self, seed: int, *, lanes: bool = True) -> None:
        rng = self.rng = random.Random(f"groups {seed}")
        self.seed = seed
        self.trace: list[str] = []
        self.violations: list[Violation] = []
        self.elections_ms: list[int] = []
        self.tally = StateCounts(GroupsSometimes, NetSometimes)
        self.time = Timeline(rng, moves=True)
        self.owner = OwnerInReach()
        self.late = LateFrames(
            self.time,
            rng,
            self.tally,
            self._metadata_held,
            share=rng.choice((0.0, 0.0, 0.005, 0.03)),
        )
        self._network = _network(rng)
        quiet = NetworkFaults(patience_ms=self._network.patience_ms)
        self.net = SimNet(self.time, rng, self.tally, quiet, self.late)
        self.divergence = Divergence(rng, self.tally, self.report_violation)
        self.records = SimMetadataStore(self.time, rng, self.tally)
        self.records.on_write = self._written
        self.healed = False
        self.skewed = False  # clocks tick alike, and are set by little
        # Wall clocks of brokers are days apart. Nothing is delayed then: due times are wall time.
        self.far = rng.random() < 0.4
        self._far_ms = rng.sample(_FAR_MS, len(_FAR_MS))  # of the first, second and third replica
        groups, self.replicas = rng.choice(_SHAPES)
        self.names = [f"group-{letter}" for letter in "abc"[:groups]]
        self.settings = replace(_settings(rng, self.replicas), lean=LeanSettings(lanes=lanes))
        self.client = LoopHost(CLIENT, self.time, HostClock(self.time), self.client_failed)
        self.controllers = [self._controller(f"x{number}") for number in range(2)]
        self.brokers = [
            self._broker(name, number) for name in self.names for number in range(self.replicas)
        ]
        addresses = [controller.address for controller in self.controllers]
        hosts = [self._loop_host(f"proxy{number}") for number in range(PROXIES)]
        self.proxies: list[Host] = list(hosts)
        self.proxy_nodes = [ProxyNode(self.net, host, self.settings, addresses) for host in hosts]
        self._look_due_ms = 0
        # By broker, process and epoch: the state (epoch, version) of the owner that it has copied.
        self._copied: dict[tuple[str, int, int], tuple[int, int]] = {}
        # All share one line of time: were every process slow, none would come to anything.
        slow = rng.choice(self.brokers)
        for host in (*self.hosts, self.client):
            if host is not slow.host:
                host.process_clock.slow_down()

    def trace_line(self, line: str) -> None:
        self.trace.append(f"{self.time.now_ms} {line}")

    # -- making it

    def _clock(self, far_ms: int = 0) -> HostClock:
        offset_ms = self.rng.choice((-40, 0, 0, 30)) + far_ms
        rate_ppm = self.rng.choice((-200, 0, 200))
        return HostClock(self.time, offset_ms=offset_ms, rate_ppm=rate_ppm)

    def _loop_host(self, name: str) -> LoopHost:
        def failed(error: BaseException) -> None:
            self._broken(name, error)

        return LoopHost(name, self.time, self._clock(), failed)

    def _controller(self, name: str) -> ControllerNode:
        host = Host(name, self.time, self._clock())
        return ControllerNode(
            self.net, host, self.records, self.rng, cluster=self.settings.cluster.name
        )

    def _broker(self, group: str, number: int) -> ClusterBroker:
        far_ms = self._far_ms[number] if self.far else 0
        host = Host(f"{group[-1]}{number}", self.time, self._clock(far_ms))
        settings = replace(self.settings, broker=replace(self.settings.broker, name=group))
        broker = ClusterBroker(
            self.net,
            host,
            settings,
            self.rng,
            controllers=[controller.address for controller in self.controllers],
            note=self.trace_line,
            on_broken=lambda broker, error: self._broken(broker.name, error),
            on_moved=lambda broker: None,
        )
        self.slow_or_not(broker)
        return broker

    def slow_or_not(self, broker: ClusterBroker) -> None:
        takes_ms = self.rng.choice(_SYNC_MS)
        broker.sync_ms = lambda: self.rng.choice(takes_ms)

    def start(self) -> None:
        self.client.boot()
        for controller in self.controllers:
            controller.start()
        for broker in self.brokers:
            broker.start()
        for number in range(PROXIES):
            self.start_proxy(number)

    @property
    def hosts(self) -> list[Host]:
        brokers = [broker.host for broker in self.brokers]
        return [*brokers, *(item.host for item in self.controllers), *self.proxies]

    def clock_was_set(self, broker: ClusterBroker) -> None:
        """By less than a client can tell from a slow answer."""

    def begin_faults(self) -> None:
        """Those of the network; before, it is quiet."""
        self.net.manners = self._network
        self.late.begin()

    def start_proxy(self, number: int) -> None:
        self.proxy_nodes[number].start()

    def kill_proxy(self, number: int) -> None:
        self.tally.hit(GroupsSometimes.PROXY_DIED)
        self.proxy_nodes[number].stop()

    # -- watching

    def go(self, ms: int) -> None:
        """Let time pass, or until something is wrong."""
        until_ms = self.time.now_ms + ms
        while self.time.now_ms < until_ms and not self.violations:
            step_ms = min(until_ms, self.time.now_ms + OWNER_MS)
            self.time.run(step_ms, stop=lambda: bool(self.violations))
            self.owner.look(self.time.now_ms, in_reach=self._owner_in_reach)
            if self.time.now_ms < self._look_due_ms:
                continue
            self._look_due_ms = self.time.now_ms + LOOK_MS
            self._check_tables()
            for group in self.names:
                self.divergence.look(self.of(group))

    @property
    def _owner_in_reach(self) -> bool:
        """The newest master, of every proxy and of every other group."""
        record = self.records.newest(self.names[0])
        masters = [
            broker
            for broker in self.masters
            if (node := broker.node) is not None
            and broker.group == self.names[0]
            and (record is None or node.identity.store_id == record.leader)
        ]
        if len(masters) != 1 or masters[0].host.paused or self.net.manners.unruly:
            return False
        name = masters[0].name
        others = [broker.name for broker in self.brokers if broker.group != self.names[0]]
        others += [proxy.name for proxy in self.proxies]
        links = [pair for other in others for pair in ((name, other), (other, name))]
        return not any(self.net.link(*pair).cut for pair in links)

    def _metadata_held(self) -> None:
        self.owner.out_of_reach(self.time.now_ms, self.time.now_ms + HELD_MS)

    def of(self, group: str) -> list[ClusterBroker]:
        """The brokers of a broker group."""
        return [broker for broker in self.brokers if broker.group == group]

    def go_until(self, reached: Callable[[], bool], limit_ms: int) -> bool:
        """Whether it came true in time."""
        until_ms = self.time.now_ms + limit_ms
        while not reached() and self.time.now_ms < until_ms and not self.violations:
            self.go(100)
        return reached()

    def _check_tables(self) -> None:
        for broker in self.brokers:
            node = broker.node
            if node is None or node.changing or node.role is BrokerRole.COPYING:
                continue
            if broken := broken_invariant(node.broker):
                self.report_violation("I19 tables-agree", f"{broker.name}: {broken}")
            slave = node.broker.store.slave
            if slave is None:
                self._check_copy(broker, node.broker.registry)
            if slave is None or broker.group in self.divergence.groups:
                continue
            self.tally.hit(GroupsSometimes.HASH_COMPARED, int(slave.hashes.compared > 0))
            if slave.hashes.diverged:
                self.report_violation("I12 same-state", f"tables of {broker.name} diverged")

    def _check_copy(self, broker: ClusterBroker, registry: Registry) -> None:
        """While a broker leads, its copy of the owner's topics and groups never goes back."""
        if not registry.owner:
            return
        assert broker.node is not None
        leadership = broker.node.master_role
        led = broker.name, broker.host.life, leadership.epoch if leadership else 0
        before = self._copied.get(led, (0, 0))
        if registry.meta_state < before:
            what = f"{broker.name} copies state {registry.meta_state} after {before}"
            self.report_violation("I20 metadata-monotonic", what)
        self._copied[led] = registry.meta_state

    def compare_tables(self) -> None:
        """Tables of masters and slaves at one position of the log, entry by entry."""
        for master in self.masters:
            for broker in self.of(master.group):
                if broker is master or master.group in self.divergence.groups:
                    continue
                assert broker.node is not None
                assert master.node is not None
                slave = broker.node.broker.store.slave
                if slave is None or slave.applied != master.node.broker.store.end:
                    continue
                self.tally.hit(GroupsSometimes.STATE_COMPARED)
                judge = Judge(partial(self._differs, broker.name))
                check = ReplayCheck(self.settings, ManualClock(), judge, set())
                check.compare(master.node.broker, broker.node.broker)

    def _differs(self, name: str, what: str) -> None:
        self.report_violation("I12 same-state", f"{name} and its master: {what}")

    def report_violation(self, rule: str, what: str) -> None:
        self.violations.append(Violation(rule, what, ()))

    def _broken(self, name: str, error: BaseException) -> None:
        where = traceback.extract_tb(error.__traceback__)[-4:]
        places = "; ".join(f"{frame.name}, line {frame.lineno}: {frame.line}" for frame in where)
        self.report_violation("I0 broken", f"{name}: {type(error).__name__}: {error} {places}")

    def client_failed(self, error: BaseException) -> None:
        self._broken(CLIENT, error)

    def _written(self, key: str, old: GroupRecord | None, new: GroupRecord) -> None:
        members = [self.name(member) for member in new.sync_state_set]
        leader = self.name(new.leader)
        self.trace_line(f"{key} record {new.version}: {leader} epoch {new.epoch} set {members}")
        if old is not None and new.epoch > old.epoch:
            self.tally.hit(GroupsSometimes.ELECTION)
            self.elections_ms.append(self.time.now_ms)
            self.late.happened(Change.EPOCH)

    def name(self, store_id: str) -> str:
        for broker in self.brokers:
            if broker.node is not None and broker.node.identity.store_id == store_id:
                return broker.name
        return store_id[:6]

    @property
    def masters(self) -> list[ClusterBroker]:
        """Brokers that let clients in. One that has no replicas needs no gate for that."""
        return [
            broker
            for broker in self.brokers
            if (node := broker.node) is not None
            and (
                node.gate.clients.is_open or (self.replicas == 1 and node.role is BrokerRole.MASTER)
            )
        ]

    @property
    def all_lead(self) -> bool:
        """Each group has one master with all its brokers in its set. One whose tables were changed
        may stay out of it, with an alarm (docs/concepts/replication.md)."""
        masters = self.masters
        if len(masters) != len(self.names):
            return False
        for broker in masters:
            record = self.records.newest(broker.group)
            members = 1 if record is None else len(record.sync_state_set)
            planted = broker.group in self.divergence.groups
            least = self.settings.replication.effective_min_in_sync if planted else self.replicas
            if members < least:
                return False
        return True

    def heal(self) -> None:
        """Nothing fails any more, and all that is away comes back."""
        self.healed = True
        self.trace_line("heal")
        self.late.stop()
        self.net.heal_all()
        self.net.manners = NetworkFaults(patience_ms=self.net.manners.patience_ms)
        manners = self.records.manners
        manners.silent = manners.stale = 0.0
        manners.away = False
        manners.away_from.clear()
        for controller in self.controllers:
            controller.host.resume()
            if not controller.host.up:
                controller.start()
        for broker in self.brokers:
            broker.disk.faults.heal()
            broker.sync_ms = lambda: 1
            broker.host.resume()
            if broker.node is None:
                broker.start()
        for number, host in enumerate(self.proxies):
            host.resume()
            if not host.up:
                self.start_proxy(number)


class OwnerInReach:
    """When a proxy or a broker group may not have reached the owner of the topics."""

    def __init__(self) -> None:
        self.away: list[tuple[int, int]] = []  # from, until

    def look(self, now_ms: int, *, in_reach: bool) -> None:
        if not in_reach:
            self.out_of_reach(now_ms - 2 * OWNER_MS, now_ms)

    def out_of_reach(self, since_ms: int, until_ms: int) -> None:
        if self.away and self.away[-1][1] >= since_ms:
            since_ms, last_ms = self.away.pop()
            until_ms = max(until_ms, last_ms)
        self.away.append((since_ms, until_ms))


def _settings(rng: random.Random, replicas: int) -> Settings:
    settings = Settings(
        store=StoreSettings(
            segment_bytes=rng.choice((64, 256)) << 10,
            snapshot_bytes=rng.choice((24, 96, 4096)) << 10,
            reserved_segments=1,
            retention_hours=72,
        ),
        message=MessageSettings(max_body_bytes=8192, max_properties_bytes=2048),
        group=GroupSettings(auto_create=False),
        topic=TopicSettings(auto_create=False),
        proxy=ProxySettings(),
        replication=ReplicationSettings(
            replicas=replicas,
            min_in_sync=min(replicas, rng.choice((1, 2, 2))),
            laggard_ms=rng.choice((600, 1_500)),
            fetch_bytes=rng.choice((4, 64)) << 10,
        ),
    )
    store = replace(settings.store, tail_bytes=rng.choice((0, 8 << 10, 1 << 20)))
    return replace(settings, store=store)


def _network(rng: random.Random) -> NetworkFaults:
    patience_ms = rng.choice((1_500, 6_000))
    if rng.random() < 0.7:
        latency_ms = rng.choice(((0, 1), (0, 4), (1, 25)))
        return NetworkFaults(latency_ms=latency_ms, patience_ms=patience_ms)
    return NetworkFaults(
        latency_ms=rng.choice(((0, 3), (0, 15))),
        unruly=True,
        loss=rng.choice((0.0, 0.005)),
        twice=rng.choice((0.0, 0.1)),
        late=rng.choice((0.0, 0.01, 0.03)),
        patience_ms=patience_ms,
    )
