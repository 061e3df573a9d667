"""One run: a few lives of the broker, each ended by a crash, a disk error or a clean stop. Then
everything heals, the clients drain what is left, and the oracle looks back."""

import errno
import random
from collections.abc import Callable

from popmq.broker.core.broker import Broker
from popmq.broker.index.key_index import ENTRIES_PER_FILE
from popmq.common.settings.settings import (
    GroupSettings,
    MessageSettings,
    PopSettings,
    Settings,
    StoreSettings,
    TimerSettings,
)
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.harness.sometimes import Allowed, Sometimes, StateCounts
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.actions import Actions
from popmq.testing.sim.clients import BRIEF, INVISIBLE_MS, LONG_MS
from popmq.testing.sim.drain import drain
from popmq.testing.sim.equal_ids import EqualIds
from popmq.testing.sim.lives import POWER, RunEnded, SeedResult
from popmq.testing.sim.lookup import LookupChecks
from popmq.testing.sim.moves import ExpiryMoves, ParkingMoves, Recreation, add_reader
from popmq.testing.sim.operators import Operators
from popmq.testing.sim.producers import FIFO_QUEUES, QUIET
from popmq.testing.sim.replay import ReplayCheck
from popmq.testing.sim.retention import RetentionChecks
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.sim.store_checks import StoreChecks
from popmq.testing.sim.topic_retention import BRIEF_MS, TopicRetention

_RETENTION = ((1, 0), (1000, 20_000), (1, 40_000))  # hours and bytes


