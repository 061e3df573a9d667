"""TimerQueue: the records of `rmq_sys_wheel_timer` as timers.

The unit of a record says all but the topic; what was just appended is remembered, so that
enqueueing it reads nothing.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from popmq.broker.log.consume_queue import ConsumeQueue
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_state import Timer
from popmq.common import topics
from popmq.common.record.message import Stamp, StoredMessage, message_size
from popmq.common.record.timer_token import MOVED_BIT, TimerToken

_REMEMBERED = 100_000


class TimerQueueEntry(NamedTuple):
    """One record of the queue; no timer where it cannot be read any more."""

    offset: int
    timer: Timer | None
    moved: bool


class TimerQueue:
    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._recent: deque[TimerQueueEntry] = deque()

    @property
    def queue(self) -> ConsumeQueue:
        return self._store.queue(topics.TIMER_TOPIC_ID, 0)

    @property
    def count(self) -> int:
        """Confirmed records."""
        return self.queue.count

    @property
    def log_start(self) -> int:
        """A body below this position is gone; its timer, if it is pending, has a newer one."""
        return self._store.start

    def append(
        self,
        head: bytes,
        properties: bytes,
        due_ms: int,
        token: TimerToken,
        stamp: Stamp | None = None,
    ) -> Timer:
        """Store a timer's record; reply once the store's end is confirmed."""
        moved = token.moved_from is not None
        encoded = token.encode()
        offset = self._store.put_message(
            topic_id=topics.TIMER_TOPIC_ID,
            queue_id=0,
            head=head,
            properties=properties,
            tag_hash=due_ms | (MOVED_BIT if moved else 0),
            token=encoded,
            stamp=stamp,
        )
        position = self._store.last_position
        identity = position if token.moved_from is None else token.moved_from
        size = message_size(head, properties, encoded)
        timer = Timer(due_ms, identity, position, size, token.topic_id, offset)
        recent = self._recent
        if not recent or (recent[-1].offset == offset - 1 and len(recent) < _REMEMBERED):
            recent.append(TimerQueueEntry(offset, timer, moved))
        return timer

    def read(self, offset: int, limit: int, *, wait: bool = True) -> Sequence[TimerQueueEntry]:
        """Confirmed records from `offset` on. ColdRead instead of waiting with `wait` off."""
        recent = self._recent
        while recent and recent[0].offset < offset:
            recent.popleft()
        limit = min(limit, self.count - offset)
        if limit <= 0:
            return ()
        if recent and recent[0].offset == offset:
            return [recent[at] for at in range(min(limit, len(recent)))]
        units = self.queue.units(offset, limit, wait=wait)
        messages = self._store.reader.read(units, wait=wait)
        return [
            entry_of(offset + at, unit, message)
            for at, (unit, message) in enumerate(zip(units, messages, strict=True))
        ]

    def stored_ms(self, offset: int) -> int:
        """Wall time at which a confirmed record was stored. ColdRead instead of waiting."""
        (unit,) = self.queue.units(offset, 1, wait=False)
        return self._store.reader.stored_ms(unit, wait=False)

    def not_enqueued(self) -> list[Timer]:
        """What was appended lately and not read yet."""
        return [entry.timer for entry in self._recent if entry.timer is not None]

    def offset_behind(self, position: int) -> int:
        """Offset of the first record behind the one at `position`."""
        low, high = self.queue.min_offset, self.count
        while low < high:
            middle = (low + high) // 2
            if self.queue.units(middle, 1)[0].position <= position:
                low = middle + 1
            else:
                high = middle
        return low


def entry_of(
    offset: int, unit: QueueUnit, message: StoredMessage | DamagedMessage
) -> TimerQueueEntry:
    token = None if isinstance(message, DamagedMessage) else message.any_token
    if not isinstance(token, TimerToken):
        return TimerQueueEntry(offset, None, False)
    return TimerQueueEntry(offset, timer_of(token, unit, offset), token.moved_from is not None)


def timer_of(token: TimerToken, unit: QueueUnit, offset: int) -> Timer:
    """The timer of a record at that offset of the queue."""
    identity = unit.position if token.moved_from is None else token.moved_from
    due_ms = unit.tag_hash & ~MOVED_BIT
    return Timer(due_ms, identity, unit.position, unit.size, token.topic_id, offset)
