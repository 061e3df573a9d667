"""Topics, groups, the receipt key and the store id: all of them records of the log (D1).

The tables are a function of the META records, applied in log order; ids only grow, so a name
that was deleted and made again is another topic and old records never reach it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from popmq.broker.store.message_store import MessageStore
from popmq.broker.store.snapshot import entry_hash
from popmq.common import topics
from popmq.common.back_off import ExponentialBackOff
from popmq.common.errors import Code, GroupNotFound, Refused, StoreDamaged, TopicNotFound
from popmq.common.message import RecordKind
from popmq.common.topics import (
    CheckPoints,
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
    LastIds,
    MetaRecord,
    TopicRecord,
)

META_VERSION = 1
QUEUE_LIMIT = 1024
ATTEMPT_LIMIT = 10_000
BACK_OFF_STEPS_LIMIT = 64
BACK_OFF_LIMIT_MS = 12 * 3_600_000
TOPIC_LIMIT = 50_000
GROUP_LIMIT = 50_000
_PER_PIECE = 128


class Registry:
    table_number = 1

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._topics: dict[str, TopicConfig] = {}
        self._topics_by_id: dict[int, TopicConfig] = {}
        self._groups: dict[str, SubscriptionGroup] = {}
        self._groups_by_id: dict[int, SubscriptionGroup] = {}
        self._last_topic_id = topics.FIRST_USER_TOPIC_ID - 1
        self._last_group_id = 0
        self.receipt_key = b""
        self.log_id = ""
        # Told after a topic or a group is gone, so that those above drop what they hold of it.
        self.on_topic_gone: Callable[[TopicConfig], None] = lambda topic: None
        self.on_group_gone: Callable[[SubscriptionGroup], None] = lambda group: None

    # -- look up

    def topic(self, name: str) -> TopicConfig:
        found = self._topics.get(name)
        if found is None:
            raise TopicNotFound(
                f"topic {name} does not exist: create it with `popmq topic create {name}`, or "
                "set topic.auto_create"
            )
        return found

    def find_topic(self, name: str) -> TopicConfig | None:
        return self._topics.get(name)

    def topic_by_id(self, topic_id: int) -> TopicConfig | None:
        return self._topics_by_id.get(topic_id)

    def group(self, name: str) -> SubscriptionGroup:
        found = self._groups.get(name)
        if found is None:
            raise GroupNotFound(
                f"consumer group {name} does not exist: create it with "
                f"`popmq group create {name}`, or set group.auto_create"
            )
        return found

    def find_group(self, name: str) -> SubscriptionGroup | None:
        return self._groups.get(name)

    def group_by_id(self, group_id: int) -> SubscriptionGroup | None:
        return self._groups_by_id.get(group_id)

    def topics(self) -> Iterator[TopicConfig]:
        return iter(sorted(self._topics.values(), key=lambda topic: topic.name))

    def groups(self) -> Iterator[SubscriptionGroup]:
        return iter(sorted(self._groups.values(), key=lambda group: group.name))

    # -- change

    def create_topic(self, wanted: TopicConfig, *, internal: bool = False) -> TopicConfig:
        """Write the topic with a new id. Raises BAD_REQUEST when the name is taken.

        `internal` allows the names of retry and dead-letter topics.
        """
        if not internal:
            topics.check_topic_name(wanted.name)
        if wanted.name in self._topics:
            raise Refused(Code.BAD_REQUEST, f"topic {wanted.name} exists already")
        if len(self._topics) >= TOPIC_LIMIT:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"there are {TOPIC_LIMIT} topics, which is the limit; delete some",
            )
        made = replace(wanted, id=self._last_topic_id + 1)
        self._check_topic(made)
        self._write(MetaRecord(version=META_VERSION, topic=_topic_record(made)))
        return made

    def internal_topic(self, name: str) -> TopicConfig:
        """A retry or dead-letter topic, made when it is first needed: one queue."""
        found = self.find_topic(name)
        if found is not None:
            return found
        wanted = TopicConfig(0, name, queues=1, type=MessageType.MIXED)
        return self.create_topic(wanted, internal=True)

    def alter_topic(self, wanted: TopicConfig) -> TopicConfig:
        """Change queues or permission. The type and a smaller number of queues are refused."""
        old = self.topic(wanted.name)
        new = replace(wanted, id=old.id)
        self._check_topic(new)
        if new.type is not old.type:
            raise Refused(
                Code.BAD_REQUEST,
                f"the type of topic {old.name} is {old.type.name} and cannot change",
            )
        if new.queues < old.queues or (new.queues != old.queues and old.type is MessageType.FIFO):
            raise Refused(
                Code.BAD_REQUEST,
                f"topic {old.name} has {old.queues} queues: a number cannot shrink, and that of "
                "a FIFO topic is fixed at creation",
            )
        self._write(MetaRecord(version=META_VERSION, topic=_topic_record(new)))
        return new

    def delete_topic(self, name: str) -> TopicConfig:
        """Delete the topic with its messages, and what groups have of it in topics of their own."""
        topics.check_readable_topic_name(name)
        gone = self.topic(name)
        copies = [t for t in self._topics.values() if t.name.endswith(f"+{name}")]
        for topic in (gone, *(t for t in copies if topics.is_group_owned(t.name))):
            self._write(MetaRecord(version=META_VERSION, topic_deleted=topic.id))
        return gone

    def create_group(self, wanted: SubscriptionGroup) -> SubscriptionGroup:
        topics.check_group_name(wanted.name)
        if wanted.name in self._groups:
            raise Refused(Code.BAD_REQUEST, f"consumer group {wanted.name} exists already")
        if len(self._groups) >= GROUP_LIMIT:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"there are {GROUP_LIMIT} consumer groups, which is the limit; delete some",
            )
        made = replace(wanted, id=self._last_group_id + 1)
        _check_group(made)
        self._write(MetaRecord(version=META_VERSION, group=_group_record(made)))
        return made

    def alter_group(self, wanted: SubscriptionGroup) -> SubscriptionGroup:
        old = self.group(wanted.name)
        new = replace(wanted, id=old.id)
        _check_group(new)
        if new.type is not old.type:
            raise Refused(
                Code.BAD_REQUEST,
                f"the type of consumer group {old.name} is {old.type.name} and cannot change",
            )
        self._write(MetaRecord(version=META_VERSION, group=_group_record(new)))
        return new

    def delete_group(self, name: str) -> SubscriptionGroup:
        """Delete the group, its progress, and its topics. Its dead letters stay."""
        gone = self.group(name)
        own = (topics.retry_topic(name, ""), topics.parked_topic(name, ""))
        for topic in [t for t in self._topics.values() if t.name.startswith(own)]:
            self._write(MetaRecord(version=META_VERSION, topic_deleted=topic.id))
        self._write(MetaRecord(version=META_VERSION, group_deleted=gone.id))
        return gone

    def set_receipt_key(self, key: bytes) -> None:
        self._write(MetaRecord(version=META_VERSION, receipt_key=key))

    def set_log_id(self, log_id: str) -> None:
        self._write(MetaRecord(version=META_VERSION, store_id=log_id))

    def _check_topic(self, topic: TopicConfig) -> None:
        if not 1 <= topic.queues <= QUEUE_LIMIT:
            raise Refused(
                Code.BAD_REQUEST,
                f"topic {topic.name} with {topic.queues} queues: it takes 1 to {QUEUE_LIMIT}",
            )
        longest_ms = self._store.retention_ms
        if not 0 <= topic.retention_ms <= longest_ms:
            raise Refused(
                Code.BAD_REQUEST,
                f"topic {topic.name} with a retention of {topic.retention_ms} ms: it takes up to "
                f"{longest_ms} ms, that of the store (store.retention_hours)",
            )

    # -- apply

    def apply(self, body: bytes) -> None:
        """One META record, in log order."""
        record = MetaRecord.FromString(body)
        if record.version != META_VERSION:
            raise StoreDamaged(
                f"a record of rmq_sys_meta has version {record.version}, this build reads "
                f"{META_VERSION}: start a newer popmq"
            )
        match record.WhichOneof("change"):
            case "topic":
                self._put_topic(_topic(record.topic))
            case "topic_deleted":
                self._drop_topic(record.topic_deleted)
            case "group":
                group = _group(record.group)
                self._groups[group.name] = self._groups_by_id[group.id] = group
                self._last_group_id = max(self._last_group_id, group.id)
            case "group_deleted":
                gone = self._groups_by_id.pop(record.group_deleted, None)
                if gone is not None:
                    del self._groups[gone.name]
                    self.on_group_gone(gone)
            case "receipt_key":
                self.receipt_key = record.receipt_key
            case "store_id":
                self.log_id = record.store_id
            case "last_ids":
                self._last_topic_id = max(self._last_topic_id, record.last_ids.topic)
                self._last_group_id = max(self._last_group_id, record.last_ids.group)

    # -- snapshots (store/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        version = META_VERSION
        last_ids = LastIds(topic=self._last_topic_id, group=self._last_group_id)
        records = [
            MetaRecord(version=version, last_ids=last_ids),
            MetaRecord(version=version, receipt_key=self.receipt_key),
            MetaRecord(version=version, store_id=self.log_id),
        ]
        topics_now, groups_now = list(self.topics()), list(self.groups())
        return self._pieces(records, topics_now, groups_now)

    def restore(self, content: bytes) -> None:
        at = 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 4], "big")
            self.apply(content[at + 4 : at + 4 + size])
            at += 4 + size

    def restored(self) -> None:
        return

    def _pieces(
        self,
        records: list[MetaRecord],
        topics_now: list[TopicConfig],
        groups_now: list[SubscriptionGroup],
    ) -> Iterator[tuple[bytes, int]]:
        yield _piece(records)
        for at in range(0, len(topics_now), _PER_PIECE):
            part = topics_now[at : at + _PER_PIECE]
            yield _piece([MetaRecord(version=META_VERSION, topic=_topic_record(t)) for t in part])
        for at in range(0, len(groups_now), _PER_PIECE):
            some = groups_now[at : at + _PER_PIECE]
            yield _piece([MetaRecord(version=META_VERSION, group=_group_record(g)) for g in some])

    def _write(self, record: MetaRecord) -> None:
        body = record.SerializeToString()
        self._store.put_record(
            RecordKind.META, topic_id=topics.META_TOPIC_ID, queue_id=0, body=body
        )
        self.apply(body)

    def _put_topic(self, topic: TopicConfig) -> None:
        known = topic.id in self._topics_by_id
        self._topics[topic.name] = self._topics_by_id[topic.id] = topic
        self._last_topic_id = max(self._last_topic_id, topic.id)
        if not known:
            self._store.add_topic(topic.id, topic.name)

    def _drop_topic(self, topic_id: int) -> None:
        gone = self._topics_by_id.pop(topic_id, None)
        if gone is not None:
            del self._topics[gone.name]
            self._store.dispatch.drop_topic(topic_id)
            self.on_topic_gone(gone)


def _piece(records: list[MetaRecord]) -> tuple[bytes, int]:
    bodies = [record.SerializeToString(deterministic=True) for record in records]
    content = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    return content, sum(map(entry_hash, bodies))


def _check_group(group: SubscriptionGroup) -> None:
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


def _topic_record(topic: TopicConfig) -> TopicRecord:
    return TopicRecord(
        id=topic.id,
        name=topic.name,
        queues=topic.queues,
        type=topic.type,
        permission=topic.permission,
        retention_ms=topic.retention_ms,
    )


def _topic(record: TopicRecord) -> TopicConfig:
    return TopicConfig(
        record.id,
        record.name,
        record.queues,
        MessageType(record.type),
        Permission(record.permission),
        record.retention_ms,
    )


def _group_record(group: SubscriptionGroup) -> GroupRecord:
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


def _group(record: GroupRecord) -> SubscriptionGroup:
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
