"""TransactionSimulator: one seed, one run of a broker whose clients use transactions.

As `sim/run.py`: a few lives, each ended by a crash, a disk error or a clean stop, then healing and
a drain in which every transaction comes to its end (docs/concepts/simulator.md).
"""

import random
import traceback
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
from popmq.testing.disk.disk_faults import FailedPages
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.oracle.client_history import Violation
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.replay import Replay, ReplayCheck
from popmq.testing.sim.run import SeedResult
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

_POWER = (Loss.ALL, Loss.KEPT, Loss.TORN, Loss.SCATTERED, Loss.SCATTERED)
_HOUR_MS = 3_600_000
INTERVAL_MS = 1_000


class TransactionSimulator:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.trace: list[str] = []
        self.tally = StateCounts(States)
        self.retains = seed % 3 == 0
        self.oracle = Oracle()
        self.machine = SimulatedBroker(self._settings(), self.rng, self.tally)
        self.clients = TransactionClients(
            self.machine, self.oracle, self.rng, self.tally, self.trace_line
        )
        self.checks = StoreChecks(self.machine, self.oracle)
        self.replay = ReplayCheck(self.machine.settings, self.machine.clock, self.oracle, set())
        self.machine.on_recovered = self._recovered
        self.machine.disk.faults.failed_pages = self.rng.choice(list(FailedPages))
        self._soft = False

    def trace_line(self, line: str) -> None:
        self.trace.append(f"{self.machine.clock.boot_ms() - 1_000_000} {line}")

    def run(self) -> SeedResult:
        try:
            self._set_up()
            for _ in range(self.rng.randrange(2, 5)):
                self._live()
                if self.oracle.violations:
                    break
                self._restart()
            if not self.oracle.violations:
                self._drain()
        except Exception as error:  # of the product, or of the simulator: say where
            where = traceback.extract_tb(error.__traceback__)[-4:]
            places = tuple(f"{frame.name}, line {frame.lineno}: {frame.line}" for frame in where)
            what = f"{type(error).__name__}: {error}"
            self.oracle.violations.append(Violation("I0 broken", what, places))
        for violation in self.oracle.violations:
            self.trace_line(str(violation))
        return SeedResult(
            self.seed, self.oracle.violations, self.trace, self.tally, "--transactions "
        )

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
        trouble = self.machine.try_start()
        assert not trouble, f"the first start: {trouble}"
        for name, queues, kind in (
            (TOPIC, QUEUES, MessageType.TRANSACTION),
            (NOISE, 1, MessageType.NORMAL),
        ):
            self.machine.broker.registry.create_topic(TopicConfig(0, name, queues, kind))
        self.machine.run_until_idle()

    def _actions(self) -> list[tuple[Callable[[], object], int]]:
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

    def _live(self) -> None:
        """Act until a fault ends the process, or the life is over."""
        self._arm()
        self.machine.mixes = True
        linger = self.rng.choice((0, 0, 3, 12))
        actions, weights = zip(*self._actions(), strict=True)
        try:
            for action in self.rng.choices(actions, weights, k=self.rng.choice((8, 25, 60, 110))):
                action()
                if self.oracle.violations:
                    return
                if self.machine.failed is not None:
                    linger -= 1
                    if linger < 0:
                        break
                elif self.machine.at_rest:
                    self.clients.look()
            self._end_life()
        except PowerCut:
            pass
        except AssertionError as error:
            if not self.machine.disk.faults.sick:
                raise
            self.trace_line(f"stopped by {error}, after the disk failed")

    def _arm(self) -> None:
        """One fault for this life, or none."""
        rng, faults = self.rng, self.machine.disk.faults
        self._soft = False
        slow = rng.random() < 0.3
        self.machine.sync_ms = (lambda: rng.choice((0, 0, 30, 400))) if slow else (lambda: 0)
        match rng.choices(("cut", "roll", "write", "sync", "full", "none"), (7, 5, 2, 3, 2, 4))[0]:
            case "cut":
                faults.cut_at(rng.randrange(rng.choice((5, 25, 120))))
            case "roll":
                folder = rng.choice(("/commitlog/", "/commitlog/", "/snapshot/", "/checkpoint"))
                faults.cut_at(rng.randrange(8), after_start_of=folder)
                self._soft = rng.random() < 0.6
            case "write":
                faults.fail_write_at(rng.randrange(30))
            case "sync":
                faults.fail_sync_at(rng.randrange(10), below=rng.choice(("", "/commitlog/")))
                self._soft = rng.random() < 0.6
            case "full":
                faults.budget = rng.choice((100, 2_000, 20_000))
            case _:
                pass

    def _end_life(self) -> None:
        if self.machine.failed is not None or self.rng.random() < 0.6:
            return
        try:
            self.trace_line("stop")
            self.machine.stop()
        except (PowerCut, OSError):
            return
        self.tally.hit(States.CLEAN_STOP)

    def _restart(self) -> None:
        """Crash as the life ended, and start until it holds."""
        rng, machine = self.rng, self.machine
        self.tally.hit(States.MOVED, machine.broker.store.retention.relocated)
        self.tally.hit(States.DELETED, machine.broker.store.retention.deleted_segments)
        for attempt in range(4):
            power = rng.random() < 0.6 and not (self._soft and attempt == 0)
            loss = rng.choice(_POWER) if power else Loss.NOTHING
            self.trace_line(f"crash, lost: {loss.value}")
            self.tally.hit(States.POWER_CUT, int(power))
            machine.crash(loss)
            self.clients.crashed()
            machine.advance(rng.choice((0, 10, 700)))
            if attempt < 3 and rng.random() < 0.3:
                machine.disk.faults.cut_at(rng.randrange(rng.choice((4, 30))))
            trouble = machine.try_start()
            machine.disk.faults.heal()
            self.trace_line(f"start: {trouble or 'ok'} at {machine.recovered}")
            if not trouble:
                break
            if trouble.startswith("damaged"):
                self.oracle.report_violation("I0 starts", f"refused to start: {trouble}")
                return
        self.checks.after_start()
        self.clients.look()
        pending = len(machine.broker.transactions.table.pending)
        snapshot = machine.broker.store.snapshots.position > 0
        self.tally.hit(States.PENDING_OVER_START, pending)
        self.tally.hit(States.SNAPSHOT_START, int(snapshot and pending > 0))

    def _recovered(self, seed: int) -> None:
        self.checks.tail_is_clean()
        replay = self.replay.after_recovery(self.machine.broker, self.machine.disk, seed)
        self.tally.hit(States.LONGER_REPLAY, int(replay is Replay.LONGER))
        self.tally.hit(States.FULL_REPLAY, int(replay is Replay.FULL))

    # -- the end

    def _drain(self) -> None:
        """No more faults: producers are there and answer; what they do not know is given up."""
        machine, clients = self.machine, self.clients
        machine.sync_ms, machine.mixes = (lambda: 0), False
        self._soft = False
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
