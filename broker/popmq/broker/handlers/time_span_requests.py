"""TIME_SPANS: from when to when queues hold messages, and how far a group has come in them."""

from popmq.broker.core.broker import Broker
from popmq.common import topics
from popmq.common.errors import Code
from popmq.common.topics import TopicConfig
from popmq.common.wire import admin_pb2 as pb

_QUEUES_A_STEP = 16


class TimeSpanJob:
    """What a group has been given counts as read, also while it is in flight."""

    def __init__(self, broker: Broker, request: pb.TimeSpansRequest) -> None:
        self._broker = broker
        self._group = broker.registry.group(request.group)
        for name in request.topics:
            topics.check_readable_topic_name(name)
        named = [broker.registry.topic(name) for name in request.topics]
        self._left = [
            (topic, queue_id)
            for topic in named or self._read()
            for queue_id in broker.registry.queue_ids(topic)
        ]
        self._spans: list[pb.TimeSpan] = []

    def step(self) -> bytes | None:
        for topic, queue_id in self._left[:_QUEUES_A_STEP]:
            self._spans.append(self._span(topic, queue_id))
            del self._left[0]
        if self._left:
            return None
        return pb.TimeSpansReply(
            status=pb.Status(code=Code.OK, message="OK"),
            spans=self._spans,
            now_ms=self._broker.wall_ms(),
        ).SerializeToString()

    def _read(self) -> list[TopicConfig]:
        """Topics of people's own that the group has come to."""
        places = (place for place, _ in self._broker.table.progress_items())
        ids = sorted({topic_id for group_id, topic_id, _ in places if group_id == self._group.id})
        found = map(self._broker.registry.topic_by_id, ids)
        return [one for one in found if one is not None and not topics.is_group_owned(one.name)]

    def _span(self, topic: TopicConfig, queue_id: int) -> pb.TimeSpan:
        store = self._broker.store
        queue = store.queue(topic.id, queue_id)
        progress = self._broker.table.progress(self._group.id, topic.id, queue_id)
        next_offset = max(progress.cursor if progress else 0, queue.min_offset)

        def stored_ms(offset: int) -> int:
            if not queue.min_offset <= offset < queue.count:
                return 0
            (unit,) = queue.units(offset, 1, wait=False)
            return store.reader.stored_ms(unit, wait=False)

        return pb.TimeSpan(
            broker=self._broker.settings.broker.name,
            topic=topic.name,
            queue_id=queue_id,
            oldest_ms=stored_ms(queue.min_offset),
            newest_ms=stored_ms(queue.count - 1),
            read_ms=stored_ms(next_offset - 1),
            next_ms=stored_ms(next_offset),
        )
