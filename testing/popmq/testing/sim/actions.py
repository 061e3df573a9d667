"""Actions: what a run of the simulator does next, one small move at a time."""

from popmq.testing.harness.sometimes import Sometimes
from popmq.testing.oracle.client_history import Held
from popmq.testing.oracle.false_empty import kept_waiting
from popmq.testing.sim.clients import INVISIBLE_MS, MAX_INVISIBLE_MS
from popmq.testing.sim.lives import Lives
from popmq.testing.sim.moves import some_reader
from popmq.testing.sim.operators import PUSH_CLIENTS, Operators


class Actions(Lives):
    """The parts of one run, and the moves that the scheduler picks from."""

    clients: Operators
    _invisible_ms: tuple[int, ...] = INVISIBLE_MS
    _change_ms: tuple[int, ...] = (1, 1, 500, 5_000)
    _pushes = False  # whether there are push consumers

    def _receive(self) -> None:
        rng, reader = self.rng, some_reader(self.oracle, self.rng)
        if reader is not None and reader.group.fifo and rng.random() < 0.4:
            limit, invisible_ms = rng.choice((1, 2, 8, 32)), rng.choice(self._invisible_ms)
            self.clients.receive_named(reader, limit=limit, invisible_ms=invisible_ms)
        elif reader is not None:
            # Short ones are not buffered.
            often = (MAX_INVISIBLE_MS,) * 8 if reader.group.buffered else ()
            self.clients.receive(
                reader,
                limit=rng.choice((1, 3, 8, 32)),
                invisible_ms=rng.choice((*self._invisible_ms, *often)),
                poll_ms=rng.choice((0, 0, 400, 3_000)),
                queue_id=rng.choice((-1, -1, -1, 0)),
                client_id=rng.choice(PUSH_CLIENTS) if self._pushes and rng.random() < 0.3 else "",
            )

    def _rest(self) -> None:
        """The broker has nothing left to do: nobody may wait for what is there."""
        broker = self.machine.broker
        if broker.polling.unfinished or broker.store.confirmed != broker.store.end:
            return
        for pop in self.clients.waiting:
            beside = any(held.reader is pop.reader for held in self.clients.held)
            self.tally.hit(Sometimes.WAITED_BESIDE, int(beside))
            kept_waiting(self.oracle, pop)

    def _leave(self) -> None:
        """A consumer asks, and does not wait for the answer; another one comes."""
        rng, machine, reader = self.rng, self.machine, some_reader(self.oracle, self.rng)
        if reader is None:
            return
        limit, invisible_ms = rng.choice((1, 8)), rng.choice(self._invisible_ms)
        self.clients.receive(reader, limit=limit, invisible_ms=invisible_ms)
        machine.run_until_idle(until=lambda: rng.random() < 0.3)
        self.clients.leave()
        if rng.random() < 0.6:
            machine.run_until_idle(until=lambda: rng.random() < 0.1)
            self.clients.hear_of_leaving()
            machine.step()
            machine.run_until_idle(until=lambda: rng.random() < 0.05)
            self.clients.receive(reader, limit=32, invisible_ms=MAX_INVISIBLE_MS)

    def _some_held(self) -> Held | None:
        held = self.clients.held
        if len(held) > 60:
            del held[:20]
        if not held:
            return None
        # Mostly fresh ones, now and then any.
        return held[-1 - min(int(self.rng.expovariate(0.3)), len(held) - 1)]

    def _ack(self) -> None:
        first = self._some_held()
        if first is None:
            return
        if self.rng.random() < 0.06:
            self.clients.ack_wrongly(first)
            return
        batch = [first]
        for _ in range(self.rng.choice((0, 0, 0, 3))):
            other = self._some_held()
            if other is not None and other.reader is first.reader and other not in batch:
                batch.append(other)
        self.clients.ack(batch)
        if self.rng.random() < 0.8:
            self.clients.held = [held for held in self.clients.held if held not in batch]

    def _change(self) -> None:
        held = self._some_held()
        if held is not None:
            self.clients.change(held, self.rng.choice(self._change_ms))

    def _reject(self) -> None:
        held = self._some_held()
        if held is not None:
            for _ in range(self.rng.choice((1, 1, 2))):
                self.clients.reject(held)
                self.machine.run_until_idle(until=lambda: self.rng.random() < 0.1)

    def _repeat(self) -> None:
        self.clients.repeat()

    def _silence(self) -> None:
        """Push consumers are heard for a while, or for longer nobody is."""
        if self.rng.random() < 0.8:
            self.clients.heard()
        else:
            self.machine.advance(36_000)

    def _reset(self) -> None:
        """The offset of a group is set while it reads."""
        reader = some_reader(self.oracle, self.rng)
        if reader is not None:
            self.clients.reset(reader, self.checks.forget_offsets)
            mine = [held for held in self.clients.held if held.reader is reader]
            if mine and self.rng.random() < 0.5:
                self.machine.run_until_idle(until=lambda: self.rng.random() < 0.1)
                self.clients.ack(mine[-3:])

    def _redrive(self) -> None:
        group = self.rng.choice(("g", "f")) if "f" in self.clients.groups else "g"
        for _ in range(self.rng.choice((1, 1, 2))):
            self.clients.redrive(group)

    def _loop(self) -> None:
        if self.machine.loop_ready:
            before = self.clients.answered
            self.machine.loop()
            self.tally.hit(Sometimes.GROUP_COMMIT, int(self.clients.answered > before + 1))

    def _time(self) -> None:
        ms = self.rng.choice((1, 20, 200, 1_000, 3_000, 11_000))
        self.machine.advance(ms)
        if self.machine.disk.faults.budget is not None and self.rng.random() < 0.2:
            self.machine.disk.faults.budget = None
            self.trace_line("space was freed")
            self.tally.hit(Sometimes.SPACE_FREED)
        if self.rng.random() < 0.1:
            self.machine.step_wall(self.rng.choice((-5_000, 60_000)))
