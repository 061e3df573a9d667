"""Which broker group owns topics, consumer groups and users; the others follow copies (D7).

The oldest does.  What brokers have in their logs says who that is; only when nothing is written
anywhere yet does the controller choose, and keeps it beside the records of the groups.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from popmq.common.protocol.group_record import GroupRecord
from popmq.controller.metadata_store import (
    MetadataStore,
    MetadataStoreUnavailable,
    WriteOutcome,
    WriteResult,
)

logger = logging.getLogger(__name__)

KEY = "cluster.owner"  # no broker group can be called so
READ_MS = 1_000


@dataclass(frozen=True, slots=True)
class OwnershipClaim:
    """What a group's log says: whose topics it has copied, or how many changes of its own."""

    owner: str
    changes: int

    @property
    def has_own(self) -> bool:
        return not self.owner and self.changes > 0


class MetadataOwnership:
    """Waits `patience_ms` for other groups before it chooses; `at_once`, for a single broker in
    this process, it does not."""

    def __init__(
        self, store: MetadataStore, *, patience_ms: int, on_owner: Callable[[], None]
    ) -> None:
        self.owner = ""  # not known yet
        self._store = store
        self._patience_ms = patience_ms
        self._patient_until_ms: int | None = None  # counted from the first group that is heard
        self._on_owner = on_owner
        self._claims: dict[str, OwnershipClaim] = {}
        self._busy = False
        self._is_read = False
        self._read_ms = -READ_MS

    def on_claim(self, group: str, claim: OwnershipClaim) -> None:
        self._claims[group] = claim

    def has_joined(self, group: str) -> bool:
        """Its topics are the cluster's, so that messages may go there."""
        claim = self._claims.get(group)
        if not self.owner or group == self.owner or claim is None:
            return True
        return claim.owner == self.owner or claim.has_own

    def step(self, now_ms: int, *, at_once: bool = False) -> int:
        """Read, and decide when there is somebody; returns how much was done."""
        if self.owner or self._busy or not self._claims:
            return 0
        if not self._is_read:
            if now_ms - self._read_ms >= READ_MS:
                self._read(now_ms)
            if not self._is_read or self.owner:
                return 0
        if self._patient_until_ms is None:
            self._patient_until_ms = now_ms + self._patience_ms
        chosen = self._chosen(patient=not at_once and now_ms < self._patient_until_ms)
        if not chosen:
            return 0
        self._busy = True
        self._store.swap(KEY, 0, GroupRecord(chosen, 1, (chosen,), 1), self._written)
        return 1

    def _read(self, now_ms: int) -> None:
        self._busy = True
        self._read_ms = now_ms

        def read(record: GroupRecord | MetadataStoreUnavailable | None) -> None:
            self._busy = False
            if not isinstance(record, MetadataStoreUnavailable):
                self._is_read = True
                self._take(record)

        self._store.read(KEY, read)

    def _written(self, result: WriteResult) -> None:
        self._busy = False
        self._take(result.record)
        if result.outcome is WriteOutcome.UNKNOWN:
            self._is_read = False  # read again, and then compare

    def _take(self, record: GroupRecord | None) -> None:
        if record is not None and not self.owner:
            self.owner = record.leader
            logger.info("owner of the topics", extra={"broker": self.owner})
            self._on_owner()

    def _chosen(self, *, patient: bool) -> str:
        """Whom the others follow already; else who has topics; else, in time, the first name."""
        followed = sorted({claim.owner for claim in self._claims.values() if claim.owner})
        if followed:
            return followed[0]
        own = [(-claim.changes, name) for name, claim in self._claims.items() if claim.has_own]
        if own:
            return min(own)[1]
        return "" if patient else min(self._claims)
