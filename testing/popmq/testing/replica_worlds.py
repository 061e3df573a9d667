"""The simulator's worlds again, with a slave that follows and takes over (sim/slave.py)."""

from collections.abc import Callable
from dataclasses import replace

from popmq.broker.core.broker import Broker
from popmq.common.settings.replication_settings import ReplicationSettings
from popmq.common.settings.settings import Settings
from popmq.testing.sim.replay import ReplayCheck
from popmq.testing.sim.run import Simulator
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.sim.slave import ReplicaMachine
from popmq.testing.timer_world.run import TimerSimulator


class ReplicaSimulator(Simulator):
    """Pops, acks, changes, order, parking, operators and retention."""

    option = "--replica"
    machine: ReplicaMachine

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        # What expired on one replica may be there still on another.
        self.machine.fails_over = not self.retains
        self.machine.damages = self._damages
        self._actions += [(self._compare, 3), (self._lose_slave, 4)]
        self.compared = 0

    def reached(self) -> dict[str, int]:
        """How often rare states were."""
        return {"comparisons": self.compared, **self.machine.reached()}

    def _machine(self, settings: Settings) -> SimulatedBroker:
        return ReplicaMachine(_of_two(settings), self.rng, self.tally)

    def _lose_slave(self) -> None:
        _lose_slave(self.machine)

    def _compare(self) -> None:
        if self.oracle.log_lost:
            return
        self.machine.run_until_idle()
        for _ in range(3):  # what was just written may let others pop
            self.machine.broker.buffer.write_all()
            self.machine.run_until_idle()
        if any(ck.buffered for ck in self.machine.broker.table):
            return
        self.compared += _compare(self.machine, self.replay)


class TimerReplicaSimulator(TimerSimulator):
    """Timers."""

    option = "--replica --timers"
    machine: ReplicaMachine

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.machine.fails_over = not self.retains
        self.compared = 0

    def reached(self) -> dict[str, int]:
        """How often rare states were."""
        return {"comparisons": self.compared, **self.machine.reached()}

    def _machine(self, settings: Settings) -> SimulatedBroker:
        return ReplicaMachine(_of_two(settings), self.rng, self.tally)

    def weighted(self) -> list[tuple[Callable[[], object], int]]:
        return [*super().weighted(), (self._compare, 3), (self._lose_slave, 4)]

    def _lose_slave(self) -> None:
        _lose_slave(self.machine)

    def _compare(self) -> None:
        self.compared += _compare(self.machine, self.replay)


def _of_two(settings: Settings) -> Settings:
    return replace(settings, replication=ReplicationSettings(replicas=2))


def _lose_slave(machine: ReplicaMachine) -> None:
    """Its disk is gone, and the master's log begins behind what a new one could have."""
    if machine.broker.store.start > 0 and not machine.slave.given_up:
        machine.slave.lose_disk()


def _compare(machine: ReplicaMachine, check: ReplayCheck) -> int:
    """1 when the slave's tables were compared with the master's."""
    machine.run_until_idle()
    if machine.failed is not None or machine.slave.given_up or _waits_for_room(machine.broker):
        return 0
    machine.slave.catch_up()
    if machine.slave.given_up or _waits_for_room(machine.slave.machine.broker):
        return 0
    first, second = machine.broker, machine.slave.machine.broker
    assert second.store.slave is not None
    assert second.store.slave.applied == first.store.end, "a slave that does not catch up"
    _same_log(first, second)
    check.compare(first, second)
    return 1


def _waits_for_room(broker: Broker) -> bool:
    """Whether a broker with nothing else to do has a batch that met a full disk: it is written a
    second later."""
    return broker.store.durable < broker.store.end


def _same_log(first: Broker, second: Broker) -> None:
    end = first.store.end
    assert (second.store.end, second.store.confirmed) == (end, end)
