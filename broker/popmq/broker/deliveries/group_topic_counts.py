"""GroupTopicCounts: a counter for each group in each topic, as many as the metrics may show.

Plain integers in a dict; the pairs beyond the bound are counted together.
"""

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

    def drop(self, *, topic: str = "", group: str = "") -> None:
        """A topic or a group was deleted: its counters go, as those of a process that ended."""
        for pair in [pair for pair in self.counts if group == pair[0] or topic == pair[1]]:
            del self.counts[pair]
