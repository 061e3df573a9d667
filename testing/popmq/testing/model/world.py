"""The light replicas' world: brokers that only replicate, controllers, faults, one golden log.

Everything that any broker ever called confirmed is written down here once; whoever confirms
something else at that place, or leads without it, broke a rule of replication.  In the end all
heals, and the group has to confirm again and agree.
"""

import random
from functools import partial

from popmq.broker.ha.epoch_file import EpochFile
from popmq.broker.ha.identity import Identity
from popmq.common.errors import PopmqError
from popmq.common.protocol.group_record import GroupRecord
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.cluster_settings import ClusterSettings
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.testing.cluster_world.controller import ControllerNode
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.cluster_world.sim_metadata_store import SimMetadataStore
from popmq.testing.cluster_world.sim_network import NetworkFaults, SimNet
from popmq.testing.cluster_world.sometimes_states import ModelSometimes, NetSometimes
from popmq.testing.cluster_world.timeline import MOVING_SEEDS, HostClock, Timeline
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.model.log import RECORD, START, VALUE, ModelLog, values
from popmq.testing.model.node import CLUSTER, GROUP, ModelNode
from popmq.testing.oracle.client_history import Violation

PUT_MS = 40


class ModelReplica:
    """A host with a disk, and the process that runs on it now and then."""

    def __init__(self, name: str, world: "ModelWorld") -> None:
        clock = HostClock(world.time, rate_ppm=world.rng.choice((0, 0, 20_000, -20_000)))
        self.host = Host(name, world.time, clock)
        self.world = world
        self.node: ModelNode | None = None
        self.store_id = ""  # of its disk
        self._new_disk()

    def _new_disk(self) -> None:
        self.disk = SimDisk(self.world.rng)
        self.log = ModelLog(self.world.rng)

    def start(self) -> None:
        world = self.world
        self.host.boot()
        self.node = world.make_node(self)
        self.store_id = self.node.identity.store_id
        takes_ms = world.rng.choice(((1,), (1, 2, 4, 30), (5, 80, 400)))
        self.node.sync_ms = lambda: world.rng.choice(takes_ms)
        self.node.start()

    def crash(self, *, power: bool) -> None:
        self.world.tally.hit(ModelSometimes.POWER, int(power and self.log.unsynced))
        self.world.tally.hit(ModelSometimes.CRASH, int(not power))
        self.node = None
        self.host.die(off=power)
        self.world.net.process_ended(self.host, quietly=power)
        self.log.crash(power=power)
        self.disk.crash(Loss.ALL if power else Loss.NOTHING)

    def wipe(self) -> None:
        """The disk is replaced by an empty one."""
        self._new_disk()
        self.store_id = ""

    def was_alone(self) -> None:
        """It begins with what a broker without replicas wrote."""
        rng, cluster = self.world.rng, ClusterSettings()
        Identity(self.disk, "identity", rng, cluster=cluster).accept(1)
        EpochFile(self.disk, "epochs").append(1, 0)
        values = [RECORD.pack(1, VALUE, 0)] * self.world.rng.choice((1, 30))
        self.log.fill(RECORD.pack(1, START, 0) + b"".join(values))


