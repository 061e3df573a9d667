"""PullReader: messages of one queue from an offset that the asker names (docs/concepts/pull.md).

Reads only: no check point, no record, and other readers of the queue notice nothing.
"""

from dataclasses import dataclass

from popmq.broker.filter.message_filter import MessageFilter
from popmq.broker.log.cold_read_retry import ColdReadRetry
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.pop.pop_batch import LOOK_BYTES, LOOK_UNITS, SCAN_UNITS
from popmq.broker.store.message_store import MessageStore
from popmq.common.record.message import StoredMessage
from popmq.common.topics import TopicConfig


@dataclass(frozen=True, slots=True)
class PullParams:
    topic: TopicConfig
    queue_id: int
    limit: int
    filter: MessageFilter
    reply_bytes: int


@dataclass(frozen=True, slots=True)
class PullResult:
    """Messages with their offsets, in order, and the first offset that was not looked at."""

    messages: list[tuple[int, StoredMessage]]
    next_offset: int
    more: bool  # whether the queue has messages from there on


@dataclass(slots=True)
class PullMetrics:
    pulls: int = 0
    pulled: int = 0  # messages
    illegal_offsets: int = 0
    offsets_set: int = 0


class PullReader:
    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.metrics = PullMetrics()
        self.cold = ColdReadRetry(store.readers)

    def nearest(self, params: PullParams, offset: int) -> int:
        """`offset`, or the nearest that the queue has: from its oldest message to its end."""
        queue = self._store.queue(params.topic.id, params.queue_id)
        return min(max(offset, queue.min_offset), queue.count)

    def why_illegal(self, params: PullParams, offset: int) -> str:
        queue = self._store.queue(params.topic.id, params.queue_id)
        return (
            f"offset {offset} of queue {params.queue_id} of topic {params.topic.name}: it has "
            f"{queue.min_offset} to {queue.count}, the end"
        )

    def bounds(self, params: PullParams) -> tuple[int, int]:
        """The offsets of the queue's oldest message and of its end."""
        queue = self._store.queue(params.topic.id, params.queue_id)
        return queue.min_offset, queue.count

    def read(self, params: PullParams, offset: int) -> PullResult:
        """A bounded look from `offset` on.  Raises ColdRead, with nothing changed, when what it
        looks at is not in memory."""
        queue = self._store.queue(params.topic.id, params.queue_id)
        offset = max(offset, queue.min_offset)
        chosen, passed = self._choose(params, offset)
        read = self._store.reader.read([unit for _, unit in chosen], wait=False) if chosen else []
        ats: list[tuple[int, StoredMessage]] = []
        for (at, _), message in zip(chosen, read, strict=True):
            if isinstance(message, DamagedMessage) or not params.filter.accepts(message):
                continue
            if self._store.reader.is_expired(message):
                continue
            if len(ats) == params.limit:
                passed = at
                break
            ats.append((at, message))
        self.metrics.pulled += len(ats)
        return PullResult(ats, passed, passed < queue.count)

    def _choose(self, params: PullParams, offset: int) -> tuple[list[tuple[int, QueueUnit]], int]:
        """Units to be read, and the first offset behind what was passed; the first message fits
        whatever its size."""
        requested, room, bytes_left = params.filter, params.limit, params.reply_bytes
        span = room if requested.matches_all else SCAN_UNITS
        if not (requested.matches_all or requested.uses_tag_hash):
            room = span = max(1, LOOK_UNITS // requested.cost)
            bytes_left = min(bytes_left, LOOK_BYTES)
        units = self._store.queue(params.topic.id, params.queue_id).units(offset, span, wait=False)
        chosen: list[tuple[int, QueueUnit]] = []
        for at, unit in enumerate(units, offset):
            if not (requested.matches_all or requested.may_match_hash(unit.tag_hash)):
                continue
            if chosen and (len(chosen) == room or unit.size > bytes_left):
                return chosen, at
            bytes_left -= unit.size
            chosen.append((at, unit))
        return chosen, offset + len(units)
