"""Retention of a topic of its own: its messages expire before their segment goes.

Only the queues' minimum offsets move, by the log time at which messages were stored; a pop goes on
at the minimum and counts what it missed.  Messages in flight are not touched.
"""

from collections.abc import Iterator

from popmq.broker.meta.registry import Registry
from popmq.broker.store.lookup import Lookup
from popmq.broker.store.message_store import MessageStore

LOOK_MS = 10_000


class TopicExpiry:
    def __init__(self, store: MessageStore, registry: Registry, lookup: Lookup) -> None:
        self._store = store
        self._registry = registry
        self._lookup = lookup
        self._due_ms = 0
        self._round: Iterator[None] = iter(())

    def step(self, *, now_ms: int) -> int:
        """One queue a call (a binary search), each topic once in 10 s. Returns 1 for work done."""
        if next(self._round, self) is not self:
            return 1
        if now_ms < self._due_ms:
            return 0
        self._due_ms = now_ms + LOOK_MS
        self._round = self._queues()
        return 0

    def run_all(self) -> None:
        """Every queue at once, before the first pop after a start."""
        for _ in self._queues():
            pass

    def _queues(self) -> Iterator[None]:
        for topic in list(self._registry.topics()):
            if not topic.retention_ms:
                continue
            for queue_id in self._registry.queue_ids(topic):
                if self._registry.topic_by_id(topic.id) is None:
                    break
                oldest_ms = self._store.log_time.oldest_ms(topic.retention_ms)
                first = self._lookup.by_log_time(topic.id, queue_id, oldest_ms)
                self._store.queue(topic.id, queue_id).raise_minimum(first)
                yield
