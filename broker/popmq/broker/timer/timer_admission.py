"""Which timers are taken, and when they are due: horizon, spread, and a bound per slot."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from zlib import crc32

from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_enqueue import TimerEnqueue
from popmq.broker.timer.timer_files import TimerFiles
from popmq.broker.timer.timer_queue import TimerQueue
from popmq.broker.timer.timer_state import Timer, TimerState
from popmq.broker.timer.timer_unit import TimerDamaged
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, Refused, TooManyRequests
from popmq.common.protocol.messaging_payloads import PutEntry
from popmq.common.quantities import format_duration, iso_time
from popmq.common.record.message import Stamp
from popmq.common.record.timer_token import TimerToken
from popmq.common.settings.settings import TimerSettings

_COUNTED_SLOTS = 1_024


class TimerAdmission:
    def __init__(
        self,
        store: MessageStore,
        queue: TimerQueue,
        state: TimerState,
        files: TimerFiles,
        enqueue: TimerEnqueue,
        settings: TimerSettings,
        *,
        wall_ms: Callable[[], int],
        on_damage: Callable[[TimerDamaged], None],
    ) -> None:
        """`on_damage` hears of a wheel that has to be made anew."""
        self._store = store
        self._on_damage = on_damage
        self._queue = queue
        self._state = state
        self._files = files
        self._enqueue = enqueue
        self._settings = settings
        self._wall_ms = wall_ms
        self._counts: OrderedDict[int, Counter[int]] = OrderedDict()  # slot -> topic -> timers
        self._counted_far = False  # the counts have all that is due in the slot
        self.refused = 0
        self.spread = 0

    def due_ms(self, entry: PutEntry) -> int:
        """When the message is due, in wall milliseconds; 0 when its time has come.

        Raises ILLEGAL_DELIVERY_TIME beyond the longest delay.
        """
        now_ms = self._wall_ms()
        due_ms = entry.due_ms if entry.due_ms >= 0 else now_ms - entry.due_ms
        self.check_horizon(due_ms + entry.spread_ms, now_ms)
        if entry.spread_ms and due_ms:
            due_ms += crc32(entry.message_id.encode()) % (entry.spread_ms + 1)
        return due_ms if due_ms > now_ms else 0

    def check_horizon(self, due_ms: int, now_ms: int) -> None:
        limit_ms = self._settings.max_delay_ms
        if due_ms - now_ms > limit_ms:
            raise Refused(
                Code.ILLEGAL_DELIVERY_TIME,
                f"{iso_time(due_ms)} lies {format_duration(due_ms - now_ms)} ahead, over the limit "
                f"of {format_duration(limit_ms)} (timer.max_delay_ms)",
            )

    def put(
        self,
        topic_id: int,
        queue_id: int,
        entry: PutEntry,
        due_ms: int,
        stamp: Stamp | None = None,
        *,
        sent_back: int | None = None,
    ) -> Timer:
        """Store the timer; its `due_ms` may be later than asked where it may be spread.

        Raises TooManyRequests at a bound.
        """
        if (due_ms, self._store.end) <= self._state.cursor:
            self._check_late()
        if self._settings.slot_limit:
            due_ms = self._with_room(topic_id, due_ms, entry)
        token = TimerToken(topic_id, queue_id, entry.tag_hash, sent_back=sent_back)
        timer = self._queue.append(entry.head, entry.properties, due_ms, token, stamp)
        self._state.stored(topic_id)
        return timer

    def take(self, head: bytes, properties: bytes, due_ms: int, token: TimerToken) -> None:
        """Store a timer that another broker group admitted; its time stays what it was.

        Raises TooManyRequests where it would be late and no more of those are taken.
        """
        if (due_ms, self._store.end) <= self._state.cursor:
            self._check_late()
        slot_ms = self._settings.slot_ms
        if (counts := self._counts.get(due_ms - due_ms % slot_ms)) is not None:
            counts[token.topic_id] += 1
        self._queue.append(head, properties, due_ms, token)
        self._state.stored(token.topic_id)

    def _check_late(self) -> None:
        """The clock went back, and this timer will wait in the index of late ones."""
        limit = self._settings.late_limit
        if len(self._state.late) >= limit:
            self.refused += 1
            raise TooManyRequests(
                f"{len(self._state.late)} timers wait that are due before the newest one that "
                f"fired (did the clock go back?), the limit is {limit} (timer.late_limit)"
            )

    def _with_room(self, topic_id: int, due_ms: int, entry: PutEntry) -> int:
        """The due time, or a later one within the spread, whose slot has room for the topic."""
        limit, slot_ms = self._settings.slot_limit, self._settings.slot_ms
        last_ms = due_ms
        if entry.spread_ms:
            asked_ms = entry.due_ms if entry.due_ms > 0 else self._wall_ms() - entry.due_ms
            last_ms = asked_ms + entry.spread_ms
        at_ms = due_ms
        while at_ms <= last_ms:
            counts = self._counted(at_ms - at_ms % slot_ms)
            if counts[topic_id] < limit:
                counts[topic_id] += 1
                self.spread += at_ms != due_ms
                return at_ms
            at_ms += slot_ms - at_ms % slot_ms
        self.refused += 1
        raise TooManyRequests(
            f"{limit} timers of this topic are due within the {slot_ms} ms of {due_ms}, and no "
            "more are taken (timer.slot_limit): choose another time, or a spread"
        )

    def _counted(self, slot_ms: int) -> Counter[int]:
        """How many timers of each topic are due in the slot; counted when it comes up first."""
        far = self._enqueue.far
        if far.complete and not self._counted_far:
            self._counts.clear()
        elif not far.complete and slot_ms >= self._enqueue.window_end_ms:
            raise TooManyRequests(
                "the timers beyond the wheel's window are counted since the start "
                "(timer.slot_limit): try again"
            )
        self._counted_far = far.complete
        counts = self._counts.get(slot_ms)
        if counts is None:
            counts = self._counts[slot_ms] = Counter(self._due_in(slot_ms).values())
            if len(self._counts) > _COUNTED_SLOTS:
                self._counts.popitem(last=False)
        else:
            self._counts.move_to_end(slot_ms)
        return counts

    def _due_in(self, slot_ms: int) -> dict[int, int]:
        """The topics of the timers that are due in the slot, by identity: retention gives one whose
        body moves another unit."""
        slot_size_ms = self._settings.slot_ms
        topics = dict(self._enqueue.far.due_in(slot_ms))
        try:
            slot = self._files.wheel.get(slot_ms, wait=False)
            for units in self._files.log.chain(slot, wait=False):
                topics.update((unit.identity, unit.topic_id) for unit in units if not unit.roll)
        except ColdRead as cold:
            warm = cold.warm
            self._store.readers.submit(lambda: _do(warm), lambda error: None)
            raise TooManyRequests(
                "the timers of that slot are read from the disk: try again"
            ) from None
        except TimerDamaged as damage:
            self._on_damage(damage)
            raise TooManyRequests(
                "the timer wheel is damaged, and is made anew: try again"
            ) from None
        for timer in self._queue.not_enqueued():
            if timer.due_ms - timer.due_ms % slot_size_ms == slot_ms:
                topics[timer.identity] = timer.topic_id
        return topics


def _do(warm: Callable[[], object]) -> None:
    warm()
