"""The system topics as an administrator reads them: records by place or time, as JSON.

The timer topic and the half topic hold messages, which `Lookup` finds like any others.  Records of
the other system topics have neither id nor key.  The key that signs receipt handles is a record
of rmq_sys_meta; it never leaves the broker.
"""

import json
import struct
from collections.abc import Iterator
from enum import Enum

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from popmq.broker.deliveries.pop_check_point import ReviveKind, decode_revive
from popmq.broker.meta.lite_topics import describe_lite_record
from popmq.broker.meta.offset_record import OffsetRecord
from popmq.broker.meta.registry import without_secrets
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.errors import Code, PopmqError, Refused, TopicNotFound
from popmq.common.record.message import HEADER_SIZE, BadRecord, Header, RecordKind, decode_header
from popmq.common.record.transaction_token import TransactionEndToken
from popmq.common.topics import TopicConfig
from popmq.common.wire import admin_pb2 as pb
from popmq.common.wire.meta_pb2 import MetaRecord

_WITH_MESSAGES = (topics.TIMER_TOPIC_ID, topics.HALF_TOPIC_ID)


def system_topic(name: str, cluster: str) -> TopicConfig | None:
    """The system topic of that name; None for a name that no system topic may have.

    Raises TOPIC_NOT_FOUND for a system name that this broker does not have.
    """
    if not topics.is_system_topic(name):
        return None
    known = {
        topics.META_TOPIC: TopicConfig(topics.META_TOPIC_ID, topics.META_TOPIC, 1),
        topics.OFFSETS_TOPIC: TopicConfig(topics.OFFSETS_TOPIC_ID, topics.OFFSETS_TOPIC, 1),
        topics.TIMER_TOPIC: TopicConfig(topics.TIMER_TOPIC_ID, topics.TIMER_TOPIC, 1),
        topics.HALF_TOPIC: TopicConfig(topics.HALF_TOPIC_ID, topics.HALF_TOPIC, 1),
        topics.OP_TOPIC: TopicConfig(topics.OP_TOPIC_ID, topics.OP_TOPIC, 1),
    }
    revive = topics.revive_topic(cluster)
    known[revive] = TopicConfig(topics.REVIVE_TOPIC_ID, revive, topics.REVIVE_QUEUES)
    if name not in known:
        raise TopicNotFound(
            f"system topic {name} does not exist: there are {', '.join(sorted(known))}"
        )
    return known[name]


def holds_messages(topic: TopicConfig) -> bool:
    """Whether its records are messages; those of the other system topics are not."""
    return topic.id >= topics.FIRST_USER_TOPIC_ID or topic.id in _WITH_MESSAGES


def find_records(
    store: MessageStore, topic: TopicConfig, broker: str, request: pb.FindMessagesRequest
) -> Iterator[pb.FoundMessage]:
    """Records of one queue, from an offset or from the first one stored at a time or later."""
    records = _Records(store, topic, request.queue_id)
    if request.HasField("queue_offset"):
        first = records.checked(request.queue_offset)
    elif request.HasField("stored_ms"):
        first = records.first_since(request.stored_ms)
    else:
        raise Refused(
            Code.BAD_REQUEST,
            f"records of {topic.name} have neither id nor key: name a queue and an offset, "
            "or a queue and a time",
        )
    for offset in range(first, min(records.count, first + (request.limit or 1))):
        header, body = records.at(offset)
        yield pb.FoundMessage(
            broker=broker,
            topic=topic.name,
            queue_id=request.queue_id,
            queue_offset=offset,
            position=header.position,
            stored_ms=header.wall_ms,
            record=json.dumps(_described(header.kind, body)),
        )


class _Records:
    """One queue of a system topic whose records are no messages."""

    def __init__(self, store: MessageStore, topic: TopicConfig, queue_id: int) -> None:
        self._store = store
        self._queue = store.queue(topic.id, queue_id)
        self._queue_id = queue_id
        self._fixed_width = topic.id == topics.REVIVE_TOPIC_ID
        self.count = self._queue.count

    def checked(self, offset: int) -> int:
        """The offset. Raises ILLEGAL_OFFSET when the queue has no record there."""
        low = self._queue.min_offset
        if not low <= offset < self.count:
            held = f"{low} to {self.count - 1}" if self.count > low else "nothing"
            raise Refused(
                Code.ILLEGAL_OFFSET,
                f"offset {offset} of queue {self._queue_id}: the queue holds {held}",
            )
        return offset

    def first_since(self, wall_ms: int) -> int:
        low, high = self._queue.min_offset, self.count
        while low < high:
            middle = (low + high) // 2
            if self.at(middle)[0].wall_ms < wall_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def at(self, offset: int) -> tuple[Header, bytes]:
        if self._fixed_width:  # the queue holds the records themselves
            data = self._queue.raw(offset, 1)
        else:
            data = self._store.reader.record(self._queue.units(offset, 1)[0])
        return decode_header(data), data[HEADER_SIZE:]


def _described(kind: int, body: bytes) -> dict[str, object]:
    """The record's fields; `unreadable` says why there are none."""
    try:
        name = RecordKind(kind).name
        return {"record": name, **_fields(kind, body)}
    except (PopmqError, BadRecord, DecodeError, ValueError, struct.error) as error:
        return {"record": kind, "unreadable": str(error)}


def _fields(kind: int, body: bytes) -> dict[str, object]:
    match kind:
        case RecordKind.META:
            record = MetaRecord.FromString(body)
            for secret in ("receipt_key", "signing_keys"):
                if record.HasField(secret):
                    return {secret: "not shown"}
            if record.HasField("user"):
                record.user.CopyFrom(without_secrets(record.user))
            return dict(MessageToDict(record, preserving_proto_field_name=True))
        case RecordKind.LITE_TOPIC:
            return describe_lite_record(body)
        case RecordKind.OFFSET:
            offset = OffsetRecord.decode(body)
            return {name: _plain(getattr(offset, name)) for name in OffsetRecord.__slots__}
        case RecordKind.REVIVE:
            revive = decode_revive(body)
            return {"kind": _plain(ReviveKind(body[1])), **_plain_fields(revive._asdict())}
        case RecordKind.TRANSACTION:
            token = TransactionEndToken.decode(body)
            fields = token._asdict()
            del fields["topic_id" if token.next_check_ms else "next_check_ms"]  # has no such field
            return _plain_fields(fields)
    raise ValueError(f"{len(body)} bytes of a kind that is not shown")


def _plain_fields(fields: dict[str, object]) -> dict[str, object]:
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: object) -> object:
    return value.name.lower() if isinstance(value, Enum) else value
