"""Topics, groups, users, the receipt key and the store id: all of them records of the log (D1).

MetadataTable is a function of the META records, applied in log order; Registry writes them.  Ids
only grow, so a name that was deleted and made again is another topic and old records never reach
it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from popmq.broker.log.snapshot_table import Row, SnapshotTable, entry_hash
from popmq.broker.meta.lite_topics import LiteTopicTable
from popmq.broker.meta.meta_limits import check_group, check_topic
from popmq.broker.meta.meta_records import (
    META_VERSION,
    group_of,
    group_record,
    keys_record,
    topic_of,
    topic_record,
)
from popmq.broker.meta.user_table import UserTable
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.errors import Code, GroupNotFound, Refused, StoreDamaged
from popmq.common.protocol.user_records import user_record
from popmq.common.record.message import RecordKind
from popmq.common.record.signing_keys import SigningKey, SigningKeys
from popmq.common.topics import (
    MessageType,
    SubscriptionGroup,
    TopicConfig,
)
from popmq.common.users import AuthMode, Quotas, UserConfig, check_user
from popmq.common.wire.meta_pb2 import AuthRecord, Followed, LastIds, MetaRecord, UserRecord

TOPIC_LIMIT = 50_000
GROUP_LIMIT = 50_000
DELETED_KEPT = 1_000  # names
WANTED_LIMIT = 64  # names that are asked of the owner at once
_PER_PIECE = 128
_NO_QUOTAS = Quotas()
# Fields that came later than the first version, which replicas without them drop.
_NOT_HASHED = (
    ("followed", "epoch"),
    ("group", "auto_created"),
    ("group", "created_by"),
    ("topic", "created_by"),
    ("user", "quotas"),
)


class DeletionListener(Protocol):
    """Drops what it holds of a topic or a group, after that is gone."""

    def on_topic_deleted(self, topic: TopicConfig) -> None: ...

    def on_group_deleted(self, group: SubscriptionGroup) -> None: ...


class MetadataTable(SnapshotTable):
    table_number = 1

    def __init__(
        self, store: MessageStore, listener: DeletionListener, *, queue_limit: int
    ) -> None:
        """`queue_limit` is for all topics together."""
        self._store = store
        self._queue_limit = queue_limit
        self._queues = 0  # of all topics
        self.lites = LiteTopicTable(store)
        self.users = UserTable()
        self._topics: dict[str, TopicConfig] = {}
        self._topics_by_id: dict[int, TopicConfig] = {}
        self._groups: dict[str, SubscriptionGroup] = {}
        self._groups_by_id: dict[int, SubscriptionGroup] = {}
        self.auto_created: set[int] = set()  # ids of groups that receives made
        self._last_topic_id = topics.FIRST_USER_TOPIC_ID - 1
        self._last_local_id = topics.FIRST_LOCAL_TOPIC_ID - 1
        self._last_group_id = 0
        self.changes = 0  # of topics and groups, ever
        self.owner = ""  # the broker group whose topics and groups these are; empty: this one
        # Its epoch and its `changes` when they were copied last.
        self.owner_epoch = self.owner_version = 0
        self._deleted_topics: dict[int, str] = {}  # names, since the start; the newest are kept
        self.missing_topics: set[str] = set()  # asked for here, and perhaps the owner makes them
        self.missing_groups: dict[str, bool] = {}  # and whether they are to be FIFO
        self.draining = False  # no new messages
        self._restored_changes = 0
        self.signing_keys = SigningKeys(store.log_ms)
        self.log_id = ""
        self._listener = listener

    # -- look up

    def topic(self, name: str) -> TopicConfig:
        topic = self._topics.get(name)
        if topic is None:
            raise topics.topic_not_found(name, self._groups)
        return topic

    def find_topic(self, name: str) -> TopicConfig | None:
        return self._topics.get(name)

    def topic_by_id(self, topic_id: int) -> TopicConfig | None:
        return self._topics_by_id.get(topic_id)

    def topic_label(self, topic_id: int) -> str:
        """For people: its name; of a deleted one the name that it had, as far as it is known."""
        topic = self._topics_by_id.get(topic_id)
        if topic is not None:
            return topic.name
        name = self._deleted_topics.get(topic_id)
        return f"{name} (deleted)" if name else f"(deleted, topic id {topic_id})"

    def group(self, name: str) -> SubscriptionGroup:
        group = self._groups.get(name)
        if group is None:
            raise GroupNotFound(
                f"consumer group {name} does not exist: create it with "
                f"`popmq group create {name}`, or set group.auto_create"
            )
        return group

    def find_group(self, name: str) -> SubscriptionGroup | None:
        return self._groups.get(name)

    def group_by_id(self, group_id: int) -> SubscriptionGroup | None:
        return self._groups_by_id.get(group_id)

    def queue_ids(self, topic: TopicConfig) -> Sequence[int]:
        """The topic's queues; of a LITE topic those of its lite topics."""
        if topic.type is MessageType.LITE:
            return self.lites.queue_ids(topic.id)
        return range(topic.queues)

    def topics(self) -> Iterator[TopicConfig]:
        return iter(sorted(self._topics.values(), key=lambda topic: topic.name))

    def groups(self) -> Iterator[SubscriptionGroup]:
        return iter(sorted(self._groups.values(), key=lambda group: group.name))

    # -- copies of another broker group's

    @property
    def meta_state(self) -> tuple[int, int]:
        """Which state of the owner's topics and groups this is: a higher one is newer."""
        if self.owner:
            return self.owner_epoch, self.owner_version
        return self._store.epoch, self.changes

    @property
    def has_deleted(self) -> bool:
        """Whether a topic or a group of this group's own was ever deleted."""
        given = self._last_topic_id - topics.FIRST_USER_TOPIC_ID + 1 + self._last_group_id
        kept = sum(topic_id < topics.FIRST_LOCAL_TOPIC_ID for topic_id in self._topics_by_id)
        return given > kept + len(self._groups_by_id)

    def request_topic_copy(self, name: str) -> None:
        if len(self.missing_topics) < WANTED_LIMIT:
            self.missing_topics.add(name)

    def request_group_copy(self, name: str, *, fifo: bool = False) -> None:
        if len(self.missing_groups) < WANTED_LIMIT:
            self.missing_groups[name] = fifo

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
                self.changes += 1
                self._put_topic(topic_of(record.topic))
            case "topic_deleted":
                self.changes += 1
                self._drop_topic(record.topic_deleted)
            case "group":
                self.changes += 1
                group = group_of(record.group)
                self._groups[group.name] = self._groups_by_id[group.id] = group
                self.auto_created.discard(group.id)
                if group.auto_created:
                    self.auto_created.add(group.id)
                self._last_group_id = max(self._last_group_id, group.id)
            case "group_deleted":
                self.changes += 1
                gone = self._groups_by_id.pop(record.group_deleted, None)
                if gone is not None:
                    self.auto_created.discard(gone.id)
                    del self._groups[gone.name]
                    self._listener.on_group_deleted(gone)
            case "receipt_key":
                first = [SigningKey(0, record.receipt_key)] if record.receipt_key else []
                self.signing_keys.replace(first)
            case "signing_keys":
                self.signing_keys.replace(
                    SigningKey(key.id, key.secret, key.until_ms) for key in record.signing_keys.keys
                )
            case "store_id":
                self.log_id = record.store_id
            case "last_ids":
                self._last_topic_id = max(self._last_topic_id, record.last_ids.topic)
                self._last_group_id = max(self._last_group_id, record.last_ids.group)
                self._last_local_id = max(self._last_local_id, record.last_ids.local_topic)
                self._restored_changes = record.last_ids.changes
            case "followed":
                self.owner = record.followed.owner
                self.owner_epoch = record.followed.epoch
                self.owner_version = record.followed.version
            case "draining":
                self.draining = record.draining
            case "user" | "user_deleted" | "auth":
                self.users.apply(record)

    # -- snapshots (persistence/snapshot.py)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        version = META_VERSION
        last_ids = LastIds(
            topic=self._last_topic_id,
            group=self._last_group_id,
            local_topic=self._last_local_id,
            changes=self.changes,
        )
        followed = Followed(owner=self.owner, version=self.owner_version, epoch=self.owner_epoch)
        oldest = next(iter(self.signing_keys), SigningKey(0, b""))
        records = [
            MetaRecord(version=version, last_ids=last_ids),
            MetaRecord(version=version, receipt_key=oldest.secret),
            MetaRecord(version=version, store_id=self.log_id),
            MetaRecord(version=version, followed=followed),
            MetaRecord(version=version, draining=self.draining),
        ]
        if self.signing_keys.newest.id or oldest.id:  # they were rotated
            records.append(MetaRecord(version=version, signing_keys=keys_record(self.signing_keys)))
        topics_now, groups_now = list(self.topics()), list(self.groups())
        return _pieces(records, topics_now, groups_now, self.users.snapshot_records())

    def restore(self, content: bytes) -> None:
        at = 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 4], "big")
            self.apply(content[at + 4 : at + 4 + size])
            at += 4 + size

    def restored(self) -> None:
        self.changes = self._restored_changes

    def _put_topic(self, topic: TopicConfig) -> None:
        known = self._topics_by_id.get(topic.id)
        self._queues += topic.queues - (known.queues if known is not None else 0)
        self._topics[topic.name] = self._topics_by_id[topic.id] = topic
        if topic.id >= topics.FIRST_LOCAL_TOPIC_ID:
            self._last_local_id = max(self._last_local_id, topic.id)
        else:
            self._last_topic_id = max(self._last_topic_id, topic.id)
        if known is None:
            self._store.add_topic(topic.id, topic.name)

    def _drop_topic(self, topic_id: int) -> None:
        gone = self._topics_by_id.pop(topic_id, None)
        if gone is not None:
            self._queues -= gone.queues
            del self._topics[gone.name]
            self._store.dispatch.drop_topic(topic_id)
            self.lites.drop_topic(topic_id)
            if len(self._deleted_topics) >= DELETED_KEPT:
                del self._deleted_topics[next(iter(self._deleted_topics))]
            self._deleted_topics[topic_id] = gone.name
            self._listener.on_topic_deleted(gone)


