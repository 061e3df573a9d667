"""Shortages: a disk without room, or a process without descriptors, at each file operation.

A scenario without other faults goes through starts, steady load and each change of roles. A first
run of it lists the operations that need space or a descriptor; each place in the product from which
one came is then refused it, once or for some seconds, at one broker or at all of them. Nobody may
end, receives go on where a master serves, and all goes on soon after the shortage is over.
"""

import errno
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import FrameType

from popmq.common.settings.settings import Settings
from popmq.testing.cluster_world.broker import ClusterBroker
from popmq.testing.cluster_world.faults import ServiceFaults
from popmq.testing.cluster_world.run import ClusterRun
from popmq.testing.cluster_world.sim_network import NetworkFaults
from popmq.testing.cluster_world.world import ClusterWorld
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.disk_faults import Demand

LASTS_MS = 4_000
GOES_ON_MS = 3_000  # after the end of a shortage, beyond what the scenario takes without one
_PLACE_FRAMES = 5  # of the product, that tell one place from another
_SAMPLE_MS = 100
_WINDOW_MS = 1_000  # within which some receive is answered
_SENT = re.compile(r"(\d+) sent ")
_ASKED_AT_ONCE = re.compile(r"(\d+) \d+ pop \S+ \S+ \d+ \d+ 0$")  # it does not wait
# Of a queue that was never opened a receive is refused while there are no descriptors.
_ANSWERED = re.compile(r"(\d+) (?:got \[|\d+ -> TOO_MANY_REQUESTS)")
_ERRORS = {
    Demand.SPACE: (errno.ENOSPC, errno.EDQUOT),
    Demand.DESCRIPTOR: (errno.EMFILE,),
}


class Scope(Enum):
    ONE = "one broker"
    ALL = "all brokers"


@dataclass(frozen=True)
class Operation:
    """An operation of the first run that needs something."""

    number: int  # in the order of all brokers
    phase: str  # of the scenario
    demand: Demand
    place: str  # where in the product it came from, and on which file


@dataclass(frozen=True)
class Shortage:
    """What is refused from an operation on; with `lasts_ms` 0 only that operation is."""

    operation: Operation
    error: int
    scope: Scope
    lasts_ms: int

    def __str__(self) -> str:
        span = f"for {self.lasts_ms} ms" if self.lasts_ms else "once"
        where = f"{self.operation.phase}, operation {self.operation.number}"
        return f"{errno.errorcode[self.error]} {span} at {self.scope.value} ({where})"