class Simulator(Actions):
    states = states_of_lives = Sometimes
    fault_weights = (7, 5, 2, 3, 2, 3)
    cut_operations = (5, 25, 80)
    sync_operations = 15
    folder_first = ("roll", "sync")
    disk_budgets = (100, 10_000, 40_000)
    crash_share = 0.5

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.oracle = Oracle()
        self.keeps_order = self.rng.random() < 0.5
        self.oracle.parks = self.keeps_order and self.rng.random() < 0.5
        self.oracle.longest_ms = max(LONG_MS if self.retains else INVISIBLE_MS)
        settings = _settings(self.rng, retains=self.retains, parks=self.oracle.parks)
        self.machine = self._machine(settings)
        self.clients = Operators(self.machine, self.oracle, self.rng, self.tally, self.trace_line)
        self.clients.ids = EqualIds(seed)
        self.oracle.limited = self.machine.settings.pop.max_in_flight_per_queue < 100
        self.checks = StoreChecks(self.machine, self.oracle)
        self.retention = RetentionChecks(self.machine, self.oracle, self.tally)
        self.topic_retention = TopicRetention(self.machine, self.oracle, self.tally, self.retention)
        raised = self.retention.raised
        self.replay = ReplayCheck(self.machine.settings, self.machine.clock, self.oracle, raised)
        self.lookups = LookupChecks(self.machine, self.oracle, self.tally, self.clients.topics)
        self.machine.index_entries = self.rng.choice((8, *[ENTRIES_PER_FILE] * 4))
        self._watch_disk()
        self.clients.uniform = self.rng.choice((0, 0, 120))
        self._damages = self.rng.random() < 0.12
        self._damaged = ""  # where a bit was flipped before the last start
        parking = ParkingMoves(self.machine, self.clients, self.oracle, self.rng, self.checks)
        recreation = Recreation(self.machine, self.clients, self.oracle, self.rng, self.tally)
        expiry = ExpiryMoves(self.machine, self.clients, self.oracle, self.rng)
        self._actions: list[tuple[Callable[[], object], int]] = [
            (self.clients.send, 14),
            (self._receive, 14),
            (self._ack, 10),
            (self._change, 4),
            (self._leave, 3),
            (self.clients.hear_of_leaving, 4),
            (recreation.make_or_drop, 1),
            (self._loop, 22),
            (self._flush, 18),
            (self.machine.step, 8),
            (self._time, 6),
            (self.machine.run_until_idle, 6),
            (self.clients.resend, 3),
        ]
        self._pushes = self.rng.random() < 0.3
        self._actions += [(self._reject, 1), (self.clients.proxy_dies, 1)]
        if self._pushes:
            self._actions += [(self._silence, 4)]
        if self.keeps_order:
            self._actions += [(self._repeat, 4), (parking.stick, 1)]
        if self.oracle.parks:
            self._actions += [(parking.unpark, 3), (parking.stick, 4), (parking.resume, 1)]
        self._actions += [(self._reset, 2), (self._redrive, 2)]
        if self.retains:
            self._change_ms = (*self._change_ms, *LONG_MS)
            self._invisible_ms = (*INVISIBLE_MS, *LONG_MS)
            self._actions += [(expiry.hours, 5), (expiry.burst, 5), (expiry.work, 10)]
            self._actions += [(expiry.quiet, 1), (expiry.outlive, 2)]

    def run(self) -> SeedResult:
        result = super().run()
        self.tally.hit(Sometimes.BUFFERED_FORGOTTEN, self.oracle.forgotten)
        self.tally.hit(Allowed.KEPT_ATTEMPTS, len(self.checks.kept_attempts))
        return result

    def weighted(self) -> list[tuple[Callable[[], object], int]]:
        return self._actions

    def _drain(self) -> None:
        self._heal()
        drain(
            self.machine,
            self.clients,
            self.oracle,
            self.checks,
            self.retention,
            self.topic_retention,
            self.trace_line,
            silence=self._pushes and self.rng.random() < 0.2,
        )
        self.lookups.look(5)

    # -- a run

    def _machine(self, settings: Settings) -> SimulatedBroker:
        return SimulatedBroker(settings, self.rng, self.tally)

    def _set_up(self) -> None:
        self._first_start()
        self.retention.on_start()
        self.topic_retention.on_start()
        clients = self.clients
        clients.make_topic("t0", self.rng.choice((1, 3)))
        clients.make_topic("t1", 1)
        buffered = self.rng.choice(("", "", "g", "gh"))
        clients.make_group("g", self.rng.choice((1, 2, 3, 4)), buffered="g" in buffered)
        clients.make_group("h", 40, buffered="h" in buffered)
        clients.make_group("n", 40, newest=True)
        clients.make_group("audit", 40)
        if self.keeps_order:
            clients.make_topic("fo", FIFO_QUEUES, fifo=True)
            clients.make_group("f", self.rng.choice((2, 3, 4)), fifo=True)
            clients.make_group("ft", 40, fifo=True)
        self.machine.run_until_idle()
        if self.keeps_order:
            add_reader(clients, self.oracle, "f", "fo")
            add_reader(clients, self.oracle, "ft", "fo", "A", "B")
            if self.rng.random() < 0.3:
                add_reader(clients, self.oracle, "g", "fo")
        add_reader(clients, self.oracle, "g", "t0")
        add_reader(clients, self.oracle, "g", "t1")
        add_reader(clients, self.oracle, "h", "t0", "A")
        add_reader(clients, self.oracle, "n", "t0")
        if self.retains:
            clients.make_topic(QUIET, 1)
            clients.make_topic(BRIEF, 1, retention_ms=self.rng.choice(BRIEF_MS))
            self.machine.run_until_idle()
            add_reader(clients, self.oracle, "g", QUIET)
            add_reader(clients, self.oracle, "g", BRIEF)
            clients.send(clients.topics[QUIET])

    def _at_rest(self) -> None:
        self.tally.hit(Sometimes.BLOCKED, int(self.machine.blocked > 0))
        self.checks.at_rest()
        self._rest()
        if self.rng.random() < 0.05:
            self.lookups.look(13)

    def _arm_disk(self) -> None:
        cut = self.retains and self.rng.random() < 0.5
        self.retention.cut_power_in = self.rng.randrange(14) if cut else None
        if not cut:
            super()._arm_disk()

    def _disk_failed(self, failed: OSError) -> None:
        sync = "sync" in str(failed)
        full = failed.errno == errno.ENOSPC
        what = Sometimes.SYNC_ERROR if sync else Sometimes.WRITE_ERROR
        self.tally.hit(Sometimes.NO_SPACE if full else what)
        super()._disk_failed(failed)

    def _before_stop(self) -> None:
        self.clients.dismissed()

    def _stop_failed(self) -> None:
        self.tally.hit(Sometimes.CRASH_IN_STOP)

    def _before_crash(self) -> None:
        self.retention.before_crash()
        _count_store(self.machine.broker, self.clients, self.tally)
        self.oracle.era += self._last_kind != "stop"
        self.oracle.process += 1
        self.retention.cut_power_in = None

    def _crash_with(self, loss: Loss, attempt: int) -> None:
        self.machine.crash(loss)
        if attempt or self._last_kind != "stop":
            self.oracle.unanswered.crashed(self.oracle.process - 1)
        self.clients.crashed()

    def _while_crashed(self, attempt: int) -> None:
        self._while_down()
        if self.retains and attempt == 0 and self.rng.random() < 0.3:
            self._lose_index()
            self.trace_line("the index was removed")
            self.retention.index_lost = True
        self._damaged = self._damage() if attempt == 0 and self._last_kind != "error" else ""

    def _start_failed(self, trouble: str, attempt: int) -> bool:
        self._judge_start(trouble, self._damaged)
        self.tally.hit(Sometimes.NO_SPACE if trouble == "full" else Sometimes.CRASH_IN_START)
        self.tally.hit(Sometimes.CRASH_TWICE, int(attempt > 0))
        return False

    def _started(self) -> None:
        self.oracle.unanswered.started(self.machine.log_ms)
        store = self.machine.broker.store
        self.tally.hit(Sometimes.TORN_TAIL, int(store.metrics.torn_bytes > 0))
        self.tally.hit(Sometimes.SNAPSHOT_START, int(store.snapshots.position > 0))
        self.tally.hit(Sometimes.CHECKPOINT_DAMAGED, int("/checkpoint" in self._damaged))
        passed_over = self.retention.on_start()
        if self.topic_retention.on_start() or passed_over:
            self.checks.forget_offsets()
        self.checks.after_start()
        if self.keeps_order and self.rng.random() < 0.5:
            self.clients.repeat()
        if not self.oracle.log_lost:
            self.checks.at_rest()
            self.lookups.look(7)

    def _judge_start(self, trouble: str, damaged: str) -> None:
        if not trouble.startswith("damaged"):
            return
        if damaged or self.oracle.log_lost:
            self.tally.hit(Sometimes.REFUSED_DAMAGE)
            raise RunEnded("refused to start on damaged files, as it may")
        self.oracle.report_violation(
            "I0 starts", f"refused to start on an undamaged disk: {trouble}"
        )
        raise RunEnded("it does not start")

    def _while_down(self) -> None:
        rng, machine = self.rng, self.machine
        machine.advance(rng.choice((0, 5, 2_000)))
        step_ms = rng.choice((0, 0, 0, 50, -50, 40_000, -3_600_000, 3_600_000))
        if step_ms:
            machine.step_wall(step_ms)
            self.trace_line(f"wall clock {step_ms:+}")
        self.tally.hit(Sometimes.WALL_BACK, int(step_ms < 0))

    def _damage(self) -> str:
        """Flip a bit that was durable, in seeds that allow it; returns where."""
        if not self._damages or self.rng.random() < 0.5:
            return ""
        data = self.machine.settings.broker.data
        folder = self.rng.choice(("commitlog", "checkpoint"))
        where = self.machine.disk.flip_bit(f"{data}/{folder}")
        self.trace_line(f"bit flipped at {where.removeprefix(data)}")
        if folder == "commitlog" and where:
            self.oracle.log_lost = True
        return where

    def _heal(self) -> None:
        """No more faults: one last restart, then the clock runs and nobody disturbs."""
        self._quiet_disk()
        self._damages = False
        self.retention.cut_power_in = None
        if self.rng.random() < 0.3:
            self.clients.dismissed()
            self.machine.stop()
            self.tally.hit(Sometimes.CLEAN_STOP)
        else:
            self.oracle.era += 1
            self.oracle.unanswered.crashed(self.oracle.process)
        self.oracle.process += 1
        self.retention.before_crash()
        _count_store(self.machine.broker, self.clients, self.tally)
        self.retention.cut_power_in = None
        self.tally.hit(Sometimes.PADDED_ROLL, self.checks.padded_segments())
        self.machine.crash(self.rng.choice(POWER))
        self.clients.crashed()
        trouble = self.machine.try_start()
        self.trace_line(f"healed: {trouble or 'ok'} at {self.machine.recovered}")
        if trouble:
            self._judge_start(trouble, "")
        self._damaged = ""
        self._started()
        self.oracle.healed_ms = self.oracle.now_ms = self.machine.clock.boot_ms()


