"""One measured run of one peer: its own CPU, what the loader spent, the disk, and the count.

Every run compares what was answered OK with what the peer itself says that it has stored.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from bench.peers.peer import Peer
from bench.peers.processes import Process, cpu_s, device_flushes, machine_cpu_s
from popmq.cli.load.consuming import ConsumeStats
from popmq.cli.load.figures import LatencySummary, LoadStats
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.sending import ClosedLoad
from popmq.cli.load.target import check_stored


@dataclass(frozen=True, slots=True)
class Shape:
    """So many connections with so many calls in flight on each."""

    connections: int
    in_flight: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        connections, _, in_flight = text.partition("x")
        return cls(int(connections), int(in_flight))

    def __str__(self) -> str:
        return f"{self.connections}x{self.in_flight}"


@dataclass(frozen=True, slots=True)
class Measure:
    """CPU figures are microseconds of user and system time for each message."""

    peer: str
    case: str
    round: int
    messages: int
    per_second: float
    cpu_us: float
    by_process_us: dict[str, float]
    loader_us: float
    ms: LatencySummary
    flushes: int  # of the whole disk
    other_cores: float  # what anybody else on the machine used meanwhile
    load_average: float
    refused: dict[str, int] = field(default_factory=dict)
    receive_ms: LatencySummary = field(default_factory=LatencySummary)

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class _Meter:
    def __init__(self, processes: Sequence[Process], folder: Path) -> None:
        self._processes = processes
        self._folder = folder
        self._start = self._look()

    def _look(self) -> tuple[list[float], float, float, float, int]:
        return (
            [cpu_s([process]) for process in self._processes],
            time.process_time(),
            machine_cpu_s(),
            time.perf_counter(),
            device_flushes(self._folder),
        )

    def result(self, peer: str, case: str, number: int, tally: LoadStats) -> Measure:
        before, after = self._start, self._look()
        if not tally.done:
            raise LoadError(f"{peer}, {case}: nothing was done: {dict(tally.refusals)}")
        by_process = {
            process.name: (now - then) / tally.done * 1e6
            for process, then, now in zip(self._processes, before[0], after[0], strict=True)
        }
        ours = sum(after[0]) - sum(before[0]) + after[1] - before[1]
        wall = after[3] - before[3]
        return Measure(
            peer=peer,
            case=case,
            round=number,
            messages=tally.done,
            per_second=round(tally.per_second, 1),
            cpu_us=round(sum(by_process.values()), 2),
            by_process_us={name: round(us, 2) for name, us in by_process.items()},
            loader_us=round((after[1] - before[1]) / tally.done * 1e6, 2),
            ms=tally.spread(),
            flushes=after[4] - before[4],
            other_cores=round((after[2] - before[2] - ours) / wall, 2),
            load_average=os.getloadavg()[0],
            refused=dict(tally.refusals),
        )


def send(
    peer: Peer, shape: Shape, *, body: int, seconds: float, number: int, folder: Path
) -> Measure:
    """A closed load; a short one before it, on the same connections, is not measured."""

    def load(reactor: Reactor) -> Measure:
        lanes = peer.lanes(reactor, shape.connections, body)
        ClosedLoad(reactor, lanes, shape.in_flight).run(min(1.0, seconds / 4))
        before = peer.stored()
        meter = _Meter(peer.processes(), folder)
        tally = ClosedLoad(reactor, lanes, shape.in_flight).run(seconds)
        measure = meter.result(peer.name, f"send {shape}", number, tally)
        check_stored(measure.case, tally.done, before, peer.stored())
        return measure

    return _in_reactor(load)


def warm_up(peer: Peer, *, body: int, seconds: float) -> int:
    """Send `peer.warm_up` messages, for at most so many seconds; how many it took."""

    def load(reactor: Reactor) -> int:
        lanes = peer.lanes(reactor, 16, body)
        tally = ClosedLoad(reactor, lanes, 16).run(seconds, limit=peer.warm_up)
        return tally.done

    return _in_reactor(load)


def consume(
    peer: Peer, shape: Shape, *, seconds: float, number: int, acks: str, folder: Path
) -> Measure | None:
    """`shape.in_flight` loops on each connection; None where the peer does not offer it."""
    meters: list[_Meter] = []

    def load(reactor: Reactor) -> ConsumeStats | None:
        meters.append(_Meter(peer.processes(), folder))
        return peer.consume(reactor, shape.connections, shape.in_flight, seconds, acks=acks)

    consumed = _in_reactor(load)
    if consumed is None:
        return None
    case = f"receive 32, {'32 acks' if acks == 'each' else 'one ack'}"
    measure = meters[0].result(peer.name, case, number, consumed.acks)
    if consumed.twice:
        raise LoadError(f"{peer.name}, {case}: {consumed.twice} messages came twice")
    refused = dict(consumed.acks.refusals + consumed.receives.refusals)
    return replace(measure, receive_ms=consumed.receives.spread(), refused=refused)


T = TypeVar("T")


def _in_reactor(load: Callable[[Reactor], T]) -> T:
    reactor = Reactor()
    try:
        return load(reactor)
    finally:
        reactor.close()
