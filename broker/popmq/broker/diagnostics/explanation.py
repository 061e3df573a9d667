"""Explained: one named state of a message for a group, with the records that prove it.

What `explain.py` finds out, and the copies of a message and reasons to hold it back that it
asks about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from popmq.broker.diagnostics.delivery_evidence import GroupQueueOffset, ParkedKeySkip
from popmq.common.record.message import RedrivenLetter, StoredMessage
from popmq.common.record.timer_token import FiringToken
from popmq.common.topics import SubscriptionGroup, TopicConfig, is_internal_topic


class State(Enum):
    READY = "READY"
    INVISIBLE = "INVISIBLE"
    DELAYED = "DELAYED"
    BLOCKED = "BLOCKED"
    ACKED = "ACKED"
    DEAD_LETTERED = "DEAD_LETTERED"
    FILTERED = "FILTERED"
    EXPIRED = "EXPIRED"
    SKIPPED = "SKIPPED"  # an offset that was set passed over it
    LOST = "LOST"  # its body could not be read when it was to be revived
    RECALLED = "RECALLED"  # before its delivery time
    MOVED = "MOVED"  # before its delivery time, to another broker group
    UNKNOWN = "UNKNOWN"  # the proof was not found within the bound


@dataclass(frozen=True, slots=True)
class Proof:
    what: str
    position: int
    wall_ms: int
    text: str = ""


@dataclass(slots=True)
class Explanation:
    """`until_log_ms` is log time, 0 for no end; every other time is of the wall clock."""

    group: str
    state: State
    since_ms: int
    attempt: int
    text: str
    next_step_text: str
    until_log_ms: int = 0
    client: int = 0
    proofs: list[Proof] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StoredCopy:
    """One stored copy of the message, as the group would read it."""

    message: StoredMessage
    topic: TopicConfig

    def place(self, group: SubscriptionGroup) -> GroupQueueOffset:
        header = self.message.header
        return GroupQueueOffset(group.id, header.topic_id, header.queue_id, header.queue_offset)

    @property
    def name(self) -> str:
        token = self.message.token
        if isinstance(self.message.any_token, FiringToken):
            return "firing"
        if token is None or not is_internal_topic(self.topic.name):
            return "message"
        if token.dead:
            return "dead letter"
        if token.ends is None:
            return "parked"
        return "redriven" if isinstance(token.ends, RedrivenLetter) else "retry"

    @property
    def proof(self) -> Proof:
        header = self.message.header
        text = f"{self.topic.name} queue {header.queue_id} offset {header.queue_offset}"
        return Proof(self.name, header.position, header.wall_ms, text)


@dataclass(frozen=True, slots=True)
class WithheldReason:
    """Why a message that is ready by its place is given to nobody: DELAYED or BLOCKED."""

    state: State
    since_ms: int
    text: str
    next_step_text: str
    until_log_ms: int = 0


# Parts that hold messages back (order by message group) add themselves here.
HoldOf = Callable[[StoredCopy, SubscriptionGroup], WithheldReason | None]


def over(
    group: SubscriptionGroup,
    state: State,
    since_ms: int,
    attempt: int,
    text: str,
    proofs: Sequence[Proof],
) -> Explanation:
    then = "nothing: for this group it is over"
    return Explanation(group.name, state, since_ms, attempt, text, then, proofs=list(proofs))


def skipped(
    group: SubscriptionGroup, word: ParkedKeySkip, attempt: int, proofs: Sequence[Proof]
) -> Explanation:
    text = "an operator skipped what was parked of its message group"
    proof = Proof("skip", word.position, word.wall_ms)
    return over(group, State.SKIPPED, word.wall_ms, attempt, text, [*proofs, proof])
