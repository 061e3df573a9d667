"""PullEnds: how messages that pull consumers read ended, for verdicts and metrics.

A pull consumer acks nothing: it moves its group's offset, also past a message that it sent back.
So what an offset passes counts as acked, but for messages that were sent back before.
"""

from popmq.broker.deliveries.group_topic_counts import PAIRS_LIMIT, EndCounts
from popmq.common.topics import GroupTopic, is_internal_topic


class PullEnds:
    def __init__(self, counts: EndCounts) -> None:
        self._counts = counts
        self._sent_back: dict[GroupTopic, int] = {}  # and not passed by an offset yet

    def passed(self, pair: GroupTopic, count: int) -> None:
        """The group's offset in a queue of the topic moved by `count` messages."""
        if is_internal_topic(pair[1]) or count <= 0:
            return  # a retry topic has messages of all topics: their first ends are known alone
        waiting = self._sent_back.pop(pair, 0)
        if waiting > count:
            self._sent_back[pair] = waiting - count
        self._counts.acked.add(pair, max(0, count - waiting))

    def returned(self, pair: GroupTopic, *, attempt: int, dead: bool) -> None:
        """A consumer could not process a message, at that attempt, from 1 on."""
        (self._counts.dead if dead else self._counts.returned).add(pair, 1)
        known = self._sent_back.get(pair)
        if attempt == 1 and (known is not None or len(self._sent_back) < PAIRS_LIMIT):
            self._sent_back[pair] = (known or 0) + 1
