"""The world of one run: the brokers of a group, controllers, proxies, clients, and who watches."""

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

from popmq.broker.ha.role import BrokerRole
from popmq.broker.ha.sync_state import SyncState
from popmq.broker.node.broker_node import BrokerNode
from popmq.broker.persistence.state_hashes import StateHashes
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import (
    GroupSettings,
    MessageSettings,
    PopSettings,
    Settings,
    StoreSettings,
    TimerSettings,
)
from popmq.testing.cluster_world.broker import IDLE_MS, ClusterBroker
from popmq.testing.cluster_world.clients import DELAY, FIFO, GROUP, NORMAL, QUICK, ClusterClients
from popmq.testing.cluster_world.controller import ControllerNode
from popmq.testing.cluster_world.golden_log import GoldenLog
from popmq.testing.cluster_world.history import ClusterReader, Message
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.oracle import ClusterOracle
from popmq.testing.cluster_world.router import Router
from popmq.testing.cluster_world.sim_metadata_store import SimMetadataStore
from popmq.testing.cluster_world.sim_network import NetworkFaults, SimNet
from popmq.testing.cluster_world.sometimes_states import ClusterSometimes, NetSometimes
from popmq.testing.cluster_world.timeline import MOVING_SEEDS, HostClock, Timeline
from popmq.testing.harness.invariants import broken_invariant
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.equal_ids import EqualIds

PROXIES = 2
OFFSETS_MS = 700  # from one look at the offsets to the next
_FAR_MS = (-360_000_000, 0, 360_000_000)
_SYNC_MS = ((1,), (1, 2, 8), (2, 30, 120))


