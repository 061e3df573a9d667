"""TransactionSimulator: one seed, one run of a broker whose clients use transactions.

As `sim/run.py`: a few lives, each ended by a crash, a disk error or a clean stop, then healing and
a drain in which every transaction comes to its end (docs/concepts/simulator.md).
"""

from collections.abc import Callable

from popmq.common.settings.send_settings import DedupSettings, TransactionSettings
from popmq.common.settings.settings import (
    GroupSettings,
    MessageSettings,
    Settings,
    StoreSettings,
    TimerSettings,
)
from popmq.common.topics import MessageType, TopicConfig
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.equal_ids import EqualIds
from popmq.testing.sim.lives import Lives
from popmq.testing.sim.replay import ReplayCheck
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.sim.store_checks import StoreChecks
from popmq.testing.transaction_world.clients import (
    MAX_CHECKS,
    NOISE,
    QUEUES,
    TOPIC,
    TransactionClients,
)
from popmq.testing.transaction_world.sometimes_states import TransactionSometimes as States

_HOUR_MS = 3_600_000
INTERVAL_MS = 1_000


class TransactionSimulator(Lives):
    option = "--transactions"
    clients: TransactionClients
    states = states_of_lives = States
    fault_weights = (7, 5, 2, 3, 2, 4)
    disk_budgets = (100, 2_000, 20_000)
    start_budgets = ()
    folder_first = ("roll",)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.oracle = Oracle()
        self.machine = SimulatedBroker(self._settings(), self.rng, self.tally)
        self.clients = TransactionClients(
            self.machine, self.oracle, self.rng, self.tally, self.trace_line
        )
        self.clients.ids = EqualIds(seed)
        self.checks = StoreChecks(self.machine, self.oracle)
        self.replay = ReplayCheck(self.machine.settings, self.machine.clock, self.oracle, set())
        self._watch_disk()

    # -- a run

    def _settings(self) -> Settings:
        rng = self.rng
        return Settings(
            store=StoreSettings(
                segment_bytes=rng.choice((11, 16)) << 10,
                snapshot_bytes=rng.choice((6, 12) if self.retains else (6, 12, 4096)) << 10,
                reserved_segments=1,
                retention_hours=1 if self.retains else 72,
            ),
            message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
            dedup=DedupSettings(window_ms=24 * _HOUR_MS),
            group=GroupSettings(auto_create=False),
            timer=TimerSettings(wheel_slots=60, log_segment_bytes=4 << 10),
            transaction=TransactionSettings(
                first_check_ms=500,
                check_interval_ms=INTERVAL_MS,
                max_checks=MAX_CHECKS,
                keep_ms=300 * _HOUR_MS,
            ),
        )

    def _set_up(self) -> None:
        self._first_start()
        for name, queues, kind in (
            (TOPIC, QUEUES, MessageType.TRANSACTION),
            (NOISE, 1, MessageType.NORMAL),
        ):
            self.machine.broker.registry.create_topic(TopicConfig(0, name, queues, kind))
        self.machine.run_until_idle()

    def weighted(self) -> list[tuple[Callable[[], object], int]]:
        clients, rng, machine = self.clients, self.rng, self.machine
        often: list[tuple[Callable[[], object], int]] = [
            (clients.begin, 12),
            (clients.begin_again, 3),
            (clients.end, 14),
            (clients.end_wrongly, 1),
            (lambda: clients.wait_for_checks(rng.choice((0, 500, 5_000))), 6),
            (lambda: clients.send_noise(rng.choice((10, 1_000))), 3),
            (lambda: machine.loop() if machine.loop_ready else None, 22),
            (self._work, 18),
            (machine.step, 12),
            (lambda: machine.advance(rng.choice((1, 20, 300, 1_200))), 8),
            (self._settle, 8),
        ]
        if self.retains:
            often += [(self._hours, 7), (self._burst, 9)]
        return often

    def _work(self) -> None:
        lanes = self.machine.ready_lanes
        if lanes:
            self.machine.work(self.rng.choice(lanes), self.rng.choice((None, None, 1, 3)))

    def _settle(self) -> None:
        self.machine.run_until_idle(until=lambda: self.rng.random() < 0.05)

    def _hours(self) -> None:
        """Segments grow old; what is read now may be gone afterwards."""
        self.machine.run_until_idle()
        self.clients.look()
        self.machine.advance(self.rng.choice((1, 2)) * _HOUR_MS)
        for _ in range(3):  # a look, moves, and what they wait for
            self.machine.advance(10_001)
            self.machine.run_steps()

    def _burst(self) -> None:
        for _ in range(12):
            self.clients.send_noise(1_500)
        self.machine.run_until_idle()

    def _at_rest(self) -> None:
        self.clients.look()

    def _disk_failed(self, failed: OSError) -> None: ...

    def _before_crash(self) -> None:
        retention = self.machine.broker.store.retention
        self.tally.hit(States.MOVED, retention.relocated)
        self.tally.hit(States.DELETED, retention.deleted_segments)

    def _crash_with(self, loss: Loss, attempt: int) -> None:
        self.tally.hit(States.POWER_CUT, int(loss is not Loss.NOTHING))
        super()._crash_with(loss, attempt)

    def _while_crashed(self, attempt: int) -> None:
        self.machine.advance(self.rng.choice((0, 10, 700)))

    def _started(self) -> None:
        self.checks.after_start()
        self.clients.look()
        pending = len(self.machine.broker.transactions.table.pending)
        snapshot = self.machine.broker.store.snapshots.position > 0
        self.tally.hit(States.PENDING_OVER_START, pending)
        self.tally.hit(States.SNAPSHOT_START, int(snapshot and pending > 0))

    # -- the end

    def _drain(self) -> None:
        """No more faults: producers are there and answer; what they do not know is given up."""
        machine, clients = self.machine, self.clients
        self._quiet_disk()
        self._restart()
        clients.knows = 1.0
        for _ in range(4 * (MAX_CHECKS + 3)):
            clients.wait_for_checks(INTERVAL_MS)
            machine.advance(INTERVAL_MS // 2)
            machine.run_steps()
            clients.look()
            if self.oracle.violations:
                return
        clients.finish()
        self.trace_line(f"drained {len(clients.stories)} transactions")
