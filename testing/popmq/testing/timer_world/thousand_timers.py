"""ThousandTimers: a thousand timers in one broker, and a crash at every operation of its disk.

A run is a script, the operation at which the broker dies first, and what a crash takes: up to
that operation all runs of a script are one, so that together they die at each.  Then it goes on,
and dies now and then, in starts too.  All of it beside recalls that race with firings, clocks
that step, a wheel of an hour under timers of five, and retention that moves bodies each hour.
"""

import random
from collections.abc import Callable
from enum import Enum

from popmq.common.settings.send_settings import DedupSettings
from popmq.common.settings.settings import (
    GroupSettings,
    MessageSettings,
    Settings,
    StoreSettings,
    TimerSettings,
)
from popmq.testing.disk.crash_loss import Loss
from popmq.testing.disk.lying_disk import PowerCut
from popmq.testing.timer_world.run import TimerSimulator
from popmq.testing.timer_world.sometimes_states import TimerSometimes as States

TIMERS = 1_000
# Only the process dies; or the power goes and takes what was not synced: all, or any sectors.
LOSSES = (Loss.NOTHING, Loss.ALL, Loss.SCATTERED)
MOST = 6_000  # operations in a script: the number of a run has room for so many
NEVER = 1 << 60
_APART = 400  # operations from one crash to the next, at most; a start alone takes 40 to 90
_REPLAYED = 8  # one start of so many is compared with a start from the older snapshot
_IN_A_REQUEST = (8, 24, 24)
_LAST_MOVES = 5_000


class CrashedAt(Enum):
    """Where the broker has to die; by the first part of a path below its data."""

    COMMIT_LOG = "commitlog"
    TIMER_LOG = "timerlog"
    TIMER_WHEEL = "timerwheel"
    TIMER_CHECK_POINT = "timercheckpoint"
    SNAPSHOT = "snapshot"
    INDEX = "index"
    QUEUES = "consumequeue"
    CHECK_POINT = "checkpoint"
    A_START = "any, in a start"


_PLACES = {crashed_at.value: crashed_at for crashed_at in CrashedAt}

# And what has to have happened in these runs.
REACHED = (
    States.FIRED,
    States.SAME_MS,
    States.LATE,
    States.ROLLED,
    States.WRAPPED,
    States.MOVED_FIRED,
    States.MOVED_TWICE,
    States.RECALLED,
    States.RECALL_RACED,
    States.RESCHEDULED,
    States.CLOCK_BACK,
    States.CLOCK_FORWARD,
    States.SLEPT,
    States.TURNED_BACK,
    States.CRASH_IN_FIRING,
    States.DOWN_FOR_A_LAP,
    States.SNAPSHOT_LATE,
    States.SNAPSHOT_CANCELLED,
    States.LATE_LOG,
    States.LOG_CUT,
)


def seed_of(*, first: int, loss: int, script: int = 0) -> int:
    """The number of the run that dies first at operation `first`, if the script has so many."""
    return (script * MOST + first) * len(LOSSES) + loss


