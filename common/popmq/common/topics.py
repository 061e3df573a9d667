"""Names and settings of topics and consumer groups.

Topics and groups are records of the log (`rmq_sys_meta`); a name that is deleted and made
again gets a new id, so old records never reach the new topic.  Name rules are RocketMQ's:
letters, digits, `%`, `|`, `_`, `-`; 127 characters for a topic, 120 for a group.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import lru_cache

from popmq.common.back_off import ExponentialBackOff
from popmq.common.errors import Code, Refused, TopicNotFound

META_TOPIC = "rmq_sys_meta"
OFFSETS_TOPIC = "rmq_sys_offsets"
TIMER_TOPIC = "rmq_sys_wheel_timer"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
REVIVE_PREFIX = "rmq_sys_REVIVE_LOG_"
REVIVE_QUEUES = 8
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
# Timers whose topic was deleted; of a group whose name no client may have.
TIMER_DLQ_TOPIC = f"{DLQ_PREFIX}CID_RMQ_SYS_TIMER"
TRANSACTION_DLQ_TOPIC = f"{DLQ_PREFIX}CID_RMQ_SYS_TRANS"
PARKED_PREFIX = "%PARKED%"
INTERNAL_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX, PARKED_PREFIX)

TOPIC_NAME_LIMIT = 127
GROUP_NAME_LIMIT = 120
LITE_NAME_LIMIT = 64

# Fixed ids of the system topics; users' topics are numbered from FIRST_USER_TOPIC_ID.
META_TOPIC_ID = 1
OFFSETS_TOPIC_ID = 2
REVIVE_TOPIC_ID = 3
TIMER_TOPIC_ID = 4
HALF_TOPIC_ID = 5
OP_TOPIC_ID = 6
FIRST_USER_TOPIC_ID = 64
# Retry topics and their like in a broker group that follows the topics of another one: what it
# makes for itself must not meet the ids that the owner gives.
FIRST_LOCAL_TOPIC_ID = 1 << 30

GroupTopic = tuple[str, str]  # their names

_ALLOWED = re.compile(r"[%|a-zA-Z0-9_-]+")
_BROKER_NAME = re.compile(r"[a-zA-Z0-9_-]{1,100}")  # as the setting broker.name
_SYSTEM_NAMES = frozenset(
    {"TBW102", "SCHEDULE_TOPIC_XXXX", "BenchmarkTest", "OFFSET_MOVED_EVENT", "SELF_TEST_TOPIC"}
)


class MessageType(IntEnum):
    """What a topic takes, and what a message is; numbers of the public protocol, plus MIXED."""

    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4
    LITE = 5
    PRIORITY = 6
    MIXED = 100

    def accepts(self, kind: "MessageType") -> bool:
        """A mixed topic takes neither priorities nor lite topics: those choose their queues by
        other rules."""
        if self is kind:
            return True
        return self is MessageType.MIXED and kind not in _OF_THEIR_OWN

    @property
    def accepted(self) -> tuple["MessageType", ...]:
        if self is MessageType.MIXED:
            return (
                MessageType.NORMAL,
                MessageType.FIFO,
                MessageType.DELAY,
                MessageType.TRANSACTION,
            )
        if self is MessageType.PRIORITY:
            # One without a priority has the lowest: the Node client calls priority 0 NORMAL.
            return (self, MessageType.NORMAL)
        return (self,)


_OF_THEIR_OWN = (MessageType.LITE, MessageType.PRIORITY)


class Permission(IntFlag):
    """RocketMQ's bits: 4 readable, 2 writable."""

    NONE = 0
    WRITE = 2
    READ = 4
    READ_WRITE = 6


class GroupType(IntEnum):
    NORMAL = 1
    FIFO = 2


class CheckPoints(IntEnum):
    """Of a group: whether a check point is durable before its messages leave (D2)."""

    DURABLE = 1
    BUFFERED = 2


