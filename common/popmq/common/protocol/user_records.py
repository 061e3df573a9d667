"""Users as bodies of META records and of frames, and back (`wire/meta.proto`)."""

from popmq.common.users import PolicyEntry, SealedSecret, UserConfig, quotas_of
from popmq.common.wire.meta_pb2 import PolicyRecord, SecretRecord, UserRecord


def user_record(user: UserConfig) -> UserRecord:
    return UserRecord(
        name=user.name,
        is_super=user.is_super,
        disabled=user.disabled,
        secrets=map(secret_record, user.secrets),
        entries=map(policy_record, user.entries),
        networks=user.networks,
        clock_offsets=user.clock_offsets,
        learns_clock=user.learns_clock,
        version=user.version,
        quotas=user.quotas.limits(),
    )


def user_of(record: UserRecord) -> UserConfig:
    return UserConfig(
        record.name,
        record.is_super,
        record.disabled,
        tuple(map(secret_of, record.secrets)),
        tuple(map(policy_of, record.entries)),
        tuple(record.networks),
        tuple(record.clock_offsets),
        record.learns_clock,
        record.version,
        quotas_of(record.quotas),
    )


def secret_record(secret: SealedSecret) -> SecretRecord:
    return SecretRecord(
        id=secret.id,
        key=secret.key,
        nonce=secret.nonce,
        sealed=secret.sealed,
        until_ms=secret.until_ms,
    )


def secret_of(record: SecretRecord) -> SealedSecret:
    return SealedSecret(record.id, record.key, record.nonce, record.sealed, record.until_ms)


def policy_record(entry: PolicyEntry) -> PolicyRecord:
    return PolicyRecord(
        resources=entry.resources,
        actions=entry.actions,
        networks=entry.networks,
        deny=entry.deny,
    )


def policy_of(record: PolicyRecord) -> PolicyEntry:
    return PolicyEntry(
        tuple(record.resources), tuple(record.actions), tuple(record.networks), record.deny
    )
