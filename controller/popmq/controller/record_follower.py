"""The record of one broker group as a controller knows it: read again and again, and written.

Whatever the metadata store answers, the newest record that was read counts: versions only move
forward (docs/concepts/controller.md).
"""

import logging
from collections.abc import Callable

from popmq.common.protocol.group_record import GroupRecord
from popmq.controller.metadata_store import (
    MetadataStore,
    MetadataStoreUnavailable,
    WriteOutcome,
    WriteResult,
)

logger = logging.getLogger(__name__)

READ_MS = 1_000  # other controllers write too
RECORD_AGE_MS = 2 * READ_MS  # an older record allows no rebuild
SOON_MS = 100  # something contradicts what was read last


class RecordFollower:
    """`on_news` is called when a record was read or written, also when it is no newer one."""

    def __init__(
        self, name: str, store: MetadataStore, *, now_ms: int, on_news: Callable[[], None]
    ) -> None:
        self.record: GroupRecord | None = None
        self.is_read = False  # the store has answered
        self.trouble = ""  # why it does not answer now
        self.reads = 0
        self.read_number = 0  # of the newest read that was answered
        self.known_ms = now_ms - RECORD_AGE_MS - 1  # that read began then
        self.seen_ms = now_ms  # when a record of this epoch was first read
        self._name = name
        self._store = store
        self._on_news = on_news
        self._now_ms = now_ms
        self._reading = False
        self._read_ms = now_ms - READ_MS

    @property
    def epoch(self) -> int:
        return self.record.epoch if self.record else 0

    def advance(self, now_ms: int) -> int:
        """Time does not go back; returns what it is."""
        self._now_ms = max(self._now_ms, now_ms)
        return self._now_ms

    def extend_deadlines(self, ms: int) -> None:
        self.seen_ms += ms

    def read_if_due(self, now_ms: int) -> None:
        if not self._reading and now_ms - self._read_ms >= READ_MS:
            self._read()

    def read_soon(self) -> None:
        self._read_ms = min(self._read_ms, self._now_ms - READ_MS + SOON_MS)

    def write(
        self,
        expected_version: int,
        record: GroupRecord,
        then: Callable[[WriteResult], None],
        *,
        answer_first: bool = False,
    ) -> None:
        """One compare-and-set; `then` is called behind the news, or before it."""

        def swapped(result: WriteResult) -> None:
            if answer_first:
                then(result)
            self._take_result(result)
            if not answer_first:
                then(result)

        record.check_invariants()
        self._store.swap(self._name, expected_version, record, swapped)

    def _read(self) -> None:
        self._reading = True
        self._read_ms = self._now_ms
        self.reads += 1
        began_ms = self._now_ms

        def read(record: GroupRecord | MetadataStoreUnavailable | None) -> None:
            self._reading = False
            if isinstance(record, MetadataStoreUnavailable):
                self._store_is_away(str(record))
                return
            self.is_read = True
            self.read_number = self.reads
            self.known_ms = began_ms
            self.trouble = ""
            self._take(record)

        self._store.read(self._name, read)

    def _take_result(self, result: WriteResult) -> None:
        """Whatever it says, a record that came with it is true; the rest is read again (R1)."""
        if result.outcome is WriteOutcome.UNKNOWN:
            self._store_is_away(result.reason)
        self._take(result.record)
        if result.outcome is not WriteOutcome.WRITTEN:
            self._read_ms = self._now_ms - READ_MS

    def _take(self, record: GroupRecord | None) -> None:
        """Versions only move forward; what is older is a stale read."""
        if record is not None and (self.record is None or record.version > self.record.version):
            if record.epoch != self.epoch:
                self.seen_ms = self._now_ms
            self.record = record
        self._on_news()

    def _store_is_away(self, reason: str) -> None:
        if reason != self.trouble:
            logger.warning("metadata store", extra={"broker": self._name, "reason": reason})
        self.trouble = reason