class Durability(IntEnum):
    """Of a topic: what a send waits for (D2)."""

    DISK = 1  # as store.flush says
    MEMORY = 2  # of every member of the SyncStateSet


class StartAt(IntEnum):
    """Where a group begins in a topic that it never read (D11: the oldest message)."""

    OLDEST = 1
    NEWEST = 2


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """One topic; `id` tells incarnations of the same name apart."""

    id: int
    name: str
    queues: int = 8
    type: MessageType = MessageType.NORMAL
    permission: Permission = Permission.READ_WRITE
    retention_ms: int = 0  # 0: that of the store
    # Of a topic that takes FIFO messages: the broker groups that it was created over. Another one
    # that comes later takes no message group away from these (D11). Empty: all.
    brokers: tuple[str, ...] = ()
    durability: Durability = Durability.DISK
    lite_ttl_ms: int = 0  # of a LITE topic; 0: lite.ttl_ms
    created_by: str = ""  # the user, for its quotas

    @property
    def kind(self) -> "TopicKind":
        return _LITE if self.type is MessageType.LITE else _QUEUES

    @property
    def readable(self) -> bool:
        # Not `permission & READ`: that makes an enum member, 2 us on the path of each message.
        return self.permission in (Permission.READ_WRITE, Permission.READ)

    @property
    def writable(self) -> bool:
        return self.permission in (Permission.READ_WRITE, Permission.WRITE)


# RocketMQ's retry steps (SubscriptionGroupConfig, CustomizedRetryPolicy), in milliseconds.
CUSTOMISED_BACK_OFF_MS = tuple(
    1000 * s
    for s in (
        *(1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600),
        *(1200, 1800, 3600, 7200),
    )
)


@dataclass(frozen=True, slots=True)
class SubscriptionGroup:
    """One consumer group. `max_attempts` counts deliveries, the first included."""

    id: int
    name: str
    type: GroupType = GroupType.NORMAL
    max_attempts: int = 17
    back_off_ms: tuple[int, ...] = CUSTOMISED_BACK_OFF_MS
    start_at: StartAt = StartAt.OLDEST
    check_points: CheckPoints = CheckPoints.DURABLE
    exponential: ExponentialBackOff | None = None  # instead of the steps
    auto_created: bool = False  # by its first receive, and not altered since
    created_by: str = ""  # the user, for its quotas

    @property
    def buffered(self) -> bool:
        return self.check_points == CheckPoints.BUFFERED

    def back_off_after_ms(self, attempt: int, message: bytes = b"") -> int:
        """How long delivery `attempt` (from 1) waits for the next when the consumer failed.

        `message` names the message, for the jitter.
        """
        if self.exponential is not None:
            return self.exponential.after_ms(attempt, message)
        return self.back_off_ms[min(attempt, len(self.back_off_ms)) - 1]


class TopicKind:
    """What a topic's type decides, beside the messages that it takes: here of a topic whose queues
    its clients know."""

    queue_limit = 1_024
    waits_by_client = False  # a receive waits for what its own client subscribed to
    can_be_pulled = True
    has_lite_topics = False  # each is a queue, made by its first message

    def is_ordered(self, group: SubscriptionGroup) -> bool:
        """Whether the group gets messages in order: what comes back waits in its place."""
        return group.type is GroupType.FIFO

    def start_at(self, group: SubscriptionGroup) -> StartAt:
        return group.start_at

    def receives_by_queue(self, group: SubscriptionGroup) -> bool:
        """Whether consumers receive from each queue by itself."""
        return group.type is GroupType.FIFO


class LiteTopicKind(TopicKind):
    queue_limit = 1
    waits_by_client = True
    can_be_pulled = False
    has_lite_topics = True

    def is_ordered(self, group: SubscriptionGroup) -> bool:
        return True

    def start_at(self, group: SubscriptionGroup) -> StartAt:
        return StartAt.OLDEST  # or where its subscriber said

    def receives_by_queue(self, group: SubscriptionGroup) -> bool:
        return False


