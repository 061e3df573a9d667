"""TimerCountAudit: once a day the pending timers are counted again, from the timer queue.

The counts by topic are kept up with each record; here they are made from what the queue and
the cursor say, in bounded steps beside traffic.  What is stored or ends while that goes on
counts for both sides, so that the two are equal at the end whatever came between.  What was wrong
is mended by a record, since all state is a function of the log.
"""

import logging
from collections.abc import Callable

from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_queue import TimerQueue, entry_of
from popmq.broker.timer.timer_state import TimerState
from popmq.common.disk import ColdRead
from popmq.common.record.message import RecordKind
from popmq.common.record.timer_token import MOVED_BIT, TimerRecount
from popmq.common.settings.settings import TimerSettings

logger = logging.getLogger(__name__)

_UNITS_A_STEP = 512
_BODIES_A_STEP = 64
_BYTES_A_STEP = 1 << 20
_HOUR_MS = 3_600_000


class TimerCount:
    """One count of the queue's records below `end`, a log position.

    A body that was moved is another record of the same timer: it counts where the first one is
    not in the queue any more, and once.
    """

    def __init__(self, offset: int, first: int, end: int) -> None:
        self.offset = offset  # the next record
        self.first = first  # log position of the first one
        self.position = first  # records before it were looked at
        self.end = end
        self.by_topic: dict[int, int] = {}
        self._moved: dict[int, int] = {}  # identity of those counted by a moved body -> topic

    def add(self, identity: int, topic_id: int, *, moved: bool) -> None:
        if moved and (identity >= self.first or identity in self._moved):
            return
        if moved:
            self._moved[identity] = topic_id
        self.change(topic_id, 1)

    def ended(self, identity: int, topic_id: int) -> None:
        """It counts no more, if it did; else the count will come to its record and pass by."""
        known = identity >= self.end or self.first <= identity < self.position
        if known or self._moved.pop(identity, None) is not None:
            self.change(topic_id, -1)

    def change(self, topic_id: int, by: int) -> None:
        self.by_topic[topic_id] = self.by_topic.get(topic_id, 0) + by


class TimerCountAudit:
    """Implements `timer_state.PendingTimersListener`."""

    def __init__(
        self,
        store: MessageStore,
        queue: TimerQueue,
        state: TimerState,
        settings: TimerSettings,
        *,
        wall_ms: Callable[[], int],
        boot_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._queue = queue
        self._state = state
        self._settings = settings
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._look_ms = 0  # since boot
        self._last_ms: int | None = None  # since boot
        self._wanted = False
        self._count: TimerCount | None = None
        self._cold = ColdReadRetry(store.readers)
        self.done = 0
        self.mismatches = 0

    @property
    def running(self) -> bool:
        return self._wanted or self._count is not None

    def step(self) -> int:
        """A bounded piece of a count, or a look at the clock. Returns 1 for work done."""
        if self._cold.waiting:
            return 0
        try:
            if self._wanted:
                return self._begin()
            return self._look() if self._count is None else self._go_on(self._count)
        except ColdRead as cold:
            self._cold.warm(cold)
            return 0

    def start(self) -> None:
        """Count, or begin the count anew, with the next step."""
        self._count, self._state.watch = None, None
        self._wanted = True

    # -- what happens meanwhile

    def stored(self, topic_id: int) -> None:
        if self._count is not None:
            self._count.change(topic_id, 1)

    def ended(self, identity: int, topic_id: int) -> None:
        if self._count is not None:
            self._count.ended(identity, topic_id)

    def lost(self) -> None:
        """Its body cannot be read: nobody knows whether the count met it while it could be."""
        self.start()

    # -- inside

    def _look(self) -> int:
        """The hour is that of the wall clock in UTC."""
        now_ms = self._boot_ms()
        if now_ms < self._look_ms:
            return 0
        self._look_ms = now_ms + self._settings.check_every_ms
        hour = self._wall_ms() // _HOUR_MS % 24
        apart = self._last_ms is None or now_ms - self._last_ms >= self._settings.check_apart_ms
        if hour != self._settings.check_hour or not apart:
            return 0
        self._last_ms = now_ms
        self.start()
        return 1

    def _begin(self) -> int:
        if self._store.retention.is_relocating:
            return 0  # some are below the queue's minimum, and not above its end yet
        queue, end = self._queue.queue, self._store.end
        offset, first = queue.min_offset, end
        if offset < queue.count:
            first = queue.units(offset, 1, wait=False)[0].position
        self._count = TimerCount(offset, first, end)
        self._state.watch = self
        self._wanted = False
        return 1

    def _go_on(self, count: TimerCount) -> int:
        queue = self._queue.queue
        if queue.min_offset > count.offset:
            self.start()  # retention has overtaken it, and moved what it has not seen
            return 1
        if self._store.confirmed < count.end:
            return 0
        limit = min(_UNITS_A_STEP, queue.count - count.offset)
        units = queue.units(count.offset, limit, wait=False) if limit > 0 else []
        units = [unit for unit in units if unit.position < count.end]
        if not units:
            self._finish(count)
            return 1
        looked, size = 0, 0
        to_read: list[tuple[int, QueueUnit]] = []
        for offset, unit in enumerate(units, count.offset):
            if len(to_read) >= _BODIES_A_STEP or size >= _BYTES_A_STEP:
                break
            looked += 1
            moved = unit.tag_hash & MOVED_BIT  # which timer's, only its record says
            if moved or self._state.is_pending(unit.tag_hash, unit.position, offset):
                to_read.append((offset, unit))
                size += unit.size
        self._take(count, to_read)
        count.offset += looked
        count.position = units[looked - 1].position + 1
        return 1

    def _take(self, count: TimerCount, to_read: list[tuple[int, QueueUnit]]) -> None:
        messages = self._store.reader.read([unit for _, unit in to_read], wait=False)
        for (offset, unit), message in zip(to_read, messages, strict=True):
            entry = entry_of(offset, unit, message)
            timer = entry.timer
            if timer is not None and self._state.is_pending(*timer.key, offset, moved=entry.moved):
                count.add(timer.identity, timer.topic_id, moved=entry.moved)

    def _finish(self, count: TimerCount) -> None:
        self._count = None
        self._state.watch = None
        self.done += 1
        known, pending_counts = self._state.pending, count.by_topic
        wrong = sorted(
            topic_id
            for topic_id in known.keys() | pending_counts.keys()
            if known.get(topic_id, 0) != pending_counts.get(topic_id, 0)
        )
        self.mismatches += len(wrong)
        if not wrong:
            return
        mends = self._store.guard.copies_allowed  # else the next count does it
        logger.error(
            "pending timers were counted wrongly", extra={"topics": len(wrong), "mended": mends}
        )
        for topic_id in wrong if mends else ():
            self.mend(TimerRecount(topic_id, pending_counts.get(topic_id, 0)))

    def mend(self, record: TimerRecount) -> None:
        """Write and apply a count."""
        body = record.encode()
        self._store.put_record(RecordKind.TIMER, topic_id=0, queue_id=0, body=body)
        self._state.apply_recount(record)
