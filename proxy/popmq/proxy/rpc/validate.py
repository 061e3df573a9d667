"""Every check of a request that needs no broker, with RocketMQ's code and a sentence of ours.

Nothing here knows protobuf or waits.  Limits and their order follow RocketMQ's proxy
(docs/concepts/proxy.md); where it answers 50001 to a caller's mistake, we name the mistake.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import FilterType
from popmq.common.quantities import format_duration
from popmq.common.settings.settings import MessageSettings, PopSettings
from popmq.common.topics import MessageType, TopicConfig, check_lite_topic_name

MESSAGE_ID_LIMIT = 255
MESSAGE_GROUP_LIMIT = 64  # the first size that is refused
EXPRESSION_LIMIT = 16 << 10
ATTEMPT_ID_LIMIT = 1024
RECOVERY_LIMIT_MS = 3_600_000
TIMES_S = (-62_135_596_800, 253_402_300_799)  # of the protocol's Timestamp
DEFAULT_POLL_MS = 20_000
POLL_RESERVE_MS = 400  # an answer must leave before the client's deadline

EVERY_TAG = "*"

# A number of the public protocol beside those of `MessageType`.
SQL = 2

# What Java calls an ISO control character.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

# Keys that RocketMQ keeps for itself among a message's properties.  popmq stores its own apart
# from the user's, so this only keeps a program that moves to RocketMQ later from breaking.
_RESERVED = """
    KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET
    BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME MSG_REGION
    TRACE_ON UNIQ_KEY EXTEND_UNIQ_INFO MAX_RECONSUME_TIMES CONSUME_START_TIME INSTANCE_ID
    CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE POP_CK
    POP_CK_OFFSET FIRST_POP_TIME TRANSACTION_PREPARED_QUEUE_OFFSET DUP_INFO TIMER_DELIVER_MS
    TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY
    DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID
"""
RESERVED_KEYS = frozenset(_RESERVED.split())

# User properties that make a DELAY message, and the milliseconds of one of their units.
DELAY_KEYS = {"TIMER_DELAY_MS": 1, "TIMER_DELAY_SEC": 1_000}


class MessageFacts(NamedTuple):
    """What a client's message says, as far as a check looks at it.

    `claimed_type` is the protocol's number.  Empty tag, key and group mean that there is none,
    but a delivery time of 0 is one.
    """

    body_bytes: int = 1
    message_id: str = "id"
    user_properties: Mapping[str, str] = MappingProxyType({})
    tag: str = ""
    keys: Sequence[str] = ()
    message_group: str = ""
    deliver_at_ms: int | None = None
    claimed_type: int = MessageType.NORMAL
    recovery_ms: int | None = None
    lite_topic: str = ""
    priority: int = 0


def type_of(facts: MessageFacts) -> MessageType:
    """The type that the *properties* make it; what it claims counts for transactions, lite topics
    and priorities only."""
    if facts.claimed_type == MessageType.TRANSACTION:
        return MessageType.TRANSACTION
    if facts.claimed_type == MessageType.LITE or facts.lite_topic:
        return MessageType.LITE
    # Priority 0 is none: the Node client sends it with ordinary messages.
    if facts.claimed_type == MessageType.PRIORITY or facts.priority:
        return MessageType.PRIORITY
    if _is_delayed(facts):
        return MessageType.DELAY
    return MessageType.FIFO if facts.message_group else MessageType.NORMAL


def _is_delayed(facts: MessageFacts) -> bool:
    given = facts.user_properties
    return facts.deliver_at_ms is not None or any(map(given.__contains__, DELAY_KEYS))


def check_message(facts: MessageFacts, limits: MessageSettings) -> None:
    """Raise for the first thing wrong with a message by itself, in RocketMQ's order."""
    _check_body(facts.body_bytes, limits.max_body_bytes)
    _check_properties(facts.user_properties, limits.max_properties)
    _check_tag(facts.tag)
    for key in facts.keys:
        _check_key(key)
    _check_properties_bytes(facts, limits.max_properties_bytes)
    _check_message_id(facts.message_id)
    if facts.recovery_ms is not None and facts.recovery_ms < 0:
        raise Refused(
            Code.BAD_REQUEST,
            f"orphaned_transaction_recovery_duration of {facts.recovery_ms} ms is negative",
        )
    if facts.recovery_ms is not None and facts.recovery_ms > RECOVERY_LIMIT_MS:
        raise Refused(
            Code.BAD_REQUEST,
            f"orphaned_transaction_recovery_duration of {facts.recovery_ms} ms is over the limit "
            f"of {RECOVERY_LIMIT_MS} ms",
        )
    _check_message_group(facts.message_group)
    if facts.priority < 0:
        raise Refused(Code.BAD_REQUEST, f"priority {facts.priority} is negative")