class ClusterWorld:
    def __init__(
        self, seed: int, change: Callable[[Settings], Settings] = lambda settings: settings
    ) -> None:
        """`change` is applied to the settings that the seed gives."""
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.trace: list[str] = []
        self.tally = StateCounts(ClusterSometimes, NetSometimes)
        self.oracle = ClusterOracle()
        self.time = Timeline(rng, moves=seed >= MOVING_SEEDS)
        self.net = SimNet(self.time, rng, self.tally, _manners(rng))
        self.records = SimMetadataStore(self.time, rng, self.tally)
        self.records.on_write = self._written
        self.golden = GoldenLog(self.oracle.report_violation)
        self.healed = False
        self.strikes = 0.06  # how often the network fails whoever is being added
        self.skewed = rng.random() < 0.4  # clocks are wrong by more than a little
        # Wall clocks of brokers are days apart. Nothing is delayed then: due times are wall time.
        self._far = random.Random(f"far {seed}")
        self.far = self._far.random() < 0.25
        self.settings = change(_settings(rng))
        self.names = [GROUP]
        self.controllers = [self._controller(f"x{number}") for number in range(2)]
        self.brokers = [self._broker(name) for name in "abc"]
        self.proxies = [self._host(f"proxy{number}") for number in range(PROXIES)]
        self.routers: list[Router | None] = [None] * PROXIES
        self.clients = ClusterClients(self.routers, self.oracle, rng, self.tally, self.trace_line)
        self.clients.ids = EqualIds(seed)
        self.oracle.readers += [
            ClusterReader("g", NORMAL, rng.choice((3, 16))),
            ClusterReader("h", NORMAL, 40),
            ClusterReader("f", FIFO, rng.choice((3, 16)), fifo=True),
            ClusterReader("d", DELAY, 40),
            ClusterReader("q", QUICK, 40),
            ClusterReader("k", NORMAL, 40, buffered=True),
            ClusterReader("r", NORMAL, 40, renewed=True),
        ]
        self.in_memory = MemorySends()
        self.clients.on_memory = lambda message: self.in_memory.on_reply(message, self.golden.data)
        self._logs = LogHistory(self.oracle, self.tally)
        self._offsets = CommittedOffsets(self.oracle)
        self._offsets_due_ms = 0
        self._struck = (0, 0)  # epoch and version of the last proposal that was looked at
        self._led: set[tuple[str, int]] = set()
        self._led_last = ("", 0)  # the newest master, and which of its lives
        self._counted_ms: dict[str, int] = {}  # by which log time may have jumped

    def trace_line(self, line: str) -> None:
        self.trace.append(f"{self.time.now_ms} {line}")

    # -- making it

    def _host(self, name: str) -> Host:
        rng = self.rng
        offset_ms, rate_ppm = rng.choice((-40, 0, 0, 30)), rng.choice((-200, 0, 200))
        if self.skewed:
            offset_ms = rng.choice((-9_000, -2_000, 0, 1_500, 12_000))
            rate_ppm = rng.choice((-30_000, 0, 20_000))
        if self.far and name in "abc":
            offset_ms += self._far.choice(_FAR_MS)
        self.oracle.fastest_ppm = max(self.oracle.fastest_ppm, rate_ppm)
        self.oracle.slowest_ppm = min(self.oracle.slowest_ppm, rate_ppm)
        self.oracle.wall_error(offset_ms)
        return Host(name, self.time, HostClock(self.time, offset_ms=offset_ms, rate_ppm=rate_ppm))

    def _controller(self, name: str) -> ControllerNode:
        cluster = self.settings.cluster.name
        return ControllerNode(self.net, self._host(name), self.records, self.rng, cluster=cluster)

    def _broker(self, name: str) -> ClusterBroker:
        broker = ClusterBroker(
            self.net,
            self._host(name),
            self.settings,
            self.rng,
            controllers=[controller.address for controller in self.controllers],
            note=self.trace_line,
            on_broken=self._broken,
            on_moved=self._moved,
        )
        broker.host.after_each = broker.after_each
        broker.on_dying = lambda: self._dying(broker)
        self.slow_or_not(broker)
        return broker

    def slow_or_not(self, broker: ClusterBroker) -> None:
        takes_ms = self.rng.choice(_SYNC_MS)
        self.tally.hit(ClusterSometimes.SLOW_DISK, int(max(takes_ms) > 100))
        broker.sync_ms = lambda: self.rng.choice(takes_ms)

    def clock_was_set(self, broker: ClusterBroker) -> None:
        self.oracle.wall_error(broker.host.clock.error_ms)

    def start(self) -> None:
        for controller in self.controllers:
            controller.start()
        for broker in self.brokers:
            broker.start()
        for number in range(PROXIES):
            self.start_proxy(number)

    def start_proxy(self, number: int) -> None:
        host = self.proxies[number]
        host.boot()
        addresses = [controller.address for controller in self.controllers]
        self.routers[number] = Router(self.net, host, addresses, self.rng)
        self.clients.proxy_is_back()

    def kill_proxy(self, number: int) -> None:
        self.tally.hit(ClusterSometimes.PROXY_DIED, int(bool(self.clients.open)))
        self.routers[number] = None
        self.proxies[number].die()
        self.net.process_ended(self.proxies[number], quietly=False)
        self.clients.proxy_died(number)

    # -- watching

    def go(self, ms: int) -> None:
        """Let time pass, or until something is wrong."""
        oracle, until_ms = self.oracle, self.time.now_ms + ms
        while self.time.now_ms < until_ms and not oracle.violations:
            self.time.run(min(until_ms, self.time.now_ms + 50), stop=self._tick)
            for broker in self.brokers:  # they drift
                oracle.wall_error(broker.host.clock.error_ms)
            if self.time.now_ms >= self._offsets_due_ms:
                self._offsets_due_ms = self.time.now_ms + OFFSETS_MS
                self._offsets.look(self.brokers)
                _check_tables(self.brokers, self.oracle)

    def _tick(self) -> bool:
        self.oracle.now_ms = self.time.now_ms
        return bool(self.oracle.violations)

    def _moved(self, broker: ClusterBroker) -> None:
        """Something was done on its host."""
        moved = self.golden.look(broker)
        self.in_memory.look(self.golden.data)
        node = broker.node
        if node is None:
            return
        self._logs.count(broker, node)
        if node.master_role is None:
            return
        self._logs.count_renewals(broker, node)
        if moved:
            self._check_members(broker.name, node.broker.store.confirmed)
        self._strike(node.master_role.replication_server.sync)
        led = (broker.name, node.master_role.epoch)
        if led not in self._led:
            self._led.add(led)
            self.clients.epoch = max(self.clients.epoch, node.master_role.epoch)
            # A master that died and is back knows what its disk says: how much was confirmed when
            # that was written last. A slave heard it from the master.
            led_before, self._led_last = self._led_last, (broker.name, broker.host.life)
            is_back = led_before[0] == broker.name and led_before[1] != broker.host.life
            blind = is_back or not node.master_role.replication_server.sync.confirmed
            forward_ms = broker.forward_ms - self._counted_ms.get(broker.name, 0)
            self._counted_ms[broker.name] = broker.forward_ms
            self.oracle.took_over(forward_ms, blind=blind)
            self.trace_line(f"{broker.name} leads epoch {node.master_role.epoch}")

    def _dying(self, broker: ClusterBroker) -> None:
        self.tally.hit(ClusterSometimes.IN_MEMORY, int(self.in_memory.died(self.time.now_ms) > 0))
        node = broker.node
        buffered = node.broker.buffer.held if node is not None and node.master_role else 0
        self.tally.hit(ClusterSometimes.BUFFERED, int(buffered > 0))

    def _check_members(self, name: str, confirmed: int) -> None:
        """Whoever an election may pick now has on its disk what a master has just confirmed."""
        record = self.records.newest(GROUP)
        for broker in self.brokers:
            node = broker.node
            if record is None or node is None or node.changing:
                continue
            durable = node.broker.store.durable
            if node.identity.store_id in record.sync_state_set and durable < confirmed:
                what = f"{name} confirmed {confirmed}, {broker.name} of the set has {durable}"
                self.oracle.report_violation("D2 durable", what)

    def _strike(self, sync: SyncState) -> None:
        """Sometimes whoever is being added falls silent before that is written."""
        proposed = (sync.epoch, sync.version)
        if not sync.pending or self.healed or proposed == self._struck:
            return
        self._struck = proposed
        if self.rng.random() < self.strikes:
            for name in map(self.name, sorted(sync.pending)):
                self.trace_line(f"{name} falls silent while it is being added")
                for other in self.brokers:
                    self.net.cut(name, other.name)
                    self.net.cut(other.name, name)
            self.records.manners.away = True

            def over() -> None:
                self.records.manners.away = False
                self.net.heal_all()

            self.time.after(3_500, over)

    def _broken(self, broker: ClusterBroker, error: BaseException) -> None:
        where = traceback.extract_tb(error.__traceback__)[-4:]
        places = "; ".join(f"{frame.name}, line {frame.lineno}: {frame.line}" for frame in where)
        what = f"{broker.name}: {type(error).__name__}: {error} {places}"
        self.oracle.report_violation("I0 broken", what)

    def _written(self, key: str, old: GroupRecord | None, new: GroupRecord) -> None:
        if key != GROUP:
            return
        names = [self.name(member) for member in new.sync_state_set]
        self.trace_line(
            f"record {new.version}: {self.name(new.leader)} epoch {new.epoch} set {names}"
        )
        if old is None:
            return
        tally, elected = self.tally, new.epoch > old.epoch
        grown = set(new.sync_state_set) - set(old.sync_state_set)
        tally.hit(ClusterSometimes.ELECTION, int(elected))
        tally.hit(ClusterSometimes.SAME_AGAIN, int(elected and new.leader == old.leader))
        tally.hit(ClusterSometimes.EXPAND, len(grown))
        fewer = len(new.sync_state_set) < len(old.sync_state_set)
        tally.hit(ClusterSometimes.SHRINK, int(fewer and not elected))
        same = new.sync_state_set == old.sync_state_set
        tally.hit(ClusterSometimes.CANCELLED, int(same and not elected))

    def name(self, store_id: str) -> str:
        for broker in self.brokers:
            if broker.node is not None and broker.node.identity.store_id == store_id:
                return broker.name
        return store_id[:6]

    @property
    def masters(self) -> list[ClusterBroker]:
        """Who lets clients in."""
        brokers = [broker for broker in self.brokers if broker.node is not None]
        return [broker for broker in brokers if broker.node and broker.node.gate.clients.is_open]

    def heal(self) -> None:
        """Nothing fails any more, and who is away comes back."""
        self.healed = True
        self.trace_line("heal")
        self.net.heal_all()
        self.net.manners = NetworkFaults(patience_ms=self.net.manners.patience_ms)
        manners = self.records.manners
        manners.silent = manners.stale = 0.0
        manners.away = False
        for controller in self.controllers:
            controller.host.resume()
            if not controller.host.up:
                controller.start()
        for broker in self.brokers:
            broker.disk.faults.heal()
            broker.sync_ms, broker.idle_ms = lambda: 1, 3 * IDLE_MS
            broker.host.resume()
            if broker.node is None:
                broker.start()
        for number, router in enumerate(self.routers):
            self.proxies[number].resume()
            if router is None:
                self.start_proxy(number)


