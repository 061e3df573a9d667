"""What clients of a simulated cluster asked and heard, as its oracle sees it.

Times are true milliseconds of the run; `at` is the number of an event, so that "before" means
something within one of them.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Message:
    """One message that a client asked to store; tried again or not, it is stored once."""

    number: int
    topic: str
    head: bytes
    properties: bytes
    asked_ms: int
    key: bytes = b""  # message group
    delay_ms: int = 0  # asked for, as a duration
    due_ms: int = 0  # as the broker said, on its wall
    ok_at: int = 0
    ok_ms: int = 0
    refused: bool = False
    epoch: int = 0  # of the newest master when the send was OK
    recall_asked: bool = False
    cancelled: bool = False  # a recall was DONE
    in_memory: bool = False  # its topic is
    settled: bool = False  # and it was confirmed after its OK
    excused: bool = False  # a broker died before that


@dataclass(slots=True, eq=False)
class ClusterReader:
    """One group reading one topic."""

    group: str
    topic: str
    max_attempts: int
    fifo: bool = False
    buffered: bool = False  # its check points
    renewed: bool = False  # its deliveries, while its client is heard
    heard_log_ms: int = 0  # the client was heard then, or later
    silent_log_ms: int = 0  # it was silent for long up to then, perhaps
    left: bool = False  # it said good-bye
    open_pops: int = 0
    lost_pops: int = 0  # asked for, and nobody knows what they were given
    haunted_ms: int = -1  # until then one of those may arrive
    stories: dict[int, "GroupMessageHistory"] = field(default_factory=dict)

    def history(self, number: int) -> "GroupMessageHistory":
        return self.stories.setdefault(number, GroupMessageHistory())


@dataclass(slots=True, eq=False)
class GroupMessageHistory:
    """What one group did with one message."""

    given: dict[int, "DeliveryHistory"] = field(default_factory=dict)  # by attempt
    acked: int = 0  # 1 perhaps, 2 for sure
    ending: int = 0  # acks that are not answered
    acked_attempt: int = 0
    acked_at: int = 0
    dead: int = 0
    overtaken_at: int = 0  # event at which a later one of its key came, as it may be over
    events: deque[str] = field(default_factory=lambda: deque(maxlen=12))

    @property
    def attempt(self) -> int:
        return max(self.given, default=0)


@dataclass(slots=True, eq=False)
class ReceiveRequestHistory:
    """A receive."""

    reader: ClusterReader
    invisible_ms: int
    poll_ms: int
    asked_at: int
    asked_ms: int
    log_ms: int  # the oracle's log time when it was asked for
    lost_before: int
    alone: bool  # no other of its reader was open
    number: int = 0


@dataclass(slots=True, eq=False)
class DeliveryHistory:
    """A delivery, or what a change made of it."""

    reader: ClusterReader
    message: Message
    attempt: int
    handle: bytes
    log_ms: int  # at the latest when its invisible time began to count
    invisible_ms: int
    heard_at: int
    superseded: int = 0  # 1 perhaps, 2 for sure
    acked: int = 0  # likewise
    asking: int = 0  # acks and changes that are not answered
    in_doubt: bool = False  # a new master does not renew it
    got_ms: int = 0  # true time
    epoch: int = 0  # of the newest master when it was heard
    successor: "DeliveryHistory | None" = None  # what a change made of it
    changes: list[tuple[int, int]] = field(default_factory=list)  # asked: log time, invisible ms

    @property
    def history(self) -> GroupMessageHistory:
        return self.reader.history(self.message.number)