def check_sizes(facts: MessageFacts, limits: MessageSettings) -> None:
    """For a message whose sender knows no other rules than those of size, and that a filter has to
    be able to select it."""
    _check_body(facts.body_bytes, limits.max_body_bytes)
    _check_selectable(facts.tag)
    _check_properties_count(facts.user_properties, limits.max_properties)
    _check_properties_bytes(facts, limits.max_properties_bytes)
    _check_message_id(facts.message_id)
    _check_message_group(facts.message_group)


def check_type(facts: MessageFacts, topic: TopicConfig) -> MessageType:
    """The message's type. Raises when the topic takes another one, or popmq does not serve it.

    A DELAY message whose time has come needs a topic that takes DELAY all the same.
    """
    kind = type_of(facts)
    if kind is MessageType.NORMAL and topic.type is MessageType.PRIORITY:
        kind = MessageType.PRIORITY
    if not topic.type.accepts(kind):
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"topic {topic.name} takes {topic.type.name} messages and this one is {kind.name}: "
            f"send it to a topic of type {kind.name.lower()} (popmq topic create NAME --type ...)",
        )
    if kind is MessageType.TRANSACTION and _is_delayed(facts):
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            "a TRANSACTION message is visible when it is committed: it has no delivery time",
        )
    if facts.lite_topic or kind is MessageType.LITE:
        _check_alone(facts, kind, "a lite topic")
        check_lite_topic_name(facts.lite_topic)
    if facts.priority or kind is MessageType.PRIORITY:
        _check_alone(facts, kind, "a priority")
    return kind


def check_writable(topic: TopicConfig) -> None:
    if not topic.writable:
        raise Refused(Code.FORBIDDEN, f"topic {topic.name} has no writable queue")


def check_readable(topic: TopicConfig) -> None:
    if not topic.readable:
        raise Refused(Code.FORBIDDEN, f"topic {topic.name} has no readable queue")


def batch_limit(batch_size: int, limits: PopSettings) -> int:
    """How many messages a receive asks for: unset means as many as a batch may hold."""
    if batch_size < 0:
        raise Refused(Code.BAD_REQUEST, f"batch_size {batch_size} is negative")
    return min(batch_size, limits.max_batch) or limits.max_batch


def receive_invisible_ms(given_ms: int | None, *, auto_renew: bool, limits: PopSettings) -> int:
    """The invisible time of a receive; 0 is the broker's default, which it then renews."""
    if given_ms is None:
        if auto_renew:
            return 0
        raise Refused(
            Code.ILLEGAL_INVISIBLE_TIME,
            "invisible_duration is missing: set it, or ask for auto_renew",
        )
    _check_invisible(given_ms, limits.invisible_min_ms, "pop.invisible_min_ms", limits)
    return given_ms


def change_invisible_ms(given_ms: int, limits: PopSettings) -> int:
    """The invisible time of a change; 0 hands the message back at once."""
    _check_invisible(given_ms, 0, "", limits)
    return given_ms


def poll_ms(
    asked_ms: int | None, remaining_ms: int | None, longest_ms: int, shortest_ms: int = 0
) -> int:
    """How long a receive waits: what was asked or 20 s, but it ends before the client does."""
    wait_ms = max(shortest_ms, DEFAULT_POLL_MS if asked_ms is None else asked_ms)
    wait_ms = min(wait_ms, longest_ms)
    if remaining_ms is not None:
        wait_ms = min(wait_ms, remaining_ms - POLL_RESERVE_MS)
    return max(0, wait_ms)


