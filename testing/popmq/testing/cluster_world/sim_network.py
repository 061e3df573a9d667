"""The network of a simulated cluster: links between hosts, and what a seed does to them.

A link has a latency and may be cut in one direction; what was under way then waits, as TCP
repeats it, until the link is whole again or the sender's patience is over.  In an `unruly`
network frames also overtake each other, get lost one by one, and some requests arrive twice:
more than TCP would do, so that no rule rests on TCP.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.sometimes_states import NetSometimes
from popmq.testing.cluster_world.timeline import Action, Timeline
from popmq.testing.harness.sometimes import StateCounts

_LATE_MS = (50, 400, 3_000)  # what delays a frame once in a while, in an unruly network


@dataclass(slots=True)
class NetworkLink:
    """One direction between two hosts."""

    cut: bool = False
    slow_ms: int = 0
    waiting: list[Action] = field(default_factory=list)  # for the link to be whole again


@dataclass(slots=True)
class NetworkFaults:
    """What this seed's network is like."""

    latency_ms: tuple[int, int] = (0, 2)
    unruly: bool = False
    loss: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    patience_ms: int = 8_000  # how long TCP repeats, before it calls a connection dead


class HeldFrames(Protocol):
    """Frames that a world keeps back for longer than the network does."""

    def hold(self, kind: Kind, arrive: Action, *, answer: bool) -> bool:
        """Whether it calls `arrive` itself, later."""
        ...


class NoHeldFrames:
    def hold(self, kind: Kind, arrive: Action, *, answer: bool) -> bool:
        return False


class SimNet:
    """Who listens where, and what lies between; `cluster_port` has the connections."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        tally: StateCounts,
        manners: NetworkFaults,
        held: HeldFrames | None = None,
    ) -> None:
        self.held = held or NoHeldFrames()
        self.timeline = timeline
        self.rng = rng
        self.tally = tally
        self.manners = manners
        self.listeners: dict[str, tuple[Host, Port]] = {}
        # Told of every connection that begins or ends, both hosts named; faults break some.
        self.connections: dict[int, NetworkConnection] = {}
        self._numbers = 0
        self._links: dict[tuple[str, str], NetworkLink] = {}

    # -- addresses

    def listen(self, address: str, host: Host, port: Port) -> None:
        self.listeners[address] = (host, port)

    def listener(self, address: str) -> tuple[Host, Port] | None:
        """Whoever is up and listens there."""
        listener = self.listeners.get(address)
        return listener if listener is not None and listener[0].up else None

    def is_off(self, address: str) -> bool:
        """Whether the machine behind an address says nothing at all."""
        return address in self.listeners and self.listeners[address][0].off

    # -- links

    def link(self, source: str, target: str) -> NetworkLink:
        return self._links.setdefault((source, target), NetworkLink())

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from one to the other; the way back is another link."""
        self.link(source, target).cut = True

    def heal(self, source: str, target: str) -> None:
        link = self.link(source, target)
        link.cut = False
        waiting, link.waiting = link.waiting, []
        for action in waiting:
            self.timeline.after(self.latency_ms(link), action)

    def heal_all(self) -> None:
        for (source, target), link in sorted(self._links.items()):
            link.slow_ms = 0
            if link.cut:
                self.heal(source, target)

    @property
    def whole(self) -> bool:
        return not any(link.cut for link in self._links.values())

    def latency_ms(self, link: NetworkLink) -> int:
        manners, rng = self.manners, self.rng
        late_ms = rng.choice(_LATE_MS) if rng.random() < manners.late else 0
        return rng.randint(*manners.latency_ms) + late_ms + link.slow_ms

    def carry(self, source: str, target: str, action: Action) -> None:
        """`action` when it got to the other side; never, if it is lost."""
        link = self.link(source, target)
        if link.cut:
            self.tally.hit(NetSometimes.STALLED)
            link.waiting.append(action)
        elif self.manners.loss and self.rng.random() < self.manners.loss:
            self.tally.hit(NetSometimes.FRAME_LOST)
        else:
            self.timeline.after(self.latency_ms(link), action)

    # -- connections

    def opened(self, connection: "NetworkConnection") -> int:
        self._numbers += 1
        self.connections[self._numbers] = connection
        return self._numbers

    def ended(self, number: int) -> None:
        self.connections.pop(number, None)

    def break_some(self, chosen: Callable[["NetworkConnection"], bool]) -> int:
        """Both ends of these connections are told that they are lost; returns how many."""
        connections = [
            connection for connection in list(self.connections.values()) if chosen(connection)
        ]
        for connection in connections:
            connection.break_off("the connection was reset")
        return len(connections)

    def process_ended(self, host: Host, *, quietly: bool) -> None:
        """Its connections end; `quietly`: the machine is off and nobody says so."""
        for connection in list(self.connections.values()):
            if host.name in connection.hosts:
                connection.host_gone(host.name, quietly=quietly)


class NetworkConnection:
    """What the network needs to know of a connection."""

    hosts: tuple[str, str]

    def break_off(self, why: str) -> None:
        raise NotImplementedError

    def host_gone(self, name: str, *, quietly: bool) -> None:
        raise NotImplementedError
