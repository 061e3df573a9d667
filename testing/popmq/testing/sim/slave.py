"""Slave: a second broker beside a simulated one, whose log it follows; and failovers to it.

Blocks come in random pieces, the confirmed position late, and the slave crashes by itself at any
operation of its disk.  When the master dies, the slave may become the machine under test: clients
go on with it, and the oracle knows of no difference (docs/concepts/simulator.md).
"""

import random
from collections.abc import Callable

from popmq.broker.handlers.server import BrokerServer
from popmq.common.errors import StoreDamaged
from popmq.common.record.message import BadRecord
from popmq.common.settings.settings import Settings
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.disk.sim_disk import SimDisk
from popmq.testing.harness.invariants import broken_invariant
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.simulated_broker import SimulatedBroker

_NOWHERE = 1 << 62
_LOSSES = tuple(Loss)
_SIZES = (1, 100, 700, 5_000, 1 << 20)


class SlaveMachine(SimulatedBroker):
    """The process of a slave."""

    def begin(self) -> None:
        self.broker.open()
        self.broker.records.slave_lifecycle.start()


class Slave:
    def __init__(self, master: "ReplicaMachine", rng: random.Random) -> None:
        self._master = master
        self._rng = rng
        self.machine = SlaveMachine(master.settings, rng, StateCounts())
        self.machine.clock = master.clock
        self.machine.process_clock = master.process_clock
        self._alive = False
        self._limit = 0  # of its log, what is below is the master's for sure; the rest must go
        self._cutting = False
        self._anew = False  # its disk is of no use any more: it gets another one
        self._installing = False  # a snapshot, and nothing is copied meanwhile
        self._copying = False  # what it has is not whole: a crash makes it begin anew
        self.given_up = False  # its disk was damaged on purpose
        self.hashes = self.copies = 0
        self.crashes = self.cuts = self.applied = 0

    # -- while the master runs

    def turn(self) -> None:
        """One small thing that a slave does."""
        if self.given_up:
            return
        if not self._alive:
            if self._rng.random() < 0.2:
                self._start()
            return
        try:
            self._act()
        except PowerCut:
            self._crash()
            return
        except StoreDamaged:
            self._give_up()
            return
        self._look_whether_whole()
        if self.machine.failed is not None or self._rng.random() < 0.004:
            self._anew |= self._rng.random() < 0.3  # somebody removes its disk
            self._crash()

    def master_started(self, end: int) -> None:
        """The master's log ends there now: what was behind is gone, or will be something else."""
        if self._alive and end < self.machine.broker.store.confirmed and not self._installing:
            assert self._master.damages, "the master starts without what was confirmed"
            self.given_up = True
        self._limit = min(self._limit, end)
        if self.given_up:
            return
        if self._alive and not self._cutting:
            self._agree()

    def catch_up(self, *, until: int = _NOWHERE, confirmed: bool = True) -> None:
        """The master's log up to `until` is here, durably; and applied, if it is confirmed."""
        try:
            self._catch_up(until, confirmed=confirmed)
        except StoreDamaged:
            self._give_up()

    def _catch_up(self, until: int, *, confirmed: bool) -> None:
        master, rng = self._master.broker.store, self._rng
        self.machine.disk.faults.heal()
        while not self._alive and not self.given_up:
            self._start()
        self.machine.disk.faults.heal()
        self.machine.run_until_idle()
        if self.given_up:
            return
        assert self._alive
        assert not self._cutting
        self._finish_install()
        while self.machine.broker.store.end < min(until, master.end):
            if not self._fetch(rng.choice(_SIZES)):
                break
        if self._anew:  # the master does not have any more what comes next
            self._crash()
            self._catch_up(until, confirmed=confirmed)
            return
        self.machine.run_until_idle()
        if confirmed:
            self._tell(master.confirmed)
            self.machine.run_steps()
        self._look_whether_whole()

    def lose_disk(self) -> None:
        """It begins anew, when it is its turn."""
        self._anew = True
        if self._alive:
            self._crash()

    @property
    def may_lead(self) -> bool:
        """Whether it has all that its log says."""
        return self._alive and not (self.given_up or self._copying)

    # -- inside

    def _give_up(self) -> None:
        """A record on its disk, a master's before, is damaged: nothing of it is applied."""
        assert self._master.damages, "damage on a whole disk"
        self.given_up = True

    def _act(self) -> None:
        machine, roll = self.machine, self._rng.random()
        if roll < 0.2:
            self._fetch(self._rng.choice(_SIZES))
        elif roll < 0.3:
            self._tell(self._master.broker.store.confirmed)
        elif roll < 0.6 and machine.loop_ready:
            machine.loop()
        elif roll < 0.8 and machine.ready_lanes:
            lane = self._rng.choice(machine.ready_lanes)
            machine.work(lane, self._rng.choice((None, 1, 2, 5)))
        elif roll > 0.9:
            machine.step()

    def _start(self) -> None:
        """Recover, and agree with the master on where the logs part (R21)."""
        if self._anew:
            self._take_new_disk()
        if self._rng.random() < 0.3:
            self.machine.disk.faults.cut_at(self._rng.randrange(60))
        try:
            trouble = self.machine.try_start()
        except StoreDamaged:
            trouble = "damaged"
        self.machine.disk.faults.heal()
        if trouble.startswith("damaged"):
            assert self._master.damages, f"a slave on a whole disk does not start: {trouble}"
            self.given_up = True
            return
        if trouble:
            self._crash()
            return
        self._alive = True
        self._agree()
        if self._copying:
            self._begin_install()
        if self._rng.random() < 0.5:
            self.machine.disk.faults.cut_at(self._rng.randrange(400))

    def _crash(self) -> None:
        self._note()
        self.crashes += 1
        self._alive = self._cutting = self._installing = False
        self._anew |= self._copying
        self.machine.crash(self._rng.choice(_LOSSES))
        self.machine.disk.faults.heal()

    def _take_new_disk(self) -> None:
        self._anew = False
        self._copying = self._master.broker.store.start > 0
        self.machine = SlaveMachine(self._master.settings, self._rng, StateCounts())
        self.machine.clock = self._master.clock
        self.machine.process_clock = self._master.process_clock
        self._limit = _NOWHERE

    def _begin_install(self) -> None:
        """The master's newest snapshot in pieces; its log comes when the tables are restored."""
        master = self._master
        position = master.broker.store.snapshots.position
        data = master.disk.durable(f"{master.settings.broker.data}/snapshot/{position:020d}")
        install = self.machine.broker.records.slave_lifecycle.begin_install(
            master.broker.store.start
        )
        size = self._rng.choice((100, 1_000, 1 << 20))
        for at in range(0, len(data), size):
            install.append_chunk(data[at : at + size])
        self._installing = True

        def done(trouble: str) -> None:
            assert not trouble, trouble
            self._installing = False

        install.finish(done)

    def _finish_install(self) -> None:
        while self._installing:
            self.machine.run_until_idle()
            self.machine.step()
            assert self.machine.failed is None, self.machine.failed

    def _look_whether_whole(self) -> None:
        slave = self.machine.broker.store.slave
        if self._copying and not self._installing and slave and not slave.apply.rebuilding:
            self._copying = False
            self.copies += 1
        if self.may_lead and (broken := broken_invariant(self.machine.broker)):
            raise RuntimeError(f"a slave's tables: {broken}")

    def _note(self) -> None:
        """Before its process is gone."""
        slave = self.machine.broker.store.slave
        if slave is not None:
            self.hashes += slave.hashes.compared
            self.applied += slave.apply.records
            assert not slave.hashes.diverged, "a snapshot's hash is not the master's"

    def _agree(self) -> None:
        store = self.machine.broker.store
        if store.end <= self._limit:
            self._limit = _NOWHERE
            return
        self._cutting = True
        self.cuts += 1

        def done() -> None:
            self._cutting = False
            if self._limit < store.end:
                self._agree()
            else:
                self._limit = _NOWHERE

        store.replicas.truncate(
            self._limit, known=store.slave.applied if store.slave else 0, done=done
        )

    def _fetch(self, limit: int) -> bool:
        store = self.machine.broker.store
        if self._cutting or self._installing or self._limit != _NOWHERE:
            return False
        data = self._master.broker.store.replicas.read_tail(store.end, limit)
        if data is None:
            assert store.end < self._master.broker.store.start, f"{store.end} is in no log"
            self._anew = True  # too far behind
        if data:
            try:
                block = store.replicas.append_block(store.end, data)
                store.log_clock.sample(block.log_ms, epoch=self._master.broker.store.epoch)
            except BadRecord:
                assert self._master.damages, "a block of a whole log is not intact"
                self.given_up = True
                return False
        return bool(data)

    def _tell(self, confirmed: int) -> None:
        store = self.machine.broker.store
        if not (self._cutting or self._installing) and self._limit == _NOWHERE:
            store.confirm(max(store.confirmed, min(confirmed, store.end)))


