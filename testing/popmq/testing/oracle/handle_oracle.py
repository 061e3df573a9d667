"""What an ack, a reject or a change of a handle may answer: half of the oracle.

Knows nothing of the product.  `log_ms` is an upper bound of how far log time can have moved.
"""

from popmq.testing.oracle import delivery_chains as chains
from popmq.testing.oracle.client_history import Held, MessageHistory, ReceiveCall, Violation
from popmq.testing.oracle.push_client_liveness import PushClientLiveness

UNANSWERED_MS = 5_000
BUFFERED_MS = 10_000  # later than its answer a check point may be written


class UnansweredDeliveries:
    """Which deliveries the next life of a broker need not renew (docs/concepts/pop.md).

    A broker that ends in a crash may have taken answers along, so what it delivered in the 5 s
    before it was last known to live comes back although its client lives; and nothing else does.
    Knows nothing of the product: an answer that rests on a record proves that its broker lived,
    and that the next one knows.  Counts in log time as far as it certainly passed.

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


OUTCOME_MS = 600_000  # how long the answer to a repeated ack is known


class HandleOracle:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.log_lost = False  # a damaged sector took durable records along: only bytes count
        self.at = 0  # event number
        self.era = 0  # crashes so far
        self.process = 0  # ends of the broker so far, clean or not
        self.clients = PushClientLiveness()
        self.unanswered = UnansweredDeliveries()
        self.now_ms = 0
        self.log_ms = 0

    def report_violation(
        self, invariant: str, what: str, life: MessageHistory | None = None
    ) -> None:
        self.violations.append(Violation(invariant, what, tuple(life.events) if life else ()))

    def must_refuse(self, held: Held) -> str:
        """Why an ack asked now may not be OK; "" when it may."""
        return chains.over_because(held)

    def must_accept(self, held: Held) -> bool:
        """Whether an ack answered now has to be OK: its time cannot have passed."""
        elapsed = self.log_ms - held.asked_log_ms
        known = not held.life.acked or elapsed < OUTCOME_MS
        fresh = known and (held.acked == 2 or elapsed < held.invisible_ms)
        steady = held.reader.alive and not held.superseded and not held.changes_open
        forgotten = held.acked < 2 and self.may_be_forgotten(held)  # an ack that was OK never is
        sure = not self.log_lost and not forgotten
        sure = sure and held.chain == held.life.chain and not held.life.loose
        life = held.life
        sure = sure and not held.reader.resets_open
        steady = steady and not (life.rejected or life.ending or self.clients.left(held))
        return fresh and steady and not held.life.dead and sure

    def may_be_forgotten(self, held: Held) -> bool:
        """Its check point was in memory only, perhaps, and a crash came since."""
        return held.reader.group.buffered and held.era < self.era and not held.recorded

    def acked(self, held: Held, ok: bool, refuse: str) -> None:
        life = held.life
        life.events.append(f"{self.at} t={self.now_ms} ack {held.attempt} {'OK' if ok else 'no'}")
        if ok:
            held.acked = 2
        if ok and (life.loose or held.chain == life.chain):
            life.acked, life.acked_at = 2, self.at
        if not held.reader.alive or self.log_lost:
            return
        if ok and refuse:
            self.report_violation(
                "I6 stale-handle", f"{self._who(held)}: OK for a {refuse} handle", life
            )
        if not ok and self.must_accept(held):
            self.report_violation("I6 live-handle", f"{self._who(held)}: ack refused in time", life)

    def rejected(self, held: Held, ok: bool, refuse: str) -> None:
        life = held.life
        life.events.append(
            f"{self.at} t={self.now_ms} reject {held.attempt} {'OK' if ok else 'no'}"
        )
        if ok and (life.loose or held.chain == life.chain):
            life.rejected = 2
        held.rejected |= ok
        if not held.reader.alive or self.log_lost:
            return
        # Its last attempt may have ended, as a dead letter, before what is refused now.
        if ok and refuse and not 0 < held.reader.group.max_attempts <= held.attempt:
            self.report_violation(
                "I6 stale-handle", f"{self._who(held)}: reject of a {refuse} one", life
            )
        if not ok and self.must_accept(held) and not life.acked:
            self.report_violation(
                "I6 live-handle", f"{self._who(held)}: reject refused in time", life
            )

    def changed(
        self, held: Held, handle: bytes, invisible_ms: int, asked: ReceiveCall, why: str
    ) -> Held:
        """A change was OK; `asked` has the times at which it was asked for.

        A repeated one gets the handle of the first again, and changes nothing.
        """
        life = held.life
        life.events.append(f"{self.at} t={self.now_ms} change {held.attempt} {invisible_ms} OK")
        after = held.successor
        if after is not None and after.handle == handle:
            return after
        if why and held.reader.alive and not self.log_lost:
            self.report_violation(
                "I6 stale-handle", f"{self._who(held)}: change of a {why} handle", life
            )
        self.unanswered.recorded(asked.asked_log_ms)
        repeated = held.superseded == 1  # the first one may count, whose answer was lost
        held.superseded = 2
        times = asked.asked_log_ms, asked.asked_ms, invisible_ms
        new = Held(held.reader, held.sent, held.attempt, handle, *times, era=self.era)
        new.chain, new.push = held.chain, held.push
        new.superseded = int(repeated)
        held.successor = new
        new.process, new.recorded = self.process, True
        if life.held is held:
            life.held = new
        return new

    def change_refused(self, held: Held) -> None:
        if self.must_accept(held) and not held.life.acked:
            self.report_violation(
                "I6 live-handle", f"{self._who(held)}: change refused in time", held.life
            )

    def _who(self, held: Held) -> str:
        return f"message {held.sent.number}, attempt {held.attempt}, {held.reader.group.name}"
