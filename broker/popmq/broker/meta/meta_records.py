"""Topics and groups as bodies of META records, and back (`wire/meta.proto`)."""

from popmq.common.back_off import ExponentialBackOff
from popmq.common.topics import (
    CheckPoints,
    Durability,
    GroupType,
    MessageType,
    Permission,
    StartAt,
    SubscriptionGroup,
    TopicConfig,
)
from popmq.common.wire.meta_pb2 import ExponentialRecord, GroupRecord, TopicRecord


def topic_record(topic: TopicConfig) -> TopicRecord:
    return TopicRecord(
        id=topic.id,
        name=topic.name,
        queues=topic.queues,
        type=topic.type,
        permission=topic.permission,
        retention_ms=topic.retention_ms,
        brokers=topic.brokers,
        durability=topic.durability,
        lite_ttl_ms=topic.lite_ttl_ms,
    )


def topic_of(record: TopicRecord) -> TopicConfig:
    return TopicConfig(
        record.id,
        record.name,
        record.queues,
        MessageType(record.type),
        Permission(record.permission),
        record.retention_ms,
        tuple(record.brokers),
        Durability(record.durability or Durability.DISK),
        record.lite_ttl_ms,
    )


def group_record(group: SubscriptionGroup) -> GroupRecord:
    told = group.exponential
    exponential = None
    if told is not None:
        exponential = ExponentialRecord(
            initial_ms=told.initial_ms,
            max_ms=told.max_ms,
            multiplier_milli=told.multiplier_milli,
            jitter_percent=told.jitter_percent,
        )
    return GroupRecord(
        id=group.id,
        name=group.name,
        type=group.type,
        max_attempts=group.max_attempts,
        back_off_ms=group.back_off_ms,
        start_at=group.start_at,
        exponential=exponential,
        check_points=group.check_points,
    )


def group_of(record: GroupRecord) -> SubscriptionGroup:
    return SubscriptionGroup(
        record.id,
        record.name,
        GroupType(record.type),
        record.max_attempts,
        tuple(record.back_off_ms),
        StartAt(record.start_at),
        CheckPoints(record.check_points or CheckPoints.DURABLE),
        _exponential(record.exponential) if record.HasField("exponential") else None,
    )


def _exponential(record: ExponentialRecord) -> ExponentialBackOff:
    return ExponentialBackOff(
        record.initial_ms, record.max_ms, record.multiplier_milli, record.jitter_percent
    )