class ModelWorld:
    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.trace: list[str] = []
        self.violations: list[Violation] = []
        self.tally = StateCounts(ModelSometimes, NetSometimes)
        self.time = Timeline(rng, moves=seed >= MOVING_SEEDS)
        self.net = SimNet(self.time, rng, self.tally, _manners(rng))
        self.records = SimMetadataStore(self.time, rng, self.tally)
        self.records.on_write = self._written
        self.count = rng.choice((2, 3, 3))
        self.min_in_sync = rng.choice((1, 2)) if self.count == 3 else rng.choice((1, 1, 2))
        self.replicas = [ModelReplica("abc"[number], self) for number in range(self.count)]
        self.controllers = [
            ControllerNode(
                self.net,
                Host(f"x{number}", self.time, HostClock(self.time)),
                self.records,
                rng,
                cluster=CLUSTER,
            )
            for number in range(2)
        ]
        self.golden = bytearray()
        self.acknowledged = 0
        self._wrote_ms = 0
        self._masters: dict[int, str] = {}  # epoch -> who confirmed something in it
        self._confirmed_numbers: set[int] = set()
        self._numbers = 0
        self._client = Host("client", self.time, HostClock(self.time))
        self._client.boot()
        self._ports: dict[str, SimPort] = {}
        self.healed = False

    def trace_line(self, line: str) -> None:
        self.trace.append(f"{self.time.now_ms} {line}")

    def make_node(self, replica: ModelReplica) -> ModelNode:
        return ModelNode(
            self.net,
            replica.host,
            disk=replica.disk,
            log=replica.log,
            controllers=[controller.address for controller in self.controllers],
            replication=ReplicationSettings(replicas=self.count, min_in_sync=self.min_in_sync),
            on_confirmed=self.confirmed,
            note=lambda line: self.trace_line(f"{replica.host.name} {line}"),
            tally=self.tally,
        )

    def start(self) -> None:
        for controller in self.controllers:
            controller.start()
        if self.rng.random() < 0.2:
            self.replicas[0].was_alone()
        for replica in self.replicas:
            replica.start()
        self._put()

    # -- what is watched

    def report_violation(self, invariant: str, what: str) -> None:
        self.violations.append(Violation(invariant, what))
        self.trace_line(f"VIOLATION {invariant}: {what}")

    def confirmed(self, node: ModelNode) -> None:
        """Some broker calls its log confirmed up to there."""
        golden, position, name = self.golden, node.confirmed, node.host.name
        data = bytes(node.log.data[:position])
        known = min(len(golden), len(data))
        if data[:known] != golden[:known]:
            at = next(at for at in range(known) if data[at] != golden[at])
            self.report_violation("replaced", f"{name} has other records at {at} of {len(golden)}")
        if node.sync is None:
            if position > len(golden):
                self.report_violation(
                    "I10 one-master", f"slave {name} confirmed {position} by itself"
                )
            return
        self._check_copies(node)
        golden += data[known:]
        self._confirmed_numbers.update(values(data[known:]))
        other = self._masters.setdefault(node.sync.epoch, name)
        if other != name:
            what = f"{other} and {name} confirmed in epoch {node.sync.epoch}"
            self.report_violation("I10 one-master", what)
        self.tally.hit(ModelSometimes.PENDING, int(bool(node.sync.pending)))

    def _check_copies(self, node: ModelNode) -> None:
        """What is confirmed is on the disks of min_in_sync stores, each of which can be elected."""
        record = self.records.newest(GROUP)
        if record is None:
            return
        position = node.confirmed
        stores = {replica.store_id: replica.log for replica in self.replicas}
        logs = [stores[member] for member in record.sync_state_set if member in stores]
        copies = sum(log.on_platter >= position for log in logs)
        lost = len(record.sync_state_set) - len(logs)  # with their disks, since they acked
        if copies < min(self.min_in_sync, len(record.sync_state_set)) - lost:
            what = f"{node.host.name} confirms {position}, which {copies} members of the set have"
            self.report_violation("D2 durable", what)
        if len(record.sync_state_set) < self.min_in_sync and record.epoch == self._epoch(node):
            self.report_violation(
                "D2 durable", f"confirmed by a set of {len(record.sync_state_set)}"
            )

    def _check_set(self, record: GroupRecord) -> None:
        """Whatever an election can pick has what is confirmed, on as many disks as promised."""
        logs = {replica.store_id: replica.log for replica in self.replicas}
        known = [logs[member] for member in record.sync_state_set if member in logs]
        copies = sum(log.on_platter >= len(self.golden) for log in known)
        lost = len(record.sync_state_set) - len(known)
        if self.golden and copies < self.min_in_sync - lost:
            what = f"{len(self.golden)} confirmed bytes are on {copies} disks of {record}"
            self.report_violation("D2 durable", what)

    @staticmethod
    def _epoch(node: ModelNode) -> int:
        return node.sync.epoch if node.sync is not None else 0

    def _written(self, key: str, old: GroupRecord | None, new: GroupRecord) -> None:
        if key != GROUP:
            return
        self.trace_line(
            f"record {new.version}: {self.name(new.leader)} epoch {new.epoch} "
            f"set {[self.name(member) for member in new.sync_state_set]}"
        )
        self._check_set(new)
        if old is None:
            return
        self.tally.hit(ModelSometimes.SPLIT, int(self.time.now_ms - self._wrote_ms < 1_000))
        self._wrote_ms = self.time.now_ms
        tally, elected = self.tally, new.epoch > old.epoch
        if elected and self.rng.random() < 0.15 and not self.healed:
            self.time.after(self.rng.choice((200, 300, 600)), partial(self._strike, new.leader))
        grown = len(set(new.sync_state_set) - set(old.sync_state_set))
        tally.hit(ModelSometimes.ELECTION, int(elected))
        tally.hit(ModelSometimes.SAME_AGAIN, int(elected and new.leader == old.leader))
        tally.hit(ModelSometimes.EXPAND, int(grown > 0))
        fewer = len(new.sync_state_set) < len(old.sync_state_set)
        tally.hit(ModelSometimes.SHRINK, int(fewer and not elected))
        tally.hit(
            ModelSometimes.CANCELLED,
            int(not elected and new.sync_state_set == old.sync_state_set),
        )

    def _strike(self, store_id: str) -> None:
        """The power goes while a new master begins."""
        for replica in self.replicas:
            if replica.store_id == store_id and replica.node is not None and not self.healed:
                self.trace_line(f"{replica.host.name} loses its power")
                replica.crash(power=True)
                self.time.after(5, partial(_start_again, replica))

    def name(self, store_id: str) -> str:
        names = [replica.host.name for replica in self.replicas if replica.store_id == store_id]
        return names[0] if names else store_id[:6]

    # -- the client: asks everybody for ever

    def _put(self) -> None:
        for replica in self.replicas:
            node = replica.node
            if node is not None and node.sync is not None:
                self._ask(node.address)
        masters = [
            replica for replica in self.replicas if replica.node is not None and replica.node.serves
        ]
        self.tally.hit(ModelSometimes.STALE_MASTER, int(len(masters) > 1))
        self._client.after(self.rng.choice((10, PUT_MS, 3 * PUT_MS)), self._put)

    def _ask(self, address: str) -> None:
        if address not in self._ports:
            self._ports[address] = SimPort(self.net, self._client, address)
        self._numbers += 1
        number = self._numbers
        body = number.to_bytes(4, "big")
        connected = partial(self._heard, number)
        self._ports[address].request(Kind.PUT, body, 5_000, connected)

    def _heard(self, number: int, answer: bytes | PopmqError) -> None:
        if isinstance(answer, PopmqError):
            return
        self.acknowledged += 1
        if number not in self._confirmed_numbers:
            self.report_violation("I1 no-loss", f"{number} was acknowledged and is not confirmed")

    # -- the end

    def heal(self) -> None:
        self.healed = True
        self.net.heal_all()
        self.net.manners = NetworkFaults()
        self.records.manners.silent = self.records.manners.stale = 0.0
        self.records.manners.away = False
        for controller in self.controllers:
            controller.host.resume()
            if not controller.host.up:
                controller.start()
        for replica in self.replicas:
            replica.host.resume()
            if replica.node is None:
                replica.start()
            if replica.node is not None:
                replica.node.sync_ms = lambda: 2

    def drain(self) -> None:
        """It has to serve within some seconds, take every broker back, and agree."""
        before = self.acknowledged
        self.time.run(self.time.now_ms + 12_000, stop=lambda: bool(self.violations))
        if self.violations:
            return
        if self.acknowledged == before:
            self.report_violation(
                "progress", "nothing was confirmed in 12 s after everything healed"
            )
            return
        record = self.records.newest(GROUP)
        if record is None or len(record.sync_state_set) != self.count:
            self.report_violation("progress", f"the set is {record} after 12 s without a fault")
        for replica in self.replicas:
            node = replica.node
            assert node is not None
            data = bytes(node.log.data)
            known = min(len(data), len(self.golden))
            if data[:known] != self.golden[:known] or known + 2_000 < len(self.golden):
                self.report_violation(
                    "agreement", f"{replica.host.name} ends at {len(data)}, otherwise"
                )


def _manners(rng: random.Random) -> NetworkFaults:
    if rng.random() < 0.6:
        latency_ms = rng.choice(((0, 1), (0, 4), (1, 30)))
        return NetworkFaults(latency_ms=latency_ms, patience_ms=rng.choice((1_000, 6_000)))
    return NetworkFaults(
        latency_ms=rng.choice(((0, 3), (0, 20))),
        unruly=True,
        loss=rng.choice((0.0, 0.01, 0.05)),
        twice=rng.choice((0.0, 0.1)),
        late=rng.choice((0.0, 0.02, 0.1, 0.3)),
        patience_ms=rng.choice((1_000, 6_000)),
    )


def _start_again(replica: ModelReplica) -> None:
    if replica.node is None:
        replica.start()
