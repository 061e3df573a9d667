"""Why a message of a FIFO group that is ready by its place is not delivered (explain)."""

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.parked_keys import ParkedKey
from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.diagnostics.explanation import State, StoredCopy, WithheldReason
from popmq.common import topics
from popmq.common.topics import SubscriptionGroup


class FifoBlockReason:
    def __init__(self, table: CheckPointTable) -> None:
        self._table = table

    def __call__(self, copy: StoredCopy, group: SubscriptionGroup) -> WithheldReason | None:
        place = copy.place(group)
        since_ms = copy.message.header.wall_ms
        key = self._table.parked.owner(place.topic_id, place.offset)
        if key is not None:
            return self._parked(key, copy, group)
        progress = self._table.progress(place.group_id, place.topic_id, place.queue_id)
        order = progress.order if isinstance(progress, FifoProgress) else None
        if order is None or not order.is_blocked(place.offset):
            return None
        return WithheldReason(
            State.BLOCKED,
            since_ms,
            "an earlier message of its message group is not over",
            "it is available when that is over",
        )

    def _parked(
        self, key: ParkedKey, copy: StoredCopy, group: SubscriptionGroup
    ) -> WithheldReason | None:
        since_ms, offset = copy.message.header.wall_ms, copy.message.header.queue_offset
        if key.state is UnparkAction.RESUME:
            if self._is_first(key, offset):
                return None
            text = "its message group was parked and is resumed; an earlier message is not over"
            return WithheldReason(
                State.BLOCKED, since_ms, text, "it is available when that is over"
            )
        if key.state is UnparkAction.DEAD_LETTER and offset < key.action_end_offset:
            text = "its message group is parked, and is being made dead letters"
            then = f"becomes a dead letter: `popmq dlq list {group.name}`"
            return WithheldReason(State.BLOCKED, since_ms, text, then)
        topic = topics.split_group_topic(copy.topic.name)[1]
        name = key.name.decode(errors="replace")
        return WithheldReason(
            State.BLOCKED,
            since_ms,
            "its message group was stuck, and is parked",
            f"`popmq group resume {group.name} --topic {topic} --key {name!r}` or skip or "
            "dead-letter",
        )

    def _is_first(self, key: ParkedKey, offset: int) -> bool:
        """Whether a receive may have it now: none of its message group is before it or away."""
        origin, first = key.messages[0]
        base = self._table.progress(key.group_id, key.topic_id, key.queue_id)
        order = base.order if isinstance(base, FifoProgress) else None
        return first == offset and not (order and order.has_open_below(key.name, origin))
