"""Topics and groups as bodies of META records, and back (`wire/meta.proto`)."""

from collections.abc import Iterable

from popmq.common.back_off import ExponentialBackOff
from popmq.common.record.signing_keys import SigningKey
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
from popmq.common.wire.meta_pb2 import (
    ExponentialRecord,
    GroupRecord,
    SigningKeyRecord,
    SigningKeysRecord,
    TopicRecord,
)

META_VERSION = 1


def keys_record(keys: Iterable[SigningKey]) -> SigningKeysRecord:
    return SigningKeysRecord(
        keys=[SigningKeyRecord(id=key.id, secret=key.secret, until_ms=key.until_ms) for key in keys]
    )


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
        created_by=topic.created_by,
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
        record.created_by,
    )


def group_record(group: SubscriptionGroup) -> GroupRecord:
    back_off = group.exponential
    exponential = None
    if back_off is not None:
        exponential = ExponentialRecord(
            initial_ms=back_off.initial_ms,
            max_ms=back_off.max_ms,
            multiplier_milli=back_off.multiplier_milli,
            jitter_percent=back_off.jitter_percent,
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
        auto_created=group.auto_created,
        created_by=group.created_by,
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
        record.auto_created,
        record.created_by,
    )


def _exponential(record: ExponentialRecord) -> ExponentialBackOff:
    return ExponentialBackOff(
        record.initial_ms, record.max_ms, record.multiplier_milli, record.jitter_percent
    )