_QUEUES, _LITE = TopicKind(), LiteTopicKind()


def loses_order(group: SubscriptionGroup, topic: TopicConfig) -> bool:
    """Whether the topic's messages have an order that the group does not keep."""
    return topic.type is MessageType.FIFO and group.type is not GroupType.FIFO


def unordered_text(group: str, names: Sequence[str]) -> str:
    """What is wrong with such a pair, and the way out."""
    return (
        f"group {group} is normal and reads FIFO topics ({', '.join(names)}): a message that comes "
        "back is delivered behind later ones. Make a group of another name for it (`popmq group "
        f"create {group}-fifo --type fifo`)"
    )


def retry_topic(group: str, topic: str) -> str:
    """`+` is illegal in users' names, so the pair can be told apart again (RocketMQ's V2)."""
    return f"{RETRY_PREFIX}{group}+{topic}"


def pull_retry_topic(group: str) -> str:
    """Where a group's messages wait that a consumer has sent back; it pulls them there."""
    return f"{RETRY_PREFIX}{group}"


def group_of_pull_retry(name: str) -> str:
    """The group whose `pull_retry_topic` that is; empty for any other name."""
    if not name.startswith(RETRY_PREFIX) or "+" in name:
        return ""
    return name[len(RETRY_PREFIX) :]


def dlq_topic(group: str) -> str:
    return f"{DLQ_PREFIX}{group}"


def parked_topic(group: str, topic: str) -> str:
    """Where a FIFO group's messages of message groups that are stuck wait for an operator."""
    return f"{PARKED_PREFIX}{group}+{topic}"


def revive_topic(cluster: str) -> str:
    return f"{REVIVE_PREFIX}{cluster}"


def is_retry_topic(name: str) -> bool:
    return name.startswith(RETRY_PREFIX)


def is_parked_topic(name: str) -> bool:
    return name.startswith(PARKED_PREFIX)


def split_group_topic(name: str) -> tuple[str, str]:
    """The group and the topic that a retry or a parking topic belongs to; of a dead-letter topic
    the group alone, of any other the topic alone."""
    for prefix in INTERNAL_PREFIXES:
        if name.startswith(prefix):
            group, _, topic = name[len(prefix) :].partition("+")
            return group, topic
    return "", name


def is_group_owned(name: str) -> bool:
    """A retry or a parking topic: one group's messages of one topic, and nobody else's."""
    return is_retry_topic(name) or is_parked_topic(name)


def has_dead_letters(name: str) -> bool:
    """Whether its messages are dead letters, or the retries of a group that reads dead letters."""
    base = split_group_topic(name)[1] if is_group_owned(name) else name
    return is_dead_letter_topic(base)


def first_attempt(name: str, stored: int) -> int:
    """The attempt that a message of that topic is first delivered as.

    `stored` is the attempt of its record. It counts in topics of the group that reads it; in a
    dead letter it is that of another group.
    """
    return stored if is_group_owned(name) else 1


def is_internal_topic(name: str) -> bool:
    """A retry, a parking or a dead-letter topic: each broker group makes its own when it needs one.

    Not every name with a `%`: users' topics of earlier releases may begin with it.
    """
    return name.startswith(INTERNAL_PREFIXES)


def is_dead_letter_topic(name: str) -> bool:
    return name.startswith(DLQ_PREFIX)


def group_of_dead_letters(name: str) -> str:
    """The group whose `dlq_topic` that is; empty for any other name."""
    return name[len(DLQ_PREFIX) :] if is_dead_letter_topic(name) else ""


def is_system_topic(name: str) -> bool:
    return name.startswith("rmq_sys_") or name.startswith("RMQ_SYS_") or name in _SYSTEM_NAMES


