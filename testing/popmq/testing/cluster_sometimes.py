"""Rare states that the seeds of a cluster have to reach."""

from enum import Enum


class NetSometimes(Enum):
    """Of the network and the metadata store."""

    STALLED = "frame waited for a cut link"
    FRAME_LOST = "frame lost"
    TWICE = "request arrived twice"
    RESET = "connection broken"
    HALF_OPEN = "machine off without a word"
    PATIENCE = "connection given up after silence"
    STALE_READ = "old record read"
    SILENT_WRITE = "nobody heard what came of a write to the metadata store"
    CONFLICT = "write lost against another one"
    LATE_WRITE = "such a write was made seconds later"


class ModelSometimes(Enum):
    """Of the light replicas."""

    ELECTION = "master elected"
    SAME_AGAIN = "the same broker elected again"
    TRUNCATION = "unconfirmed records cut"
    STALE_MASTER = "two masters at once"
    SHRINK = "set shrunk"
    EXPAND = "set grown"
    CANCELLED = "expansion given up"
    PENDING = "confirmed with somebody being added"
    OLD_ORDER = "order of an old epoch refused"
    OLD_FRAME = "frame of an old epoch refused"
    SPLIT = "two records written within a second"
    WIPED = "disk wiped"
    CRASH = "process killed"
    POWER = "machine lost power with un-synced records"
    PAUSE = "process stopped for seconds"
    ALL_DOWN = "all brokers down at once"
    PUT_REFUSED = "put refused by who does not lead"
    AWAY = "metadata store away"
    CONTROLLERS_AWAY = "no controller up"
