"""Clients of the transactions' world: producers, the proxies that ask them, and an onlooker.

What should become of a transaction is decided when it begins; whoever is asked knows it, except of
those that nobody ever knows about.  The onlooker sees what a consumer could see, in the queues.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from popmq.broker.transaction.transaction_table import KEEP_ENDED_MS
from popmq.common import topics
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest
from popmq.common.topics import MessageType
from popmq.common.wire import transaction_pb2 as pb
from popmq.testing.harness.sometimes import StateCounts
from popmq.testing.oracle.delivery_oracle import Oracle
from popmq.testing.sim.producers import RESEND_MS
from popmq.testing.sim.requests import Requests
from popmq.testing.sim.simulated_broker import SimulatedBroker
from popmq.testing.transaction_world.sometimes_states import TransactionSometimes as States

TOPIC, NOISE = "t", "noise"
QUEUES = 2
MAX_CHECKS = 4
COMMIT, ROLLBACK, UNKNOWN = "commit", "rollback", "unknown"


@dataclass(slots=True, eq=False)
class TransactionHistory:
    """One transaction as its producers know it."""

    number: int
    wanted: str
    entry: PutEntry
    made_ms: int  # log time
    begun: int = 0  # event number of the first OK
    lost: bool = False  # an attempt to begin it was never answered
    refused: bool = False
    transaction: str = ""
    asked: set[str] = field(default_factory=set)  # ends that were asked for
    asked_ms: int = 0  # log time of the first of these
    ended: str = ""  # the one that was OK
    checks: int = 0
    copies: int = 0  # in its topic
    letters: int = 0  # among the dead letters
    # A resend behind a rollback, or behind the last check, begins another half message.
    lives: int = 1  # at most
    asked_about: str = ""  # transaction id of the newest check
    former: set[str] = field(default_factory=set)  # transaction ids of those that are over
    events: list[str] = field(default_factory=list)

    def begin_anew(self, transaction: str) -> None:
        """The half message before it was rolled back or given up."""
        self.former.add(self.known_id)
        self.transaction, self.ended, self.asked_ms = transaction, "", 0
        self.asked.clear()
        self.events.append("begun anew")

    @property
    def known_id(self) -> str:
        """Of the transaction, from an answer or a check."""
        return self.transaction or self.asked_about

    @property
    def name(self) -> str:
        return self.entry.message_id


class TransactionClients(Requests):
    def __init__(
        self,
        machine: SimulatedBroker,
        oracle: Oracle,
        rng: random.Random,
        tally: StateCounts,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(machine, oracle, rng, tally, note)
        self.stories: list[TransactionHistory] = []
        self._looked: dict[tuple[int, int], int] = {}  # by topic and queue, up to which offset
        self.knows = 0.7  # how often a producer that is asked answers

    # -- producers

    def begin(self) -> None:
        """One or several half messages, in one request."""
        batch = [self._story() for _ in range(self._rng.choice((1, 1, 1, 3)))]
        self._put(batch)

    def begin_again(self) -> None:
        """A resend, whatever became of the first attempt, while its id is remembered."""
        from_ms = self._machine.log_ms - RESEND_MS
        recent = (history for history in self.stories[-12:] if history.made_ms > from_ms)
        known = [history for history in recent if not history.refused]
        if known:
            self._put([self._rng.choice(known)])

    def end(self) -> None:
        """By its producer; now and then repeated, or the wrong end by one that is confused."""
        known = [history for history in self.stories[-30:] if history.transaction]
        if not known:
            return
        story = self._rng.choice(known)
        requested = story.wanted
        if requested == UNKNOWN or self._rng.random() < 0.05:
            requested = self._rng.choice((COMMIT, ROLLBACK)) if self._rng.random() < 0.1 else ""
        if requested:
            self._end(story, requested, story.transaction)

    def end_wrongly(self) -> None:
        """With the id of another message."""
        known = [history for history in self.stories if history.transaction]
        if len(known) < 2:
            return
        history, other = self._rng.sample(known, 2)
        if history.name == other.name:
            return  # which of the two is meant, the transaction says

        def hear(answer: bytes | PopmqError) -> None:
            refused = isinstance(answer, PopmqError)
            assert refused, f"the id of {other.number} ended {history.number}"

        self._ask_end(history, COMMIT, other.transaction, hear)

    def send_noise(self, size: int) -> None:
        entry = PutEntry(MessageType.NORMAL, b"noise" + bytes(size), b"")
        body = hop.encode_put(PutRequest(NOISE, [entry]))
        self._ask("noise", Kind.PUT, body, lambda answer: None)

    # -- proxies

    def wait_for_checks(self, wait_ms: int) -> None:
        """A proxy with producers; what it is told goes to one of them."""

        def hear(answer: bytes | PopmqError) -> None:
            if not isinstance(answer, PopmqError):
                for check in pb.ChecksReply.FromString(answer).checks:
                    self._checked(check)

        request = pb.ChecksRequest(topics=[TOPIC], wait_ms=wait_ms).SerializeToString()
        self._ask("wait for checks", Kind.CHECKS, request, hear)

    def _checked(self, check: pb.Check) -> None:
        story = self._story_of(check.head)
        if story is None:
            self._oracle.report_violation("I18 check", f"of {check.head[:20]!r}, which nobody sent")
            return
        story.checks += 1
        story.events.append(f"{self._oracle.at} checked")
        self._tally.hit(States.CHECKED)
        self._tally.hit(States.CHECKED_AGAIN, int(story.checks > 1))
        self._tally.hit(States.CHECK_AFTER_LOST_BEGIN, int(not story.begun))
        if check.transaction_id in story.former:
            return  # told before that one ended
        if story.known_id not in ("", check.transaction_id):
            if story.lives == 1:
                self._complain(story, "I18 check", "is checked under another id")
            story.begin_anew(check.transaction_id)
        elif story.ended:
            self._complain(story, "I18 check", f"is checked after its {story.ended} was OK")
        story.asked_about = check.transaction_id
        if self._rng.random() < self.knows and story.wanted != UNKNOWN:
            self._machine.later(lambda: self._end(story, story.wanted, check.transaction_id))

    # -- the onlooker

    def look(self) -> None:
        """Whatever is readable now, and was not before."""
        broker = self._machine.broker
        for name in (TOPIC, topics.TRANSACTION_DLQ_TOPIC):
            config = broker.registry.find_topic(name)
            for queue_id in range(config.queues) if config is not None else ():
                assert config is not None
                self._look_at(config.id, queue_id, letters=name != TOPIC)
        for story in self.stories:
            if story.ended == COMMIT and not story.copies:
                self._complain(story, "I18 committed", "was committed, and is not there")

    def _look_at(self, topic_id: int, queue_id: int, *, letters: bool) -> None:
        queue = self._machine.broker.store.queue(topic_id, queue_id)
        at = max(self._looked.get((topic_id, queue_id), 0), queue.min_offset)
        messages = self._machine.broker.store.reader.read(queue.units(at, queue.count - at))
        self._looked[(topic_id, queue_id)] = queue.count
        for message in messages:
            story = self._story_of(getattr(message, "head", b""))
            if story is None:
                self._oracle.report_violation("bytes", f"{str(message)[:60]} was never sent so")
            elif letters:
                story.letters += 1
                self._tally.hit(States.GIVEN_UP)
                if story.ended and story.lives == 1:
                    self._complain(story, "I18 once", f"is given up after its {story.ended}")
            else:
                story.copies += 1
                self._tally.hit(States.COMMITTED)
                if COMMIT not in story.asked:
                    self._complain(story, "I18 half", "is visible, and nobody committed it")
                if story.ended == ROLLBACK:
                    self._complain(story, "I18 once", "is visible after its rollback was OK")
            if story is not None and story.copies + story.letters > story.lives:
                self._complain(story, "I18 once", "is there twice")

    def finish(self) -> None:
        """Everything was answered, and time enough has passed: each has its one end."""
        pending = self._machine.broker.transactions.table.pending
        if pending:
            self._oracle.report_violation("I18 stuck", f"{len(pending)} transactions are pending")
        for story in self.stories:
            over = story.copies or story.letters or ROLLBACK in story.asked
            if story.begun and not over:
                self._complain(story, "I18 stuck", "came to no end")
            self._tally.hit(States.ROLLED_BACK, int(story.ended == ROLLBACK))

    # -- inside

    def _story_of(self, head: bytes) -> TransactionHistory | None:
        return next((history for history in self.stories if history.entry.head == head), None)

    def _story(self) -> TransactionHistory:
        rng, number = self._rng, len(self.stories)
        head = b"%05d|" % number + rng.randbytes(rng.choice((10, 100, 900)))
        name = self.ids.name(TOPIC, f"m{number:05}")
        properties = b"\x1a" + bytes((len(name),)) + name.encode() + self.ids.fingerprint(number)
        check_ms = rng.choice((0, 0, 100, 2_000))
        kind = MessageType.TRANSACTION
        queue_id = rng.randrange(QUEUES)
        entry = PutEntry(kind, head, properties, 0, queue_id, check_ms, name)
        requested = rng.choice((COMMIT, COMMIT, ROLLBACK, UNKNOWN))
        story = TransactionHistory(number, requested, entry, self._machine.log_ms)
        self.stories.append(story)
        return story

    def _put(self, batch: list[TransactionHistory]) -> None:
        def hear(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                return
            for story, result in zip(batch, hop.decode_put_reply(answer), strict=True):
                if result.code != Code.OK:
                    continue
                self._tally.hit(States.BEGUN_AGAIN, int(bool(story.begun)))
                self._tally.hit(States.BEGUN_LATE, int(story.lost and not story.begun))
                story.begun = story.begun or self._oracle.at
                if story.known_id in ("", result.message):
                    story.transaction = result.message
                elif result.message not in story.former:
                    if story.lives == 1:
                        self._complain(story, "I17 stored-once", "has got another id")
                    self._tally.hit(States.BEGUN_ANEW)
                    story.begin_anew(result.message)

        def lost() -> None:
            for story in batch:
                story.lost = True

        for story in batch:
            may_be_over = ROLLBACK in story.asked or story.wanted == UNKNOWN or story.checks
            story.lives += bool(story.transaction or story.checks) and bool(may_be_over)
        names = ",".join(str(history.number) for history in batch)
        body = hop.encode_put(PutRequest(TOPIC, [history.entry for history in batch]))
        self._ask(f"begin {names}", Kind.PUT, body, hear, lost=lost)

    def _end(self, story: TransactionHistory, requested: str, transaction: str) -> None:
        if not story.asked:
            story.asked_ms = self._machine.log_ms
        story.asked.add(requested)
        story.events.append(f"{self._oracle.at} {requested} asked")

        def hear(answer: bytes | PopmqError) -> None:
            if transaction in story.former:
                return
            if not isinstance(answer, PopmqError):
                story.events.append(f"{self._oracle.at} {requested} OK")
                self._tally.hit(States.ENDED_AGAIN, int(story.ended == requested))
                if story.ended not in ("", requested):
                    self._complain(story, "I18 once", f"{requested} OK after {story.ended}")
                story.ended = requested
            elif answer.code == Code.INVALID_TRANSACTION_ID:
                self._tally.hit(States.END_REFUSED)
                self.look()
                old = self._machine.log_ms - story.asked_ms >= KEEP_ENDED_MS
                other = story.asked - {requested} or story.letters or old
                if not other:
                    self._complain(story, "I18 end", f"{requested} was refused: {answer}")
            else:
                story.events.append(f"{self._oracle.at} {requested}: {answer.code.name}")

        self._ask_end(story, requested, transaction, hear)

    def _ask_end(
        self,
        story: TransactionHistory,
        requested: str,
        transaction: str,
        hear: Callable[[bytes | PopmqError], None],
    ) -> None:
        request = pb.EndTransactionRequest(
            topic=TOPIC,
            message_id=story.name,
            transaction_id=transaction,
            commit=requested == COMMIT,
        )
        self._ask(
            f"{requested} {story.number}", Kind.END_TRANSACTION, request.SerializeToString(), hear
        )

    def _complain(self, story: TransactionHistory, invariant: str, what: str) -> None:
        events = "; ".join(story.events[-8:])
        self._oracle.report_violation(invariant, f"transaction {story.number} {what} ({events})")