def topic_not_found(name: str, groups: Collection[str]) -> TopicNotFound:
    """That there is no such topic, and what to do; each reason has a text of its own."""
    if group := group_of_dead_letters(name):
        why = f"consumer group {group} has no dead letters yet"
        if group not in groups:
            why = (
                f"there is no consumer group {group}, and it left no dead letters; "
                "`popmq group list` shows the groups"
            )
    elif is_system_topic(name) or is_internal_topic(name):
        why = "popmq makes topics of such names, and clients cannot create them"
    elif not is_new_name(name):
        why = "no new topic begins with %"
    else:
        return TopicNotFound(
            f"topic {name} does not exist: create it with `popmq topic create {name}`, or set "
            "topic.auto_create"
        )
    return TopicNotFound(f"topic {name} does not exist: {why}")


def check_form(
    name: str, what: str, limit: int, code: Code, allowed: re.Pattern[str] = _ALLOWED
) -> None:
    """Raise `code` unless the name has letters, as many as allowed at most, and of those only."""
    if not name.strip():
        raise Refused(code, f"the {what} is blank")
    if len(name) > limit:
        raise Refused(code, f"{what} of {len(name)} characters is longer than the limit {limit}")
    if not allowed.fullmatch(name):
        raise Refused(code, f"{what} {name!r} has characters outside ^{allowed.pattern}$")


@lru_cache(maxsize=4_096)  # for the names that are fine: a refusal is not kept
def check_topic_name(name: str) -> None:
    """Raise ILLEGAL_TOPIC unless users may create and send to a topic of this name.

    Retry topics are popmq's own.  A dead-letter topic may be read, which `check_readable`
    allows, but nobody sends to it.
    """
    check_readable_topic_name(name)
    if is_internal_topic(name):
        raise Refused(
            Code.ILLEGAL_TOPIC,
            f"topic {name} is written by popmq only: names that start with "
            f"{RETRY_PREFIX}, {DLQ_PREFIX} or {PARKED_PREFIX} cannot be created or sent to",
        )


def is_new_name(name: str) -> bool:
    """Whether a new topic or a new group may have it. Those that exist keep theirs."""
    return not name.startswith("%")


def check_new_name(name: str, what: str, code: Code) -> None:
    """Raise `code` unless a new topic or a new group may have the name."""
    if not is_new_name(name):
        raise Refused(code, f"{what} {name!r} begins with %, as only popmq's own names do")


def check_readable_topic_name(name: str) -> None:
    """Raise ILLEGAL_TOPIC unless clients may name this topic at all."""
    check_form(name, "topic name", TOPIC_NAME_LIMIT, Code.ILLEGAL_TOPIC)
    if is_system_topic(name) or is_group_owned(name):
        raise Refused(Code.ILLEGAL_TOPIC, f"{name} is a system topic; clients cannot use it")


@lru_cache(maxsize=16_384)
def is_broker_name(name: str) -> bool:
    """Whether a broker group, or a broker, can have that name."""
    return _BROKER_NAME.fullmatch(name) is not None


def check_lite_topic_name(name: str) -> None:
    """Raise ILLEGAL_LITE_TOPIC unless the name may be a lite topic's."""
    if not name.strip():
        raise Refused(Code.ILLEGAL_LITE_TOPIC, "the lite topic name is blank")
    if len(name) > LITE_NAME_LIMIT:
        raise Refused(
            Code.ILLEGAL_LITE_TOPIC,
            f"lite topic name of {len(name)} characters is longer than the limit {LITE_NAME_LIMIT}",
        )
    if not _ALLOWED.fullmatch(name):
        raise Refused(
            Code.ILLEGAL_LITE_TOPIC,
            f"lite topic name {name!r} has characters outside ^[%|a-zA-Z0-9_-]+$",
        )


def check_group_name(name: str) -> None:
    """Raise ILLEGAL_CONSUMER_GROUP unless the name may be a consumer group's."""
    check_form(name, "consumer group name", GROUP_NAME_LIMIT, Code.ILLEGAL_CONSUMER_GROUP)
    if name.startswith("CID_RMQ_SYS_"):
        raise Refused(
            Code.ILLEGAL_CONSUMER_GROUP, f"{name} is a system group; clients cannot use it"
        )
