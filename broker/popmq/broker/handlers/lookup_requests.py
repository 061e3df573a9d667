"""FIND_MESSAGES: what an administrator asks about stored messages, answered by `Lookup`."""

from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeAlias, get_args

from google.protobuf.message import DecodeError

from popmq.broker.handlers.request import Request
from popmq.broker.handlers.system_lookup import find_records, holds_messages, system_topic
from popmq.broker.index.index_file import NO_MS
from popmq.broker.meta.registry import Registry
from popmq.broker.store.lookup import MESSAGES_LIMIT, Lookup, LookupResult
from popmq.broker.store.message_store import MessageStore
from popmq.common.errors import Code, Refused
from popmq.common.record.message import StoredMessage
from popmq.common.settings.settings import Settings
from popmq.common.topics import TopicConfig
from popmq.common.wire import admin_pb2 as pb

LookupKey: TypeAlias = Literal["message_id", "key", "queue_offset", "stored_ms"]
_WAYS: tuple[LookupKey, ...] = get_args(LookupKey)


class LookupParts(Protocol):
    """The parts of a Broker that a lookup needs."""

    @property
    def registry(self) -> Registry: ...
    @property
    def store(self) -> MessageStore: ...
    @property
    def lookup(self) -> Lookup: ...
    @property
    def settings(self) -> Settings: ...


def find(broker: LookupParts, request: Request) -> bytes:
    return find_messages(broker, request.body)


def find_messages(broker: LookupParts, body: bytes) -> bytes:
    """The encoded FindMessagesReply. Finding nothing is an answer; refusals are raised."""
    try:
        request = pb.FindMessagesRequest.FromString(body)
    except DecodeError as error:
        raise Refused(Code.BAD_REQUEST, "the request is no FindMessagesRequest") from error
    cluster, name = broker.settings.cluster.name, broker.settings.broker.name
    system = system_topic(request.topic, cluster)
    topic = system or broker.registry.topic(request.topic)
    queues = range(topic.queues) if system else broker.registry.queue_ids(topic)
    _check(topic, queues, request)
    if not holds_messages(topic):
        return pb.FindMessagesReply(
            status=pb.Status(code=Code.OK, message="OK"),
            messages=find_records(broker.store, topic, name, request),
        ).SerializeToString()
    findings = _find(broker.lookup, topic, request)
    return pb.FindMessagesReply(
        status=pb.Status(code=Code.OK, message="OK"),
        messages=_to_wire(topic, name, findings.messages),
        incomplete=findings.incomplete,
    ).SerializeToString()


def _check(topic: TopicConfig, queues: Sequence[int], request: pb.FindMessagesRequest) -> None:
    """Raise BAD_REQUEST unless the request is one lookup within its bounds."""
    ways = [way for way in _WAYS if request.HasField(way)]
    if len(ways) != 1:
        raise Refused(
            Code.BAD_REQUEST, f"a lookup is by exactly one of {', '.join(_WAYS)}, not {len(ways)}"
        )
    if request.limit < 0 or request.limit > MESSAGES_LIMIT:
        raise Refused(
            Code.BAD_REQUEST, f"limit {request.limit}: a lookup returns 1 to {MESSAGES_LIMIT}"
        )
    in_queue = ways[0] in ("queue_offset", "stored_ms")
    if in_queue and (not request.HasField("queue_id") or request.queue_id not in queues):
        raise Refused(
            Code.BAD_REQUEST,
            f"queue {request.queue_id} of topic {topic.name}: name one of its "
            f"{len(queues)}, the first of which is 0",
        )


def _find(lookup: Lookup, topic: TopicConfig, request: pb.FindMessagesRequest) -> LookupResult:
    (way,) = (way for way in _WAYS if request.HasField(way))
    match way:
        case "message_id":
            return lookup.by_id(topic.id, request.message_id, limit=request.limit or MESSAGES_LIMIT)
        case "key":
            return lookup.by_key(
                topic.id,
                request.key,
                limit=request.limit or MESSAGES_LIMIT,
                begin_ms=request.begin_ms,
                end_ms=request.end_ms or NO_MS,
            )
        case _:
            return _find_in_queue(lookup, topic, request, by_time=way == "stored_ms")


def _find_in_queue(
    lookup: Lookup, topic: TopicConfig, request: pb.FindMessagesRequest, *, by_time: bool
) -> LookupResult:
    queue_id = request.queue_id
    limit = request.limit or 1
    if not by_time:
        return lookup.at(topic.id, queue_id, request.queue_offset, limit=limit)
    offset = lookup.by_time(topic.id, queue_id, request.stored_ms)
    try:
        return lookup.at(topic.id, queue_id, offset, limit=limit)
    except Refused:  # nothing was stored since then
        return LookupResult()


def _to_wire(
    topic: TopicConfig, broker: str, messages: Iterable[StoredMessage]
) -> Iterable[pb.FoundMessage]:
    for message in messages:
        header = message.header
        yield pb.FoundMessage(
            broker=broker,
            topic=topic.name,
            queue_id=header.queue_id,
            queue_offset=header.queue_offset,
            position=header.position,
            stored_ms=header.wall_ms,
            attempt=message.attempt,
            head=message.head,
            properties=message.properties,
        )