class CommittedOffsets:
    """I9: what slaves know of the groups' offsets, by how far each has applied the log."""

    def __init__(self, oracle: ClusterOracle) -> None:
        self._oracle = oracle
        self._offsets: dict[tuple[int, int, int], tuple[int, int]] = {}  # applied, committed

    def look(self, brokers: Sequence[ClusterBroker]) -> None:
        """I9: what a slave knows at a position of the confirmed log, none knows less behind it."""
        for broker in brokers:
            node = broker.node
            if node is None or node.master_role is not None or node.changing:
                continue
            slave = node.broker.store.slave
            if slave is None or slave.apply.rebuilding:
                continue
            for place, progress in node.broker.table.progress_items():
                applied, committed = self._offsets.get(place, (0, 0))
                if slave.applied < applied:
                    continue
                if progress.committed < committed:
                    what = f"{place} of {broker.name}: {progress.committed} after {committed}"
                    self._oracle.report_violation("I9 offset-monotonic", what)
                self._offsets[place] = (slave.applied, progress.committed)


class LogHistory:
    """What became of each broker's log, as the table of states counts it."""

    def __init__(self, oracle: ClusterOracle, tally: StateCounts) -> None:
        self._oracle = oracle
        self._tally = tally
        self._looked: dict[str, tuple[int, int, str, BrokerRole]] = {}
        self._hashes: dict[str, StateHashes] = {}
        self._compared: dict[str, int] = {}
        self._renewed: dict[str, int] = {}

    def count(self, broker: ClusterBroker, node: BrokerNode) -> None:
        """What became of its log since the last look."""
        life, end, store_id, role = self._looked.get(broker.name, (0, 0, "", BrokerRole.NOBODY))
        now = (broker.host.life, node.broker.store.end, node.identity.store_id, node.role)
        self._looked[broker.name] = now
        slave = node.broker.store.slave
        if slave is not None and slave.hashes is not self._hashes.get(broker.name):
            self._hashes[broker.name], self._compared[broker.name] = slave.hashes, 0
        if slave is not None and slave.hashes.compared > self._compared[broker.name]:
            self._compared[broker.name] = slave.hashes.compared
            self._tally.hit(ClusterSometimes.HASH_COMPARED)
            if slave.hashes.diverged:
                self._oracle.report_violation("I12 same-state", f"tables of {broker.name} diverged")
        if life != broker.host.life:
            return
        self._tally.hit(ClusterSometimes.TRUNCATION, int(store_id == now[2] and now[1] < end))
        caught_up = role is BrokerRole.COPYING and now[3] is BrokerRole.SLAVE
        self._tally.hit(ClusterSometimes.CATCH_UP, int(caught_up))

    def count_renewals(self, broker: ClusterBroker, node: BrokerNode) -> None:
        renewed = node.broker.pop.revive.renewed
        self._tally.hit(ClusterSometimes.RENEWED, int(renewed > self._renewed.get(broker.name, 0)))
        self._renewed[broker.name] = renewed


