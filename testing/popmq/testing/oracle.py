"""Oracle: what clients saw goes in, broken promises come out (docs/concepts/simulator.md).

Knows nothing of the product.  Times are the simulator's: `log_ms` is an upper bound of how far
log time can have moved, so "too early" is judged with it, and "too late" with elapsed time.
"""

from popmq.testing.history import Held, Life, Place, Pop, Reader, Sent, Violation

LIMBO_MS = 2_000
OUTCOME_MS = 600_000  # how long the answer to a repeated ack is known


class Oracle:
    def __init__(self) -> None:
        self.messages: list[Sent] = []
        self.readers: list[Reader] = []
        self.violations: list[Violation] = []
        self._numbered: dict[tuple[Place, int, int], Sent] = {}
        self.log_lost = False  # a damaged sector took durable records along: only bytes count
        self.limited = False  # few may be in flight, so that others hold up what is due
        self.at = 0  # event number
        self.era = 0  # crashes so far
        self.forgotten = 0  # deliveries that came again as the same attempt, as they may
        self.now_ms = 0
        self.log_ms = 0
        self.healed_ms = -1

    def complain(self, invariant: str, what: str, life: Life | None = None) -> None:
        self.violations.append(Violation(invariant, what, tuple(life.events) if life else ()))

    # -- send

    def numbered(self, sent: Sent, offset: int) -> None:
        """A send was OK, with this offset."""
        place = (sent.topic, sent.queue_id, offset)
        other = self._numbered.setdefault(place, sent)
        if other is not sent and not self.log_lost:
            self.complain(
                "offset-reused",
                f"messages {other.number} and {sent.number} are both number {offset} of queue "
                f"{sent.queue_id} of {sent.topic.name}",
            )

    def sent_at(self, topic: Place, queue_id: int, offset: int) -> Sent | None:
        return self._numbered.get((topic, queue_id, offset))

    # -- receive

    def pop_lost(self, pop: Pop) -> None:
        pop.reader.open_pops -= 1
        pop.reader.lost_pops += 1
        pop.reader.lost_at = self.at

    def delivered(
        self, pop: Pop, number: int, head: bytes, properties: bytes, attempt: int, handle: bytes
    ) -> Held | None:
        """One message of an answered receive; None when it is none that was sent."""
        reader = pop.reader
        if not 0 <= number < len(self.messages) or self.messages[number].head != head:
            self.complain("bytes", f"group {reader.group.name} got {head[:40]!r}, never sent so")
            return None
        sent = self.messages[number]
        life = reader.lives.setdefault(number, Life())
        life.events.append(f"{self.at} t={self.now_ms} delivered as attempt {attempt}")
        who = f"message {number} of {sent.topic.name} to group {reader.group.name}"
        if sent.properties != properties:
            self.complain("bytes", f"{who} has other properties", life)
        if sent.topic is not pop.reader.topic:
            self.complain("topic", f"{who}: was sent to another incarnation", life)
        if pop.tags and sent.tag not in pop.tags:
            self.complain("filter", f"{who}: tag {sent.tag!r} is not among {pop.tags}", life)
        if sent.refused:
            self.complain("bytes", f"{who}: the send was refused", life)
        if not self.log_lost:
            self._check_attempt(pop, life, who, attempt)
        times = pop.asked_log_ms, pop.asked_ms, pop.invisible_ms
        held = Held(reader, sent, attempt, handle, *times, era=self.era)
        life.attempt, life.lost_pops, life.held = attempt, reader.lost_pops, held
        return held

    def _check_attempt(self, pop: Pop, life: Life, who: str, attempt: int) -> None:
        if life.acked == 2:
            self.complain("I5 ack-final", f"{who}: delivered after its ack was OK", life)
        if attempt > pop.reader.group.max_attempts or life.dead:
            self.complain("I8 max-N", f"{who}: attempt {attempt} after the last one", life)
        unseen = pop.reader.lost_pops - life.lost_pops
        before = life.held
        forgotten = before is not None and self.may_be_forgotten(before)
        if not life.attempt - forgotten < attempt <= life.attempt + 1 + unseen:
            self.complain(
                "attempts",
                f"{who}: attempt {attempt} after {life.attempt}, {unseen} replies were lost",
                life,
            )
        self.forgotten += forgotten and attempt == life.attempt
        if before is None or forgotten or attempt > life.attempt + 1:
            return
        elapsed = self.log_ms - before.asked_log_ms
        if before.superseded != 1 and elapsed < before.invisible_ms:
            self.complain(
                "I3 no-early",
                f"{who}: again after {elapsed} ms, was invisible for {before.invisible_ms}",
                life,
            )
        if self.healed_ms >= 0 and not self.limited:
            self._check_limbo(before, life, who)

    def _check_limbo(self, before: Held, life: Life, who: str) -> None:
        began = max(self.healed_ms, before.asked_ms)
        late = self.now_ms - began - before.invisible_ms
        if before.superseded != 1 and late > LIMBO_MS:
            self.complain("I2 no-limbo", f"{who}: came back {late} ms late", life)

    def popped_empty(self, pop: Pop) -> None:
        """I13: nothing that nobody else can hold was confirmed before it was asked for."""
        reader = pop.reader
        unsure = pop.dismissed or reader.open_pops or self.log_lost
        if reader.group.from_newest or not reader.alive or unsure:
            return
        for sent in self.messages:
            waited = sent.ok_ms < pop.asked_ms + pop.poll_ms
            if (
                sent.ok_at
                and (sent.ok_at < pop.asked_at or waited)
                and sent.topic is reader.topic
                and sent.number not in reader.lives
                and reader.accepts(sent)
                and (not pop.tags or sent.tag in pop.tags)
                and pop.queue_id in (-1, sent.queue_id)
                and reader.lost_at < sent.asked_at
                and not sent.expired
            ):
                self.complain(
                    "I13 no-false-empty",
                    f"group {reader.group.name}: empty at {self.at}, asked at {pop.asked_at}, "
                    f"message {sent.number} of {sent.topic.name} was confirmed at {sent.ok_at}",
                )
                return

    # -- ack and change

    def must_refuse(self, held: Held) -> str:
        """Why an ack asked now may not be OK; "" when it may."""
        if held.superseded == 2:
            return "superseded"
        return "revived" if held.life.attempt > held.attempt or held.life.dead else ""

    def must_accept(self, held: Held) -> bool:
        """Whether an ack answered now has to be OK: its time cannot have passed."""
        elapsed = self.log_ms - held.asked_log_ms
        known = not held.life.acked or elapsed < OUTCOME_MS
        fresh = known and elapsed < held.invisible_ms
        steady = held.reader.alive and not held.superseded and not held.changes_open
        sure = not self.log_lost and not self.may_be_forgotten(held)
        return fresh and steady and not held.life.dead and sure

    def may_be_forgotten(self, held: Held) -> bool:
        """Its check point was in memory only, perhaps, and a crash came since."""
        return held.reader.group.buffered and held.era < self.era

    def acked(self, held: Held, ok: bool, refuse: str) -> None:
        life = held.life
        life.events.append(f"{self.at} t={self.now_ms} ack {held.attempt} {'OK' if ok else 'no'}")
        if ok:
            held.acked = life.acked = 2
        if not held.reader.alive or self.log_lost:
            return
        if ok and refuse:
            self.complain("I6 stale-handle", f"{self._who(held)}: OK for a {refuse} handle", life)
        if not ok and self.must_accept(held):
            self.complain("I6 live-handle", f"{self._who(held)}: ack refused in time", life)

    def changed(self, held: Held, handle: bytes, invisible_ms: int, asked: Pop, why: str) -> Held:
        """A change was OK; `asked` has the times at which it was asked for."""
        life = held.life
        life.events.append(f"{self.at} t={self.now_ms} change {held.attempt} {invisible_ms} OK")
        if why and held.reader.alive and not self.log_lost:
            self.complain("I6 stale-handle", f"{self._who(held)}: change of a {why} handle", life)
        held.superseded = 2
        times = asked.asked_log_ms, asked.asked_ms, invisible_ms
        new = Held(held.reader, held.sent, held.attempt, handle, *times, era=self.era)
        if life.held is held:
            life.held = new
        return new

    def change_refused(self, held: Held) -> None:
        if self.must_accept(held) and not held.life.acked and not held.acks_open:
            self.complain("I6 live-handle", f"{self._who(held)}: change refused in time", held.life)

    def _who(self, held: Held) -> str:
        return f"message {held.sent.number}, attempt {held.attempt}, {held.reader.group.name}"
