"""What clients of a cluster saw goes in, broken promises come out (docs/concepts/simulator.md).

Knows nothing of the product.  Log time is bounded from above: it may run as fast as the fastest
clock, and jumps where a wall clock was set forward before a process began that leads (cold starts
count downtime by it); so "too early" is never said of a delivery that may have been in time.  How
far the wall clocks of machines are apart does not count.
"""

from collections.abc import Sequence

from popmq.testing.cluster_world.history import (
    ClusterReader,
    DeliveryHistory,
    GroupMessageHistory,
    Message,
    ReceiveRequestHistory,
)
from popmq.testing.oracle.client_history import Violation

_MILLION = 1_000_000
OUTCOME_MS = 600_000  # how long the answer to a repeated ack is known
LOOK_MS = 5  # what a clock drifts from one look to the next
UNANSWERED_MS = 8_000  # before a master's end: its answers may be lost, says the next one
SILENCE_MS = 30_000  # a client that is not heard for so long is gone
UNHEARD_MS = 25_000  # for which a slave that is elected may not have heard of its master
HAUNTING_MS = 60_000  # how long a request that was given up may yet arrive


class ClusterOracle:
    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.messages: list[Message] = []
        self.readers: list[ClusterReader] = []
        self.at = 0  # event number
        self.now_ms = 0
        self.fastest_ppm = self.slowest_ppm = 0
        self.jumped_ms = 0  # by which log time may have jumped
        self.ahead_ms = 0  # of the wall clock that is furthest ahead, ever
        self.answered_ms = 0  # a receive that was given something was answered
        self.took_over_at = 0  # the newest master began
        self.behind_ms = 0  # of the one that is furthest behind, ever (negative)

    # -- time

    @property
    def log_ms(self) -> int:
        return self.now_ms + self.now_ms * self.fastest_ppm // _MILLION + self.jumped_ms

    def wall_error(self, error_ms: int) -> None:
        """A host's wall clock is ahead by so much, when it was looked at."""
        self.ahead_ms = max(self.ahead_ms, error_ms + LOOK_MS)
        self.behind_ms = min(self.behind_ms, error_ms - LOOK_MS)

    def took_over(self, forward_ms: int, *, blind: bool = False) -> None:
        """A master begins: by so much its wall clock was set forward before its process began, and
        log time may jump. `blind`: it started a moment ago and knows of nothing that is confirmed,
        or of what its disk says, so every answer is in doubt."""
        for reader in self.readers:
            if reader.renewed:
                _doubt(reader, 0 if blind else self.answered_ms - UNANSWERED_MS - LOOK_MS)
        self.took_over_at = self.at
        # Meanwhile it counts by its own clock, which may be the faster one.
        apart_ppm = self.fastest_ppm - self.slowest_ppm
        self.jumped_ms += forward_ms + UNHEARD_MS * apart_ppm // _MILLION

    def report_violation(
        self, invariant: str, what: str, story: GroupMessageHistory | None = None
    ) -> None:
        self.violations.append(Violation(invariant, what, tuple(story.events) if story else ()))

    # -- sends

    def sent(self, message: Message, due_ms: int) -> None:
        message.ok_at, message.ok_ms, message.due_ms = self.at, self.now_ms, due_ms
        first_ms = _wall(message.asked_ms) + message.delay_ms + self.behind_ms
        if message.delay_ms and due_ms < first_ms:
            self.report_violation(
                "due", f"message {message.number}: due {first_ms - due_ms} ms too early"
            )

    # -- receives

    def popped(self, ask: ReceiveRequestHistory, got: Sequence[DeliveryHistory]) -> None:
        """One answered receive, in its order."""
        reader = ask.reader
        reader.open_pops -= 1
        if got:
            self.answered_ms = self.now_ms
        together: set[int] = set()
        for held in got:
            held.got_ms, held.in_doubt = self.now_ms, ask.asked_at <= self.took_over_at
            self._delivered(ask, held)
            if reader.fifo:
                self._in_order(ask, held, together)
            together.add(held.message.number)
            held.history.given.setdefault(held.attempt, held)
        if not got:
            self._empty(ask)

    def pop_lost(self, ask: ReceiveRequestHistory) -> None:
        """Nobody knows whether it was given something."""
        ask.reader.open_pops -= 1
        self.pops_unseen(ask.reader, 1)

    def pops_unseen(self, reader: ClusterReader, count: int) -> None:
        """So many tries of a receive may have been given something, or may be yet."""
        if count:
            reader.lost_pops += count
            reader.haunted_ms = self.now_ms + HAUNTING_MS

    def _delivered(self, ask: ReceiveRequestHistory, held: DeliveryHistory) -> None:
        message, reader, story = held.message, held.reader, held.history
        client = delivery_name(held)
        story.events.append(f"{self.at} t={self.now_ms} {reader.group} got attempt {held.attempt}")
        if message.topic != reader.topic:
            self.report_violation("topic", f"{client}: was sent to {message.topic}", story)
        if message.refused:
            self.report_violation("bytes", f"{client}: the send was refused", story)
        self._timer(held, client)
        if held.attempt > reader.max_attempts:
            self.report_violation(
                "I8 max-N", f"{client}: the last attempt is {reader.max_attempts}", story
            )
        if held.attempt in story.given and not reader.buffered:
            what = "I4 timer-once" if message.delay_ms else "attempts"
            self.report_violation(what, f"{client}: this attempt was delivered before", story)
        if held.attempt > len(story.given) + 1 + reader.lost_pops + reader.open_pops:
            self.report_violation("attempts", f"{client}: only {len(story.given)} were seen", story)
        late = held.attempt > story.acked_attempt or ask.asked_at > story.acked_at
        if story.acked == 2 and late:
            self.report_violation(
                "I5 ack-final", f"{client}: delivered after its ack was OK", story
            )
        before = story.given.get(held.attempt - 1)
        if before is not None and reader.renewed:
            self._renewed(held, before)
        if before is not None and before.superseded != 1 and not before.asking:
            elapsed_ms = self.log_ms - before.log_ms
            at_once = reader.buffered or (reader.renewed and reader.left)
            if elapsed_ms < before.invisible_ms and not at_once:
                what = f"{client}: again after {elapsed_ms} of {before.invisible_ms} ms"
                self.report_violation("I3 no-early", what, story)

    def client_heard(self, reader: ClusterReader, asked_log_ms: int) -> None:
        """A report that was sent then, by log time, was answered now."""
        if self.log_ms - reader.heard_log_ms >= SILENCE_MS:
            reader.silent_log_ms = self.log_ms
        reader.heard_log_ms = max(reader.heard_log_ms, asked_log_ms)

    def _renewed(self, held: DeliveryHistory, before: DeliveryHistory) -> None:
        """It stays with its client until that is silent for 30 s, or says good-bye."""
        reader = held.reader
        silent_ms = self.log_ms - reader.heard_log_ms
        spoke = silent_ms < SILENCE_MS and before.log_ms > reader.silent_log_ms
        if spoke and not reader.left and not before.acked and not before.in_doubt:
            what = f"{delivery_name(held)}: its client was heard {silent_ms} ms ago"
            self.report_violation("I3 no-early", what, held.history)

    def _timer(self, held: DeliveryHistory, client: str) -> None:
        message = held.message
        if message.due_ms and message.due_ms > _wall(self.now_ms) + self.ahead_ms:
            early_ms = message.due_ms - _wall(self.now_ms) - self.ahead_ms
            self.report_violation(
                "I3 no-early", f"{client}: {early_ms} ms before it was due", held.history
            )
        if message.cancelled:
            self.report_violation(
                "I11 cancel-truth", f"{client}: its recall was DONE", held.history
            )

    def _in_order(
        self, ask: ReceiveRequestHistory, held: DeliveryHistory, together: set[int]
    ) -> None:
        """I7: all before it in its key are over, or come in the same answer before it."""
        message, reader = held.message, held.reader
        if not message.key or not message.ok_at:
            return  # what was not answered may be stored when the next one was already
        if 0 < held.history.overtaken_at < ask.asked_at:
            what = f"{delivery_name(held)}: another of its key was delivered when it was over"
            self.report_violation("I7 fifo", what, held.history)
        for before in self.messages[: message.number]:
            if before.key != message.key or before.number in together or not before.ok_at:
                continue
            story = reader.history(before.number)
            if not _may_be_over(reader, story):
                what = f"{delivery_name(held)}: {before.number} of its key is not over"
                self.report_violation("I7 fifo", what, held.history)
                return
            story.overtaken_at = story.overtaken_at or self.at

    def _empty(self, ask: ReceiveRequestHistory) -> None:
        """I13: nothing can have been ready that was confirmed before this was asked for."""
        reader = ask.reader
        if reader.fifo or not ask.alone or reader.open_pops or ask.lost_before != reader.lost_pops:
            return
        for message in self.messages:
            if message.topic != reader.topic or reader.history(message.number).given:
                continue
            known = 0 < message.ok_at < ask.asked_at and not message.delay_ms
            known = known and not message.in_memory  # those are read when they are confirmed
            if known and message.asked_ms > reader.haunted_ms:
                what = (
                    f"group {reader.group}: nothing at {self.at}, asked at {ask.asked_at}; "
                    f"message {message.number} was confirmed at {message.ok_at}"
                )
                self.report_violation("I13 no-false-empty", what)
                return

    # -- acks and changes

    def must_accept(self, held: DeliveryHistory) -> bool:
        """Whether an ack that is answered now has to be OK: its time cannot be over."""
        story = held.history
        elapsed_ms = self.log_ms - held.log_ms
        known = not story.acked or elapsed_ms < OUTCOME_MS
        steady = not held.superseded and not held.asking and story.attempt == held.attempt
        if held.acked == 2:  # no crash takes that
            return known and steady
        # A crash takes what was no record.
        return known and steady and not held.reader.buffered and elapsed_ms < held.invisible_ms

    def acked(self, held: DeliveryHistory, ok: bool, refuse: str) -> None:
        story = held.history
        story.events.append(f"{self.at} t={self.now_ms} ack {held.attempt} {'OK' if ok else 'no'}")
        if ok and refuse:
            self.report_violation(
                "I6 stale-handle", f"{delivery_name(held)}: OK for a {refuse} handle", story
            )
        if not ok and self.must_accept(held):
            self.report_violation(
                "I6 live-handle", f"{delivery_name(held)}: ack refused in time", story
            )
        if ok:
            held.acked = 2
        if ok and story.acked < 2:
            story.acked, story.acked_attempt, story.acked_at = 2, held.attempt, self.at

    def ack_unknown(self, held: DeliveryHistory) -> None:
        held.acked = held.acked or 1
        held.history.acked = held.history.acked or 1
        held.history.events.append(f"{self.at} t={self.now_ms} ack {held.attempt} unknown")

    # -- the end

    def dead_letter(self, reader: ClusterReader, message: Message, copies: int) -> None:
        story = reader.history(message.number)
        story.dead += copies
        if copies > 1:
            self.report_violation("I8 max-N", f"{copies} dead letters of {message.number}", story)
        if story.acked == 2:
            self.report_violation(
                "I5 ack-final", f"message {message.number}: acked and dead", story
            )
        if story.attempt + reader.lost_pops < reader.max_attempts:
            what = f"message {message.number} died after attempt {story.attempt}"
            self.report_violation("I8 max-N", what, story)

    def finish(self) -> None:
        """After the drain: everything that was OK is acked or dead in every group."""
        for reader in self.readers:
            for message in self.messages:
                if not message.ok_at or message.topic != reader.topic or message.recall_asked:
                    continue
                story = reader.history(message.number)
                if story.acked or story.dead or message.excused:
                    continue
                known = bool(story.given)
                self.report_violation(
                    "I2 no-limbo" if known else "I1 no-loss",
                    f"message {message.number} of {message.topic}, confirmed at {message.ok_at}, "
                    f"never came {'back ' if known else ''}to group {reader.group}",
                    story,
                )


def delivery_name(held: DeliveryHistory) -> str:
    return f"message {held.message.number}, attempt {held.attempt}, {held.reader.group}"


def refusal_reason(held: DeliveryHistory) -> str:
    """Why an ack asked for now may not be OK; "" when it may."""
    if held.superseded == 2:
        return "superseded"
    return "revived" if not held.acked and held.history.attempt > held.attempt else ""


def _may_be_over(reader: ClusterReader, story: GroupMessageHistory) -> bool:
    unseen = reader.lost_pops + reader.open_pops
    return bool(story.acked or story.ending) or story.attempt + unseen >= reader.max_attempts


def _doubt(reader: ClusterReader, from_ms: int) -> None:
    """What was given since then is not renewed by the next master (EPOCH_START).

    By true time: no clock of ours knows whether log time jumped as far as it may have."""
    for story in reader.stories.values():
        for held in story.given.values():
            held.in_doubt |= held.got_ms >= from_ms


def _wall(true_ms: int) -> int:
    return 1_700_000_000_000 + true_ms
