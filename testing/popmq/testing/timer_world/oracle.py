"""TimerOracle: the questions of clients about timers and their answers, against what the log says
of them.

The simulator puts one message after the other, so a number is a message; the moves of the broker
are decided when they are asked, and told when they are confirmed (docs/concepts/simulator.md).
"""

from collections import deque
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.broker.timer.timer_state import KEEP_CANCELLED_MS
from popmq.common import topics
from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.common.record.send_fingerprint import fingerprint_of
from popmq.testing.oracle.client_history import ResourceIncarnation, Violation
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.timer_world.model import TimerHistory, TimerModel


@dataclass(slots=True, eq=False)
class DelayedMessage:
    """One message that was sent with a due time."""

    number: int
    topic: ResourceIncarnation
    head: bytes
    properties: bytes
    tag_hash: int
    due_ms: int  # as it was asked for: absolute or, negative, a delay
    spread_ms: int
    asked_wall_ms: int
    decided_wall_ms: int = 0  # when the broker had decided on it; 0: not yet
    ok_at: int = 0  # event number of the OK; 0: not told
    told_due_ms: int = 0
    refused: bool = False
    recalls: int = 0  # asked, of all that were sent with its id: counted at the first one
    events: deque[str] = field(default_factory=lambda: deque(maxlen=10))
    twins: "list[DelayedMessage]" = field(default_factory=list)  # all that were sent with its id

    @property
    def name(self) -> str:
        """Its message id."""
        return f"m{(self.twins or [self])[0].number:06}"

    @property
    def first_due_ms(self) -> int:
        return self.due_ms if self.due_ms >= 0 else self.asked_wall_ms - self.due_ms

    def last_due_ms(self, now_ms: int) -> int:
        """A delay counts from when the broker reads its clock."""
        decided_ms = self.decided_wall_ms or now_ms
        read_ms = max(0, decided_ms - self.asked_wall_ms) if self.due_ms < 0 else 0
        return self.first_due_ms + read_ms + self.spread_ms


@dataclass(slots=True, eq=False)
class RecallHistory:
    """A recall or a reschedule, and what was certain when it was asked."""

    history: DelayedMessage
    known: bool  # it was stored, and is neither over for long nor of a topic that went
    fired: bool  # a copy was confirmed
    cancelled: bool  # its last timer was recalled
    last_due_ms: int  # of that timer
    recalled: bool  # or perhaps
    asked: frozenset[int] = frozenset()  # numbers that were stored by then, of its id
    asked_due_ms: int = 0  # of a reschedule: absolute or, negative, a delay
    asked_wall_ms: int = 0
    decided_wall_ms: int = 0  # when the broker had decided on it; 0: not yet

    def new_due_ms(self, wall_ms: int) -> int:
        """Of a reschedule that the broker decided on at that time: never in the past."""
        due_ms = self.asked_due_ms
        return max(wall_ms, due_ms if due_ms >= 0 else wall_ms - due_ms)