class Registry(MetadataTable):
    """A change is checked, written and applied."""

    def create_topic(self, requested: TopicConfig, *, internal: bool = False) -> TopicConfig:
        """Write the topic with a new id. Raises BAD_REQUEST when the name is taken.

        `internal` allows the names of retry and dead-letter topics, and one more of them at the
        limit: what makes them is a message that comes back, which nobody could refuse.
        """
        if not internal:
            self._check_owned()
            topics.check_topic_name(requested.name)
        if requested.name in self._topics:
            raise Refused(Code.BAD_REQUEST, f"topic {requested.name} exists already")
        if not internal:
            topics.check_new_name(requested.name, "topic name", Code.ILLEGAL_TOPIC)
        if len(self._topics) >= TOPIC_LIMIT and not internal:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"there are {TOPIC_LIMIT} topics, which is the limit; delete some",
            )
        if not internal:
            self._check_queues(requested.queues)
            self._check_topic_quota(requested.created_by)
            self._check_queue_quota(requested.created_by, requested.queues)
        last_id = self._last_local_id if self.owner else self._last_topic_id
        topic = replace(requested, id=last_id + 1)
        check_topic(topic, longest_ms=self._store.retention_ms)
        self._write(MetaRecord(version=META_VERSION, topic=topic_record(topic)))
        return topic

    def internal_topic(self, name: str) -> TopicConfig:
        """A retry or dead-letter topic, made when it is first needed: one queue."""
        topic = self.find_topic(name)
        if topic is not None:
            return topic
        requested = TopicConfig(0, name, queues=1, type=MessageType.MIXED)
        return self.create_topic(requested, internal=True)

    def alter_topic(self, requested: TopicConfig) -> TopicConfig:
        """Change queues or permission. The type and a smaller number of queues are refused."""
        self._check_owned()
        old = self.topic(requested.name)
        new = replace(requested, id=old.id)
        check_topic(new, longest_ms=self._store.retention_ms)
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
        if new.queues > old.queues:
            self._check_queues(new.queues - old.queues)
            self._check_queue_quota(old.created_by, new.queues - old.queues)
        self._write(MetaRecord(version=META_VERSION, topic=topic_record(new)))
        return new

    def _check_queues(self, more: int) -> None:
        if self._queues + more > self._queue_limit:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"all topics have {self._queues} queues, {more} more are over the limit of "
                f"{self._queue_limit} (topic.queues_total); delete some topics",
            )

    def _quotas_of(self, user: str) -> Quotas:
        record = self.users.find(user) if user else None
        return record.quotas if record is not None else _NO_QUOTAS

    def _check_topic_quota(self, user: str) -> None:
        quotas = self._quotas_of(user)
        if quotas.topics:
            created = sum(topic.created_by == user for topic in self._topics.values())
            _check_quota(user, quotas, "topics", created, 1)

    def _check_queue_quota(self, user: str, more: int) -> None:
        quotas = self._quotas_of(user)
        if quotas.queues:
            own = (topic.queues for topic in self._topics.values() if topic.created_by == user)
            _check_quota(user, quotas, "queues", sum(own), more)

    def _check_group_quota(self, user: str) -> None:
        quotas = self._quotas_of(user)
        if quotas.groups:
            created = sum(group.created_by == user for group in self._groups.values())
            _check_quota(user, quotas, "groups", created, 1)

    def delete_topic(self, name: str) -> TopicConfig:
        """Delete the topic with its messages, and what groups have of it in topics of their own."""
        topics.check_readable_topic_name(name)
        if not topics.is_internal_topic(name):  # dead letters are this group's own
            self._check_owned()
        gone = self.topic(name)
        self.remove_topic(gone)
        return gone

    def remove_topic(self, gone: TopicConfig) -> None:
        """As `delete_topic`, wherever it is owned."""
        name = gone.name
        copies = [t for t in self._topics.values() if t.name.endswith(f"+{name}")]
        for topic in (gone, *(t for t in copies if topics.is_group_owned(t.name))):
            self._write(MetaRecord(version=META_VERSION, topic_deleted=topic.id))

    def create_group(self, requested: SubscriptionGroup) -> SubscriptionGroup:
        self._check_owned()
        topics.check_group_name(requested.name)
        if requested.name in self._groups:
            raise Refused(Code.BAD_REQUEST, f"consumer group {requested.name} exists already")
        topics.check_new_name(requested.name, "consumer group name", Code.ILLEGAL_CONSUMER_GROUP)
        if len(self._groups) >= GROUP_LIMIT:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"there are {GROUP_LIMIT} consumer groups, which is the limit; delete some",
            )
        self._check_group_quota(requested.created_by)
        group = replace(requested, id=self._last_group_id + 1)
        check_group(group)
        self._write(MetaRecord(version=META_VERSION, group=group_record(group)))
        return group

    def alter_group(self, requested: SubscriptionGroup) -> SubscriptionGroup:
        self._check_owned()
        old = self.group(requested.name)
        new = replace(requested, id=old.id, auto_created=False)
        check_group(new)
        if new.type is not old.type:
            raise Refused(
                Code.BAD_REQUEST,
                f"the type of consumer group {old.name} is {old.type.name} and cannot change: "
                "create a group of another name, or delete it with its offsets (`popmq group "
                f"delete {old.name}`) and create it again (`popmq group create {old.name} --type "
                f"{new.type.name.lower()}`)",
            )
        self._write(MetaRecord(version=META_VERSION, group=group_record(new)))
        return new

    def delete_group(self, name: str) -> SubscriptionGroup:
        """Delete the group, its progress, and its topics. Its dead letters stay."""
        self._check_owned()
        gone = self.group(name)
        self.remove_group(gone)
        return gone

    def remove_group(self, gone: SubscriptionGroup) -> None:
        """As `delete_group`, wherever it is owned."""
        name = gone.name
        own = (topics.retry_topic(name, ""), topics.parked_topic(name, ""))
        whole = topics.pull_retry_topic(name)
        named = [t for t in self._topics.values() if t.name.startswith(own) or t.name == whole]
        for topic in named:
            self._write(MetaRecord(version=META_VERSION, topic_deleted=topic.id))
        self._write(MetaRecord(version=META_VERSION, group_deleted=gone.id))

    def apply_owner_record(self, record: MetaRecord) -> None:
        """A topic or a group as its owner has it, with the owner's id."""
        self._write(record)

    def set_copied_version(self, owner: str, epoch: int, version: int) -> None:
        followed = Followed(owner=owner, epoch=epoch, version=version)
        self._write(MetaRecord(version=META_VERSION, followed=followed))

    def put_user(self, user: UserConfig) -> UserConfig:
        """Write the user as it is from now on, with the version of this change."""
        self.check_owns_users()
        if self.users.find(user.name) is None:
            self.users.check_room()
        written = replace(user, version=self.users.changes + 1)
        check_user(written)
        self._write(MetaRecord(version=META_VERSION, user=user_record(written)))
        return written

    def delete_user(self, name: str) -> UserConfig:
        self.check_owns_users()
        gone = self.users.user(name)
        self._write(MetaRecord(version=META_VERSION, user_deleted=name))
        return gone

    def set_auth_mode(self, mode: AuthMode) -> None:
        self.check_owns_users()
        self._write(MetaRecord(version=META_VERSION, auth=AuthRecord(mode=mode.value)))

    def check_owns_users(self) -> None:
        """Users are records of the owner of topics alone: proxies keep copies of their own."""
        if self.owner:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"users are owned by broker group {self.owner}: ask that one",
            )

    def set_draining(self, draining: bool) -> None:
        self._write(MetaRecord(version=META_VERSION, draining=draining))

    def set_receipt_key(self, secret: bytes) -> None:
        """The first one."""
        self._write(MetaRecord(version=META_VERSION, receipt_key=secret))

    def rotate_signing_key(self, secret: bytes, life_ms: int) -> None:
        """Sign with this secret from now on; the older ones verify for `life_ms` of log time."""
        keys = self.signing_keys.rotated(secret, life_ms)
        self._write(MetaRecord(version=META_VERSION, signing_keys=keys_record(keys)))

    def set_log_id(self, log_id: str) -> None:
        self._write(MetaRecord(version=META_VERSION, store_id=log_id))

    def _check_owned(self) -> None:
        if self.owner:
            raise Refused(
                Code.PRECONDITION_FAILED,
                f"topics and consumer groups are owned by broker group {self.owner}: ask that one",
            )

    def _write(self, record: MetaRecord) -> None:
        body = record.SerializeToString()
        self._store.put_record(
            RecordKind.META, topic_id=topics.META_TOPIC_ID, queue_id=0, body=body
        )
        self.apply(body)


