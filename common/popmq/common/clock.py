"""Where time comes from: one protocol, the machine's clock, and a clock that tests turn.

Nothing below a shell reads a clock by itself (ARCHITECTURE D3); it is handed one, or a
`now`. Two readings, both in whole milliseconds: the wall clock, which may step, and the time
since boot, which only moves forward (docs/concepts/store.md, "Log time").
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


SAMPLES_MS = 5_000  # a sample of a master's log time counts so long, and at most twice as long


class LogClock:
    """Log time, the clock that invisible times and back-offs count in: one for each process.

    It moves with this machine's time since boot, so a step of the wall clock moves nothing.  A
    master starts it.  A slave takes a sample of each log time that its master sends: what was true
    when it was sent is not ahead when it arrives, so of several samples the largest is the best
    one, and it is behind by no more than the way took.  Samples are forgotten after a while,
    because the two machines' clocks do not run at exactly the same rate.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_ms = 0  # of the time since boot
        self.known = False
        self._epoch = 0
        self._older_ms = self._newer_ms = self._since_ms = 0

    def now_ms(self) -> int:
        return self._clock.boot_ms() + self._ahead_ms

    def start(self, log_ms: int, *, epoch: int) -> None:
        """This machine's broker is the master of `epoch` from now on."""
        self.known, self._epoch = True, epoch
        self._ahead_ms = log_ms - self._clock.boot_ms()

    def sample(self, log_ms: int, *, epoch: int) -> None:
        """The master of `epoch` sent this log time, or a record of it, and it arrives now.

        Only samples of one master are compared: the next one may go on at an earlier log time.
        """
        now_ms = self._clock.boot_ms()
        ahead_ms = log_ms - now_ms
        if not self.known or epoch != self._epoch:
            self.known, self._epoch = True, epoch
            self._older_ms = self._newer_ms = ahead_ms
            self._since_ms = now_ms
        elif now_ms - self._since_ms >= SAMPLES_MS:
            self._older_ms, self._newer_ms, self._since_ms = self._newer_ms, ahead_ms, now_ms
        elif ahead_ms > self._newer_ms:
            self._newer_ms = ahead_ms
        self._ahead_ms = max(self._older_ms, self._newer_ms)
