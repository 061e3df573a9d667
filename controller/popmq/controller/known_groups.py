"""KnownGroups: the names of the cluster's broker groups, also of those that are absent now.

They are one record of the metadata store, so a controller that has just started can name the
groups that have not registered since.  A group leaves the record when it was drained and taken
away.  Every controller adds what it hears; the compare-and-set makes their lists one.
"""

from collections.abc import Callable, Collection

from popmq.common.protocol.group_record import GroupRecord
from popmq.controller.metadata_store import (
    MetadataStore,
    MetadataStoreUnavailable,
    WriteOutcome,
    WriteResult,
)

KEY = "cluster.groups"  # no broker group can be called so
RETRY_MS = 1_000


class KnownGroups:
    """Reads the record once, and writes it when it lacks a group that registers, or still has one
    that is gone for good."""

    def __init__(self, store: MetadataStore, on_read: Callable[[], None]) -> None:
        self._store = store
        self._on_read = on_read
        self._names: frozenset[str] = frozenset()
        self._version = 0
        self._busy = False
        self._retry_ms = 0
        self._fresh = False  # what the store had is known here
        self.is_read = False

    def absent(self, registered: Collection[str]) -> list[str]:
        """Those of the record that are not among `registered`."""
        return sorted(self._names.difference(registered))

    def step(self, now_ms: int, registered: Collection[str], removed: Collection[str]) -> int:
        """Returns how much was done."""
        names = self._names.union(registered).difference(removed)
        if self._busy or now_ms < self._retry_ms or (self._fresh and names == self._names):
            return 0
        if self._fresh and not names:
            return 0  # a record has one name at least
        self._busy = True
        self._retry_ms = now_ms + RETRY_MS
        if not self._fresh:
            self._store.read(KEY, self._read)
        else:
            line = tuple(sorted(names))
            record = GroupRecord(line[0], 1, line, self._version + 1)
            self._store.swap(KEY, self._version, record, self._written)
        return 1

    def _read(self, record: GroupRecord | MetadataStoreUnavailable | None) -> None:
        self._busy = False
        if not isinstance(record, MetadataStoreUnavailable):
            self._take(record)
            if not self.is_read:
                self.is_read = True
                self._on_read()

    def _written(self, result: WriteResult) -> None:
        self._busy = False
        if result.outcome is WriteOutcome.UNKNOWN:
            self._fresh = False
        else:
            self._take(result.record)

    def _take(self, record: GroupRecord | None) -> None:
        self._fresh = True
        self._retry_ms = 0
        self._names = frozenset(record.sync_state_set if record is not None else ())
        self._version = record.version if record is not None else 0
