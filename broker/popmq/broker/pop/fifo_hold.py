"""Why a message of a FIFO group that is ready by its place is given to nobody (explain)."""

from popmq.broker.pop.check_point_table import CheckPointTable
from popmq.broker.pop.explain import Copy, Hold, State
from popmq.broker.pop.queue_progress import FifoProgress
from popmq.common import topics
from popmq.common.topics import SubscriptionGroup


class FifoHold:
    def __init__(self, table: CheckPointTable) -> None:
        self._table = table

    def __call__(self, copy: Copy, group: SubscriptionGroup) -> Hold | None:
        place = copy.place(group)
        since_ms = copy.message.header.wall_ms
        key = self._table.parked.owner(place.topic_id, place.offset)
        if key is not None:
            topic = topics.of_group_and_topic(copy.topic.name)[1]
            name = key.name.decode(errors="replace")
            return Hold(
                State.BLOCKED,
                since_ms,
                "its message group was stuck, and is parked",
                f"`popmq group resume {group.name} --topic {topic} --key {name!r}` or skip or "
                "dead-letter",
            )
        progress = self._table.progress(place.group_id, place.topic_id, place.queue_id)
        order = progress.order if isinstance(progress, FifoProgress) else None
        if order is None or not order.is_blocked(place.offset):
            return None
        return Hold(
            State.BLOCKED,
            since_ms,
            "an earlier message of its message group is not over",
            "it is available when that is over",
        )
