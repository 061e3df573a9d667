"""FifoQueueScan: one receive of a FIFO group at one queue; which messages it takes.

Reads on in the queue as far as it must, remembers in OrderInfo whose message group is busy,
and passes over what no one is to get.  Nothing is delivered here.
"""

from typing import TypeGuard

from popmq.broker.deliveries.in_flight_bodies import InFlightBodies
from popmq.broker.deliveries.message_group import message_group
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.filter.message_filter import MessageFilter
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.pop.pop_batch import LOOK_UNITS, PopBatch
from popmq.broker.pop.pop_metrics import PopMetrics
from popmq.broker.store.message_store import MessageStore
from popmq.common.disk import ColdRead
from popmq.common.record.message import StoredMessage

_LOOK_UNITS = 800  # that one receive looks at, in all queues together
_READ_UNITS = 32  # of them in one read
_READ_BYTES = 1 << 20


class FifoQueueScan:
    def __init__(
        self,
        store: MessageStore,
        bodies: InFlightBodies,
        metrics: PopMetrics,
        topic_id: int,
        queue_id: int,
        progress: FifoProgress,
        *,
        requested: MessageFilter,
        open_limit: int,
        look_at: int,
    ) -> None:
        """`look_at`: about how many units it may look at beyond those that are known."""
        self._store = store
        self._bodies = bodies
        self._metrics = metrics
        self._place = (topic_id, queue_id)
        self.queue = store.queue(topic_id, queue_id)
        self._wanted = requested
        self._open_limit = open_limit
        self.left = look_at
        self._read: dict[int, StoredMessage] = {}  # by this visit
        self.progress = progress
        self.queue_id = queue_id
        assert progress.order is not None, "a visit without order info"
        self.order = progress.order
        # What was held before a start may have ended before it was looked at.
        self.order.scanned = max(self.order.scanned, progress.committed)

    @property
    def full(self) -> bool:
        """At the bound of open messages: nothing more is looked at until some are over."""
        return len(self.order.open) >= self._open_limit

    @property
    def rest(self) -> int:
        """Messages that may be looked at and were not."""
        return 0 if self.full else max(0, self.queue.count - self.order.scanned)

    def choose(self, batch: PopBatch, room: int) -> list[tuple[int, QueueUnit]]:
        """At most `room` messages of available keys, in the order of their offsets.

        They are out of the order info until they are held or given back.  Raises ColdRead when
        there is nothing to take before something was read from the disk.
        """
        taken: list[tuple[int, QueueUnit]] = []
        while len(taken) < room:
            ready = self.order.next_ready()
            if ready is None:
                try:
                    if not self._look_on():
                        break
                except (ColdRead, OSError):
                    if taken:
                        break  # these can leave; the next receive waits for the disk, or fails
                    raise
                continue
            offset, unit = ready
            if not self._wanted.may_match_hash(unit.tag_hash):
                self._metrics.filtered += 1
                self._pass_over(offset)
                continue
            first = not batch.deliveries and not taken
            if unit.size > batch.bytes_left and not first:
                self.order.returned(offset)
                break
            batch.bytes_left -= unit.size
            taken.append(ready)
        return taken

    def read(self, taken: list[tuple[int, QueueUnit]]) -> list[tuple[int, StoredMessage]]:
        """The chosen messages; a damaged one is passed over. An error gives all of them back."""
        missing = [(offset, unit) for offset, unit in taken if offset not in self._read]
        try:
            messages = self._messages(missing)
        except (ColdRead, OSError):
            for offset, _ in taken:
                self.order.returned(offset)
            raise
        for (offset, _), message in zip(missing, messages, strict=True):
            if self._is_wanted(message):
                self._read[offset] = message
            else:
                self._pass_over(offset)
        return [(offset, self._read[offset]) for offset, _ in taken if offset in self._read]

    def expire(self) -> None:
        """Pass over what went by retention, but not what was delivered: that is kept alive."""
        low, progress, order = self.queue.min_offset, self.progress, self.order
        at, kept = progress.retained_below(low)
        if low <= at:
            return
        unknown = [offset for offset in kept if offset not in order.open]
        units = [
            (offset, self._bodies.unit_at((*self._place, offset), wait=False)) for offset in unknown
        ]
        self._enter(units)
        for offset in set(order.waiting_between(at, low)).difference(kept):
            order.skip(offset)
        expired = low - at - progress.finished.count(at, low) - len(kept)
        self._metrics.expired += expired
        progress.expired += expired
        for offset in [*kept, low]:
            progress.skip_filtered(at, offset)
            at = offset + 1
        order.scanned = max(order.scanned, low)
        progress.expired_until = low

    def _look_on(self) -> bool:
        """Read a piece of the queue; False when there is none or it is enough for a receive."""
        order, progress = self.order, self.progress
        # What was passed over last may have joined the committed offset with what was over
        # behind it.
        offset = order.scanned = max(order.scanned, progress.committed)
        if offset >= self.queue.count or self.left <= 0 or self.full:
            return False
        over_end = progress.finished.end_of(offset)
        if over_end > offset:
            order.scanned = over_end
            return True
        limit = min(_READ_UNITS, self.left, self._open_limit - len(order.open))
        next_over = progress.finished.next_start(offset)
        if next_over is not None:
            limit = min(limit, next_over - offset)
        requested: list[tuple[int, QueueUnit]] = []
        passed: list[tuple[int, int]] = []  # runs of them
        end, size = offset, 0
        for unit in self.queue.units(offset, limit, wait=False):
            if end not in progress.in_flight_offsets and not self._wanted.may_match_hash(
                unit.tag_hash
            ):
                start = passed.pop()[0] if passed and passed[-1][1] == end else end
                passed.append((start, end + 1))
            elif requested and size + unit.size > _READ_BYTES:
                break
            else:
                requested.append((end, unit))
                size += unit.size
            end += 1
        self._enter(requested)
        for start, behind in passed:
            progress.skip_filtered(start, behind)
            self._metrics.filtered += behind - start
        self.left -= end - offset
        order.scanned = end
        progress.cursor = max(progress.cursor, end)
        return True

    def _enter(self, units: list[tuple[int, QueueUnit]]) -> None:
        """Read these messages and remember their keys; ColdRead with nothing changed."""
        for (offset, unit), message in zip(units, self._messages(units), strict=True):
            if offset in self.progress.in_flight_offsets:
                # What is damaged and in flight is given up when its time is over.
                if not isinstance(message, DamagedMessage):
                    self.order.add_message(
                        offset, message_group(message.properties), unit, held=True
                    )
            elif self._is_wanted(message):
                self.order.add_message(offset, message_group(message.properties), unit, held=False)
                self._read[offset] = message
            else:
                self.progress.skip_filtered(offset, offset + 1)

    def _is_wanted(self, message: StoredMessage | DamagedMessage) -> TypeGuard[StoredMessage]:
        if isinstance(message, DamagedMessage):
            return False
        if self._store.reader.is_expired(message):
            self._metrics.passed_over(0, 1)
            self.progress.expired += 1
            return False
        accepted = self._wanted.accepts(message)
        self._metrics.filtered += not accepted
        return accepted

    def _messages(self, units: list[tuple[int, QueueUnit]]) -> list[StoredMessage | DamagedMessage]:
        where = [self._bodies.moved_to((*self._place, offset)) or unit for offset, unit in units]
        return self._store.reader.read(where, wait=False)

    def _pass_over(self, offset: int) -> None:
        self.order.skip(offset)
        self.progress.skip_filtered(offset, offset + 1)


def units_to_look_at(requested: MessageFilter) -> int:
    """In one receive; less where each message has to be looked into."""
    reads_all = not (requested.matches_all or requested.uses_tag_hash)
    return max(1, (LOOK_UNITS if reads_all else _LOOK_UNITS) // requested.cost)
