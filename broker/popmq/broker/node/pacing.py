"""How long the step loop may wait: a broker that has nothing to do costs next to nothing.

A round of steps takes about a tenth of a millisecond, and two hundred a second were 3 % of a core
for nothing.  What a step does either begins with a record of the log, or is due at a time that is
known; so without new records steps come rarely, and the next record wakes the loop.
"""

from popmq.broker.core.broker import Broker
from popmq.common.clock import Clock

BUSY_MS = 5
REST_MS = 200
QUIET_MS = 1_000  # since the last record: what followed from it is over, or counted below


class Pacing:
    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self._end = -1
        self._quiet_from_ms = 0

    def wait_ms(self) -> int:
        """For a round that did nothing: BUSY_MS to REST_MS until the next one."""
        now_ms = self._clock.boot_ms()
        broker = self._broker
        if broker.store.end != self._end:
            self._end = broker.store.end
            self._quiet_from_ms = now_ms + QUIET_MS
        if now_ms < self._quiet_from_ms or self._busy():
            return BUSY_MS
        # A receive that waits is answered, a delivery comes back, and a timer fires in time.
        nearest_ms = min(
            broker.polling.next_ms(broker.waits.boot_ms(), REST_MS),
            broker.table.due_times.next_ms(broker.store.log_ms(), REST_MS),
            broker.timers.next_ms(REST_MS),
        )
        return max(BUSY_MS, nearest_ms)

    def _busy(self) -> bool:
        broker = self._broker
        return (
            broker.timers.busy
            or broker.polling.unfinished
            or broker.pop.catch_up.is_throttling
            or broker.fifo.parking.moving
        )
