"""CrashEverywhere: the thousand timers' script once, and a crash at every operation of its disk.

At each operation copies of the run crash, one for each model of what a crash takes.  A copy starts
again, crashes once more at random, and ends when every timer has come to its end.  What it draws
comes from the state in which it crashed, so that a state is looked at once: what the disk holds,
what clients were told, and the clocks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.sim.forks import Forks
from popmq.testing.sim.lives import SeedResult
from popmq.testing.timer_world.thousand_timers import (
    LOSSES,
    NEVER,
    CrashedAt,
    ThousandTimers,
    seed_of,
)

_CRASHES = 2  # of a copy
_COMPARED = 8  # one copy of so many compares its start with one from the older snapshot


def everywhere(at: int, loss: int) -> bool:
    return True


class CrashedHere(Exception):
    """The broker crashed and started: from here on time passes, and nobody sends."""


class SameState(BaseException):
    """Another copy is in the same state; no error, so that nothing takes it for one."""


class OneCrash(ThousandTimers):
    """A run that crashes at one operation, and in the same way as the copy of it would."""

    option = "--one-crash"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_new: Callable[[bytes], bool] = lambda state: True
        self._compares = True  # its first start, and perhaps the one after its crash

    def _lives(self) -> None:
        try:
            super()._lives()
        except CrashedHere:
            self._come_to_an_end()

    def _die(self) -> None:
        first = not self.crashes
        super()._die()
        if first:
            raise CrashedHere

    def _crash(self) -> None:
        if self.crashes > 1:
            super()._crash()
            return
        self.rng.seed(self._state())  # what a crash takes is drawn, too
        super()._crash()
        state = self._state()
        self.rng.seed(state)
        self._fate.seed(state)
        self.machine.process_clock.seed(state)
        self._compares = state[0] % _COMPARED == 0
        if not self.is_new(state):
            raise SameState

    def _draw_next(self) -> int:
        return super()._draw_next() if self.crashes < _CRASHES else NEVER

    @property
    def _compares_starts(self) -> bool:
        return self._compares

    def _state(self) -> bytes:
        """All that what comes depends on."""
        machine, oracle = self.machine, self.oracle
        model = oracle.model
        stories = [
            (
                message.number,
                message.ok_at > 0,
                message.told_due_ms,
                message.refused,
                message.recalls,
            )
            for message in oracle.delayed.values()
        ]
        clock = machine.clock
        times = clock.wall_ms(), clock.boot_ms(), machine.log_ms, machine.lived_log_ms
        ends = machine.ends.confirmed, machine.ends.appended
        # Of the log that retention deleted the model knows yet what was in it: in one script it is
        # the same up to the same position.
        read = model.scanned, model.cursor, model.classified, len(model.fired), model.miscounted
        known = repr((self.loss, stories, times, ends, read, machine.clock_went_back))
        return blake2b(machine.disk.image() + known.encode(), digest_size=16).digest()

    def _come_to_an_end(self) -> None:
        machine = self.machine
        machine.mixes = False
        while not self.oracle.violations:
            try:
                self.work_to_the_end()
                break
            except PowerCut:
                self._die()
        machine.disk.faults.heal()

    def _drain(self) -> None:
        if self.crashes:
            self._finish()
        else:
            super()._drain()

    def _finish(self) -> None:
        self.oracle.finish()
        self.count_fired()
        self._count(self.machine.broker.timers.service)


@dataclass(slots=True)
class CrashEverywhereResult:
    """What the copies saw, added up."""

    points: int = 0  # at which the broker crashed: operations, by models
    same: int = 0  # of these, the ones whose state was that of another one
    crashes: int = 0
    timers: int = 0  # that were acknowledged when the broker crashed first
    tally: StateCounts = field(default_factory=lambda: StateCounts(CrashedAt))
    stories: list[str] = field(default_factory=list)  # of what was violated
    digests: dict[int, str] = field(default_factory=dict)  # of the traces, by number of the run

    def add(self, other: "CrashEverywhereResult") -> None:
        self.same += other.same
        self.crashes += other.crashes
        self.timers += other.timers
        self.tally.add(other.tally)
        self.stories += other.stories
        self.digests.update(other.digests)


class CrashEverywhere(OneCrash):
    """The run that does not crash."""

    def __init__(
        self, script: int, *, copies: int, wants: Callable[[int, int], bool] = everywhere
    ) -> None:
        """`copies` live at a time. `wants` may leave out operations, by number, for a model."""
        super().__init__(seed_of(first=0, loss=0, script=script))
        self._next = NEVER
        self._script = script
        self._is_same = False
        self._wants = wants
        self.found = CrashEverywhereResult()
        self._forks = Forks(copies, self._heard)
        self.is_new = self._forks.is_new

    def run_all(self) -> CrashEverywhereResult:
        """Raises AssertionError when the script itself, without a crash, is broken."""
        try:
            outcome = self.run()
        except SameState:
            self._is_same = True
        finally:
            if self._forks.is_copy:
                self._forks.leave(self._seen_by_a_copy)
            self._forks.finish()
        assert not outcome.violations, outcome.history(40)
        return self.found

    def _lives(self) -> None:
        faults = self.machine.disk.faults
        faults.at_operation = lambda path: self.machine.disk.on_main(lambda: self._fork(path))
        try:
            super()._lives()
        finally:
            faults.at_operation = None
        if not self.crashes:
            self._come_to_an_end()  # without the start of another drain

    def _drain(self) -> None:
        self._finish()

    def _fork(self, path: str) -> None:
        """Between two operations: in a copy the second one is never done."""
        faults, at = self.machine.disk.faults, self._done
        for loss in range(len(LOSSES)):
            if not self._wants(at, loss):
                continue
            self.found.points += 1
            if not self._forks.fork():
                continue
            self.seed = seed_of(first=at, loss=loss, script=self._script)
            self.loss = LOSSES[loss]
            faults.at_operation = None
            self.machine.flusher.forget_thread()
            self.machine.housekeeper.forget_thread()
            faults.cut_at(0)
            faults.touch(path)

    def _seen_by_a_copy(self) -> CrashEverywhereResult:
        if self._is_same:
            return CrashEverywhereResult(same=1)
        outcome = SeedResult(
            self.seed, self.oracle.violations, self.trace, self.tally, "--one-crash "
        )
        stories = [outcome.history(40)] if outcome.violations else []
        result = CrashEverywhereResult(0, 0, self.crashes, self.acknowledged, self.tally, stories)
        result.digests[self.seed] = outcome.digest
        return result

    def _heard(self, seen: object) -> None:
        assert isinstance(seen, CrashEverywhereResult)
        self.found.add(seen)
