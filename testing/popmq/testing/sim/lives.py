"""A run as the simulators share it: a few lives of the broker, each ended by a crash, a disk error
or a clean stop. Then a drain without faults (docs/concepts/simulator.md)."""

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Protocol

from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.disk_faults import FailedPages
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.oracle.client_history import Violation
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.replay import Replay, ReplayCheck
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.sim.store_checks import StoreChecks

REPLAY = ".venv/bin/python -m popmq.testing.{module} {world}--seed {seed} --trace"
POWER = (Loss.ALL, Loss.KEPT, Loss.TORN, Loss.SCATTERED, Loss.SCATTERED)
_FAULTS = ("cut", "roll", "write", "sync", "full", "none")


@dataclass(slots=True)
class SeedResult:
    """What one seed gave; `digest` is the hash of its trace."""

    seed: int
    violations: list[Violation]
    trace: list[str] = field(repr=False)
    tally: StateCounts = field(repr=False)
    world: str = ""  # how the command line calls it
    module: str = "simulator"
    replay: str = REPLAY

    @property
    def digest(self) -> str:
        return blake2b("\n".join(self.trace).encode(), digest_size=8).hexdigest()

    def history(self, lines: int = 0) -> str:
        """The violations, the command that replays them, and the last `lines` of the trace."""
        command = self.replay.format(module=self.module, world=self.world, seed=self.seed)
        kept = self.trace[-lines:] if lines else []
        violations = [str(violation) for violation in self.violations]
        verdict = f"seed {self.seed}: {len(violations)} violations, trace {self.digest}"
        return "\n".join([*kept, verdict, *violations, f"replay: {command}"])


class RunEnded(Exception):
    """The run is over early, for a reason that is not a violation."""


def broken(error: Exception) -> Violation:
    where = traceback.extract_tb(error.__traceback__)[-4:]
    places = tuple(f"{frame.name}, line {frame.lineno}: {frame.line}" for frame in where)
    return Violation("I0 broken", f"{type(error).__name__}: {error}", places)


class CrashingClients(Protocol):
    def crashed(self) -> None:
        """The broker is gone, and with it what it has not answered."""