def time_ms(seconds: int, nanos: int) -> int:
    """Milliseconds since 1970 of a time in a request, rounded down; one before that is 0."""
    if not (TIMES_S[0] <= seconds <= TIMES_S[1] and 0 <= nanos < 1_000_000_000):
        raise Refused(
            Code.BAD_REQUEST,
            f"a timestamp of {seconds} s and {nanos} ns: it takes {TIMES_S[0]} s to {TIMES_S[1]} s "
            "(the years 1 to 9999) and 0 to 999999999 ns",
        )
    return max(0, seconds * 1000 + nanos // 1_000_000)


def possible_time(seconds: int, nanos: int) -> tuple[int, int]:
    """The nearest time that a client, too, can read: in the years 1970 to 9999."""
    return min(max(0, seconds), TIMES_S[1]), min(max(0, nanos), 999_999_999)


def filter_of(filter_type: int, expression: str) -> tuple[FilterType, str]:
    """The filter for the broker, which compiles one in SQL. No tags, and `*`, pass everything."""
    if (size := len(expression.encode())) > EXPRESSION_LIMIT:
        raise Refused(
            Code.ILLEGAL_FILTER_EXPRESSION,
            f"filter expression of {size} bytes is over the limit of {EXPRESSION_LIMIT} bytes",
        )
    if filter_type == SQL:
        if _is_blank(expression):
            raise Refused(Code.ILLEGAL_FILTER_EXPRESSION, "the SQL filter is empty")
        return FilterType.SQL, expression  # with its blanks: errors name a column
    expression = expression.strip()
    if expression in ("", EVERY_TAG):
        return FilterType.NONE, ""
    return FilterType.TAG, expression


def check_attempt_id(attempt_id: str) -> None:
    if (size := len(attempt_id.encode())) > ATTEMPT_ID_LIMIT:
        raise Refused(
            Code.BAD_REQUEST,
            f"attempt_id of {size} bytes is over the limit of {ATTEMPT_ID_LIMIT} bytes",
        )


def check_stored_size(size: int, limits: MessageSettings) -> None:
    """Raise when topic, headers and system properties take more than is put aside for them."""
    if size > limits.largest_bytes:
        raise Refused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"message of {size} bytes with all its properties is over the limit of "
            f"{limits.largest_bytes} bytes (message.max_body_bytes + "
            "message.max_properties_bytes + 4 KiB)",
        )


def common_code(codes: Sequence[int]) -> int:
    """The code of a reply with several entries: theirs when they agree."""
    return codes[0] if len(set(codes)) == 1 else Code.MULTIPLE_RESULTS


def _check_body(size: int, limit: int) -> None:
    if size == 0:
        raise Refused(Code.MESSAGE_BODY_EMPTY, "the message body is empty")
    if size > limit:
        raise Refused(
            Code.MESSAGE_BODY_TOO_LARGE,
            f"message body of {size} bytes is over the limit of {limit} bytes "
            "(message.max_body_bytes)",
        )


def _check_properties_count(properties: Mapping[str, str], limit: int) -> None:
    if len(properties) > limit:
        raise Refused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"{len(properties)} user properties are over the limit of {limit} "
            "(message.max_properties)",
        )


def _check_properties(properties: Mapping[str, str], limit: int) -> None:
    _check_properties_count(properties, limit)
    for key, value in properties.items():
        if key in RESERVED_KEYS:
            raise _bad_property(f"user property {key!r} is a name that the system uses")
        if CONTROL.search(key):
            raise _bad_property(f"user property {key!r} has a control character in its name")
        if CONTROL.search(value):
            raise _bad_property(f"user property {key!r} has a control character in its value")


def _check_properties_bytes(facts: MessageFacts, limit: int) -> None:
    texts = [*facts.user_properties, *facts.user_properties.values(), facts.tag, *facts.keys]
    size = len("".join(texts).encode())
    if size > limit:
        raise Refused(
            Code.MESSAGE_PROPERTIES_TOO_LARGE,
            f"user properties, tag and keys of {size} bytes are over the limit of {limit} bytes "
            "(message.max_properties_bytes)",
        )


