"""HeadTimes: when the oldest ready messages of queues, their heads, were stored.

The time at which a message was stored never changes, so one read serves as long as the head stands,
also when the record has left the page cache since.  Offsets of a queue never come twice, and topic
ids neither.  The lag of operators, metrics and reports share these times.
"""

import logging
from functools import partial
from typing import NamedTuple

from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore
from popmq.common.disk import ColdRead

logger = logging.getLogger(__name__)

KEPT_LIMIT = 65_536  # heads whose times are kept; those that nobody asked for longest go first


class Head(NamedTuple):
    topic_id: int
    queue_id: int
    offset: int


class HeadTimes:
    def __init__(self, store: MessageStore, registry: Registry) -> None:
        self.kept_limit = KEPT_LIMIT
        self._store = store
        self._registry = registry
        self._known: dict[Head, int] = {}
        self._unreadable: set[Head] = set()

    def __len__(self) -> int:
        return len(self._known)

    def stored_ms(self, head: Head) -> int | None:
        """Wall milliseconds; None when nobody can know: the message is gone meanwhile, its record
        is damaged, or the disk failed to read it a moment ago.

        Raises ColdRead for a record that is on the disk alone; a failure of that read is no error.
        """
        known = self._known.pop(head, None)
        if known is None:
            known = self._read(head)
            if not known:
                return None
            while len(self._known) >= self.kept_limit:
                del self._known[next(iter(self._known))]
        self._known[head] = known  # the newest again
        return known

    def _read(self, head: Head) -> int:
        """0: not known."""
        if head in self._unreadable:
            self._unreadable.discard(head)  # the next look tries again
            return 0
        if self._registry.topic_by_id(head.topic_id) is None:
            return 0
        queue = self._store.queue(head.topic_id, head.queue_id)
        if not queue.min_offset <= head.offset < queue.count:
            return 0
        try:
            (unit,) = queue.units(head.offset, 1, wait=False)
            return self._store.reader.stored_ms(unit, wait=False)
        except ColdRead as cold:
            raise ColdRead(partial(self._warm, cold, head)) from None

    def _warm(self, cold: ColdRead, head: Head) -> None:
        """On a thread that may wait."""
        try:
            cold.warm()
        except OSError as error:
            self._unreadable.add(head)
            logger.error(
                "cannot read when a message was stored",
                extra={"topic_id": head.topic_id, "queue": head.queue_id, "reason": str(error)},
            )