class Lives:
    """One seed; a subclass says what clients do, and which faults its disk has."""

    option = ""  # of the command that runs this world
    states: type[Enum]  # that its seeds have to reach
    states_of_lives: type[Enum]  # with CLEAN_STOP, LONGER_REPLAY and FULL_REPLAY
    fault_weights: tuple[int, ...]  # of _FAULTS
    cut_operations: tuple[int, ...] = (5, 25, 120)  # within which the power goes
    roll_folders: tuple[str, ...] = ("/commitlog/", "/commitlog/", "/snapshot/", "/checkpoint")
    sync_operations = 10
    sync_folders: tuple[str, ...] = ("", "/commitlog/")
    # Faults whose folder is drawn before their operation: a seed stays the run that it was.
    folder_first: tuple[str, ...] = ()
    disk_budgets: tuple[int, ...]
    start_budgets: tuple[int, ...] = (0, 60, 5_000)  # of a disk that is full in a start
    crash_share = 0.6  # of the ends of lives without a fault

    machine: SimulatedBroker
    oracle: Oracle
    clients: CrashingClients
    checks: StoreChecks
    replay: ReplayCheck

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.trace: list[str] = []
        self.tally = StateCounts(self.states)
        self.retains = seed % 3 == 0
        self._soft = False  # this life's crash is one of the process
        self._last_kind = ""  # how the last life ended

    def trace_line(self, line: str) -> None:
        self.trace.append(f"{self.machine.clock.boot_ms() - 1_000_000} {line}")

    def run(self) -> SeedResult:
        try:
            self._set_up()
            self._lives()
            if not self.oracle.violations:
                self._drain()
        except RunEnded as end:
            self.trace_line(f"over: {end}")
        except Exception as error:  # of the product, or of the simulator: say where
            self.oracle.violations.append(broken(error))
        for violation in self.oracle.violations:
            self.trace_line(str(violation))
        world = self.option and f"{self.option} "
        return SeedResult(self.seed, self.oracle.violations, self.trace, self.tally, world)

    # -- what a world has of its own

    def weighted(self) -> Sequence[tuple[Callable[[], object], int]]:
        """The moves that the scheduler picks from, and how often."""
        raise NotImplementedError

    def _set_up(self) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        raise NotImplementedError

    def _acted(self) -> None: ...

    def _at_rest(self) -> None: ...

    def _disk_failed(self, failed: OSError) -> None:
        self.trace_line(f"the disk failed: {failed}")

    def _before_stop(self) -> None: ...

    def _stop_failed(self) -> None: ...

    def _before_crash(self) -> None: ...

    def _crash_with(self, loss: Loss, attempt: int) -> None:
        self.machine.crash(loss)
        self.clients.crashed()

    def _while_crashed(self, attempt: int) -> None:
        """Between the crash and the start."""

    def _start_failed(self, trouble: str, attempt: int) -> bool:
        """Whether it is not to be tried again."""
        if trouble.startswith("damaged"):
            self.oracle.report_violation("I0 starts", f"refused to start: {trouble}")
            return True
        return False

    def _started(self) -> None: ...

    # -- a run

    def _watch_disk(self) -> None:
        self.machine.on_recovered = self._recovered
        self.machine.disk.faults.failed_pages = self.rng.choice(list(FailedPages))

    def _first_start(self) -> None:
        trouble = self.machine.try_start()
        assert not trouble, f"the first start: {trouble}"

    def _lives(self) -> None:
        for _ in range(self.rng.randrange(2, 5)):
            self._live()
            if self.oracle.violations:
                break
            self._restart()

    def _live(self) -> None:
        """Act until a fault ends the process, or the life is over."""
        self._arm()
        self.machine.mixes = True
        linger = self.rng.choice((0, 0, 3, 12))  # moves that a process makes after its disk failed
        actions, weights = zip(*self.weighted(), strict=True)
        count = self.rng.choice((8, 25, 60, 110))
        try:
            for action in self.rng.choices(actions, weights, k=count):
                action()
                self._acted()
                if self.machine.failed is None:
                    self.checks.invariants()
                if self.oracle.violations:
                    return
                if self.machine.failed is not None:
                    linger -= 1
                    if linger < 0:
                        break
                elif self.machine.at_rest:
                    self._at_rest()
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
        self._soft = False
        self._arm_syncs()
        self._arm_disk()

    def _arm_syncs(self) -> None:
        rng = self.rng
        slow = rng.random() < 0.3
        self.machine.sync_ms = (lambda: rng.choice((0, 0, 30, 400))) if slow else (lambda: 0)

    def _arm_disk(self) -> None:
        rng, faults = self.rng, self.machine.disk.faults
        match rng.choices(_FAULTS, self.fault_weights)[0]:
            case "cut":
                faults.cut_at(rng.randrange(rng.choice(self.cut_operations)))
            case "roll":
                operation, folder = self._draw("roll", 8, self.roll_folders)
                faults.cut_at(operation, after_start_of=folder)
                self._soft = rng.random() < 0.6
            case "write":
                faults.fail_write_at(rng.randrange(30))
            case "sync":
                operation, folder = self._draw("sync", self.sync_operations, self.sync_folders)
                faults.fail_sync_at(operation, below=folder)
                self._soft = rng.random() < 0.6
            case "full":
                faults.budget = rng.choice(self.disk_budgets)
            case _:
                pass

    def _draw(self, fault: str, operations: int, folders: tuple[str, ...]) -> tuple[int, str]:
        if fault not in self.folder_first:
            return self.rng.randrange(operations), self.rng.choice(folders)
        folder = self.rng.choice(folders)
        return self.rng.randrange(operations), folder

    def _flush(self) -> None:
        lanes = self.machine.ready_lanes
        if lanes:
            operations = self.rng.choice((None, None, 1, 1, 2, 4))
            self.machine.work(self.rng.choice(lanes), operations)

    def _end_life(self) -> str:
        """Returns how it ended: "stop" for a clean stop, else "cut" or "error"."""
        failed = self.machine.failed
        if failed is not None:
            self._disk_failed(failed)
            return "error"
        if self.rng.random() < self.crash_share:
            return "cut"
        self._before_stop()
        try:
            self.trace_line("stop")
            self.machine.stop()
        except (PowerCut, OSError):
            self._stop_failed()
            return "cut"
        self.tally.hit(self.states_of_lives["CLEAN_STOP"])
        return "stop"

    def _restart(self) -> None:
        """Crash as the life ended, and start until it holds."""
        rng, machine = self.rng, self.machine
        self._before_crash()
        for attempt in range(4):
            power = rng.random() < 0.6 and not (self._soft and attempt == 0)
            loss = rng.choice(POWER) if power else Loss.NOTHING
            self.trace_line(f"crash, lost: {loss.value}")
            self._crash_with(loss, attempt)
            self._while_crashed(attempt)
            if attempt < 3 and rng.random() < 0.3:
                machine.disk.faults.cut_at(rng.randrange(rng.choice((4, 30))))
            elif attempt < 3 and self.start_budgets and rng.random() < 0.05:
                machine.disk.faults.budget = rng.choice(self.start_budgets)
            trouble = machine.try_start()
            machine.disk.faults.heal()
            self.trace_line(f"start: {trouble or 'ok'} at {machine.recovered}")
            if not trouble:
                break
            if self._start_failed(trouble, attempt):
                return
        self._started()

    def _recovered(self, seed: int) -> None:
        self.checks.tail_is_clean()
        self.checks.invariants()
        machine = self.machine
        replay = self.replay.after_recovery(
            machine.broker, machine.disk, seed, lived_ms=machine.lived_log_ms
        )
        self.tally.hit(self.states_of_lives["LONGER_REPLAY"], int(replay is Replay.LONGER))
        self.tally.hit(self.states_of_lives["FULL_REPLAY"], int(replay is Replay.FULL))

    def _lose_index(self) -> None:
        """The folders that the broker itself says may be removed."""
        data, disk = self.machine.settings.broker.data, self.machine.disk
        for folder in ("consumequeue", "system"):
            disk.lose_folder(f"{data}/{folder}")

    def _quiet_disk(self) -> None:
        self.machine.sync_ms = lambda: 0
        self.machine.process_clock.slow_down()
        self.machine.mixes = False
        self._soft = False
