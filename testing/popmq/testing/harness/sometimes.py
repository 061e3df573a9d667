"""Counters of rare states: a run that never reaches them proves nothing about them."""

from collections import Counter
from enum import Enum


class Sometimes(Enum):
    """Every state that the seeds have to reach."""

    TORN_TAIL = "torn tail cut"
    PADDED_ROLL = "segment rolled with padding"
    CRASH_IN_START = "crash during recovery"
    CRASH_TWICE = "crash again before anything was served"
    PROCESS_CRASH = "crash of the process only"
    POWER_CUT = "power cut with un-synced bytes"
    CLEAN_STOP = "clean stop and start"
    CRASH_IN_STOP = "crash during a clean stop"
    CHECKPOINT = "checkpoint written"
    SNAPSHOT = "snapshot published"
    SNAPSHOT_START = "start from a snapshot"
    WRITE_ERROR = "EIO on write stops the broker"
    SYNC_ERROR = "EIO on fsync stops the broker"
    NO_SPACE = "full disk stops the broker, or its start"
    SEND_REFUSED = "send refused by a full disk"
    ACK_REFUSED = "ack refused by a full disk"
    SPACE_FREED = "space freed while running"
    SLOW_SYNC = "slow fsync"
    WALL_BACK = "wall clock stepped back over a restart"
    BUFFERED_COMMIT = "acks of a buffered group committed by an offset"
    BUFFERED_WRITTEN = "buffered check point written"
    BUFFERED_FORGOTTEN = "buffered delivery forgotten by a crash"
    REFUSED_DAMAGE = "refused to start on damage"
    CHECKPOINT_DAMAGED = "started with a damaged checkpoint"
    GROUP_COMMIT = "one flush answered several requests"
    LOST_REPLY = "message again after its reply was lost"
    REVIVED = "unacked message came back"
    JOB_STOPPED = "loop ran between two operations of a thread's job"
    LANES_MIXED = "flusher and housekeeper took turns within a job"
    CRASH_IN_JOB = "crash between two operations of a thread's job"
    LONGER_REPLAY = "state compared with a start from the older snapshot"
    FULL_REPLAY = "state compared with a replay of the whole log"
    FOUND_SEVERAL = "several messages found by one name"
    MOVED_FOUND = "moved body found by its names"
    INDEX_SEALED = "tail of the key index became a file"
    REVIVE_CUT = "revival cut by a crash"
    DEAD_LETTER = "dead letter"
    LATE_ACK = "ack after expiry, before the revival, was OK"
    REPEATED_ACK = "repeated ack was OK"
    SUPERSEDED = "superseded handle refused"
    STALE = "handle of a revived delivery refused"
    FOREIGN = "foreign handle refused"
    FORGED = "forged handle refused"
    RESENT_STORED = "resend of a stored message stored nothing"
    RESENT_LOST = "resend of a message whose reply was lost"
    ACK_LOST = "answer to an ack lost"
    CHANGE_LOST = "answer to a change lost"
    WOKEN = "long poll woken by a message"
    POLL_TIMEOUT = "long poll timed out"
    WAITED_BESIDE = "long poll waited while others held messages of its group"
    REJECTED = "message rejected"
    REJECTED_TWICE = "repeated reject was OK"
    AFTER_REJECT = "ack after a reject refused"
    RESET = "offset reset"
    RESET_IN_FLIGHT = "reset ended deliveries"
    FIFO_RESET = "offset of a FIFO group reset"
    AFTER_RESET = "handle from before a reset refused"
    REDRIVEN = "dead letter sent back"
    FIFO_REDRIVEN = "dead letter of a FIFO group sent back"
    RESET_TO_TIME = "offset reset to a time"
    REDRIVEN_BEFORE = "dead letter passed over, it was sent back before"
    RENEWED = "delivery kept because its client lives"
    SAID_GOOD_BYE = "push consumer said good-bye"
    FELL_SILENT = "delivery came back, its client fell silent"
    PROXY_DIED = "proxy ended with open requests"
    OTHER_PROXY = "ack through another proxy was OK"
    RETURNED = "FIFO message came back in its place"
    GIVEN_AGAIN = "FIFO delivery given again to the same receive"
    REPEATED_LATER = "receive repeated after a restart"
    BLOCKED = "FIFO messages waited for one of their key"
    PARKED = "message parked"
    RESUMED = "parked message group resumed"
    SKIPPED = "parked message group skipped"
    GIVEN_UP = "parked message group made dead letters"
    PARKED_DEAD = "parked message became a dead letter"
    CANCELLED = "client left before its receive was answered"
    CROSSED = "answer crossed with the news that its client left"
    UNDONE = "receive undone"
    IN_FLIGHT_LIMIT = "receive refused at the in-flight limit"
    FILTERED = "message passed over by a filter"
    TOPIC_REMADE = "topic deleted and made again"
    GROUP_REMADE = "group deleted and made again"
    SEGMENT_DELETED = "segment deleted by retention"
    BODY_MOVED = "body moved by retention"
    MOVED_REVIVED = "moved body revived"
    CRASH_IN_CUT = "crash between move and delete"
    LATE_LOG = "start on a log that does not begin at 0"
    INDEX_REBUILT = "index rebuilt on a log that does not begin at 0"
    TOPIC_EXPIRED = "message passed over by its topic's own retention"
    TOPIC_EXPIRED_HELD = "message in flight stayed when its topic's time was over"
    EXPIRED = "unread message expired"


class Allowed(Enum):
    """What an oracle lets pass; counted, because an exception that grows hides mistakes."""

    KEPT_ATTEMPTS = "attempts kept of a message that was passed over"


class StateCounts:
    """Counts of states; `wanted` are those that have to be reached. Those of `Allowed` need not
    be, and are printed below them."""

    def __init__(self, *requested: type[Enum]) -> None:
        self.counts: Counter[Enum] = Counter()
        self._wanted = [what for kind in requested or (Sometimes,) for what in kind]

    def hit(self, what: Enum, times: int = 1) -> None:
        if times:
            self.counts[what] += times

    def add(self, other: "StateCounts") -> None:
        self.counts.update(other.counts)

    @property
    def never(self) -> list[str]:
        return [what.value for what in self._wanted if not self.counts[what]]

    def table(self) -> str:
        rows = {what.value: self.counts[what] for what in self._wanted}
        rows |= {f"allowed: {what.value}": self.counts[what] for what in Allowed}
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}} {count:>8}" for name, count in rows.items())
