"""Reset: an operator says where a group reads on, also while it is being served.

One OFFSET record a queue.  Whoever applies it, at append or at recovery, sets the offset and ends
the group's deliveries of that queue: none comes back, and no ack of them counts.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.queue_progress import GroupQueue
from popmq.broker.log.snapshot_table import SnapshotTable
from popmq.broker.meta.offset_record import OffsetReason, OffsetRecord
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.pop_service import PopService
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.errors import Code, Refused
from popmq.common.record.message import RecordKind
from popmq.common.topics import GroupType, StartAt, SubscriptionGroup, TopicConfig

_PER_PIECE = 512
_PLACE = struct.Struct(">III")  # group, topic, queue


class ResetTo(Enum):
    OLDEST = "oldest"
    NEWEST = "newest"
    OFFSET = "offset"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class ResetTarget:
    """`value` is the offset, or wall milliseconds: the first message stored then or later."""

    to: ResetTo
    value: int = 0


@dataclass(frozen=True, slots=True)
class QueueReset:
    """One queue's reset: where a pop would have read on, where it does now, and how many
    deliveries end with that."""

    topic: TopicConfig
    queue_id: int
    before: int
    after: int
    in_flight: int


class OffsetReset:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        pops: PopService,
        lookup: Lookup,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = deliveries.table
        self._buffer = deliveries.buffer
        self._pops = pops
        self._lookup = lookup
        self.resets = 0

    def check(self, topic: TopicConfig, target: ResetTarget, queue_id: int | None) -> None:
        """Raise BAD_REQUEST for a queue that is not there, or one offset for several queues."""
        queues = self._registry.queue_ids(topic)
        if queue_id is not None and queue_id not in queues:
            raise Refused(
                Code.BAD_REQUEST,
                f"queue {queue_id} of topic {topic.name}: name one of its {len(queues)}, the first "
                "of which is 0",
            )
        if target.to is ResetTo.OFFSET and queue_id is None and len(queues) > 1:
            raise Refused(
                Code.BAD_REQUEST,
                f"an offset is one queue's, and topic {topic.name} has {len(queues)}: name one "
                "with --queue, or reset to a time",
            )

    def offset_of(self, topic: TopicConfig, queue_id: int, target: ResetTarget) -> int:
        """Where that queue would be set to.

        Raises ILLEGAL_OFFSET outside of what the queue holds; its end is allowed. Raises ColdRead
        instead of waiting for the disk.
        """
        queue = self._store.queue(topic.id, queue_id)
        match target.to:
            case ResetTo.OLDEST:
                return queue.min_offset
            case ResetTo.NEWEST:
                return queue.count
            case ResetTo.TIME:
                return self._lookup.by_time(topic.id, queue_id, target.value, wait=False)
        if not queue.min_offset <= target.value <= queue.count:
            raise Refused(
                Code.ILLEGAL_OFFSET,
                f"offset {target.value} of queue {queue_id}: it takes {queue.min_offset} to "
                f"{queue.count}, the end",
            )
        return target.value

    def side_topic(self, group: SubscriptionGroup, topic: TopicConfig) -> TopicConfig | None:
        """Where messages of the topic wait for the group besides it: retries, or parked ones."""
        name_of = topics.parked_topic if group.type is GroupType.FIFO else topics.retry_topic
        return self._registry.find_topic(name_of(group.name, topic.name))

    def plan(
        self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int, offset: int
    ) -> QueueReset:
        progress = self._table.progress(group.id, topic.id, queue_id)
        queue = self._store.queue(topic.id, queue_id)
        if progress is not None:
            before = max(progress.cursor, queue.min_offset)
        elif group.start_at is StartAt.NEWEST and not self._reads(group, topic):
            before = queue.count
        else:
            before = queue.min_offset
        in_flight = progress.in_flight if progress else 0
        return QueueReset(topic, queue_id, before, offset, in_flight)

    def _reads(self, group: SubscriptionGroup, topic: TopicConfig) -> bool:
        return any(
            self._table.progress(group.id, topic.id, q) for q in self._registry.queue_ids(topic)
        )

    def apply(
        self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int, offset: int
    ) -> QueueReset:
        """Append the record and apply it; tell the operator when it is confirmed."""
        self._store.guard.check_write()
        self._pops.progress(group, topic, queue_id)
        # A check point that became a record behind the reset would be one again at recovery.
        self._buffer.write_queue((group.id, topic.id, queue_id))
        done = self.plan(group, topic, queue_id, offset)
        record = OffsetRecord(group.id, topic.id, queue_id, offset, OffsetReason.RESET)
        log_ms = self._store.put_record(
            RecordKind.OFFSET,
            topic_id=topics.OFFSETS_TOPIC_ID,
            queue_id=0,
            body=record.encode(),
        )
        apply_offset(self._table, record, log_ms, fifo=topic.kind.is_ordered(group))
        self.resets += 1
        return done


class ResetMarks(SnapshotTable):
    """The queues whose reset no pull consumer has noticed yet (`QueueProgress.was_reset`).

    A table of its own, after that of the check points, because an older popmq passes over it.  That
    a consumer notices is no record, so the marks are no part of the state hash.  Those that change
    while a snapshot runs are in it as they are then; records after its position come again.
    """

    table_number = 12

    def __init__(self, table: CheckPointTable) -> None:
        self._table = table
        self._restored: list[GroupQueue] = []

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        progress = list(self._table.progress_items())
        for at in range(0, len(progress), _PER_PIECE):
            some = progress[at : at + _PER_PIECE]
            yield b"".join(_PLACE.pack(*place) for place, queue in some if queue.was_reset), 0

    def restore(self, content: bytes) -> None:
        self._restored.extend(_PLACE.iter_unpack(content))

    def restored(self) -> None:
        for place in self._restored:
            if progress := self._table.progress(*place):
                progress.was_reset = True
        self._restored.clear()


def apply_offset(table: CheckPointTable, record: OffsetRecord, log_ms: int, *, fifo: bool) -> None:
    """One OFFSET record, in log order."""
    place = (record.group_id, record.topic_id, record.queue_id)
    match record.reason:
        case OffsetReason.RESET | OffsetReason.PULLED:
            table.reset(*place, record.queue_offset, log_ms, fifo=fifo)
            if progress := table.progress(*place):
                progress.was_reset = record.reason is OffsetReason.RESET
        case OffsetReason.COMMITTED:
            table.commit(*place, record.queue_offset, acked=record.acked, log_ms=log_ms)
        case OffsetReason.START_AT_NEWEST:
            table.start(*place, record.queue_offset, fifo=fifo, logged=True)
