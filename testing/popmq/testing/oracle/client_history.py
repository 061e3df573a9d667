"""History: what one run of the simulator's clients asked and heard, as the oracle sees it."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class ResourceIncarnation:
    """One incarnation of a topic or a group. `gone`: 1 a delete was asked, 2 it was answered."""

    name: str
    gone: int = 0
    max_attempts: int = 0
    from_newest: bool = False
    buffered: bool = False  # a crash may forget its deliveries
    fifo: bool = False
    back_off_ms: int = 0  # the least that a failed push delivery stays away


@dataclass(slots=True, eq=False)
class SentMessageHistory:
    number: int
    topic: ResourceIncarnation
    tag: str
    head: bytes
    properties: bytes
    asked_at: int  # event number
    ok_at: int = 0  # event number of the OK; 0: not told
    ok_ms: int = 0
    refused: bool = False
    queue_id: int = -1
    offset: int = -1
    key: bytes = b""  # message group
    asked_log_ms: int = 0
    asked_wall_ms: int = 0
    asked_ran_ms: int = 0  # the time for which a broker had run when it was asked for
    copied: bool = False  # sent back to a FIFO group: every group gets it once more
    expired: bool = False  # the first copy lies below a cut


@dataclass(slots=True, eq=False)
class GroupReader:
    """One group reading one topic."""

    group: ResourceIncarnation
    topic: ResourceIncarnation
    tags: tuple[str, ...] = ()
    open_pops: int = 0
    lost_pops: int = 0
    left_pops: int = 0  # their clients left
    crossing: int = 0  # of those, answered before the broker heard of it
    undone_pops: int = 0  # of those, what the broker has to undo while it lives
    lost_at: int = 0  # event number; also of a reset: who holds what is not sure
    resets_open: int = 0
    reset_at: int = 0  # event number at which the last one was asked for
    lives: dict[int, "MessageHistory"] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return not self.group.gone and not self.topic.gone

    def unseen(self, life: "MessageHistory") -> int:
        """Deliveries since the life's last one that may count, and that nobody saw."""
        return self.lost_pops + self.crossing - life.lost_pops

    def accepts(self, sent: SentMessageHistory) -> bool:
        return not self.tags or sent.tag in self.tags


@dataclass(slots=True, eq=False)
class MessageHistory:
    """What one group did with one message."""

    attempt: int = 0
    lost_pops: int = 0
    acked: int = 0  # 1 perhaps, 2 for sure
    acked_at: int = 0  # event number of the OK
    dead: int = 0
    rejected: int = 0  # as acked
    ending: int = 0  # acks and rejects that are asked, not answered
    chain: int = 0  # how often it began anew, after a reset or a redrive
    again: int = 0  # redrives that may have sent it back
    letters: bool = False  # an earlier chain may have died
    inherits: bool = False  # some of the letters sent back may be an earlier group's
    loose: bool = False  # nobody knows how many copies of it there are
    passed: bool = False  # a reset may have passed over it
    skipped: bool = False  # a reset passed over it
    resolved_at: int = 0  # event at which an operator skipped it, perhaps, or made it a dead letter
    held: "Held | None" = None
    events: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def begin_again(self, lost_pops: int) -> None:
        """Its deliveries so far count for nothing any more."""
        self.chain += 1
        self.skipped = False
        self.attempt = self.acked = self.rejected = 0
        self.lost_pops, self.held = lost_pops, None


@dataclass(slots=True, eq=False)
class Held:
    """A delivery, or what a change made of it."""

    reader: GroupReader
    sent: SentMessageHistory
    attempt: int
    handle: bytes
    asked_log_ms: int
    asked_ms: int
    invisible_ms: int
    superseded: int = 0  # 1 perhaps, 2 for sure
    acked: int = 0
    changes_open: int = 0
    era: int = 0  # crashes before it
    process: int = 0  # starts of the broker before it
    recorded: bool = False  # a change made it, so that it is a record
    chain: int = 0
    received_at: int = 0  # event number
    answered_ms: int = 0  # in the time of Unanswered
    rejected: bool = False
    push: bool = False
    renewed_by: str = ""  # the client that keeps it by being alive
    successor: "Held | None" = None  # what a change made of it

    @property
    def life(self) -> MessageHistory:
        return self.reader.lives[self.sent.number]


@dataclass(slots=True, eq=False)
class ReceiveCall:
    reader: GroupReader
    tags: tuple[str, ...]
    queue_id: int
    invisible_ms: int
    poll_ms: int
    asked_at: int
    asked_ms: int
    asked_log_ms: int
    dismissed: bool = False
    lost_before: int = 0  # pops of the reader that were lost when it was asked for
    attempt_id: str = ""
    client_id: str = ""  # of a push consumer
    repeats: bool = False  # an earlier receive, by its attempt id
    crossing: bool = False  # answered when its client had left


@dataclass(frozen=True, slots=True)
class Violation:
    invariant: str
    what: str
    events: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.invariant}: {self.what}", *(f"    {event}" for event in self.events)]
        return "\n".join(lines)
