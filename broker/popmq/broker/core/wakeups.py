"""Wakes receives when there may be something to receive."""

from popmq.broker.core.record_applier import RecordApplier
from popmq.broker.lite.lite_service import LiteService
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.long_polling import LongPolling
from popmq.common import topics
from popmq.common.topics import MessageType


class Wakeups:
    def __init__(
        self, registry: Registry, polling: LongPolling, applier: RecordApplier, lites: LiteService
    ) -> None:
        self._registry = registry
        self._polling = polling
        self._applier = applier
        self._lites = lites

    def on_dispatched(self, grown: set[tuple[int, int]]) -> None:
        """Confirmed messages arrived: whoever waits for that topic pops."""
        seen = -1
        for topic_id, queue_id in sorted(grown):
            topic = self._registry.topic_by_id(topic_id)
            if topic is not None and topic_id != seen:
                self._polling.wake(topic.name)
            if topic is not None and topic.type is MessageType.LITE:
                self._lites.arrived(topic, queue_id)
                continue
            if topic is None or topic_id == seen:
                continue
            seen = topic_id
            if not topics.is_group_owned(topic.name) or topics.group_of_pull_retry(topic.name):
                self._polling.wake(topic_id)
                continue
            place = self._applier.base_of(topic)
            if place is not None:
                self._polling.wake(*place)

    def on_unblocked(self, topic_id: int, group_id: int, queue_id: int) -> None:
        """A group that gets messages in order may have more of them available: who waits for them
        tries next step."""
        topic = self._registry.topic_by_id(topic_id)
        if topic is not None and topic.type is MessageType.LITE:
            self._lites.on_unblocked(topic, queue_id, group_id)
            return
        if topic is not None and topics.is_parked_topic(topic.name):
            base = self._registry.find_topic(topics.split_group_topic(topic.name)[1])
            topic_id = base.id if base is not None else topic_id
        self._polling.retry_waiters((topic_id, group_id))
