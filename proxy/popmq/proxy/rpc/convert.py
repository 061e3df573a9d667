"""The only file that knows both worlds: the public protobuf messages and popmq's own values.

Handlers read requests and fill replies; how one of popmq's values looks there is decided here.
A message is stored as two slices (D5).  `head` is what the client sent without its system
properties, byte for byte; `properties` is the content of those, without what only the server
may say.  A delivery is head + one field 3 = properties + this delivery's properties, so nothing
is decoded on the way out.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import md5
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from popmq.common.back_off import ExponentialBackOff
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Delivery, PutResult
from popmq.common.record.send_fingerprint import fingerprint_field
from popmq.common.topics import GroupType, MessageType, Permission, SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.validate import MessageFacts, possible_time
from popmq.proxy.rpc.wire_scan import (
    LEN,
    VARINT,
    BadWire,
    chunk,
    cut,
    fields,
    only_content,
    scalar,
    tag,
    varint,
)

M = TypeVar("M", bound=Message)

# Field numbers, fixed by the public protocol.
_MESSAGES = service.SendMessageRequest.MESSAGES_FIELD_NUMBER
_SYSTEM_PROPERTIES = pb.Message.SYSTEM_PROPERTIES_FIELD_NUMBER
_STATUS = service.ReceiveMessageResponse.STATUS_FIELD_NUMBER
_P = pb.SystemProperties

# A client may not say these: the server does, or they belong to one delivery.
_Owned: TypeAlias = Literal[
    "receipt_handle",
    "store_timestamp",
    "delivery_attempt",
    "queue_offset",
    "invisible_duration",
    "dead_letter_queue",
]
_SERVER_OWNED_WITH_PRESENCE: tuple[_Owned, ...] = get_args(_Owned)
_SERVER_OWNED: tuple[_Owned | Literal["store_host", "queue_id"], ...] = (
    *_SERVER_OWNED_WITH_PRESENCE,
    "store_host",
    "queue_id",
)


def parse(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise Refused(Code.BAD_REQUEST, f"the request is no {kind.DESCRIPTOR.name}") from error


def read_reply(kind: type[M], answer: bytes) -> M:
    """A broker's answer."""
    try:
        return kind.FromString(answer)
    except DecodeError as error:
        raise Refused(Code.INTERNAL_ERROR, f"a broker's reply is no {kind.__name__}") from error


# --- statuses


def status(code: int, message: str) -> pb.Status:
    return pb.Status(code=pb.Code.ValueType(int(code)), message=message)


def status_of(error: PopmqError) -> pb.Status:
    return status(error.code, str(error))


def ok() -> pb.Status:
    return status(Code.OK, "OK")


def status_only(error: PopmqError) -> bytes:
    """Any reply of the public service that holds nothing but its Status: always field 1."""
    return chunk(_STATUS, status_of(error).SerializeToString())


OK_ONLY = chunk(_STATUS, ok().SerializeToString())


# --- names and times


def name_of(resource: pb.Resource) -> str:
    """The whole name of a topic or group. Where a client has a namespace, `namespaces.py` made it
    part of the name before; one that only a resource has is refused."""
    if resource.resource_namespace:
        raise Refused(
            Code.BAD_REQUEST,
            f"namespace {resource.resource_namespace!r} of {resource.name!r}: the header "
            "x-mq-namespace has to name it too",
        )
    return resource.name


def duration_ms(value: Duration) -> int:
    return value.seconds * 1000 + value.nanos // 1_000_000


def duration(ms: int) -> Duration:
    return Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)


