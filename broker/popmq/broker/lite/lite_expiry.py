"""LiteExpiry: removes lite topics that got no message within their time to live.

A lite topic in which a group has unread messages stays until they are read, or deleted by
retention.
"""

from collections.abc import Iterator

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.lite.lite_service import LiteService
from popmq.broker.meta.lite_topics import LiteTopic, LiteTopicTable
from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore

ROUND_MS = 10_000  # between the starts of two rounds over all lite topics
_STEP_LIMIT = 256  # lite topics checked in one step


class LiteExpiry:
    def __init__(
        self, store: MessageStore, registry: Registry, table: CheckPointTable, lites: LiteService
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = table
        self._service = lites
        self._due_ms = 0
        self._round: Iterator[LiteTopic] = iter(())

    @property
    def _lites(self) -> LiteTopicTable:
        return self._registry.lites

    def begin(self) -> None:
        """Hide the messages in each queue that are older than its lite topic.

        Call it after a start, before the first pop.
        """
        for lite in self._lites:
            self._store.queue(lite.topic_id, lite.queue_id).raise_minimum(lite.first)

    def step(self, now_ms: int, log_ms: int) -> int:
        """Check at most 256 lite topics, all of them once in 10 s; returns how many it checked."""
        checked = 0
        for lite in self._round:
            checked += 1
            if self._is_expired(lite, log_ms):
                self.remove(lite)
                self._service.ended(lite)
            if checked == _STEP_LIMIT:
                return checked
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + ROUND_MS
            self._round = iter(self._lites)
        return checked

    def remove(self, lite: LiteTopic) -> None:
        """Remove the lite topic and the progress of all groups in it.

        The messages in its queue can no longer be read.
        """
        self._lites.remove(lite)
        groups = [group.id for group in self._registry.groups()]
        self._table.drop_queue(lite.topic_id, lite.queue_id, groups)
        queue = self._store.queue(lite.topic_id, lite.queue_id)
        queue.raise_minimum(queue.count)

    def _is_expired(self, seen: LiteTopic, log_ms: int) -> bool:
        lite = self._lites.at(seen.topic_id, seen.queue_id)
        topic = self._registry.topic_by_id(seen.topic_id)
        if lite is None or topic is None or lite.name != seen.name:
            return False  # removed since the round began; the queue may have another lite topic
        ttl_ms = topic.lite_ttl_ms or self._service.settings.ttl_ms
        if log_ms - lite.last_ms < ttl_ms or lite.last_ms > self._store.log_time.oldest_ms(ttl_ms):
            return False
        queue_key = (lite.topic_id, lite.queue_id)
        queue = self._store.queue(*queue_key)
        if queue.count < self._store.dispatch.next_offset(*queue_key):
            return False  # its last message is not confirmed
        return not any(self._has_unfinished(group.id, lite) for group in self._registry.groups())

    def _has_unfinished(self, group_id: int, lite: LiteTopic) -> bool:
        progress = self._table.progress(group_id, lite.topic_id, lite.queue_id)
        if progress is None:
            return False
        assert isinstance(progress, FifoProgress), "the progress of a lite topic is FIFO"
        queue = self._store.queue(lite.topic_id, lite.queue_id)
        expired, _ = progress.expired_below(queue.min_offset)
        return progress.waiting(queue.count) > expired or progress.in_flight > 0
