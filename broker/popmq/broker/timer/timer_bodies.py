"""What timers keep alive: the messages of all that are pending, for up to a year, and of those
that leave for another broker group."""

from collections.abc import Iterator, Sequence

from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.persistence.retention import EVERYTHING, LiveBody
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.outgoing_timers import OutgoingTimers
from popmq.broker.timer.timer_queue import TimerQueue, entry_of
from popmq.broker.timer.timer_state import TimerState
from popmq.common import topics
from popmq.common.record.timer_token import MOVED_BIT, TimerToken

_PER_PIECE = 512


class TimerBodies:
    """Implements `retention.LiveBodies`.

    A move is a new record in the timer queue under the old identity, so the next retention and a
    wheel that is built anew find it there.
    """

    def __init__(
        self, store: MessageStore, queue: TimerQueue, state: TimerState, departures: OutgoingTimers
    ) -> None:
        self._store = store
        self._queue = queue
        self._state = state
        self._departures = departures
        self._from = 0
        self.relocated = 0

    def begin(self) -> None:
        """After recovery: what is above the queue's minimum has not been looked at."""
        self._from = self._queue.queue.min_offset

    @property
    def passed(self) -> int:
        """Records below this offset were moved since the start, or are being moved, or are over."""
        return self._from

    @property
    def keeps_from(self) -> int:
        """A record that is not enqueued yet stays where it is. If it moved before it is classified,
        the cursor could have passed it, and its timer would not fire."""
        queue = self._queue.queue
        unclassified = queue.units(max(self._state.classified, queue.min_offset), 1)
        return unclassified[0].position if unclassified else EVERYTHING

    def bodies_below(self, position: int) -> Iterator[Sequence[LiveBody]]:
        queue = self._queue.queue
        while self._from < queue.count:
            offset, piece = self._from, []
            for unit in queue.units(offset, _PER_PIECE):
                if unit.position >= position:
                    break
                # Which timer a body that was moved before belongs to, only its record says.
                moved = unit.tag_hash & MOVED_BIT
                if moved or self._counts(unit.tag_hash, unit.position, offset):
                    piece.append(LiveBody(topics.TIMER_TOPIC_ID, 0, offset, unit))
                offset += 1
            yield piece
            if offset < self._from + _PER_PIECE:
                self._from = offset
                return
            self._from = offset

    def move(self, body: LiveBody) -> None:
        (message,) = self._store.reader.read([body.unit], wait=False)
        if isinstance(message, DamagedMessage):
            return  # its time will come, and say that it is lost
        token = message.any_token
        assert isinstance(token, TimerToken), "a record of the timer queue without its token"
        timer = entry_of(body.queue_offset, body.unit, message).timer
        assert timer is not None, "the record that was just read"
        again = token.moved_from is not None
        if not self._counts(*timer.key, body.queue_offset, moved=again):
            return  # it fired, or was recalled, since it was found
        moved = TimerToken(
            token.topic_id,
            token.queue_id,
            token.tag_hash,
            moved_from=timer.identity,
            late=timer.identity in self._state.late,
        )
        appended = self._queue.append(message.head, message.properties, timer.due_ms, moved)
        if moved.late:
            self._state.is_late(appended)
        self._departures.apply_moved_body(timer.identity, appended.position, appended.size)
        self.relocated += 1

    def _counts(self, due_ms: int, identity: int, offset: int, *, moved: bool = False) -> bool:
        """Its message is needed yet."""
        pending = self._state.is_pending(due_ms, identity, offset, moved=moved)
        return pending or self._departures.is_migrating(identity)