class TimerOracle(Oracle):
    def __init__(self) -> None:
        super().__init__()
        self.delayed: dict[int, DelayedMessage] = {}
        self.model: TimerModel
        self._machine: SimulatedBroker
        self._looked = 0  # firings that were compared with what was sent

    def watch(self, machine: SimulatedBroker) -> None:
        self._machine = machine
        self.model = TimerModel(machine, self.complain_of)

    def complain_of(self, invariant: str, what: str, number: int) -> None:
        story = self.delayed.get(number)
        events = tuple(story.events) if story else ()
        self.violations.append(Violation(invariant, f"message {number}: {what}", events))

    # -- answers

    def sent(self, story: DelayedMessage, due_ms: int) -> None:
        """A send was OK."""
        self.model.read_on()
        if self._is_resend(story, due_ms):
            if fingerprint_of(story.properties):
                what = "told the receipt of another message with its id"
                self.complain_of("I17 stored-once", what, story.number)
            story.twins.remove(story)
            story.refused = True  # nothing was stored
            return
        story.ok_at, story.told_due_ms = self.at, due_ms
        number, first_ms = story.number, story.first_due_ms
        timers = self.model.of(number)
        if due_ms and (not timers or timers[0].due_ms != due_ms):
            self.complain_of("D2", f"told to be due at {due_ms}, the log says {timers}", number)
        if not due_ms and number not in self.model.at_once:
            self.complain_of("D2", "told to be visible, and is not", number)
        last_ms = story.last_due_ms(self._machine.clock.wall_ms())
        if due_ms and not first_ms <= due_ms <= last_ms:
            self.complain_of("due", f"asked for {first_ms} to {last_ms}: {due_ms}", number)

    def _is_resend(self, story: DelayedMessage, due_ms: int) -> bool:
        """Whether it got the receipt of an earlier message with its id, and is not stored."""
        model, number = self.model, story.number
        if model.of(number) or number in model.at_once:
            return False
        earlier = [message.number for message in story.twins if message is not story]
        dues = {model.of(due_ms)[0].due_ms for due_ms in earlier if model.of(due_ms)}
        return due_ms in dues or (not due_ms and any(due_ms in model.at_once for due_ms in earlier))

    def ask(self, story: DelayedMessage, due_ms: int = 0) -> RecallHistory:
        model = self.model
        model.read_on()
        timers = model.of(story.number)
        last = timers[-1] if timers else None
        start = self._machine.broker.store.index.start
        gone = last is None or last.position < start or story.topic.gone
        ends = last.ends[-1:] if last else []
        return RecallHistory(
            story,
            known=story.ok_at > 0 and not gone and len(story.twins) == 1,
            fired=ends == ["fired"] or ends == ["dead"],
            cancelled=ends == ["cancelled"],
            last_due_ms=last.due_ms if last is not None else 0,
            recalled=story.twins[0].recalls > 0,
            asked=frozenset(message.number for message in story.twins if message.ok_at),
            asked_due_ms=due_ms,
            asked_wall_ms=self._machine.clock.wall_ms(),
        )

    def recalled(self, ask: RecallHistory, outcome: RecallResult) -> None:
        model, story = self.model, ask.history
        model.read_on()
        open_ones = [timer for timer in self._timers(story) if not timer.ends]
        alone = len(story.twins) == 1  # else one may have fired, and the others are recalled
        visible = alone and model.copies[story.number]
        # What was sent with its id behind the recall waits: its record stands behind.
        before = [history for history in open_ones if alone or history.number in ask.asked]
        if outcome is RecallResult.DONE and (before or visible):
            self.complain_of("I11 recall", "DONE, and it is pending or visible", story.number)
        self._answered(ask, outcome, again=RecallResult.DONE)

    def rescheduled(self, ask: RecallHistory, outcome: RecallResult, due_ms: int) -> None:
        model, number = self.model, ask.history.number
        model.read_on()
        if outcome is RecallResult.DONE:
            timer_histories = [
                timer for timer in self._timers(ask.history) if timer.due_ms == due_ms
            ]
            earlier = [history for history in model.of(number)[:-1] if history.ends != ["replaced"]]
            first_ms = ask.new_due_ms(ask.asked_wall_ms)
            last_ms = ask.new_due_ms(ask.decided_wall_ms or self._machine.clock.wall_ms())
            if not first_ms <= due_ms <= last_ms or not timer_histories or earlier:
                asked = f"asked for {first_ms} to {last_ms}"
                what = f"DONE for {due_ms}, {asked}: {model.of(number)}"
                self.complain_of("I11 reschedule", what, number)
        self._answered(ask, outcome, again=RecallResult.NOT_FOUND)

    def _timers(self, story: DelayedMessage) -> list[TimerHistory]:
        """Of all messages with its id."""
        return [timer for message in story.twins for timer in self.model.of(message.number)]

    def _answered(self, ask: RecallHistory, outcome: RecallResult, *, again: RecallResult) -> None:
        """`again` is the answer for what was recalled before."""
        model, number = self.model, ask.history.number
        copies = sum(model.copies[message.number] for message in ask.history.twins)
        if outcome is RecallResult.ALREADY_VISIBLE and not copies:
            self.complain_of("I11 recall", "ALREADY_VISIBLE, and is not", number)
        if not ask.known:
            return
        allowed = set(RecallResult)
        if ask.fired:
            allowed = {RecallResult.ALREADY_VISIBLE}
        elif ask.cancelled and ask.last_due_ms >= model.cursor[0] - KEEP_CANCELLED_MS:
            allowed = {again}  # else a firing that was not confirmed yet made the broker forget it
        elif not ask.recalled:
            allowed -= {RecallResult.NOT_FOUND}
        if outcome not in allowed:
            self.complain_of("I11 recall", f"{outcome.name}, not {sorted(allowed)}", number)

    # -- what is compared at rest

    def look(self) -> None:
        """The firings that were confirmed since the last time are what was sent."""
        self.model.read_on()
        for timer, token, header, message in self.model.fired[self._looked :]:
            story = self.delayed[timer.number]
            heads = (message.head, message.tag_hash)
            properties = message.properties
            if heads != (story.head, story.tag_hash) or not (
                properties == story.properties
                or _adds_time(story.properties, properties, timer.due_ms)
            ):
                self.complain_of("bytes", f"{timer} fired as another message", timer.number)
            place = (header.topic_id, header.queue_id)
            dead = self._machine.broker.registry.find_topic(topics.TIMER_DLQ_TOPIC)
            if timer.ends == ["dead"]:
                right = story.topic.gone > 0 and dead is not None and place == (dead.id, 0)
            else:
                right = place == (timer.topic_id, timer.queue_id)
            if not right or token.topic_id != timer.topic_id:
                self.complain_of("topic", f"{timer} fired into {place}", timer.number)
            story.events.append(f"fired at {header.wall_ms}, due {timer.due_ms}")
        self._looked = len(self.model.fired)

    def at_rest(self) -> None:
        """Nothing is on its way: the broker's counts are the log's."""
        self.look()
        broker, model = self._machine.broker, self.model
        if model.scanned < broker.store.end:
            return
        counts = model.counts
        for topic_id, more in model.miscounted.items():
            counts[topic_id] = counts.get(topic_id, 0) + more
        state = broker.timers.state
        if state.pending != counts:
            self.report_violation(
                "I16 counts-true", f"pending {state.pending}, the log says {counts}"
            )
        if state.cursor != model.cursor:
            self.report_violation("I12 cursor", f"{state.cursor}, the log says {model.cursor}")
        start = model.log_start
        for timer in model.pending.values():
            if timer.position < start:
                self.complain_of("I1 no-loss", f"{timer}: the log begins at {start}", timer.number)

    def overdue(self, since_ms: int) -> list[TimerHistory]:
        """Pending ones that were due at `since_ms` of the wall clock."""
        return [history for history in self.model.pending.values() if history.due_ms <= since_ms]

    def finish(self) -> None:
        """After the drain: each came to one end, the acknowledged ones to a good one."""
        self.at_rest()
        model = self.model
        if model.miscounted:
            self.report_violation(
                "I16 counts-true", f"counted again, and {model.miscounted} too many"
            )
        for number, story in self.delayed.items():
            if self.violations:
                return
            timers, copies = model.of(number), model.copies[number]
            last = timers[-1].ends[-1:] if timers else []
            if copies > 1:
                self.complain_of("I4 exactly-once", f"{copies} copies", number)
            if any(not timer.ends for timer in timers):
                self.complain_of("I1 no-loss", f"still pending: {timers}", number)
            lost = story.ok_at and not copies and last != ["cancelled"]
            if lost or (last == ["cancelled"] and not story.twins[0].recalls):
                self.complain_of("I1 no-loss", f"acknowledged, and then {last}", number)
            if story.refused and (timers or copies):
                self.complain_of("I4 exactly-once", "was refused, and is stored", number)


def _adds_time(sent: bytes, stored: bytes, due_ms: int) -> bool:
    """Whether nothing but due times was appended, of which the last one is `due_ms`."""
    times, at = [], len(sent)
    while at < len(stored) and stored[at] == 0x5A:  # SystemProperties{delivery_timestamp}
        end = at + 2 + stored[at + 1]
        times.append(Timestamp.FromString(stored[at + 2 : end]).ToMilliseconds())
        at = end
    return stored.startswith(sent) and at == len(stored) and times[-1:] == [due_ms]