def _due_ms(value: Timestamp) -> int:
    """Rounded up, so that no message is early."""
    return value.seconds * 1000 - (-value.nanos // 1_000_000)


@lru_cache(maxsize=4_096)
def timestamp(ms: int) -> bytes:
    """A google.protobuf.Timestamp{seconds, nanos}."""
    return scalar(1, ms // 1000) + scalar(2, ms % 1000 * 1_000_000)


# --- topics and groups as brokers describe them


def topic_of(reply: bytes) -> TopicConfig:
    described = admin_pb2.TopicReply.FromString(reply)
    _raise_refusal(described.status)
    topic = described.topic
    permission = Permission.NONE
    if "r" in topic.permission:
        permission |= Permission.READ
    if "w" in topic.permission:
        permission |= Permission.WRITE
    kind = MessageType[topic.type.upper() or "NORMAL"]
    return TopicConfig(
        topic.id, topic.name, topic.queues, kind, permission, brokers=tuple(topic.brokers)
    )


def group_of(reply: bytes) -> SubscriptionGroup:
    described = admin_pb2.GroupReply.FromString(reply)
    _raise_refusal(described.status)
    group = described.group
    known = SubscriptionGroup(group.id, group.name)
    return SubscriptionGroup(
        id=group.id,
        name=group.name,
        type=GroupType[group.type.upper() or "NORMAL"],
        max_attempts=group.max_attempts or known.max_attempts,
        back_off_ms=tuple(group.back_off_ms) or known.back_off_ms,
        exponential=_exponential_of(group) if group.HasField("exponential") else None,
    )


def _exponential_of(group: admin_pb2.Group) -> ExponentialBackOff:
    back_off = group.exponential
    return ExponentialBackOff(
        back_off.initial_ms, back_off.max_ms, back_off.multiplier_milli, back_off.jitter_percent
    )


def _raise_refusal(found_status: admin_pb2.Status) -> None:
    if found_status.code not in (0, Code.OK):
        raise Refused(Code(found_status.code), found_status.message)


# --- messages on their way in


class SentMessage(NamedTuple):
    """One message of a SendMessageRequest: parsed, and where its bytes stand in the request."""

    message: pb.Message
    request: bytes
    start: int
    end: int

    @property
    def topic(self) -> str:
        return name_of(self.message.topic)

    @property
    def message_id(self) -> str:
        return self.message.system_properties.message_id

    def facts(self) -> MessageFacts:
        message, sent = self.message, self.message.system_properties
        due = sent.HasField("delivery_timestamp")
        recovery = sent.HasField("orphaned_transaction_recovery_duration")
        return MessageFacts(
            body_bytes=len(message.body),
            message_id=sent.message_id,
            user_properties=message.user_properties,
            tag=sent.tag,
            keys=sent.keys,
            message_group=sent.message_group,
            deliver_at_ms=_due_ms(sent.delivery_timestamp) if due else None,
            claimed_type=sent.message_type,
            recovery_ms=(
                duration_ms(sent.orphaned_transaction_recovery_duration) if recovery else None
            ),
            lite_topic=sent.lite_topic,
            priority=sent.priority,
        )

    def slices(
        self, kind: MessageType, *, sender: int, peer: str, now_ms: int
    ) -> tuple[bytes, bytes]:
        """`head` and `properties` as they are stored; `sender` is the `sender_hash` of the client.

        The digest is ours, over the body as sent: a client refuses a message without one, each
        understands another spelling of CRC32, and all know MD5 in upper case.
        """
        head, pieces = cut(self.request, _SYSTEM_PROPERTIES, self.start, self.end)
        sent = self.message.system_properties
        digest = md5(self.message.body, usedforsecurity=False).digest()
        checksum = digest.hex().upper()
        content, has_digest = _stored_properties(sent, pieces, checksum)
        parts = [content]
        if not has_digest:
            parts.append(MD5_DIGEST + checksum.encode())
        if not sent.body_encoding:
            parts.append(IDENTITY_ENCODING)
        if int(sent.message_type) != kind:
            parts.append(scalar(_P.MESSAGE_TYPE_FIELD_NUMBER, kind))
        if not sent.born_host and peer:
            parts.append(chunk(_P.BORN_HOST_FIELD_NUMBER, peer.encode()))
        if not sent.HasField("born_timestamp"):
            parts.append(chunk(_P.BORN_TIMESTAMP_FIELD_NUMBER, timestamp(now_ms)))
        parts.append(fingerprint_field(sender, digest))
        return head, b"".join(parts)


def sent_messages(data: bytes) -> list[SentMessage]:
    """The messages of a SendMessageRequest."""
    parsed = parse(service.SendMessageRequest, data).messages
    if len(parsed) == 1 and (start := only_content(data, _MESSAGES)):
        return [SentMessage(parsed[0], data, start, len(data))]
    try:
        wire_fields = [f for f in fields(data) if f.number == _MESSAGES and f.wire_type == LEN]
    except BadWire as error:
        raise Refused(Code.BAD_REQUEST, f"the request is no SendMessageRequest: {error}") from error
    assert len(wire_fields) == len(parsed), "the scan and protobuf disagree about a request"
    return [
        SentMessage(message, data, field.content, field.end)
        for message, field in zip(parsed, wire_fields, strict=True)
    ]


def _stored_properties(
    sent: pb.SystemProperties, pieces: Sequence[bytes], checksum: str
) -> tuple[bytes, bool]:
    """The content as it may be stored, and whether our digest is in it already."""
    has_digest = sent.HasField("body_digest")
    same_digest = (
        has_digest
        and sent.body_digest.type == pb.DigestType.MD5
        and sent.body_digest.checksum == checksum
    )
    born = sent.born_timestamp
    possible = possible_time(born.seconds, born.nanos)
    good_born = possible == (born.seconds, born.nanos)
    plain = good_born and (same_digest or not has_digest) and not _claims_too_much(sent)
    if len(pieces) == 1 and plain:
        return pieces[0], same_digest
    clean = pb.SystemProperties()
    clean.CopyFrom(sent)
    for name in _SERVER_OWNED:
        clean.ClearField(name)
    if not same_digest:
        clean.ClearField("body_digest")
    if not good_born:
        clean.born_timestamp.seconds, clean.born_timestamp.nanos = possible
    return clean.SerializeToString(), same_digest


def _claims_too_much(sent: pb.SystemProperties) -> bool:
    if sent.queue_id or sent.store_host:  # these have no presence
        return True
    return any(map(sent.HasField, _SERVER_OWNED_WITH_PRESENCE))


# --- messages on their way out


def send_entry(
    result: PutResult, message_id: str, recall_handle: str = ""
) -> service.SendResultEntry:
    """RocketMQ gives a transaction id for messages of every type: the message's, if it is no half
    message."""
    if result.code != Code.OK:
        found_status = status(result.code, result.message)
        return service.SendResultEntry(status=found_status, message_id=message_id)
    return service.SendResultEntry(
        status=ok(),
        message_id=message_id,
        transaction_id=result.message or message_id,
        offset=result.queue_offset,
        recall_handle=recall_handle,
    )


def sent_ok(
    results: Sequence[PutResult], message_ids: Sequence[str], recall_handles: Sequence[str]
) -> bytes:
    """The SendMessageResponse where every message was stored, as protobuf would write it."""
    parts = [OK_ONLY]
    for result, message_id, handle in zip(results, message_ids, recall_handles, strict=True):
        name = message_id.encode()
        if name:
            size = varint(len(name))
            transaction = _sized(result.message.encode()) if result.message else size + name
            names = b"".join((_ENTRY_ID, size, name, _ENTRY_TRANSACTION, transaction))
        else:
            names = b""
        offset = _ENTRY_OFFSET + varint(result.queue_offset) if result.queue_offset else b""
        recall = chunk(_ENTRY.RECALL_HANDLE_FIELD_NUMBER, handle.encode()) if handle else b""
        size = varint(len(OK_ONLY) + len(names) + len(offset) + len(recall))
        parts += (_SEND_ENTRY, size, OK_ONLY, names, offset, recall)
    return b"".join(parts)


def single_sent_ok(name: bytes, result: PutResult) -> bytes:
    """`sent_ok` of one message that has an id and is visible at once."""
    size = varint(len(name))
    names = b"".join((_ENTRY_ID, size, name, _ENTRY_TRANSACTION, size, name))
    if result.queue_offset:
        names += _ENTRY_OFFSET + varint(result.queue_offset)
    return b"".join((_ONE_SENT, varint(len(OK_ONLY) + len(names)), OK_ONLY, names))


def acked_ok(entries: Sequence[service.AckMessageEntry]) -> bytes:
    """The AckMessageResponse where every entry was taken, as protobuf would write it."""
    parts = [OK_ONLY]
    for entry in entries:
        content = b""
        if entry.message_id:
            content = chunk(_ACKED.MESSAGE_ID_FIELD_NUMBER, entry.message_id.encode())
        if entry.receipt_handle:
            content += chunk(_ACKED.RECEIPT_HANDLE_FIELD_NUMBER, entry.receipt_handle.encode())
        content += _ACKED_OK
        parts += (_ACK_ENTRY, varint(len(content)), content)
    return b"".join(parts)


def one_acked_ok(entry: bytes) -> bytes:
    """`acked_ok` of one entry, which begins with the bytes of the request's."""
    return b"".join((_ONE_ACKED, varint(len(entry) + len(_ACKED_OK)), entry, _ACKED_OK))


def message_parts(deliveries: Sequence[Delivery], store_host: bytes) -> list[bytes]:
    """ReceiveMessageResponse{message} of each; the system properties of a message are one field
    (rule of the Node client).

    Deliveries of one receive have most of their own properties in common.
    """
    parts: list[bytes] = []
    join = b"".join
    host = join((_STORE_HOST, varint(len(store_host)), store_host, _RECEIPT_HANDLE))
    last_ms = last_size = last_queue = last_attempt = -1
    for queue_id, queue_offset, attempt, stored_ms, handle, head, properties in deliveries:
        if stored_ms != last_ms or len(handle) != last_size:
            last_ms, last_size = stored_ms, len(handle)
            stored = timestamp(stored_ms)
            before = join((_STORE_TIMESTAMP, varint(len(stored)), stored, host, varint(last_size)))
        if queue_id != last_queue:
            last_queue = queue_id
            place = join((_QUEUE_ID, varint(queue_id), _QUEUE_OFFSET))
        if attempt != last_attempt:
            last_attempt = attempt
            after = _DELIVERY_ATTEMPT + varint(attempt)
        offset = varint(queue_offset)
        own = len(before) + last_size + len(place) + len(offset) + len(after)
        size = varint(len(properties) + own)
        content = len(head) + len(_PROPERTIES) + len(size) + len(properties) + own
        parts.append(
            join(
                (
                    *(_MESSAGE, varint(content), head, _PROPERTIES, size, properties),
                    *(before, handle, place, offset, after),
                )
            )
        )
    return parts


def stored_message(delivery: Delivery, store_host: bytes) -> pb.Message:
    """The message of what is no delivery to a consumer: without a receipt handle."""
    (part,) = message_parts((delivery,), store_host)
    message = service.ReceiveMessageResponse.FromString(part).message
    message.system_properties.ClearField("receipt_handle")
    return message


def status_part(found_status: pb.Status) -> bytes:
    """ReceiveMessageResponse{status}"""
    return chunk(_STATUS, found_status.SerializeToString())


def delivery_time_part(now_ms: int) -> bytes:
    """ReceiveMessageResponse{delivery_timestamp}"""
    return _DELIVERY_TIMESTAMP + _sized(timestamp(now_ms))


def receive_parts(
    deliveries: Sequence[Delivery], *, store_host: bytes, now_ms: int
) -> Sequence[bytes]:
    """Status, messages, delivery time: the order in which RocketMQ's proxy writes them."""
    if not deliveries:
        empty = status(Code.MESSAGE_NOT_FOUND, "no new message")
        return status_part(empty), delivery_time_part(now_ms)
    return (
        OK_ONLY,
        *message_parts(deliveries, store_host),
        delivery_time_part(now_ms),
    )


def _sized(content: bytes) -> bytes:
    return varint(len(content)) + content


_PROPERTIES = tag(_SYSTEM_PROPERTIES, LEN)
# Everything of a body's digest but its checksum, which has 32 digits.
MD5_DIGEST = chunk(
    _P.BODY_DIGEST_FIELD_NUMBER,
    pb.Digest(type=pb.DigestType.MD5, checksum="0" * 32).SerializeToString(),
)[:-32]
IDENTITY_ENCODING = scalar(_P.BODY_ENCODING_FIELD_NUMBER, pb.Encoding.IDENTITY)
_STORE_TIMESTAMP = tag(_P.STORE_TIMESTAMP_FIELD_NUMBER, LEN)
_STORE_HOST = tag(_P.STORE_HOST_FIELD_NUMBER, LEN)
_RECEIPT_HANDLE = tag(_P.RECEIPT_HANDLE_FIELD_NUMBER, LEN)
_QUEUE_ID = tag(_P.QUEUE_ID_FIELD_NUMBER, VARINT)
_QUEUE_OFFSET = tag(_P.QUEUE_OFFSET_FIELD_NUMBER, VARINT)
_DELIVERY_ATTEMPT = tag(_P.DELIVERY_ATTEMPT_FIELD_NUMBER, VARINT)
_MESSAGE = tag(service.ReceiveMessageResponse.MESSAGE_FIELD_NUMBER, LEN)
_DELIVERY_TIMESTAMP = tag(service.ReceiveMessageResponse.DELIVERY_TIMESTAMP_FIELD_NUMBER, LEN)

# Field 1 of a reply and of an entry for a sent message is the Status alike.
_ENTRY = service.SendResultEntry
_SEND_ENTRY = tag(service.SendMessageResponse.ENTRIES_FIELD_NUMBER, LEN)
_ONE_SENT = OK_ONLY + _SEND_ENTRY
_ENTRY_ID = tag(_ENTRY.MESSAGE_ID_FIELD_NUMBER, LEN)
_ENTRY_TRANSACTION = tag(_ENTRY.TRANSACTION_ID_FIELD_NUMBER, LEN)
_ENTRY_OFFSET = tag(_ENTRY.OFFSET_FIELD_NUMBER, VARINT)
_ACKED = service.AckMessageResultEntry
_ACK_ENTRY = tag(service.AckMessageResponse.ENTRIES_FIELD_NUMBER, LEN)
_ONE_ACKED = OK_ONLY + _ACK_ENTRY
_ACKED_OK = chunk(_ACKED.STATUS_FIELD_NUMBER, ok().SerializeToString())
# A body_digest up to its checksum, which has 32 characters.
MD5_DIGEST = chunk(
    _P.BODY_DIGEST_FIELD_NUMBER,
    pb.Digest(type=pb.DigestType.MD5, checksum="0" * 32).SerializeToString(),
)[:-32]