class ShortageRun(ClusterRun):
    """One run of the scenario. Without a `shortage` it lists the `operations`."""

    def __init__(self, seed: int, shortage: Shortage | None = None) -> None:
        self.phase = "start"
        super().__init__(seed)
        self.operations: list[Operation] = []
        self.begun_ms = -1
        self._led: set[int] = set()  # the sampled times at which one master reached its slaves
        self.ended_ms = -1  # when the shortage was over
        self._shortage = shortage
        self._number = 0
        self._refusing: dict[str, bool] = {}
        world = self.world
        world.net.manners = NetworkFaults(latency_ms=(0, 1), patience_ms=1_500)
        manners = world.records.manners
        manners.silent = manners.late = manners.stale = 0.0
        world.strikes = 0.0
        for broker in world.brokers:
            broker.outlives_errors = True
            broker.sync_ms = lambda: 1
            self._watch(broker)
        self._sample()

    def _make_world(self, seed: int) -> ClusterWorld:
        return ClusterWorld(seed, _roomy)

    def _sample(self) -> None:
        world = self.world
        if len(world.masters) == 1 and world.net.whole:
            self._led.add(world.time.now_ms // _SAMPLE_MS)
        world.time.after(_SAMPLE_MS, self._sample)

    def _watch(self, broker: ClusterBroker) -> None:
        broker.disk.faults.at_demand = partial(self._demanded, broker)

    def _acts(self) -> None:
        """Each change of roles, with time to come to its end."""
        world = self.world
        acts: list[tuple[str, Callable[[], None], int]] = [
            ("steady load", lambda: None, 3_000),
            ("hand-over", ServiceFaults(world).hand_over, 6_000),
            ("death of the master", self._kill_master, 10_000),
            ("a deposed master", self._depose_master, 12_000),
            ("an empty disk", self._wipe_slave, 9_000),
            ("a clean stop", self._stop_slave, 7_000),
            ("all start again", self._restart_all, 10_000),
        ]
        rest = len(acts)
        for self.phase, act, lasts_ms in acts:
            if world.oracle.violations or rest == 0:
                return
            if self.ended_ms >= 0:
                rest = min(rest, 1)  # what comes after it shows nothing new
            rest -= 1
            world.trace_line(f"phase: {self.phase}")
            act()
            world.go(lasts_ms)

    def check_service(self, usual: "ShortageRun") -> None:
        """What clients were answered during the shortage and after it; `usual` is the run
        without it."""
        report, ended_ms = self.world.oracle.report_violation, self.ended_ms
        usual_ms = usual.first_ms(_SENT, ended_ms)
        sent_ms = self.first_ms(_SENT, ended_ms)
        if usual_ms >= 0 and not 0 <= sent_ms <= max(usual_ms, ended_ms) + GOES_ON_MS:
            report("shortage", f"over at {ended_ms}; then a send was OK at {sent_ms}")
        for start_ms in range(self.begun_ms + 500, ended_ms - _WINDOW_MS, _SAMPLE_MS):
            within = range(start_ms, start_ms + _WINDOW_MS)
            led = self._led.issuperset(ms // _SAMPLE_MS for ms in within[::_SAMPLE_MS])
            asked = self.first_ms(_ASKED_AT_ONCE, start_ms) in within[: _WINDOW_MS // 2]
            if led and asked and self.first_ms(_ANSWERED, start_ms) not in within:
                report("shortage", f"no receive was answered from {start_ms} on")
        acks = {line.split()[1] for line in self.world.trace if " ack " in line}
        for line in self.world.trace:
            ms, number, *rest = line.split(" ", 3)
            if rest == ["->", "TOO_MANY_REQUESTS"] and number in acks:
                report("shortage", f"an ack was refused at {ms}")

    def first_ms(self, pattern: re.Pattern[str], from_ms: int) -> int:
        """When such a line was traced from `from_ms` on; -1: never."""
        matches = (pattern.match(line) for line in self.world.trace)
        times = (int(match[1]) for match in matches if match)
        return next((ms for ms in times if ms >= from_ms), -1)

    # -- the acts

    def _kill_master(self) -> None:
        for master in self.world.masters[:1]:
            master.crash(Loss.NOTHING)
            self._start_later(master, 1_500)

    def _depose_master(self) -> None:
        world = self.world
        for master in world.masters[:1]:
            others = [broker.name for broker in world.brokers if broker is not master]
            for other in [*others, *(controller.host.name for controller in world.controllers)]:
                world.net.cut(master.name, other)
                world.net.cut(other, master.name)
        world.time.after(5_000, world.net.heal_all)

    def _wipe_slave(self) -> None:
        slave = next((broker for broker in self.world.brokers if self._is_slave(broker)), None)
        if slave is None:
            return
        slave.crash(Loss.ALL)
        slave.wipe()
        self._watch(slave)
        self._start_later(slave, 500)

    def _stop_slave(self) -> None:
        slave = next((broker for broker in self.world.brokers if self._is_slave(broker)), None)
        if slave is not None:
            slave.stop(lambda: self._start_later(slave, 500))

    def _restart_all(self) -> None:
        for broker in self.world.brokers:
            if broker.node is not None:
                broker.crash(Loss.NOTHING)
            self._start_later(broker, 200)

    def _is_slave(self, broker: ClusterBroker) -> bool:
        return broker.node is not None and broker not in self.world.masters

    def _start_later(self, broker: ClusterBroker, ms: int) -> None:
        def start() -> None:
            if broker.node is None:
                broker.start()

        self.world.time.after(ms, start)

    # -- the shortage

    def _demanded(self, broker: ClusterBroker, demand: Demand, path: str) -> None:
        self._number += 1
        shortage = self._shortage
        if shortage is None:
            place = f"{_place()} {_kind(path)}"
            self.operations.append(Operation(self._number, self.phase, demand, place))
            return
        if self._number == shortage.operation.number:
            self._begin(broker, shortage)
            self._refuse(shortage.error)
        if demand is shortage.operation.demand and self._refusing.get(broker.name):
            self._refuse(shortage.error)

    def _begin(self, broker: ClusterBroker, shortage: Shortage) -> None:
        world = self.world
        world.trace_line(f"refused to {broker.name}: {shortage} {shortage.operation.place}")
        self.begun_ms = world.time.now_ms
        if not shortage.lasts_ms:
            self.ended_ms = world.time.now_ms
            return
        brokers = world.brokers if shortage.scope is Scope.ALL else [broker]
        self._refusing = {refused.name: True for refused in brokers}

        def end() -> None:
            self._refusing = {}
            self.ended_ms = world.time.now_ms
            world.trace_line("the shortage is over")

        world.time.after(shortage.lasts_ms, end)

    @staticmethod
    def _refuse(number: int) -> None:
        raise OSError(number, os.strerror(number))


def _roomy(settings: Settings) -> Settings:
    """Segments in which the load of a shortage has room, as those of a real broker have."""
    store = replace(settings.store, segment_bytes=256 << 10, reserved_segments=2)
    return replace(settings, store=store)


def _kind(path: str) -> str:
    """What sort of file it is: queues differ by names, and segments by numbers."""
    parts = [re.sub(r"[0-9a-f]{6,}|[0-9]+", "#", part) for part in path.split("/")]
    if parts[1:2] in (["consumequeue"], ["system"]):
        parts[2:3] = ["*"]
    return "/".join(parts)


def _place() -> str:
    """The innermost functions of the product that are on the stack."""
    names: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(names) < _PLACE_FRAMES:
        file = frame.f_code.co_filename
        if "/popmq/broker/" in file or "/popmq/common/" in file:
            names.append(f"{os.path.basename(file)[:-3]}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


def shortages(operations: list[Operation], rng: random.Random) -> Iterator[Shortage]:
    """For each place in each phase its first operation, and one by chance; all kinds of each."""
    places: dict[tuple[str, str], list[Operation]] = {}
    for operation in operations:
        places.setdefault((operation.phase, operation.place), []).append(operation)
    for here in places.values():
        chosen = {here[0].number: here[0]}
        other = rng.choice(here)
        chosen[other.number] = other
        for operation in chosen.values():
            for scope, lasts_ms in ((Scope.ONE, 0), (Scope.ONE, LASTS_MS), (Scope.ALL, LASTS_MS)):
                error = rng.choice(_ERRORS[operation.demand])
                yield Shortage(operation, error, scope, lasts_ms)


class ShortageTable:
    """Shortages of one scenario: how many were tried in each phase, and what was violated."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.usual = ShortageRun(seed)
        result = self.usual.run()
        assert not result.violations, result.history(40)
        self.tried: Counter[tuple[str, str, str]] = Counter()
        self.violations: list[str] = []

    def choose(self, count: int) -> list[Shortage]:
        """So many, at places of as many sorts as possible; the same for the same seed."""
        rng = random.Random(self.seed)
        chosen = list(shortages(self.usual.operations, rng))
        rng.shuffle(chosen)
        seen: Counter[str] = Counter()
        ranks: dict[Shortage, int] = {}
        for shortage in chosen:
            ranks[shortage] = seen[shortage.operation.place]
            seen[shortage.operation.place] += 1
        return sorted(chosen, key=ranks.__getitem__)[:count]

    def try_one(self, shortage: Shortage) -> None:
        run = ShortageRun(self.seed, shortage)
        result = run.run()
        if not result.violations:
            run.check_service(self.usual)
        names = [errno.errorcode[shortage.error], shortage.scope.value]
        span = "lasting" if shortage.lasts_ms else "once"
        self.tried[shortage.operation.phase, names[0], f"{span}, {names[1]}"] += 1
        if run.begun_ms < 0:
            self.violations.append(f"{shortage}: never begun")
        for violation in result.violations[:1]:
            self.violations.append(f"{shortage} at {shortage.operation.place}: {violation}")

    def __str__(self) -> str:
        columns = sorted({(error, how) for _, error, how in self.tried})
        head = ["phase", *(f"{error} {how}" for error, how in columns)]
        phases = dict.fromkeys(operation.phase for operation in self.usual.operations)
        rows = [
            [phase, *(str(self.tried[phase, error, how]) for error, how in columns)]
            for phase in phases
        ]
        lines = [" | ".join(row) for row in (head, *rows)]
        return "\n".join([*lines, f"{self.tried.total()} tried, {len(self.violations)} violated"])


def run_shortages(seed: int, count: int) -> int:
    """Print the table of `count` shortages; the exit status: 1 when something was violated."""
    table = ShortageTable(seed)
    for shortage in table.choose(count):
        table.try_one(shortage)
    print("\n".join([*table.violations, str(table)]))
    return 1 if table.violations else 0