def _settings(rng: random.Random) -> Settings:
    settings = Settings(
        store=StoreSettings(
            segment_bytes=rng.choice((16, 64)) << 10,
            snapshot_bytes=rng.choice((12, 48, 4096)) << 10,
            reserved_segments=1,
            retention_hours=72,
        ),
        message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
        pop=PopSettings(),
        group=GroupSettings(auto_create=False),
        timer=TimerSettings(wheel_slots=600, log_segment_bytes=4 << 10),
    )
    replication = ReplicationSettings(
        replicas=3,
        min_in_sync=rng.choice((1, 2, 2, 2)),
        laggard_ms=rng.choice((600, 1_500)),
        fetch_bytes=rng.choice((4, 64)) << 10,
    )
    store = replace(settings.store, tail_bytes=rng.choice((0, 8 << 10, 1 << 20)))
    broker = replace(settings.broker, name=GROUP)
    return replace(settings, replication=replication, store=store, broker=broker)


def _check_tables(brokers: Sequence[ClusterBroker], oracle: ClusterOracle) -> None:
    for broker in brokers:
        node = broker.node
        if node is None or node.changing or node.role is BrokerRole.COPYING:
            continue
        if broken := broken_invariant(node.broker):
            oracle.report_violation("I19 tables-agree", f"{broker.name}: {broken}")