def _check_tag(tag: str) -> None:
    if not tag:
        return
    if _is_blank(tag):
        raise Refused(Code.ILLEGAL_MESSAGE_TAG, "the tag is only white space")
    if "|" in tag:
        raise Refused(Code.ILLEGAL_MESSAGE_TAG, f"tag {tag!r} has a '|', which joins tags")
    if CONTROL.search(tag):
        raise Refused(Code.ILLEGAL_MESSAGE_TAG, f"tag {tag!r} has a control character")
    _check_selectable(tag)


def _check_selectable(tag: str) -> None:
    """A filter names it as it is: filters are trimmed, and `*` among them means every tag."""
    if tag != tag.strip():
        raise Refused(
            Code.ILLEGAL_MESSAGE_TAG,
            f"tag {tag!r} begins or ends with white space: no filter can select it",
        )
    if tag == EVERY_TAG:
        raise Refused(
            Code.ILLEGAL_MESSAGE_TAG, "tag '*': in a filter it means every tag, so none selects it"
        )


def _check_key(key: str) -> None:
    if not key:
        return
    if _is_blank(key):
        raise Refused(Code.ILLEGAL_MESSAGE_KEY, "a message key is only white space")
    if CONTROL.search(key):
        raise Refused(Code.ILLEGAL_MESSAGE_KEY, f"message key {key!r} has a control character")


def _check_message_id(message_id: str) -> None:
    if _is_blank(message_id):
        raise Refused(Code.ILLEGAL_MESSAGE_ID, "the message id is empty")
    if (size := len(message_id.encode())) > MESSAGE_ID_LIMIT:
        raise Refused(
            Code.ILLEGAL_MESSAGE_ID,
            f"message id of {size} bytes is over the limit of {MESSAGE_ID_LIMIT} bytes",
        )
    if CONTROL.search(message_id):
        raise Refused(Code.ILLEGAL_MESSAGE_ID, f"message id {message_id!r} has a control character")


def _check_message_group(group: str) -> None:
    if not group:
        return
    if _is_blank(group):
        raise Refused(Code.ILLEGAL_MESSAGE_GROUP, "the message group is only white space")
    if (size := len(group.encode())) >= MESSAGE_GROUP_LIMIT:
        raise Refused(
            Code.ILLEGAL_MESSAGE_GROUP,
            f"message group of {size} bytes is over the limit of {MESSAGE_GROUP_LIMIT - 1} bytes",
        )
    if CONTROL.search(group):
        raise Refused(
            Code.ILLEGAL_MESSAGE_GROUP, f"message group {group!r} has a control character"
        )


def _check_alone(facts: MessageFacts, kind: MessageType, what: str) -> None:
    """What chooses the queue by rules of its own goes with nothing else that does, nor with a time
    at which the message is to come."""
    others = {
        "a priority": bool(facts.priority) and kind is MessageType.LITE,
        "a transaction": kind is MessageType.TRANSACTION,
        "a message group": bool(facts.message_group),
        "a delivery time": _is_delayed(facts),
    }
    if names := [name for name, given in others.items() if given]:
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"a message has {what} or {' and '.join(names)}, not both",
        )


def _check_invisible(given_ms: int, low_ms: int, setting: str, limits: PopSettings) -> None:
    if given_ms < low_ms:
        where = f" ({setting})" if setting else ""
        raise Refused(
            Code.ILLEGAL_INVISIBLE_TIME,
            f"invisible time of {given_ms} ms is under the limit of {low_ms} ms{where}",
        )
    if given_ms > limits.invisible_max_ms:
        raise Refused(
            Code.ILLEGAL_INVISIBLE_TIME,
            f"invisible time of {format_duration(given_ms)} is over the limit of "
            f"{format_duration(limits.invisible_max_ms)} (pop.invisible_max_ms)",
        )


def _bad_property(sentence: str) -> PopmqError:
    return Refused(Code.ILLEGAL_MESSAGE_PROPERTY_KEY, sentence)


def _is_blank(text: str) -> bool:
    return not text.strip()
