"""Rare states of the transactions' world."""

from enum import Enum


class TransactionSometimes(Enum):
    """Every state that the seeds have to reach."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    GIVEN_UP = "given up after the last check"
    CHECKED = "a producer was asked"
    CHECKED_AGAIN = "asked again"
    CHECK_AFTER_LOST_BEGIN = "asked about one whose begin was never answered"
    BEGUN_AGAIN = "half message sent again"
    BEGUN_LATE = "begun by a resend, the first attempt was lost"
    BEGUN_ANEW = "begun anew after its rollback, or after it was given up"
    ENDED_AGAIN = "repeated end was OK"
    END_REFUSED = "end refused, it came to another one"
    MOVED = "half message moved by retention"
    DELETED = "segment deleted"
    POWER_CUT = "power cut"
    CLEAN_STOP = "clean stop and start"
    PENDING_OVER_START = "pending over a start"
    SNAPSHOT_START = "start from a snapshot with pending ones"
    LONGER_REPLAY = "state compared with a start from the older snapshot"
    FULL_REPLAY = "state compared with a replay of the whole log"