class ThousandTimers(TimerSimulator):
    option = "--thousand-timers"
    states = CrashedAt

    def __init__(self, seed: int) -> None:
        """As `seed_of` makes it."""
        turn, loss = divmod(seed, len(LOSSES))
        script, self._next = divmod(turn, MOST)
        super().__init__(3 * (script + 1))  # with retention
        self.seed = seed
        self.loss = LOSSES[loss]
        self._most = (256, 16, 3)[script % 3]
        self._fate = random.Random(seed)
        self._begun = 0
        self.crashes = 0
        self.operations = 0  # of the disk, between the first start and the last one

    @property
    def acknowledged(self) -> int:
        """Timers that a client was told are stored."""
        return sum(story.told_due_ms > 0 for story in self.oracle.delayed.values())

    def weighted(self) -> list[tuple[Callable[[], object], int]]:
        return [
            (self._fill, 14),
            (self._burst, 3),
            (self._recall, 6),
            (self._reschedule, 4),
            (self._race, 6),
            (self._overtake, 4),
            (self._noise, 2),
            (self._loop, 10),
            (self._flush, 10),
            (self.machine.step, 12),
            (self._time, 6),
            (self._to_the_next, 12),
            (self._clock, 2),
            (self._wobble, 1),
            (self._sleep, 1),
            (self._hours, 1),
            (self.machine.run_until_idle, 6),
            (self._work, 6),
            (self._recount, 1),
        ]

    # -- a run

    def _settings(self) -> Settings:
        return Settings(
            store=StoreSettings(
                segment_bytes=32 << 10,
                snapshot_bytes=48 << 10,
                reserved_segments=1,
                retention_hours=1,
                retention_bytes=0,
            ),
            message=MessageSettings(max_body_bytes=2048, max_properties_bytes=64),
            group=GroupSettings(auto_create=False),
            dedup=DedupSettings(window_ms=0),
            timer=TimerSettings(
                max_delay_ms=8 * 3_600_000,
                wheel_slots=60,
                slot_ms=60_000,
                log_segment_bytes=4 << 10,
                late_limit=2 * TIMERS,
                cancelled_limit=2 * TIMERS,
            ),
        )

    def _lives(self) -> None:
        self._begun = self.machine.disk.faults.operations
        self.machine.mixes = True
        self._arm()
        moves, weights = zip(*self.weighted(), strict=True)
        while self.tally.counts[States.STORED] < TIMERS and not self.oracle.violations:
            for move in self.rng.choices(moves, weights, k=40):
                self._survive(move)
        self._fire_the_rest()
        self.operations = self._done
        self.machine.disk.faults.heal()

    def _fire_the_rest(self) -> None:
        moves = (self._to_the_next, self._to_the_next, self._race, self._overtake, self._work)
        for _ in range(_LAST_MOVES):
            if self.oracle.violations or not self.oracle.model.pending:
                return
            self._survive(self.rng.choice(moves))

    def _fill(self) -> None:
        topic = self.clients.topics["d"]
        assert topic is not None
        dues = [self._due() for _ in range(self.rng.choice(_IN_A_REQUEST))]
        self.clients.send_delayed(topic, dues)

    def _overtake(self) -> None:
        super()._overtake()
        self._arm()  # it may have set another moment

    def _survive(self, move: Callable[[], None]) -> None:
        if self.oracle.violations:
            return
        try:
            move()
            self.oracle.look()
            if self.machine.at_rest:
                self.oracle.at_rest()
        except PowerCut:
            self._die()

    # -- where it dies

    @property
    def _done(self) -> int:
        return self.machine.disk.faults.operations - self._begun

    def _arm(self) -> None:
        self.machine.disk.faults.cut_at(self._next - self._done)

    def _die(self) -> None:
        """Crash, and start; a start that is cut short is not cut short again."""
        machine, again = self.machine, False
        self._count(machine.broker.timers.service)
        while True:
            self._count_crash(machine.disk.faults.fault_hit, in_start=again)
            self._crash()
            if self.rng.random() < 0.2:
                self.while_down()
            self._next = NEVER if again else self._draw_next()
            self._arm()
            trouble, again = machine.try_start(), True
            self.trace_line(f"start: {trouble or 'ok'} at {machine.recovered}")
            if trouble != "cut":
                break
        if trouble:
            self.oracle.report_violation("I0 starts", f"refused to start: {trouble}")
            return
        if self._next == NEVER:
            self._next = self._draw_next()
            self._arm()
        self._started()

    def _crash(self) -> None:
        self.machine.crash(self.loss)
        self.clients.crashed()

    def _draw_next(self) -> int:
        return self._done + self._fate.randrange(_APART)

    def _count_crash(self, path: str, *, in_start: bool) -> None:
        below = path.removeprefix(f"{self.machine.settings.broker.data}/").split("/")[0]
        below = below.removesuffix(".new")
        self.crashes += 1
        self.trace_line(f"crash at {path}, lost: {self.loss.value}")
        if below in _PLACES:
            self.tally.hit(_PLACES[below])
        self.tally.hit(CrashedAt.A_START, int(in_start))

    @property
    def _compares_starts(self) -> bool:
        return self.crashes % _REPLAYED == 0

    def _recovered(self, seed: int) -> None:
        if self._compares_starts:
            super()._recovered(seed)
            return
        self.checks.tail_is_clean()
        self._limit()
