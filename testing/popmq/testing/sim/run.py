"""One run: a few lives of the broker, each ended by a crash, a disk error or a clean stop; then
everything heals, the clients drain what is left, and the oracle looks back.
"""

import errno
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

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
from popmq.testing.disk.disk_faults import FailedPages
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.harness.sometimes import Sometimes, StateCounts
from popmq.testing.oracle.client_history import Violation
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.actions import Actions
from popmq.testing.sim.clients import BRIEF, INVISIBLE_MS, LONG_MS
from popmq.testing.sim.drain import drain
from popmq.testing.sim.lookup import LookupChecks
from popmq.testing.sim.operators import Operators
from popmq.testing.sim.producers import FIFO_QUEUES, QUIET
from popmq.testing.sim.replay import Replay, ReplayCheck
from popmq.testing.sim.retention import RetentionChecks
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.sim.store_checks import StoreChecks
from popmq.testing.sim.topic_retention import BRIEF_MS, TopicRetention

REPLAY = ".venv/bin/python -m popmq.testing.{module} {world}--seed {seed} --trace"
_POWER = (Loss.ALL, Loss.KEPT, Loss.TORN, Loss.SCATTERED, Loss.SCATTERED)
_RETENTION = ((1, 0), (1000, 20_000), (1, 40_000))  # hours and bytes


@dataclass(slots=True)
class SeedResult:
    """What one seed gave; `digest` is the hash of its trace."""

    seed: int
    violations: list[Violation]
    trace: list[str] = field(repr=False)
    tally: StateCounts = field(repr=False)
    world: str = ""  # how the command line calls it
    module: str = "simulator"

    @property
    def digest(self) -> str:
        return blake2b("\n".join(self.trace).encode(), digest_size=8).hexdigest()

    def history(self, lines: int = 0) -> str:
        """The violations, the command that replays them, and the last `lines` of the trace."""
        command = REPLAY.format(module=self.module, world=self.world, seed=self.seed)
        kept = self.trace[-lines:] if lines else []
        found = [str(violation) for violation in self.violations]
        verdict = f"seed {self.seed}: {len(found)} violations, trace {self.digest}"
        return "\n".join([*kept, verdict, *found, f"replay: {command}"])


class RunEnded(Exception):
    """The run is over early, for a reason that is not a violation."""


