"""Where time comes from: one protocol, the machine's clock, and a clock that tests turn.

Nothing below a shell reads a clock by itself (ARCHITECTURE D3); it is handed one, or a
`now`. Two readings, both in whole milliseconds: the wall clock, which may step, and the time
since boot, which only moves forward (docs/concepts/store.md, "Time").
"""

import time
from typing import Protocol


class Clock(Protocol):
    def wall_ms(self) -> int:
        """Milliseconds since 1970 on this machine's wall clock; may step either way."""
        ...

    def boot_ms(self) -> int:
        """Milliseconds since boot, suspend included; never goes back."""
        ...


class SystemClock:
    """The machine's clocks (CLOCK_REALTIME, CLOCK_BOOTTIME)."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class LogClock:
    """Log time: the clock that invisible times and back-offs count in.

    It starts from the newest record of the log plus the wall time that passed since that
    record was written (never a negative amount), and from there counts elapsed time since
    boot, so a step of the wall clock moves nothing.
    """

    def __init__(self, clock: Clock, *, last_log_ms: int, last_wall_ms: int) -> None:
        self._clock = clock
        down_ms = max(0, clock.wall_ms() - last_wall_ms) if last_wall_ms else 0
        first_ms = last_log_ms + down_ms if last_log_ms else clock.wall_ms()
        self._ahead_ms = first_ms - clock.boot_ms()

    def now_ms(self) -> int:
        return self._clock.boot_ms() + self._ahead_ms