def _check_quota(user: str, quotas: Quotas, name: str, used: int, more: int) -> None:
    if used + more > getattr(quotas, name):
        raise Refused(
            Code.TOO_MANY_REQUESTS,
            f"user {user} has created {used} {name}, and {more} more are over its quota "
            f"({quotas.setting(user, name)})",
        )


def owned_records(table: MetadataTable) -> list[MetaRecord]:
    """What other broker groups copy: all topics that users made, and all groups."""
    own = [topic for topic in table.topics() if not topics.is_internal_topic(topic.name)]
    return [
        *(MetaRecord(version=META_VERSION, topic=topic_record(topic)) for topic in own),
        *(MetaRecord(version=META_VERSION, group=group_record(group)) for group in table.groups()),
    ]


def _pieces(
    records: list[MetaRecord],
    topics_now: list[TopicConfig],
    groups_now: list[SubscriptionGroup],
    users_now: list[MetaRecord],
) -> Iterator[tuple[bytes, int]]:
    yield _piece(records)
    for at in range(0, len(users_now), _PER_PIECE):
        yield _piece(users_now[at : at + _PER_PIECE])
    for at in range(0, len(topics_now), _PER_PIECE):
        part = topics_now[at : at + _PER_PIECE]
        yield _piece([MetaRecord(version=META_VERSION, topic=topic_record(t)) for t in part])
    for at in range(0, len(groups_now), _PER_PIECE):
        some = groups_now[at : at + _PER_PIECE]
        yield _piece([MetaRecord(version=META_VERSION, group=group_record(g)) for g in some])


