"""PopRollback: undoes a receive whose client disconnected before the reply.

What it popped comes back at the next revive step with the same attempt number: as a retry, or in
place in a FIFO group.  That record is the undoing; a crash before it is written leaves an
ordinary check point, which expires (docs/concepts/pop.md, Receives that nobody waits for).
"""

from collections.abc import Callable

from popmq.broker.deliveries.check_point_table import CheckPointTable

# Receives whose answer has left are remembered for as long as it may cross with a cancel.
LEFT_LIMIT = 4_096

# An answer that left so long before its connection broke has arrived.
DOUBT_MS = 10_000

CheckPointRange = tuple[int, int, int]  # epoch, first sequence, the one behind the last


class PopRollback:
    """Knows which check points each receive made, by the number of its request."""

    def __init__(self, table: CheckPointTable) -> None:
        self._table = table
        self._leaving: dict[int, CheckPointRange] = {}  # popped, the answer waits to be confirmed
        self._left: dict[int, CheckPointRange] = {}
        self.rolled_back = 0  # check points

    def track(self, number: int, epoch: int, first: int, end: int) -> None:
        """Receive `number` made the check points from `first` to before `end`."""
        self._leaving[number] = (epoch, first, end)

    def send_unless_cancelled(self, number: int, reply: Callable[[], None]) -> None:
        """Run `reply`, unless the receive was cancelled meanwhile."""
        span = self._leaving.pop(number, None)
        if span is None:
            return
        self._left[number] = span
        if len(self._left) > LEFT_LIMIT:
            del self._left[next(iter(self._left))]
        reply()

    def doubt(self, number: int, now_ms: int) -> None:
        """The connection that the answer left on broke at log time `now_ms`: a delivery that may
        have been lost is not renewed, so it ends by its invisible time.

        A consumer that got it can ack it until then.
        """
        span = self._left.pop(number, None)
        if span is None:
            return
        epoch, first, end = span
        for sequence in range(first, end):
            ck = self._table.find(epoch, sequence)
            if ck is not None and now_ms - ck.popped_at_ms <= DOUBT_MS:
                ck.doubted = True

    def cancel(self, number: int) -> bool:
        """The asker did not take, and will not take, the answer. Whether there was one."""
        span = self._leaving.pop(number, None) or self._left.pop(number, None)
        if span is None:
            return False
        epoch, first, end = span
        for sequence in range(first, end):
            ck = self._table.find(epoch, sequence)
            # One that another receive was given too (FIFO, the same attempt id) is that one's.
            if ck is not None and ck.waiting and not ck.repeated:
                ck.rolled_back = True
                self._table.due_times.remove(ck)
                self._table.due_times.add(ck, 0)
                self.rolled_back += 1
        return True
