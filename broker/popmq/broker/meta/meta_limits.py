"""What a topic and a consumer group may be; every refusal names the value and the limit."""

from popmq.common.errors import Code, Refused
from popmq.common.topics import (
    Durability,
    GroupType,
    MessageType,
    SubscriptionGroup,
    TopicConfig,
    is_broker_name,
)

ATTEMPT_LIMIT = 10_000
BACK_OFF_STEPS_LIMIT = 64
BACK_OFF_LIMIT_MS = 12 * 3_600_000
LITE_TTL_MS = (1_000, 30 * 24 * 3_600_000)  # how long lite topics live without a message


def check_topic(topic: TopicConfig, *, longest_ms: int) -> None:
    """`longest_ms` is the retention of the store. Raises BAD_REQUEST."""
    limit = topic.kind.queue_limit
    if not 1 <= topic.queues <= limit:
        raise Refused(
            Code.BAD_REQUEST,
            f"topic {topic.name} with {topic.queues} queues: it takes 1 to {limit}",
        )
    lite = topic.kind.has_lite_topics
    if topic.lite_ttl_ms and not (lite and LITE_TTL_MS[0] <= topic.lite_ttl_ms <= LITE_TTL_MS[1]):
        raise Refused(
            Code.BAD_REQUEST,
            f"topic {topic.name} with lite topics that live {topic.lite_ttl_ms} ms: one of "
            f"type LITE takes {LITE_TTL_MS[0]} to {LITE_TTL_MS[1]} ms, and others none",
        )
    for name in topic.brokers:
        if not is_broker_name(name):
            raise Refused(
                Code.BAD_REQUEST,
                f"topic {topic.name} over broker group {name[:100]!r}: a broker group's name is 1 "
                "to 100 letters, digits, _ or -",
            )
    if not 0 <= topic.retention_ms <= longest_ms:
        raise Refused(
            Code.BAD_REQUEST,
            f"topic {topic.name} with a retention of {topic.retention_ms} ms: it takes up to "
            f"{longest_ms} ms, that of the store (store.retention_hours)",
        )
    if topic.type is MessageType.TRANSACTION and topic.durability is Durability.MEMORY:
        raise Refused(
            Code.BAD_REQUEST,
            f"topic {topic.name} is TRANSACTION: its durability is disk, because a transaction "
            "that was committed must not be lost",
        )


def check_group(group: SubscriptionGroup) -> None:
    """Raises BAD_REQUEST."""
    if not 1 <= group.max_attempts <= ATTEMPT_LIMIT:
        raise Refused(
            Code.BAD_REQUEST,
            f"max_attempts = {group.max_attempts}: it takes 1 to {ATTEMPT_LIMIT}",
        )
    if group.buffered and group.type is GroupType.FIFO:
        raise Refused(
            Code.BAD_REQUEST,
            f"consumer group {group.name} is FIFO: its check points cannot be buffered, because a "
            "crash would deliver messages out of order",
        )
    steps = group.back_off_ms
    if not 1 <= len(steps) <= BACK_OFF_STEPS_LIMIT:
        raise Refused(
            Code.BAD_REQUEST,
            f"a back-off of {len(steps)} steps: it takes 1 to {BACK_OFF_STEPS_LIMIT}",
        )
    for step in steps:
        if not 0 <= step <= BACK_OFF_LIMIT_MS:
            raise Refused(
                Code.BAD_REQUEST,
                f"a back-off step of {step} ms: it takes 0 to {BACK_OFF_LIMIT_MS} ms",
            )
    if group.exponential is not None:
        group.exponential.check()
