"""Unanswered: which deliveries the next life of a broker need not renew (docs/concepts/pop.md).

A broker that ends in a crash may have taken answers along, so what it delivered in the 5 s before
it was last known to live comes back although its client lives; and nothing else does.  Knows
nothing of the product: an answer that rests on a record proves that its broker lived, and that
the next one knows.
"""

from popmq.testing.oracle.client_history import Held

UNANSWERED_MS = 5_000
BUFFERED_MS = 10_000  # later than its answer a check point may be written


class UnansweredDeliveries:
    """Counts in log time as far as it certainly passed.

    While a broker is away it may stand still, since before what nobody can prove.
    """

    def __init__(self) -> None:
        self._ahead_ms = 0  # the upper bound of log time, of this one
        self._recorded_ms = 0  # no newer record is certain
        self._doubts: list[tuple[int, int]] = []  # a life that ended, and from when on

    def recorded(self, log_ms: int) -> None:
        """A confirmed record is that young or younger (`log_ms`: the upper bound)."""
        self._recorded_ms = max(self._recorded_ms, log_ms - self._ahead_ms)

    def delivered(self, held: Held, log_ms: int) -> None:
        held.answered_ms = log_ms - self._ahead_ms

    def crashed(self, process: int) -> None:
        """That life ended without a clean stop, or a start behind it did."""
        self._doubts.append((process, self._recorded_ms - UNANSWERED_MS))

    def started(self, log_ms: int) -> None:
        self._ahead_ms = log_ms - self._recorded_ms

    def covers(self, held: Held) -> bool:
        """Whether a crash since may have taken the delivery's answer along, for all that the
        broker can know."""
        written_ms = held.answered_ms + BUFFERED_MS * held.reader.group.buffered
        return any(
            held.process <= process and written_ms >= from_ms for process, from_ms in self._doubts
        )
