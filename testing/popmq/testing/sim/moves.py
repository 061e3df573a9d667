"""Moves of the simulator that belong together: parked keys, topics created again, and expiry."""

import random

from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.oracle.client_history import GroupReader, ResourceIncarnation
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.clients import LONG_MS, MAX_INVISIBLE_MS
from popmq.testing.sim.operators import Operators
from popmq.testing.sim.producers import KEYS, QUIET
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.sim.store_checks import StoreChecks


def add_reader(clients: Operators, oracle: Oracle, group: str, topic: str, *tags: str) -> None:
    reader_group, reader_topic = clients.groups[group], clients.topics[topic]
    assert reader_group is not None
    assert reader_topic is not None
    oracle.readers.append(GroupReader(reader_group, reader_topic, tags))


def some_reader(oracle: Oracle, rng: random.Random) -> GroupReader | None:
    usable = [reader for reader in oracle.readers if reader.alive]
    ordered = [reader for reader in usable if reader.group.fifo]
    if ordered and rng.random() < 0.4:
        return rng.choice(ordered)
    return rng.choice(usable) if usable else None


class ParkingMoves:
    """FIFO groups hold few open messages, so that keys are parked; operators resume them."""

    def __init__(
        self,
        machine: SimulatedBroker,
        clients: Operators,
        oracle: Oracle,
        rng: random.Random,
        checks: StoreChecks,
    ) -> None:
        self._machine = machine
        self._clients = clients
        self._oracle = oracle
        self._rng = rng
        self._checks = checks

    @property
    def _readers(self) -> list[GroupReader]:
        return [reader for reader in self._oracle.readers if reader.alive and reader.group.fifo]

    def stick(self) -> None:
        """Messages of few message groups, one of which is held for long."""
        fifo, machine = self._clients.topics["fo"], self._machine
        readers = self._readers
        reader = self._rng.choice(readers)
        for limit in (1, 2, 2):
            self._clients.send(fifo)
            self._clients.send(fifo)
            machine.run_until_idle()
            self._clients.receive_named(reader, limit=limit, invisible_ms=MAX_INVISIBLE_MS)
            machine.run_until_idle(until=lambda: self._rng.random() < 0.05)
            machine.advance(self._rng.choice((20, 1_200, 1_200)))
        machine.step()
        if self._rng.random() < 0.5:
            self.resume()

    def unpark(self) -> None:
        readers = self._readers
        if readers:
            reader = self._rng.choice(readers)
            parked = self._machine.parked(reader.group.name)
            often = parked and self._rng.random() < 0.5
            self._clients.unpark(reader, self._rng.choice(parked if often else KEYS))

    def resume(self) -> None:
        """What was parked is resumed and received, and then sometimes the offset is reset."""
        rng, machine, clients = self._rng, self._machine, self._clients
        readers = self._readers
        stuck = [(reader, key) for reader in readers for key in machine.parked(reader.group.name)]
        if not stuck:
            return
        reader, key = rng.choice(stuck)
        clients.unpark(reader, key, "resume")
        machine.advance(rng.choice((20, MAX_INVISIBLE_MS + 100)))  # what holds it up is back
        for _ in range(2):
            machine.step()
            machine.run_until_idle(until=lambda: rng.random() < 0.02)
            clients.receive(reader, limit=8, invisible_ms=MAX_INVISIBLE_MS)
            machine.run_until_idle(until=lambda: rng.random() < 0.02)
        if rng.random() < 0.5:
            clients.reset(reader, self._checks.forget_offsets, rng.choice(("oldest", "oldest", "")))


class Recreation:
    """A topic and a group are made, deleted and made anew under the same name."""

    def __init__(
        self,
        machine: SimulatedBroker,
        clients: Operators,
        oracle: Oracle,
        rng: random.Random,
        tally: StateCounts,
    ) -> None:
        self._machine = machine
        self._clients = clients
        self._oracle = oracle
        self._rng = rng
        self._tally = tally

    def make_or_drop(self) -> None:
        name, places, make, drop = self._rng.choice(
            (
                ("tmp", self._clients.topics, self._make_tmp_topic, self._clients.drop_topic),
                ("tg", self._clients.groups, self._make_tmp_group, self._clients.drop_group),
            )
        )
        if name in places:
            drop(name)
        else:
            make()

    def _make_tmp_topic(self) -> None:
        self._clients.make_topic("tmp", 2)
        self._machine.run_until_idle()
        self._join("g", "tmp")
        self._join("tg", "tmp")

    def _make_tmp_group(self) -> None:
        self._clients.make_group("tg", 3)
        self._machine.run_until_idle()
        self._tally.hit(Sometimes.GROUP_REMADE, int(self._join("tg", "t0")))
        self._join("tg", "tmp")

    def _join(self, group: str, topic: str) -> bool:
        known = self._clients.groups.get(group), self._clients.topics.get(topic)
        ready = all(isinstance(place, ResourceIncarnation) for place in known)
        if ready:
            add_reader(self._clients, self._oracle, group, topic)
        return ready


class ExpiryMoves:
    """For runs in which messages expire: hours pass, the log grows, segments go."""

    def __init__(
        self, machine: SimulatedBroker, clients: Operators, oracle: Oracle, rng: random.Random
    ) -> None:
        self._machine = machine
        self._clients = clients
        self._oracle = oracle
        self._rng = rng

    def hours(self) -> None:
        self._machine.advance(self._rng.choice((600_000, 1_800_000, 4_000_000)))

    def burst(self) -> None:
        for _ in range(self._rng.choice((3, 8))):
            self._clients.send()

    def outlive(self) -> None:
        """Something is held while the log grows, until segments go that were there before."""
        rng, machine, reader = self._rng, self._machine, some_reader(self._oracle, self._rng)
        if reader is None:
            return
        self._clients.receive(reader, limit=8, invisible_ms=max(LONG_MS))
        for _ in range(rng.choice((3, 6))):
            for _ in range(5):
                self._clients.send()
            machine.run_until_idle()
            machine.advance(1_200_000)
            self.work()

    def quiet(self) -> None:
        self._clients.send(self._clients.topics[QUIET])

    def work(self) -> None:
        """Many steps, as an idle broker makes them; some before the last one's news came."""
        often = self._rng.choice((0.8, 0.8, 0.2))
        for _ in range(self._rng.choice((4, 12))):
            self._machine.step()
            if self._rng.random() < often:
                self._machine.run_until_idle()
