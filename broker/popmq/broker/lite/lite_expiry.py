"""Lite topics that got no message for their time to live are removed.

One in which a group still has something to read stays until that is read, or gone by retention.
"""

from collections.abc import Iterator

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.lite.lite_service import LiteService
from popmq.broker.meta.lite_topics import LiteTopic, LiteTopicTable
from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore

LOOK_MS = 10_000
_A_STEP = 256


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
        """Before the first pop after a start: no queue shows what was before its lite topic."""
        for lite in self._lites:
            self._store.queue(lite.topic_id, lite.queue_id).raise_minimum(lite.first)

    def step(self, now_ms: int, log_ms: int) -> int:
        """Look at some of them, at all of them once in 10 s; returns how many were looked at."""
        looked = 0
        for lite in self._round:
            looked += 1
            if self._is_over(lite, log_ms):
                self.remove(lite)
                self._service.ended(lite)
            if looked == _A_STEP:
                return looked
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + LOOK_MS
            self._round = iter(self._lites)
        return looked

    def remove(self, lite: LiteTopic) -> None:
        """With what groups had of it. What it still holds is nobody's any more."""
        self._lites.remove(lite)
        groups = [group.id for group in self._registry.groups()]
        self._table.drop_queue(lite.topic_id, lite.queue_id, groups)
        queue = self._store.queue(lite.topic_id, lite.queue_id)
        queue.raise_minimum(queue.count)

    def _is_over(self, seen: LiteTopic, log_ms: int) -> bool:
        lite = self._lites.at(seen.topic_id, seen.queue_id)
        topic = self._registry.topic_by_id(seen.topic_id)
        if lite is None or topic is None or lite.name != seen.name:
            return False
        ttl_ms = topic.lite_ttl_ms or self._service.settings.ttl_ms
        if log_ms - lite.last_ms < ttl_ms or lite.last_ms > self._store.log_time.oldest_ms(ttl_ms):
            return False
        place = (lite.topic_id, lite.queue_id)
        queue = self._store.queue(*place)
        if queue.count < self._store.dispatch.next_offset(*place):
            return False  # its last message is not confirmed
        return not any(self._has_open(group.id, lite) for group in self._registry.groups())

    def _has_open(self, group_id: int, lite: LiteTopic) -> bool:
        progress = self._table.progress(group_id, lite.topic_id, lite.queue_id)
        if progress is None:
            return False
        assert isinstance(progress, FifoProgress), "a lite topic that is not in one line"
        queue = self._store.queue(lite.topic_id, lite.queue_id)
        gone, _ = progress.expired_below(queue.min_offset)
        return progress.waiting(queue.count) > gone or progress.in_flight > 0
