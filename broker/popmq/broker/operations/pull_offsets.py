"""PullOffsets: a pull consumer says how far its group is (docs/concepts/pull.md).

It is the group's one offset in that queue, the same that acks of pop move: lag, explain, retention
and snapshots know no other.  So a group reads a queue in one way at a time, and setting its offset
is refused while pop has messages of the queue in flight.
"""

from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.queue_progress import GroupQueue
from popmq.broker.meta.offset_record import OffsetReason, OffsetRecord
from popmq.broker.operations.offset_reset import apply_offset
from popmq.broker.operations.pull_ends import PullEnds
from popmq.broker.pop.pop_service import PopService
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.errors import Code, Refused
from popmq.common.record.message import RecordKind
from popmq.common.topics import GroupType, SubscriptionGroup, TopicConfig


class PullOffsets:
    def __init__(
        self, store: MessageStore, deliveries: Deliveries, pops: PopService, ends: PullEnds
    ) -> None:
        self._store = store
        self._table = deliveries.table
        self._buffer = deliveries.buffer
        self._pops = pops
        self._ends = ends

    def get(self, group: SubscriptionGroup | None, topic: TopicConfig, queue_id: int) -> int:
        """Raises OFFSET_NOT_FOUND for a group that was never in that queue, or never was."""
        progress = self._table.progress(group.id, topic.id, queue_id) if group else None
        if progress is None:
            raise Refused(
                Code.OFFSET_NOT_FOUND,
                f"the group has no offset in queue {queue_id} of topic {topic.name}",
            )
        return progress.committed

    def after_reset(self, place: GroupQueue, offset: int) -> int:
        """Where a reset has put the group, until a pull begins there; else `offset`."""
        progress = self._table.progress(*place)
        if progress is None or not progress.was_reset:
            return offset
        target = max(progress.committed, self._store.queue(*place[1:]).min_offset)
        progress.was_reset = offset != target
        return target

    def set(
        self,
        group: SubscriptionGroup,
        topic: TopicConfig,
        queue_id: int,
        offset: int,
        *,
        only_forward: bool = False,
    ) -> bool:
        """Everything below `offset` is over, the group reads on there; whether that was new.

        One record, which the caller lets be confirmed.  Raises ILLEGAL_OFFSET behind the queue's
        end, and PRECONDITION_FAILED while pop has messages of the queue in flight.  One before
        the oldest message is taken: a consumer may be slower than the retention.  `only_forward`:
        a consumer that writes what it knows, which may be older than a reset or another's.
        """
        self._store.guard.check_write()
        end = self._store.queue(topic.id, queue_id).count
        if offset > end:
            raise Refused(
                Code.ILLEGAL_OFFSET,
                f"offset {offset} of queue {queue_id} of topic {topic.name}: its end is {end}",
            )
        place = (group.id, topic.id, queue_id)
        known = self._table.progress(*place)
        if known is not None and known.in_flight:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"{known.in_flight} messages of queue {queue_id} of topic {topic.name} are in "
                f"flight to receives of group {group.name}: a group either receives or pulls a "
                "queue, let them be acked or come back first",
            )
        if only_forward and known is not None and (known.was_reset or offset < known.committed):
            return False
        if known is not None and known.cursor == known.committed == known.is_logged == offset:
            return False
        before = self._pops.progress(group, topic, queue_id).committed
        self._ends.passed((group.name, topic.name), offset - before)
        # As with a reset: what became a record behind this one would count again at recovery.
        self._buffer.write_queue(place)
        record = OffsetRecord(*place, offset, OffsetReason.PULLED)
        log_ms = self._store.put_record(
            RecordKind.OFFSET,
            topic_id=topics.OFFSETS_TOPIC_ID,
            queue_id=0,
            body=record.encode(),
        )
        apply_offset(self._table, record, log_ms, fifo=group.type is GroupType.FIFO)
        return True
