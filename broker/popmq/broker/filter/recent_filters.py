"""RecentFilters: with which filter a group last asked for a topic; to explain what it passed over.

Soft: a start forgets it, and the groups that asked longest ago leave at the bound.
"""

from collections import OrderedDict

from popmq.broker.filter.message_filter import EVERYTHING, MessageFilter
from popmq.common.topics import GroupTopic


class RecentFilters:
    def __init__(self, limit: int = 1_000) -> None:
        self._limit = limit
        self._filters: OrderedDict[GroupTopic, MessageFilter] = OrderedDict()

    def used(self, place: GroupTopic, used: MessageFilter) -> None:
        if self._filters.get(place) is used:
            return
        if used.matches_all:
            self._filters.pop(place, None)
            return
        self._filters[place] = used
        self._filters.move_to_end(place)
        if len(self._filters) > self._limit:
            self._filters.popitem(last=False)

    def last_of(self, place: GroupTopic) -> MessageFilter:
        """EVERYTHING when it is not known, too."""
        return self._filters.get(place, EVERYTHING)