def _piece(records: list[MetaRecord]) -> tuple[bytes, int]:
    bodies = [record.SerializeToString(deterministic=True) for record in records]
    content = b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
    return content, sum(map(entry_hash, map(_hashed, records, bodies)))


def _hashed(record: MetaRecord, body: bytes) -> bytes:
    """What of a record counts in the state hash. A replica of a version without one of the fields
    _NOT_HASHED drops it, and must get the same hash."""
    change = record.WhichOneof("change")
    set_ = [
        field
        for message, field in _NOT_HASHED
        if message == change and getattr(getattr(record, message), field)
    ]
    if not set_:
        return body
    plain = MetaRecord()
    plain.CopyFrom(record)
    for field in set_:
        getattr(plain, str(change)).ClearField(field)
    return plain.SerializeToString(deterministic=True)


def snapshot_rows(content: bytes) -> Iterator[Row]:
    at = 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        record = MetaRecord.FromString(content[at + 4 : at + 4 + size])
        at += 4 + size
        match record.WhichOneof("change"):
            case "topic":
                yield Row(f"topic {record.topic.id}", {"is": _shown(record.topic)})
            case "group":
                yield Row(f"group {record.group.id}", {"is": _shown(record.group)})
            case "user":
                yield Row(f"user {record.user.name}", {"is": _shown(without_secrets(record.user))})
            case "receipt_key":  # the key itself is a secret
                yield Row("receipt key", {"hash": f"{entry_hash(record.receipt_key):032x}"})
            case "signing_keys":
                yield Row("signing keys", {"hash": f"{entry_hash(content):032x}"})
            case other:
                yield Row(f"{other}".replace("_", " "), {"is": _shown(record)})


def without_secrets(user: UserRecord) -> UserRecord:
    """For people: the ids of its secrets alone. (They are sealed.)"""
    plain = UserRecord()
    plain.CopyFrom(user)
    for secret in plain.secrets:
        secret.ClearField("nonce")
        secret.ClearField("sealed")
    return plain


def _shown(value: object) -> str:
    return " ".join(f"{value}".split())