def _count_store(broker: Broker, clients: Operators, tally: StateCounts) -> None:
    store = broker.store
    tally.hit(Sometimes.INDEX_SEALED, store.index.metrics.sealed)
    tally.hit(Sometimes.RENEWED, broker.pop.revive.renewed)
    tally.hit(Sometimes.UNDONE, broker.pop.pop_rollback.rolled_back)
    tally.hit(Sometimes.RETURNED, broker.pop.revive.returned)
    tally.hit(Sometimes.PARKED, broker.fifo.parking.parked)
    tally.hit(Sometimes.PARKED_DEAD, broker.fifo.parking.dead_lettered)
    buffer = broker.buffer
    tally.hit(Sometimes.BUFFERED_COMMIT, buffer.commits)
    tally.hit(Sometimes.BUFFERED_WRITTEN, buffer.written)
    tally.hit(Sometimes.CHECKPOINT, store.checkpoints.made)
    tally.hit(Sometimes.SNAPSHOT, store.snapshots.made)
    for topic, place in clients.topics.items():
        tally.hit(Sometimes.TOPIC_REMADE, int(topic == "tmp" and place is not None))


def _settings(rng: random.Random, *, retains: bool, parks: bool) -> Settings:
    segment_bytes = rng.choice((11, 16, 64)) << 10
    hours, size = 72, 0
    if retains:
        segment_bytes = rng.choice((11, 16, 32)) << 10
        hours, size = rng.choice(_RETENTION)
    return Settings(
        store=StoreSettings(
            segment_bytes=segment_bytes,
            snapshot_bytes=rng.choice((6, 12) if retains else (6, 24, 4096)) << 10,
            reserved_segments=rng.choice((1, 2)),
            retention_hours=hours,
            retention_bytes=size,
        ),
        message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
        pop=PopSettings(
            max_in_flight_per_queue=rng.choice((5, 1000, 1000)),
            retry_first_percent=rng.choice((0, 20, 100)),
            fifo_open_offsets=rng.choice((3, 5)) if parks else 10_000,
            fifo_park_after_ms=500,
        ),
        group=GroupSettings(auto_create=False),
        timer=TimerSettings(wheel_slots=600, log_segment_bytes=4 << 10),
    )
