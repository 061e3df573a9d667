"""Recall and reschedule: what becomes of a timer before its time.

The answer is decided on the loop, against the state that firings move, and it is told when the
record it rests on is confirmed: whichever record stands first in the log wins.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.outgoing_timers import OutgoingTimers
from popmq.broker.timer.timer_admission import TimerAdmission
from popmq.broker.timer.timer_queue import TimerQueue, entry_of
from popmq.broker.timer.timer_state import KEEP_CANCELLED_MS, Timer, TimerState
from popmq.common import topics
from popmq.common.errors import Code, Refused, TooManyRequests, Unavailable
from popmq.common.protocol.messaging_payloads import RecallResult
from popmq.common.record.message import RecordKind, StoredMessage
from popmq.common.record.send_fingerprint import fingerprint_of
from popmq.common.record.timer_token import FiringToken, TimerEnd, TimerToken
from popmq.common.settings.settings import TimerSettings


class StoredTimer(NamedTuple):
    """A timer's newest record, pending or not.

    The message is without body and properties, unless it is not confirmed yet.
    """

    timer: Timer
    message: StoredMessage
    moved: bool


_DELIVERY_TIMESTAMP = 11 << 3 | 2  # its tag in definition.proto
_NO_NANOS = bytes((2 << 3, 0))


class TimerMatches(NamedTuple):
    """The timers of a message id, newest record first, and why there may be more."""

    stored: list[StoredTimer]
    incomplete: str


class TimerRecall:
    def __init__(
        self,
        store: MessageStore,
        queue: TimerQueue,
        state: TimerState,
        admission: TimerAdmission,
        lookup: Lookup,
        settings: TimerSettings,
        wall_ms: Callable[[], int],
        is_firing: Callable[[int], bool],
        departures: OutgoingTimers,
    ) -> None:
        self._store = store
        self._queue = queue
        self._state = state
        self._admission = admission
        self._lookup = lookup
        self._settings = settings
        self._wall_ms = wall_ms
        self._is_firing = is_firing
        self._departures = departures
        # What replaced a timer, by that one's identity, while the index does not find it yet.
        self._replaced: dict[int, StoredTimer] = {}
        self.recalled = 0
        self.rescheduled = 0

    def find(self, topic_id: int | None, message_id: str) -> TimerMatches:
        """The topic's timers (None: every topic's) of that message id, each identity once.

        ColdRead instead of a wait for the disk.
        """
        confirmed = self._store.confirmed
        for identity in [
            old for old, new in self._replaced.items() if new.timer.position < confirmed
        ]:
            del self._replaced[identity]
        lookup = self._lookup.all_by_id(topics.TIMER_TOPIC_ID, message_id)
        seen: set[int] = set()
        stored: list[StoredTimer] = []
        for timer in self._stored(lookup.messages):
            if topic_id in (None, timer.timer.topic_id) and timer.timer.identity not in seen:
                seen.add(timer.timer.identity)
                stored += [*self._replacing(timer), timer]
        return TimerMatches(stored, lookup.incomplete)

    def _known(
        self, topic_id: int, message_id: str, due_ms: int = 0
    ) -> tuple[list[StoredTimer], list[StoredTimer]]:
        """Its timers that no rescheduling gave another time, and those of them that wait.

        Several messages may have the id: those that were ever due at `due_ms` are meant, if there
        are any.  Refuses where one may wait that was not found: an answer speaks for all.
        """
        stored, incomplete = self.find(topic_id, message_id)
        if incomplete:
            raise Refused(
                Code.INTERNAL_ERROR,
                f"not all timers of message {message_id!r} were found, so none was changed: "
                f"{incomplete}",
            )
        if any(self._departures.is_migrating(timer.timer.identity) for timer in stored):
            raise Unavailable(
                f"message {message_id!r} is being moved to broker group "
                f"{self._departures.target}: try again"
            )
        timers = _not_replaced(stored)
        timers = [timer for timer in timers if due_ms in _due_times(timer, stored)] or timers
        pending = [timer for timer in timers if self.is_pending(timer)]
        if len(pending) > 1:
            self._check_one_message(message_id, pending)
        return timers, pending

    def _check_one_message(self, message_id: str, pending: list[StoredTimer]) -> None:
        """A message that was sent again after `dedup.window_ms` has two timers."""
        messages = [message for _, message in self._with_bodies(pending)]
        if len({fingerprint_of(message.properties) for message in messages}) > 1:
            times = ", ".join(str(timer.timer.due_ms) for timer in pending)
            raise Refused(
                Code.BAD_REQUEST,
                f"{len(pending)} messages of different clients or bodies have the id "
                f"{message_id!r}, so none was changed: they are due at {times}, and a recall "
                "handle names one of them by its time",
            )

    def _replacing(self, stored: StoredTimer) -> list[StoredTimer]:
        """What took its place one after the other, newest first."""
        newer: list[StoredTimer] = []
        while (after := self._replaced.get(stored.timer.identity)) is not None:
            newer.insert(0, after)
            stored = after
        return newer

    def recall(self, topic_id: int, message_id: str, due_ms: int = 0) -> RecallResult:
        """Cancel every pending timer of the message with that id, and due time if it is known.

        ColdRead, Refused: nothing was changed.
        """
        timers, pending = self._known(topic_id, message_id, due_ms)
        self._check_room(len(pending))
        for timer, _, _ in pending:
            ending = FiringToken(
                topic_id,
                timer.due_ms,
                timer.identity,
                self._state.classified,
                timer.offset,
                outcome=TimerEnd.CANCELLED,
            )
            self._store.put_record(RecordKind.TIMER, topic_id=0, queue_id=0, body=ending.encode())
            self._state.ended(ending)
            self.recalled += 1
        if pending or self._recalled(timers):
            return RecallResult.DONE
        return self._over(topic_id, message_id, timers)

    def reschedule(
        self, topic_id: int, message_id: str, new_due_ms: int
    ) -> tuple[RecallResult, int]:
        """Give the pending timer of that id another due time (negative: a delay from now).

        Returns the outcome and the new due time.  ColdRead, Refused: nothing was changed.
        """
        timers, pending = self._known(topic_id, message_id)
        if not pending:
            over = self._over(topic_id, message_id, timers)
            return (RecallResult.NOT_FOUND if self._recalled(timers) else over), 0
        now_ms = self._wall_ms()
        due_ms = new_due_ms if new_due_ms >= 0 else now_ms - new_due_ms
        self._admission.check_horizon(due_ms, now_ms)
        due_ms = max(due_ms, now_ms)
        self._check_room(len(pending))
        for timer, message in self._with_bodies(pending):
            old = message.any_token
            assert isinstance(old, TimerToken), "a record of the timer queue without its token"
            token = TimerToken(
                topic_id,
                old.queue_id,
                old.tag_hash,
                replaces=(timer.due_ms, timer.identity),
            )
            properties = message.properties + _delivery_time(due_ms)
            stamp = self._store.stamp()
            new = self._queue.append(message.head, properties, due_ms, token, stamp)
            self._replaced[timer.identity] = StoredTimer(
                new, message._replace(any_token=token), moved=False
            )
            self._state.replace(timer.due_ms, timer.identity, topic_id, new.identity, stamp.log_ms)
            self._state.stored(topic_id)
            self.rescheduled += 1
        return RecallResult.DONE, due_ms

    def _with_bodies(self, pending: list[StoredTimer]) -> list[tuple[Timer, StoredMessage]]:
        """What is not confirmed has its body with it, and nothing else can read that."""
        units = [
            QueueUnit(timer.position, timer.size, 0)
            for timer, _, _ in pending
            if timer.position < self._store.confirmed
        ]
        read = iter(self._store.reader.read(units, wait=False))
        whole = []
        for timer, message, _ in pending:
            intact = next(read) if timer.position < self._store.confirmed else message
            if isinstance(intact, DamagedMessage):
                raise Refused(
                    Code.INTERNAL_ERROR,
                    f"the message at position {timer.position} cannot be read: it is damaged",
                )
            whole.append((timer, intact))
        return whole

    def is_pending(self, stored: StoredTimer) -> bool:
        timer = stored.timer
        return self._state.is_pending(*timer.key, timer.offset, moved=stored.moved)

    def _recalled(self, timers: list[StoredTimer]) -> bool:
        """The newest one counts: those before it are cancelled too where it took their place.

        What became of one that is with another broker group, that one knows.
        """
        newest = timers[0].timer.identity if timers else -1
        return self._state.is_cancelled(newest) and not self._state.is_migrated(newest)

    def _over(self, topic_id: int, message_id: str, timers: list[StoredTimer]) -> RecallResult:
        """It is visible, or nothing is known of it.

        What was recalled is remembered for a while behind its due time, so within that time
        a timer that is over has fired; later, and when retention took the timer's record, its
        copy in the topic is the proof.
        """
        remembered_ms = self._state.cursor[0] - KEEP_CANCELLED_MS
        if any(
            (
                timer.timer.due_ms >= remembered_ms
                and not self._state.is_cancelled(timer.timer.identity)
            )
            or self._is_firing(timer.timer.identity)
            for timer in timers
        ):
            return RecallResult.ALREADY_VISIBLE
        copies = self._lookup.by_id(topic_id, message_id, wait=False).messages
        fired = any(isinstance(message.any_token, FiringToken) for message in copies)
        return RecallResult.ALREADY_VISIBLE if fired else RecallResult.NOT_FOUND

    def _check_room(self, more: int) -> None:
        limit = self._settings.cancelled_limit
        if more and len(self._state.cancelled) + more > limit:
            raise TooManyRequests(
                f"{limit} timers were recalled or rescheduled whose time has not passed, which is "
                "the limit (timer.cancelled_limit): try again later"
            )

    def _stored(self, messages: list[StoredMessage]) -> Iterator[StoredTimer]:
        for message in messages:
            header = message.header
            unit = QueueUnit(header.position, header.size, message.tag_hash)
            entry = entry_of(header.queue_offset, unit, message)
            if entry.timer is not None:
                yield StoredTimer(entry.timer, message, entry.moved)


def _not_replaced(timers: list[StoredTimer]) -> list[StoredTimer]:
    """Those that no rescheduling gave another time: what became of the others says nothing."""
    tokens = [timer.message.any_token for timer in timers]
    replaced = {
        token.replaces[1]
        for token in tokens
        if isinstance(token, TimerToken) and token.replaces is not None
    }
    return [timer for timer in timers if timer.timer.identity not in replaced]


def _due_times(timer: StoredTimer, stored: list[StoredTimer]) -> list[int]:
    """Of the timer, and of those that it replaced one after the other."""
    tokens = {item.timer.identity: item.message.any_token for item in stored}
    times, token = [timer.timer.due_ms], timer.message.any_token
    while isinstance(token, TimerToken) and token.replaces is not None:
        due_ms, identity = token.replaces
        times.append(due_ms)
        token = tokens.get(identity)
    return times


def _delivery_time(due_ms: int) -> bytes:
    """SystemProperties{delivery_timestamp}, which takes the place of one before it.

    Parsers merge the two: nanos are written also when they are 0.
    """
    time = Timestamp()
    time.FromMilliseconds(due_ms)
    content = _NO_NANOS + time.SerializeToString()
    return bytes((_DELIVERY_TIMESTAMP, len(content))) + content
