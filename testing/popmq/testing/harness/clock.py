"""Clocks that a test turns."""

import random
from collections.abc import Callable

from popmq.common.clock import Clock, SystemClock


class ManualClock:
    """`advance` is time passing; `step_wall` is somebody setting the wall clock."""

    def __init__(self, wall_ms: int = 1_700_000_000_000, boot_ms: int = 1_000_000) -> None:
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def boot_ms(self) -> int:
        return self._boot_ms

    def advance(self, ms: int) -> None:
        self._wall_ms += ms
        self._boot_ms += ms

    def step_wall(self, ms: int) -> None:
        self._wall_ms += ms


class TickingClock(ManualClock):
    """Every reading is a millisecond later than the one before, so two readings never agree."""

    def wall_ms(self) -> int:
        self.advance(1)
        return super().wall_ms()

    def boot_ms(self) -> int:
        self.advance(1)
        return super().boot_ms()


SHARES = (0.0, 0.01, 0.1, 0.5)  # of the readings that come later than the one before
_LATER_MS = (1, 1, 1, 1, 1, 1, 2, 7)


class MovingClock:
    """What a simulated process reads: time passes within a step, so two readings may differ.

    `pass_time` moves the simulation's own clock, which reads without moving anything. A share of
    0 is a step that takes no time; the seed draws one of SHARES.
    """

    def __init__(self, clock: Clock, pass_time: Callable[[int], None], rng: random.Random) -> None:
        self._clock = clock
        self._pass_time = pass_time
        # A generator of its own: what else the seed draws does not depend on the readings.
        own = random.Random()
        own.setstate(rng.getstate())
        own.seed(own.getrandbits(64))
        self._rng = own
        self._share = own.choice(SHARES)

    def wall_ms(self) -> int:
        self._move()
        return self._clock.wall_ms()

    def boot_ms(self) -> int:
        self._move()
        return self._clock.boot_ms()

    def stand_still(self) -> None:
        """A step takes no time."""
        self._share = 0.0

    def slow_down(self) -> None:
        """From here on little time passes within a step: how late something is, is judged."""
        self._share = min(self._share, SHARES[1])

    def seed(self, state: bytes) -> None:
        """Draw from here on as any other process that is in this state."""
        self._rng.seed(state)

    def _move(self) -> None:
        if self._rng.random() < self._share:
            self._pass_time(self._rng.choice(_LATER_MS))


class MachineClock:
    """The clocks of one machine of several: they share the time that passes, and neither the wall
    clock nor the time of boot."""

    def __init__(self, clock: Clock, *, wall_ahead_ms: int = 0, boot_ahead_ms: int = 0) -> None:
        self._clock = clock
        self._wall_ahead_ms = wall_ahead_ms
        self._boot_ahead_ms = boot_ahead_ms

    def wall_ms(self) -> int:
        return self._clock.wall_ms() + self._wall_ahead_ms

    def boot_ms(self) -> int:
        return self._clock.boot_ms() + self._boot_ahead_ms

    def step_wall(self, ms: int) -> None:
        self._wall_ahead_ms += ms

    def reboot(self) -> None:
        """The machine starts: its time since boot begins anew."""
        self._boot_ahead_ms = 1_000 - self._clock.boot_ms()


class SkippingClock:
    """The machine's clock, ahead of it by all that `advance` added; frozen, nothing else moves."""

    def __init__(self, *, frozen: bool = False) -> None:
        system = SystemClock()
        self._under: Clock = system
        if frozen:
            self._under = ManualClock(system.wall_ms(), system.boot_ms())
        self._ahead_ms = 0

    def wall_ms(self) -> int:
        return self._under.wall_ms() + self._ahead_ms

    def boot_ms(self) -> int:
        return self._under.boot_ms() + self._ahead_ms

    def advance(self, ms: int) -> None:
        self._ahead_ms += ms


class ClientClock:
    """What waiting clients' time is: that of the machine, frozen or not, and what was skipped.

    Its wall clock is the broker's, so that a delivery is stamped with the time of its message.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._flowing = SkippingClock()

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def boot_ms(self) -> int:
        return self._flowing.boot_ms()

    def advance(self, ms: int) -> None:
        self._flowing.advance(ms)
