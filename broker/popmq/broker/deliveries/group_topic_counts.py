"""GroupTopicCounts: a counter for each group in each topic, as many as the metrics may show.

Plain integers in a dict; the pairs beyond the bound are counted together.
"""

from typing import NamedTuple

from popmq.common.metric_table.row import OTHERS
from popmq.common.topics import GroupTopic

PAIRS_LIMIT = 10_000


class GroupTopicCounts:
    def __init__(self) -> None:
        self.counts: dict[GroupTopic, int] = {}

    def add(self, pair: GroupTopic, count: int) -> None:
        counts = self.counts
        known = counts.get(pair)
        if known is not None:
            counts[pair] = known + count
        elif len(counts) < PAIRS_LIMIT:
            counts[pair] = count
        else:
            rest = (OTHERS, OTHERS)
            counts[rest] = counts.get(rest, 0) + count

    def copy(self) -> "GroupTopicCounts":
        new = GroupTopicCounts()
        new.counts = dict(self.counts)
        return new

    def drop(self, *, topic: str = "", group: str = "") -> None:
        """A topic or a group was deleted: its counters go, as those of a process that ended."""
        for pair in [pair for pair in self.counts if group == pair[0] or topic == pair[1]]:
            del self.counts[pair]


class EndCounts(NamedTuple):
    """Deliveries, and how they ended, by group and topic since the broker started."""

    delivered: GroupTopicCounts
    acked: GroupTopicCounts
    returned: GroupTopicCounts
    dead: GroupTopicCounts

    def of(self, pair: GroupTopic) -> tuple[int, int, int, int]:
        delivered, acked, returned, dead = (each.counts.get(pair, 0) for each in self)
        return delivered, acked, returned, dead

    def copy(self) -> "EndCounts":
        return EndCounts(*(each.copy() for each in self))

    def drop(self, *, topic: str = "", group: str = "") -> None:
        for each in self:
            each.drop(topic=topic, group=group)
