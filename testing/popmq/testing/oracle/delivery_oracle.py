"""Oracle: what clients saw goes in, broken promises come out (docs/concepts/simulator.md).

Knows nothing of the product.  Times are the simulator's: `log_ms` is an upper bound of how far
log time can have moved, so "too early" is judged with it, and "too late" with elapsed time.
"""

from popmq.testing.oracle import delivery_chains as chains
from popmq.testing.oracle.client_history import (
    GroupReader,
    Held,
    MessageHistory,
    ReceiveCall,
    ResourceIncarnation,
    SentMessageHistory,
)
from popmq.testing.oracle.fifo_order import FifoOrder
from popmq.testing.oracle.handle_oracle import HandleOracle

LIMBO_MS = 2_000  # within which after healing what was invisible comes back


class Oracle(HandleOracle):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[SentMessageHistory] = []
        self.readers: list[GroupReader] = []
        self.order = FifoOrder(self)
        self._numbered: dict[tuple[ResourceIncarnation, int, int], SentMessageHistory] = {}
        self.parks = False  # FIFO groups hold few open messages and park keys
        self.copying: list[GroupReader] = []  # of FIFO groups whose letters are being sent back
        self.longest_ms = 0  # that anything is invisible
        self.limited = False  # few may be in flight, so that others hold up what is due
        self.forgotten = 0  # deliveries that came again as the same attempt, as they may
        self.healed_ms = -1

    # -- send

    def numbered(self, sent: SentMessageHistory, offset: int) -> None:
        """A send was OK, with this offset."""
        place = (sent.topic, sent.queue_id, offset)
        sent.offset = offset
        self.unanswered.recorded(sent.asked_log_ms)
        other = self._numbered.setdefault(place, sent)
        if other is not sent and not self.log_lost:
            self.report_violation(
                "offset-reused",
                f"messages {other.number} and {sent.number} are both number {offset} of queue "
                f"{sent.queue_id} of {sent.topic.name}",
            )

    def sent_at(
        self, topic: ResourceIncarnation, queue_id: int, offset: int
    ) -> SentMessageHistory | None:
        return self._numbered.get((topic, queue_id, offset))

    # -- receive

    def pop_lost(self, pop: ReceiveCall) -> None:
        self._over(pop)
        pop.reader.lost_pops += 1

    def pop_crossed(self, pop: ReceiveCall) -> None:
        """It was answered to nobody, and the broker does not know that yet."""
        pop.crossing = True
        pop.reader.crossing += 1

    def pop_left(self, pop: ReceiveCall) -> None:
        """Its client left before it had an answer: it counts for nothing, unless its time was
        over by then, or others have a part in what it was given."""
        reader = pop.reader
        reader.left_pops += 1
        ended = self.log_ms - pop.asked_log_ms >= pop.invisible_ms
        if ended or pop.repeats or self.clients.left_since(pop.client_id, pop.asked_log_ms):
            self.pop_lost(pop)
            return
        self._over(pop)
        reader.undone_pops += 1

    def _over(self, pop: ReceiveCall) -> None:
        pop.reader.open_pops -= 1
        pop.reader.crossing -= pop.crossing
        pop.reader.lost_at = self.at

    def all_undone(self) -> None:
        """Of the receives whose clients left nothing is in flight any more, on the disk too."""
        for reader in self.readers:
            reader.undone_pops = 0

    def ended(self) -> None:
        """The broker ended: what it was to undo may count."""
        for reader in self.readers:
            reader.lost_pops += reader.undone_pops
            reader.undone_pops = 0

    def delivered(
        self,
        pop: ReceiveCall,
        number: int,
        head: bytes,
        properties: bytes,
        attempt: int,
        handle: bytes,
    ) -> Held | None:
        """One message of an answered receive; None when it is none that was sent."""
        reader = pop.reader
        if not 0 <= number < len(self.messages) or self.messages[number].head != head:
            self.report_violation(
                "bytes", f"group {reader.group.name} got {head[:40]!r}, never sent so"
            )
            return None
        sent = self.messages[number]
        life = reader.lives.setdefault(number, MessageHistory())
        chains.copied_behind(self.copying, self.readers, [sent])
        life.loose |= sent.copied
        life.events.append(f"{self.at} t={self.now_ms} delivered as attempt {attempt}")
        client = f"message {number} of {sent.topic.name} to group {reader.group.name}"
        if sent.properties != properties:
            self.report_violation("bytes", f"{client} has other properties", life)
        if sent.topic is not pop.reader.topic:
            self.report_violation("topic", f"{client}: was sent to another incarnation", life)
        if pop.tags and sent.tag not in pop.tags:
            self.report_violation(
                "filter", f"{client}: tag {sent.tag!r} is not among {pop.tags}", life
            )
        if sent.refused:
            self.report_violation("bytes", f"{client}: the send was refused", life)
        if pop.attempt_id and life.held is not None and life.held.handle == handle:
            return life.held  # the same receive once more
        forgotten = life.held is not None and self.may_be_forgotten(life.held)
        chains.look(pop, life, attempt, forgotten=forgotten)
        if not self.log_lost and not life.loose:
            self._check_attempt(pop, life, client, attempt)
        times = pop.asked_log_ms, pop.asked_ms, pop.invisible_ms
        held = Held(reader, sent, attempt, handle, *times, era=self.era, chain=life.chain)
        held.push, held.renewed_by = bool(pop.client_id), pop.client_id
        held.process = self.process
        held.received_at = self.at
        self.unanswered.delivered(held, self.log_ms)
        if not (pop.attempt_id or reader.group.buffered):
            self.unanswered.recorded(pop.asked_log_ms)
        life.attempt, life.lost_pops, life.held = attempt, pop.lost_before, held
        return held

    def _check_attempt(
        self, pop: ReceiveCall, life: MessageHistory, client: str, attempt: int
    ) -> None:
        if life.skipped:
            self.report_violation(
                "reset", f"{client}: a reset passed over it, and skipped retries", life
            )
        if life.acked == 2:
            self.report_violation("I5 ack-final", f"{client}: delivered after its ack was OK", life)
        if life.rejected == 2:
            self.report_violation(
                "I5 ack-final", f"{client}: delivered after its reject was OK", life
            )
        if attempt > pop.reader.group.max_attempts or life.dead:
            self.report_violation(
                "I8 max-N", f"{client}: attempt {attempt} after the last one", life
            )
        unseen = pop.reader.unseen(life)
        before = life.held
        forgotten = before is not None and self.may_be_forgotten(before)
        if not life.attempt - forgotten < attempt <= life.attempt + 1 + unseen:
            self.report_violation(
                "attempts",
                f"{client}: attempt {attempt} after {life.attempt}, {unseen} replies were lost",
                life,
            )
        self.forgotten += forgotten and attempt == life.attempt
        if before is None or forgotten or attempt > life.attempt + 1:
            return
        elapsed = self.log_ms - before.asked_log_ms
        sure = before.superseded != 1 and not self.clients.left(before)
        if sure and elapsed < before.invisible_ms:
            self.report_violation(
                "I3 no-early",
                f"{client}: again after {elapsed} ms, was invisible for {before.invisible_ms}",
                life,
            )
        if self.clients.keeps(before, self.log_ms) and not self.unanswered.covers(before):
            self.report_violation(
                "I3 no-early", f"{client}: again while {before.renewed_by} lives", life
            )
        if self.healed_ms >= 0 and not self.limited:
            self._check_limbo(before, life, client)

    def _check_limbo(self, before: Held, life: MessageHistory, client: str) -> None:
        """I2: it came again, and `before` is its last delivery."""
        began = max(self.healed_ms, before.asked_ms)
        # A key goes on when all that was delivered together is back.
        away_ms = max(before.invisible_ms, self.longest_ms if before.reader.group.fifo else 0)
        late = self.now_ms - began - away_ms - self.clients.silence_ms(before)
        if before.superseded != 1 and late > LIMBO_MS:
            self.report_violation("I2 no-limbo", f"{client}: came back {late} ms late", life)