class ReplicaMachine(SimulatedBroker):
    """A master with a slave beside it. `fails_over` lets the slave take its place at a crash."""

    has_slave = True

    def __init__(self, settings: Settings, rng: random.Random, tally: StateCounts) -> None:
        super().__init__(settings, rng, tally)
        self.slave = Slave(self, random.Random(rng.getrandbits(32)))
        self.fails_over = True
        self.damages = False  # bits are flipped on purpose
        self._next: Callable[[], None] | None = None  # how the slave takes over
        self.failovers = self.live_failovers = 0
        self._leads = self._runs = False

    def reached(self) -> dict[str, int]:
        """How often rare states were, up to the end of the run."""
        slave = self.slave
        if slave._alive:
            slave._note()
        return {
            "failovers": self.failovers,
            "live failovers": self.live_failovers,
            "hashes": slave.hashes,
            "crashes": slave.crashes,
            "cuts": slave.cuts,
            "copies": slave.copies,
            "applied": slave.applied,
        }

    def loop(self) -> None:
        super().loop()
        self.slave.turn()

    def stop(self) -> None:
        self._runs = False  # its files are closed: nobody copies them any more
        super().stop()

    def crash(self, loss: Loss) -> None:
        self._next, slave = None, self.slave
        requested = self.fails_over and not slave.given_up and self._rng.random() < 0.5
        requested, self._runs = requested and self._runs, False
        if requested:
            self.disk.faults.heal()
            tell, least = self._rng.random() < 0.5, self._rng.random() < 0.5
            until = self.broker.store.confirmed if least else _NOWHERE
            slave.catch_up(until=until, confirmed=tell)
        if requested and slave.may_lead:
            self._next = self._adopt if self._rng.random() < 0.5 else self._start_on_its_disk
        super().crash(loss)

    def start(self) -> None:
        self._leads = False
        take_over, self._next = self._next, None
        if take_over is None:
            super().start()
        else:
            self.failovers += 1
            take_over()
        self._runs = True

    def begin(self) -> None:
        if self._leads:
            self.broker.open()
            self.broker.records.slave_lifecycle.start()
            self._apply_all()
        else:
            super().begin()
            self.slave.master_started(self.broker.store.confirmed)

    def lead(self) -> None:
        if not self._leads:
            return
        store = self.broker.store
        assert store.slave is not None
        self.broker.records.slave_lifecycle.promote(store.slave.apply.newest(store.end).epoch + 1)
        while not self.broker.serving:
            self.run_until_idle()
            store.confirm(store.durable)  # the only replica that is left
            self.broker.step()
            assert self.failed is None, self.failed
        self._leads = False

    def _apply_all(self) -> None:
        """A new master keeps its whole tail, and what is on its disk is confirmed (R11, R15)."""
        store = self.broker.store
        self.slave.master_started(store.end)
        self.run_until_idle()
        store.confirm(store.durable)
        while store.slave is not None and store.slave.applied < store.end:
            self.broker.step()
            self.run_until_idle()

    def _start_on_its_disk(self) -> None:
        slave = self.slave
        slave._note()
        slave.machine.crash(self._rng.choice(_LOSSES))
        self.take_disk(self._swap_disks())
        self._leads = True
        super().start()

    def _adopt(self) -> None:
        """The slave's process itself goes on as master."""
        slave = self.slave
        slave._note()
        other = slave.machine
        self.broker, self._soon = other.broker, other._soon
        self._keep_epochs(self.broker.store)
        self.flusher, self.housekeeper = other.flusher, other.housekeeper
        self.broker.store.on_failure = self._on_failure
        self.server = BrokerServer(self.broker)
        self.disk = self._swap_disks()
        self._leads = True
        self.live_failovers += 1
        self._apply_all()
        self._begun(0)

    def _swap_disks(self) -> SimDisk:
        """The deposed master's disk is the slave's from now on; returns what was the slave's."""
        slave, disk = self.slave, self.slave.machine.disk
        slave.machine = SlaveMachine(self.settings, slave._rng, StateCounts())
        slave.machine.clock = self.clock
        slave.machine.process_clock = self.process_clock
        slave.machine.take_disk(self.disk)
        slave._alive = slave._cutting = slave._copying = slave._anew = False
        slave._limit = _NOWHERE
        return disk