class Simulator(Actions):
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.trace: list[str] = []
        self.tally = StateCounts()
        self.oracle = Oracle()
        self.retains = seed % 3 == 0
        self.keeps_order = self.rng.random() < 0.5
        self.oracle.parks = self.keeps_order and self.rng.random() < 0.5
        self.oracle.longest_ms = max(LONG_MS if self.retains else INVISIBLE_MS)
        self.machine = self._machine()
        self.clients = Operators(self.machine, self.oracle, self.rng, self.tally, self.trace_line)
        self.oracle.limited = self.machine.settings.pop.max_in_flight_per_queue < 100
        self.checks = StoreChecks(self.machine, self.oracle)
        self.retention = RetentionChecks(self.machine, self.oracle, self.tally)
        self.topic_retention = TopicRetention(self.machine, self.oracle, self.tally, self.retention)
        raised = self.retention.raised
        self.replay = ReplayCheck(self.machine.settings, self.machine.clock, self.oracle, raised)
        self.machine.on_recovered = self._recovered
        self.lookups = LookupChecks(self.machine, self.oracle, self.tally, self.clients.topics)
        self.machine.index_entries = self.rng.choice((8, *[ENTRIES_PER_FILE] * 4))
        self.machine.disk.faults.failed_pages = self.rng.choice(list(FailedPages))
        self.clients.uniform = self.rng.choice((0, 0, 120))
        self._damages = self.rng.random() < 0.12
        self._linger = 0  # moves that a process makes after its disk failed
        self._soft = False  # this life's crash is one of the process
        self._last_kind = ""
        self._actions: list[tuple[Callable[[], None], float]] = [
            (self.clients.send, 14),
            (self._receive, 14),
            (self._ack, 10),
            (self._change, 4),
            (self._leave, 3),
            (self.clients.hear_of_leaving, 4),
            (self._administer, 1),
            (self._loop, 22),
            (self._flush, 18),
            (self._step, 8),
            (self._time, 6),
            (self._settle, 6),
            (self.clients.resend, 3),
        ]
        self._pushes = self.rng.random() < 0.3
        self._actions += [(self._reject, 1), (self.clients.proxy_dies, 1)]
        if self._pushes:
            self._actions += [(self._silence, 4)]
        if self.keeps_order:
            self._actions += [(self._repeat, 4), (self._stick, 1)]
        if self.oracle.parks:
            self._actions += [(self._unpark, 3), (self._stick, 4), (self._resume, 1)]
        self._actions += [(self._reset, 2), (self._redrive, 2)]
        if self.retains:
            self._long_ms = LONG_MS
            self._invisible_ms = (*INVISIBLE_MS, *LONG_MS)
            self._actions += [(self._hours, 5), (self._burst, 5), (self._work, 10)]
            self._actions += [(self._quiet, 1), (self._outlive, 2)]

    def run(self) -> SeedResult:
        try:
            self._set_up()
            for _ in range(self.rng.randrange(2, 5)):
                self._live()
                if self.oracle.violations:
                    break
                self._restart()
            if not self.oracle.violations:
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
        except RunEnded as end:
            self.trace_line(f"over: {end}")
        except Exception as error:  # of the product, or of the simulator: say where
            where = traceback.extract_tb(error.__traceback__)[-3:]
            places = tuple(f"{frame.name}, line {frame.lineno}: {frame.line}" for frame in where)
            what = f"{type(error).__name__}: {error}"
            self.oracle.violations.append(Violation("I0 broken", what, places))
        self.tally.hit(Sometimes.BUFFERED_FORGOTTEN, self.oracle.forgotten)
        for violation in self.oracle.violations:
            self.trace_line(str(violation))
        return SeedResult(self.seed, self.oracle.violations, self.trace, self.tally)

    # -- a run

    def _machine(self) -> SimulatedBroker:
        return SimulatedBroker(self._settings(), self.rng, self.tally)

    def _settings(self) -> Settings:
        rng = self.rng
        segment_bytes = rng.choice((11, 16, 64)) << 10
        hours, size = 72, 0
        if self.retains:
            segment_bytes = rng.choice((11, 16, 32)) << 10
            hours, size = rng.choice(_RETENTION)
        return Settings(
            store=StoreSettings(
                segment_bytes=segment_bytes,
                snapshot_bytes=rng.choice((6, 12) if self.retains else (6, 24, 4096)) << 10,
                reserved_segments=rng.choice((1, 2)),
                retention_hours=hours,
                retention_bytes=size,
            ),
            message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
            pop=PopSettings(
                max_in_flight_per_queue=rng.choice((5, 1000, 1000)),
                retry_first_percent=rng.choice((0, 20, 100)),
                fifo_open_offsets=rng.choice((3, 5)) if self.oracle.parks else 10_000,
                fifo_park_after_ms=500,
            ),
            group=GroupSettings(auto_create=False),
            timer=TimerSettings(wheel_slots=600, log_segment_bytes=4 << 10),
        )

    def _set_up(self) -> None:
        trouble = self.machine.try_start()
        assert not trouble, f"the first start: {trouble}"
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
            self._read("f", "fo")
            self._read("ft", "fo", "A", "B")
            if self.rng.random() < 0.3:
                self._read("g", "fo")
        self._read("g", "t0")
        self._read("g", "t1")
        self._read("h", "t0", "A")
        self._read("n", "t0")
        if self.retains:
            clients.make_topic(QUIET, 1)
            clients.make_topic(BRIEF, 1, retention_ms=self.rng.choice(BRIEF_MS))
            self.machine.run_until_idle()
            self._read("g", QUIET)
            self._read("g", BRIEF)
            self._quiet()

    def _live(self) -> None:
        """Act until a fault ends the process, or the life is over."""
        self._arm()
        self.machine.mixes = True
        self._linger = self.rng.choice((0, 0, 3, 12))
        actions = [action for action, _ in self._actions]
        weights = [weight for _, weight in self._actions]
        count = self.rng.choice((8, 25, 60, 110))
        try:
            for action in self.rng.choices(actions, weights, k=count):
                action()
                if self.oracle.violations:
                    return
                if self.machine.failed is not None:
                    self._linger -= 1
                    if self._linger < 0:
                        break
                elif self.machine.at_rest:
                    self.tally.hit(Sometimes.BLOCKED, int(self.machine.blocked > 0))
                    self.checks.at_rest()
                    self._rest()
                    if self.rng.random() < 0.05:
                        self.lookups.look(13)
            self._last_kind = self._end_life()
        except PowerCut:
            self._last_kind = "cut"
        except AssertionError as error:
            if not self.machine.disk.faults.sick:
                raise
            self.trace_line(f"stopped by {error}, after the disk failed")  # as good an end as any
            self._last_kind = "error"

    def _arm(self) -> None:
        """One fault for this life, or none."""
        rng, disk = self.rng, self.machine.disk
        self._soft = False
        slow = rng.random() < 0.3
        cut = self.retains and rng.random() < 0.5
        self.retention.cut_power_in = rng.randrange(14) if cut else None
        self.machine.sync_ms = (lambda: rng.choice((0, 0, 30, 400))) if slow else (lambda: 0)
        if cut:
            return
        match rng.choices(("cut", "roll", "write", "sync", "full", "none"), (7, 5, 2, 3, 2, 3))[0]:
            case "cut":
                disk.faults.cut_at(rng.randrange(rng.choice((5, 25, 80))))
            case "roll":
                folder = rng.choice(("/commitlog/", "/commitlog/", "/snapshot/", "/checkpoint"))
                disk.faults.cut_at(rng.randrange(8), after_start_of=folder)
                self._soft = rng.random() < 0.6
            case "write":
                disk.faults.fail_write_at(rng.randrange(30))
            case "sync":
                below = rng.choice(("", "/commitlog/"))
                disk.faults.fail_sync_at(rng.randrange(15), below=below)
                self._soft = rng.random() < 0.6
            case "full":
                disk.faults.budget = rng.choice((100, 10_000, 40_000))
            case _:
                pass

    def _end_life(self) -> str:
        """Returns how it ended: "stop" for a clean stop, else "cut" or "error"."""
        failed = self.machine.failed
        if failed is not None:
            sync = "sync" in str(failed)
            full = failed.errno == errno.ENOSPC
            what = Sometimes.SYNC_ERROR if sync else Sometimes.WRITE_ERROR
            self.tally.hit(Sometimes.NO_SPACE if full else what)
            self.trace_line(f"the disk failed: {failed}")
            return "error"
        if self.rng.random() < 0.5:
            return "cut"
        self.clients.dismissed()
        try:
            self.trace_line("stop")
            self.machine.stop()
        except (PowerCut, OSError):
            self.tally.hit(Sometimes.CRASH_IN_STOP)
            return "cut"
        self.tally.hit(Sometimes.CLEAN_STOP)
        return "stop"

    def _restart(self) -> None:
        """Crash as the life ended, and start until it holds."""
        rng, machine = self.rng, self.machine
        self._count_store()
        self.oracle.era += self._last_kind != "stop"
        self.oracle.process += 1
        self.retention.cut_power_in = None
        for attempt in range(4):
            power = rng.random() < 0.6 and not (self._soft and attempt == 0)
            loss = rng.choice(_POWER) if power else Loss.NOTHING
            self.trace_line(f"crash, lost: {loss.value}")
            machine.crash(loss)
            if attempt or self._last_kind != "stop":
                self.oracle.unanswered.crashed(self.oracle.process - 1)
            self.clients.crashed()
            self._while_down()
            if self.retains and attempt == 0 and rng.random() < 0.3:
                self._lose_index()
            damaged = self._damage() if attempt == 0 and self._last_kind != "error" else ""
            if attempt < 3 and rng.random() < 0.3:
                machine.disk.faults.cut_at(rng.randrange(rng.choice((4, 30))))
            elif attempt < 3 and rng.random() < 0.05:
                machine.disk.faults.budget = rng.choice((0, 60, 5_000))
            trouble = machine.try_start()
            machine.disk.faults.heal()
            self.trace_line(f"start: {trouble or 'ok'} at {machine.recovered}")
            if not trouble:
                break
            self._judge_start(trouble, damaged)
            self.tally.hit(Sometimes.NO_SPACE if trouble == "full" else Sometimes.CRASH_IN_START)
            self.tally.hit(Sometimes.CRASH_TWICE, int(attempt > 0))
        self._started(damaged)

    def _recovered(self, seed: int) -> None:
        self.checks.tail_is_clean()
        machine = self.machine
        replay = self.replay.after_recovery(
            machine.broker, machine.disk, seed, lived_ms=machine.lived_log_ms
        )
        self.tally.hit(Sometimes.LONGER_REPLAY, int(replay is Replay.LONGER))
        self.tally.hit(Sometimes.FULL_REPLAY, int(replay is Replay.FULL))

    def _started(self, damaged: str) -> None:
        self.oracle.unanswered.started(self.machine.log_ms)
        store = self.machine.broker.store
        self.tally.hit(Sometimes.TORN_TAIL, int(store.metrics.torn_bytes > 0))
        self.tally.hit(Sometimes.SNAPSHOT_START, int(store.snapshots.position > 0))
        self.tally.hit(Sometimes.CHECKPOINT_DAMAGED, int("/checkpoint" in damaged))
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

    def _lose_index(self) -> None:
        """The folders that the broker itself says may be removed."""
        data, disk = self.machine.settings.broker.data, self.machine.disk
        for folder in ("consumequeue", "system"):
            disk.lose_folder(f"{data}/{folder}")
        self.trace_line("the index was removed")
        self.retention.index_lost = True

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
        self.machine.sync_ms = lambda: 0
        self.machine.mixes = False
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
        self._count_store()
        self.retention.cut_power_in = None
        self.tally.hit(Sometimes.PADDED_ROLL, self.checks.padded_segments())
        self.machine.crash(self.rng.choice(_POWER))
        self.clients.crashed()
        trouble = self.machine.try_start()
        self.trace_line(f"healed: {trouble or 'ok'} at {self.machine.recovered}")
        if trouble:
            self._judge_start(trouble, "")
        self._started("")
        self.oracle.healed_ms = self.oracle.now_ms = self.machine.clock.boot_ms()

    def _count_store(self) -> None:
        store = self.machine.broker.store
        self.retention.before_crash()
        self.tally.hit(Sometimes.INDEX_SEALED, store.index.metrics.sealed)
        broker = self.machine.broker
        self.tally.hit(Sometimes.RENEWED, broker.revive.renewed)
        self.tally.hit(Sometimes.UNDONE, broker.undo.rolled_back)
        self.tally.hit(Sometimes.RETURNED, broker.revive.returned)
        self.tally.hit(Sometimes.PARKED, broker.parking.parked)
        self.tally.hit(Sometimes.PARKED_DEAD, broker.parking.dead_lettered)
        buffer = self.machine.broker.buffer
        self.tally.hit(Sometimes.BUFFERED_COMMIT, buffer.commits)
        self.tally.hit(Sometimes.BUFFERED_WRITTEN, buffer.written)
        self.tally.hit(Sometimes.CHECKPOINT, store.checkpoints.made)
        self.tally.hit(Sometimes.SNAPSHOT, store.snapshots.made)
        for topic, place in self.clients.topics.items():
            self.tally.hit(Sometimes.TOPIC_REMADE, int(topic == "tmp" and place is not None))