def _manners(rng: random.Random) -> NetworkFaults:
    patience_ms = rng.choice((1_500, 6_000))
    if rng.random() < 0.6:
        return NetworkFaults(
            latency_ms=rng.choice(((0, 1), (0, 4), (1, 25))), patience_ms=patience_ms
        )
    return NetworkFaults(
        latency_ms=rng.choice(((0, 3), (0, 15))),
        unruly=True,
        loss=rng.choice((0.0, 0.01, 0.03)),
        twice=rng.choice((0.0, 0.1)),
        late=rng.choice((0.0, 0.02, 0.1)),
        patience_ms=patience_ms,
    )


_LONGEST = 8 << 10  # a record


class MemorySends:
    """Which sends of a topic in memory that were OK may be gone.

    A broker that died, however it did, may have taken with it what no disk had.  One that was only
    cut off, paused or deposed takes nothing: all that could be elected had received it.
    """

    def __init__(self) -> None:
        self._waiting: list[Message] = []  # OK, and not confirmed
        self._looked_to = 0
        self._died_ms = -1  # when a broker did so last

    def on_reply(self, message: Message, confirmed: bytearray) -> None:
        """The send was OK; `confirmed` is the log that was ever confirmed."""
        if message.head not in confirmed:
            self._waiting.append(message)
            # The OK may rest on bytes that a broker received before it died.
            message.excused = message.asked_ms <= self._died_ms

    def died(self, now_ms: int) -> int:
        """A broker did; how many sends that were OK may be gone."""
        self._died_ms = now_ms
        for message in self._waiting:
            message.excused = True
        return len(self._waiting)

    def look(self, confirmed: bytearray) -> None:
        """More is confirmed: that is never lost."""
        if not self._waiting:
            self._looked_to = len(confirmed)
            return
        new = confirmed[max(0, self._looked_to - _LONGEST) :]
        self._looked_to = len(confirmed)
        for message in self._waiting:
            if message.head in new:
                message.excused = False
                message.settled = True
        self._waiting = [message for message in self._waiting if not message.settled]
