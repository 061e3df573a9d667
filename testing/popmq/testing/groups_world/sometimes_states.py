"""Rare states that the seeds of several broker groups have to reach."""

from enum import Enum


class GroupsSometimes(Enum):
    """Of clusters with two and three broker groups."""

    ELECTION = "master elected"
    PROXY_DIED = "proxy died"
    GROUP_DOWN = "all brokers of a group down at once"
    GROUP_ABSENT = "controllers started while a group was away"
    OWNER_ALONE = "owner cut off from other groups"
    OWNER_HALVES = "owner's old master serves beside its successor"
    TOPIC_AGAIN = "topic deleted and made again"
    GROUP_AGAIN = "consumer group deleted and made again"
    TIMERS_MOVED = "timers moved to another group"
    DRAINED = "group drained for a while"
    LATE_FRAME = "frame arrived after what it is about was replaced"
    PLANTED = "replica's tables changed"
    PLANTED_MASTER = "master's tables changed"
    REBUILT = "store rebuilt"
    HASH_COMPARED = "state hash of a slave compared with its master's"
    STATE_COMPARED = "tables of master and slave compared at rest"
