"""GroupExpiry: consumer groups that a receive made, and that are unused, end after a day.

Only those that never got a message: without a committed offset, and without a message in flight.
Who used a group is not in the log, so a start and a new master begin the day again.
"""

from collections.abc import Iterator

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.meta.metadata_resolver import MetadataResolver
from popmq.broker.meta.registry import Registry

UNUSED_MS = 24 * 3_600_000
LOOK_MS = 60_000
_PLACES_A_STEP = 1_000


class GroupExpiry:
    def __init__(
        self, registry: Registry, table: CheckPointTable, directory: MetadataResolver
    ) -> None:
        self._registry = registry
        self._table = table
        self._metadata_resolver = directory
        self._used_ms: dict[int, int] = {}  # by id: when its use was noticed last
        self._due_ms = 0
        self._round: Iterator[None] = iter(())
        self.expired = 0

    def step(self, *, now_ms: int) -> int:
        """A bounded piece of a look; one begins each minute. Returns 1 for work done."""
        if next(self._round, self) is not self:
            return 1
        if now_ms < self._due_ms:
            return 0
        self._due_ms = now_ms + LOOK_MS
        used = self._metadata_resolver.take_used_groups()
        self._used_ms = {
            group_id: now_ms if group_id in used else self._used_ms.get(group_id, now_ms)
            for group_id in self._registry.auto_created
        }
        unused = {
            group_id for group_id, at_ms in self._used_ms.items() if now_ms - at_ms >= UNUSED_MS
        }
        if unused and self._knows_all_progress():
            self._round = self._look(unused)
        return 0

    def _knows_all_progress(self) -> bool:
        """Other broker groups have progress of their own, which is not known here."""
        return not self._registry.owner and len(self._metadata_resolver.cluster_groups) <= 1

    def _look(self, unused: set[int]) -> Iterator[None]:
        for looked, (place, progress) in enumerate(list(self._table.progress_items())):
            if progress.is_logged or progress.in_flight:
                unused.discard(place[0])
            if looked % _PLACES_A_STEP == 0:
                yield
        # What was used since the look began has its next chance in a day.
        for group_id in unused - self._metadata_resolver.used_groups:
            group = self._registry.group_by_id(group_id)
            if group is not None and group.auto_created:
                self._registry.remove_group(group)
                self.expired += 1
                yield
