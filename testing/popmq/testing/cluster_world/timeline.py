"""Time of a simulated cluster: one line of events, and clocks that are a little wrong.

Events of one millisecond come in an order that the seed throws, so nothing can rest on who was
asked first; what has to stay in order (frames of a connection, callbacks of a loop) keeps a
queue of its own.
"""

import heapq
import random
from collections.abc import Callable

from popmq.common.clock import Clock
from popmq.testing.harness.clock import MovingClock

Action = Callable[[], None]

# Seeds from here on have it; the mistakes that are planted are found in the others.
MOVING_SEEDS = 1_000_000

_WALL_MS = 1_700_000_000_000
_MILLION = 1_000_000


class Timeline:
    """What happens when, in milliseconds of true time, which no host knows."""

    def __init__(self, rng: random.Random, *, moves: bool = False) -> None:
        """`moves`: time passes within what a process does, too."""
        self._rng = rng
        self._moves = moves
        self._events: list[tuple[int, float, int, Action]] = []
        self._number = 0
        self.now_ms = 0
        self.done = 0  # events so far

    def after(self, delay_ms: int, action: Action) -> None:
        """Do it in so many milliseconds; 0 is now, behind what is being done."""
        self._number += 1
        due_ms = self.now_ms + max(0, delay_ms)
        heapq.heappush(self._events, (due_ms, self._rng.random(), self._number, action))

    def pass_time(self, ms: int) -> None:
        """What is done now takes so long; what is due meanwhile happens behind it."""
        self.now_ms += ms

    def process_clock(self, clock: Clock) -> MovingClock:
        """What a process on that machine reads."""
        made = MovingClock(clock, self.pass_time, self._rng)
        if not self._moves:
            made.stand_still()
        return made

    def run(self, until_ms: int, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Let everything happen that is due by then, or until `stop` says so."""
        events = self._events
        while events and events[0][0] <= until_ms and not stop():
            due_ms, _, _, action = heapq.heappop(events)
            self.now_ms = max(self.now_ms, due_ms)  # work before it may have taken until later
            self.done += 1
            action()
        if not stop():
            self.now_ms = max(self.now_ms, until_ms)


class HostClock:
    """A machine's two clocks (`popmq.common.clock.Clock`): offset, drift, steps, reboots.

    `rate_ppm` is how many millionths faster than true time both run.
    """

    def __init__(self, timeline: Timeline, *, offset_ms: int = 0, rate_ppm: int = 0) -> None:
        self._timeline = timeline
        self._rate_ppm = rate_ppm
        self._from_ms = timeline.now_ms  # true time of the last change of the rate
        self._elapsed_ms = 0  # of its own time, until then
        self._boot_ms = 1_000_000
        self._wall_ms = _WALL_MS + offset_ms
        self.forward_ms = 0  # by which it was set forward, in all

    def wall_ms(self) -> int:
        return self._wall_ms + self._elapsed()

    def boot_ms(self) -> int:
        return self._boot_ms + self._elapsed()

    def set_rate(self, rate_ppm: int) -> None:
        self._elapsed_ms, self._from_ms = self._elapsed(), self._timeline.now_ms
        self._rate_ppm = rate_ppm

    def step_wall(self, ms: int) -> None:
        """Somebody, or a time daemon, sets the wall clock."""
        self._wall_ms += ms
        self.forward_ms += max(0, ms)

    def reboot(self) -> None:
        """The machine starts: time since boot begins anew, that on the wall goes on."""
        self._boot_ms = 1_000 - self._elapsed()

    def true_ms(self, own_ms: int) -> int:
        """How much true time passes while this clock counts `own_ms`; at least 1 of any."""
        return max(1, own_ms * _MILLION // (_MILLION + self._rate_ppm)) if own_ms > 0 else 0

    @property
    def error_ms(self) -> int:
        """How far the wall clock is ahead of true time."""
        return self.wall_ms() - _WALL_MS - self._timeline.now_ms

    def _elapsed(self) -> int:
        passed_ms = self._timeline.now_ms - self._from_ms
        return self._elapsed_ms + passed_ms + passed_ms * self._rate_ppm // _MILLION
