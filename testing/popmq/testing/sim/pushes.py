"""The simulator's world with push consumers that live on while brokers end.

What they were given stays with them, but for what a crash may have kept from them; and that comes
back, though they live (oracle/handle_oracle.py).
"""

from popmq.testing.oracle.client_history import GroupReader, MessageHistory, SentMessageHistory
from popmq.testing.oracle.delivery_chains import may_be_over
from popmq.testing.sim.clients import MAX_INVISIBLE_MS
from popmq.testing.sim.drain import empty
from popmq.testing.sim.moves import add_reader, some_reader
from popmq.testing.sim.operators import PUSH_CLIENTS
from popmq.testing.sim.run import Simulator

_HEARD_MS = 4_000


class PushSimulator(Simulator):
    """Clients hear every answer that a broker gave: only its end takes answers along."""

    option = "--pushes"

    def __init__(self, seed: int) -> None:
        super().__init__(3 * seed + 1)  # nothing expires
        self.seed = seed
        self._pushes = True
        self._actions = [
            (self.clients.send, 10),
            (self._hold, 12),
            (self._receive, 6),
            (self._ack, 4),
            (self._loop, 12),
            (self._flush, 12),
            (self.machine.step, 8),
            (self.machine.run_until_idle, 6),
            (self._live_on, 12),
        ]

    def _set_up(self) -> None:
        self._first_start()
        self.clients.make_topic("t0", self.rng.choice((1, 3)))
        self.clients.make_topic("t1", 1)
        self.clients.make_group("g", 40)
        self.clients.make_group("h", 40, buffered=self.rng.random() < 0.3)
        self.clients.make_group("audit", 40)
        self.machine.run_until_idle()
        for group, topic in (("g", "t0"), ("g", "t1"), ("h", "t0")):
            add_reader(self.clients, self.oracle, group, topic)

    def _end_life(self) -> str:
        """A consumer asks; what it is answered may be on its way, or behind it, for 3 s at most."""
        rng, machine = self.rng, self.machine
        self._hold()
        if rng.random() < 0.5:
            machine.advance(rng.choice((20, 3_000)))
            self.clients.send()
        machine.run_until_idle(until=lambda: rng.random() < 0.2)
        return super()._end_life()

    def _while_down(self) -> None:
        """Seldom for so long that nobody can say who lives."""
        if self.rng.random() < 0.3:
            super()._while_down()
        else:
            self.machine.advance(self.rng.choice((0, 5, 2_000)))

    def _hold(self) -> None:
        reader, rng = some_reader(self.oracle, self.rng), self.rng
        if reader is not None:
            self.clients.receive(
                reader,
                limit=rng.choice((1, 3)),
                invisible_ms=rng.choice(self._invisible_ms[:4]),
                client_id=rng.choice(PUSH_CLIENTS),
            )

    def _live_on(self) -> None:
        """Everybody is answered before time passes: nothing waits for an answer for seconds."""
        self.machine.run_until_idle()
        self._hear(self.rng.choice((20, 1_000, _HEARD_MS)))

    def _hear(self, ms: int) -> None:
        """The push consumers, after so long."""
        self.machine.advance(ms)
        for client_id in PUSH_CLIENTS:
            self.clients.report(client_id, gone=False)
        self.machine.step()

    def _heal(self) -> None:
        super()._heal()
        if self.oracle.log_lost or self.oracle.limited:
            return
        oracle = self.oracle
        oracle.healed_ms = -1  # who lives keeps what it has
        for _ in range(2 * MAX_INVISIBLE_MS // _HEARD_MS + 2):
            self._hear(_HEARD_MS)
            self.machine.run_steps()
            for reader in oracle.readers:
                empty(self.machine, self.clients, reader)
        for reader in oracle.readers:
            for sent in oracle.messages:
                if self._should_have_come(reader, sent):
                    self._in_limbo(reader, sent)
        oracle.healed_ms = oracle.now_ms = self.machine.clock.boot_ms()

    def _should_have_come(self, reader: GroupReader, sent: SentMessageHistory) -> bool:
        requested = sent.ok_at and sent.topic is reader.topic and reader.accepts(sent)
        life = reader.lives.get(sent.number) or MessageHistory()
        return bool(requested and not may_be_over(reader, life))

    def _in_limbo(self, reader: GroupReader, sent: SentMessageHistory) -> None:
        life = reader.lives.get(sent.number)
        held = life.held if life is not None else None
        if held is None or not held.renewed_by:
            what = f"message {sent.number} of {sent.topic.name} to group {reader.group.name}"
            self.oracle.report_violation(
                "I2 no-limbo", f"{what} does not come, nobody has it", life
            )
