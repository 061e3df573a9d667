"""PullMessage and the three calls about offsets: consumers that keep their own place.

A pull names a queue of one broker group and is served by that one alone; nothing is handed out,
so nothing has to be acked (docs/concepts/pull.md).
"""

from collections.abc import Callable, Sequence
from functools import partial

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.settings.settings import Settings
from popmq.common.topics import check_group_name, check_readable_topic_name, is_broker_name
from popmq.common.wire import pull_pb2 as wire
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.messaging.connection_limits import ConnectionLimits
from popmq.proxy.rpc.convert import (
    OK_ONLY,
    duration_ms,
    name_of,
    ok,
    parse,
    read_reply,
    status,
)
from popmq.proxy.rpc.rpc import Answer, Rpc
from popmq.proxy.rpc.validate import batch_limit, filter_of, poll_ms, time_ms
from popmq.proxy.rpc.wire_scan import chunk

BROKER_RESERVE_MS = 5_000  # beyond the poll, for a broker that is busy when it ends


class PullMessage:
    def __init__(
        self,
        brokers: BrokerPorts,
        routes: MetadataCache,
        settings: Settings,
        limits: ConnectionLimits,
    ) -> None:
        self._brokers = brokers
        self._routes = routes
        self._settings = settings
        self._limits = limits
        self._waiting: dict[Rpc, str | None] = {}  # the connection of one that may wait
        self._draining = False

    def start(self, rpc: Rpc) -> None:
        request = parse(service.PullMessageRequest, rpc.data)
        asked = self._request_of(rpc, request)
        broker, port = port_of_queue(self._brokers, request.message_queue)
        rpc.metrics.pulls += 1
        connection = rpc.call.peer if asked.poll_ms else None
        if connection is not None:
            self._limits.begin_wait(connection)
        self._waiting[rpc] = connection
        rpc.on_cancelled(partial(self._over, rpc))
        then = partial(self._answered, rpc, request, broker)

        def ask(topic_id: int, group_id: int) -> None:
            if rpc not in self._waiting:
                return  # it was answered when this proxy began to drain
            asked.topic_id, asked.group_id = topic_id, group_id
            timeout_ms = asked.poll_ms + BROKER_RESERVE_MS
            rpc.send_request(port, Kind.PULL, asked.SerializeToString(), timeout_ms, then)

        self._routes.ids(asked.topic, asked.group, partial(rpc.run, ask))

    def drain(self) -> None:
        """Answer the open pulls with nothing, and later ones at once."""
        self._draining = True
        for rpc in tuple(self._waiting):
            self._over(rpc)
            rpc.cancel_requests()
            request = parse(service.PullMessageRequest, rpc.data)
            rpc.reply(*_nothing(request.offset))

    def _over(self, rpc: Rpc) -> None:
        connection = self._waiting.pop(rpc, None)
        if connection is not None:
            self._limits.end_wait(connection)

    def _request_of(self, rpc: Rpc, request: service.PullMessageRequest) -> wire.PullRequest:
        queue, limits, requested = (
            request.message_queue,
            self._settings.pop,
            request.filter_expression,
        )
        topic, group = name_of(queue.topic), name_of(request.group)
        check_readable_topic_name(topic)
        check_group_name(group)
        asked = request.HasField("long_polling_timeout")
        filter_type, expression = filter_of(requested.type, requested.expression)
        self._limits.check_filter(rpc.call.peer, filter_type, expression)
        return wire.PullRequest(
            topic=topic,
            group=group,
            queue_id=_queue_id(queue),
            offset=_offset(request.offset),
            limit=batch_limit(request.batch_size, limits),
            poll_ms=poll_ms(
                duration_ms(request.long_polling_timeout) if asked else None,
                rpc.call.remaining_ms(),
                0 if self._draining else self._settings.poll.max_ms,
            ),
            filter_type=filter_type,
            expression=expression,
            reply_bytes=limits.reply_bytes,
        )

    def _answered(
        self, rpc: Rpc, request: service.PullMessageRequest, broker: str, answer: Answer
    ) -> None:
        self._over(rpc)
        if isinstance(answer, PopmqError):
            raise answer
        reply = read_reply(wire.PullReply, answer)
        if reply.illegal_offset:
            refusal = status(Code.ILLEGAL_OFFSET, reply.illegal_offset)
            rpc.metrics.refuse(Refused(Code.ILLEGAL_OFFSET, reply.illegal_offset))
            rpc.reply(_status_part(refusal), _offset_part(reply.next_offset))
            return
        if not reply.messages:
            rpc.reply(*_nothing(reply.next_offset))
            return
        rpc.metrics.pulled += len(reply.messages)
        store_host, queue_id = broker.encode(), request.message_queue.id
        parts = (pulled_part(message, queue_id, store_host) for message in reply.messages)
        rpc.reply(OK_ONLY, *parts, _offset_part(reply.next_offset))


class ConsumerOffsets:
    """UpdateOffset, GetOffset and QueryOffset."""

    def __init__(self, brokers: BrokerPorts, routes: MetadataCache) -> None:
        self._brokers = brokers
        self._routes = routes

    def update(self, rpc: Rpc) -> None:
        request = parse(service.UpdateOffsetRequest, rpc.data)
        topic, group = self._names(request.message_queue, request.group)
        asked = wire.UpdateOffsetRequest(
            topic=topic,
            group=group,
            queue_id=_queue_id(request.message_queue),
            offset=_offset(request.offset),
        )
        self._ask(
            rpc,
            Kind.UPDATE_OFFSET,
            request.message_queue,
            asked,
            lambda _: service.UpdateOffsetResponse(status=ok()).SerializeToString(),
        )

    def get(self, rpc: Rpc) -> None:
        request = parse(service.GetOffsetRequest, rpc.data)
        topic, group = self._names(request.message_queue, request.group)
        asked = wire.GetOffsetRequest(
            topic=topic, group=group, queue_id=_queue_id(request.message_queue)
        )
        self._ask(
            rpc,
            Kind.GET_OFFSET,
            request.message_queue,
            asked,
            lambda offset: service.GetOffsetResponse(
                status=ok(), offset=offset
            ).SerializeToString(),
        )

    def query(self, rpc: Rpc) -> None:
        request = parse(service.QueryOffsetRequest, rpc.data)
        topic = name_of(request.message_queue.topic)
        check_readable_topic_name(topic)
        asked = wire.QueryOffsetRequest(topic=topic, queue_id=_queue_id(request.message_queue))
        match request.query_offset_policy:
            case pb.QueryOffsetPolicy.BEGINNING:
                asked.beginning = True
            case pb.QueryOffsetPolicy.END:
                asked.end = True
            case pb.QueryOffsetPolicy.TIMESTAMP:
                asked.stored_ms = _wall_ms(request)
            case other:
                raise Refused(
                    Code.BAD_REQUEST,
                    f"query_offset_policy {other}: it is BEGINNING (0), END (1) or TIMESTAMP (2)",
                )
        self._ask(
            rpc,
            Kind.QUERY_OFFSET,
            request.message_queue,
            asked,
            lambda offset: service.QueryOffsetResponse(
                status=ok(), offset=offset
            ).SerializeToString(),
        )

    def _names(self, queue: pb.MessageQueue, group: pb.Resource) -> tuple[str, str]:
        topic, name = name_of(queue.topic), name_of(group)
        check_readable_topic_name(topic)
        check_group_name(name)
        return topic, name

    def _ask(
        self,
        rpc: Rpc,
        kind: Kind,
        queue: pb.MessageQueue,
        asked: wire.UpdateOffsetRequest | wire.GetOffsetRequest | wire.QueryOffsetRequest,
        reply: Callable[[int], bytes],
    ) -> None:
        def answered(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            rpc.reply(reply(read_reply(wire.OffsetReply, answer).offset))

        def ask(topic_id: int, group_id: int) -> None:
            asked.topic_id = topic_id
            if not isinstance(asked, wire.QueryOffsetRequest):
                asked.group_id = group_id
            rpc.send_request(port, kind, asked.SerializeToString(), rpc.timeout_ms(), answered)

        _, port = port_of_queue(self._brokers, queue)
        group = "" if isinstance(asked, wire.QueryOffsetRequest) else asked.group
        self._routes.ids(asked.topic, group, partial(rpc.run, ask))


def port_of_queue(brokers: BrokerPorts, queue: pb.MessageQueue) -> tuple[str, Port]:
    """The broker group of a queue, and the way to it; unnamed it is the only one that is known.

    Raises Unavailable when the group is not known now, and BAD_REQUEST when no group can have that
    name.
    """
    names, name = brokers.names(), queue.broker.name
    if not names:
        raise Unavailable("no broker is known yet")
    if not name and len(names) == 1:
        name = names[0]
    if not is_broker_name(name):
        raise Refused(
            Code.BAD_REQUEST,
            f"the queue names broker {name!r}, known are {', '.join(names[:10])}: take one of the "
            "route",
        )
    return name, brokers.port(name)


def _queue_id(queue: pb.MessageQueue) -> int:
    if queue.id < 0:
        raise Refused(
            Code.BAD_REQUEST, f"queue {queue.id}: an offset is one queue's, name one of the route"
        )
    return queue.id


def _offset(given: int) -> int:
    if given < 0:
        raise Refused(Code.ILLEGAL_OFFSET, f"offset {given} is negative")
    return given


def _wall_ms(request: service.QueryOffsetRequest) -> int:
    """The time asked about; a part of a millisecond counts as the next one."""
    if not request.HasField("timestamp"):
        raise Refused(Code.BAD_REQUEST, "the timestamp is missing, the policy TIMESTAMP needs one")
    whole_ms = time_ms(request.timestamp.seconds, request.timestamp.nanos)
    return whole_ms + (request.timestamp.nanos % 1_000_000 > 0)


def _status_part(found_status: pb.Status) -> bytes:
    return service.PullMessageResponse(status=found_status).SerializeToString()


def _offset_part(next_offset: int) -> bytes:
    return service.PullMessageResponse(next_offset=next_offset).SerializeToString()


def _nothing(next_offset: int) -> Sequence[bytes]:
    empty = status(Code.MESSAGE_NOT_FOUND, "no new message")
    return _status_part(empty), _offset_part(next_offset)


_SYSTEM_PROPERTIES = pb.Message.SYSTEM_PROPERTIES_FIELD_NUMBER
_MESSAGE = service.PullMessageResponse.MESSAGE_FIELD_NUMBER


def pulled_part(pulled_message: wire.PulledMessage, queue_id: int, store_host: bytes) -> bytes:
    """PullMessageResponse{message}: head + one field of stored and own properties (D5)."""
    seconds, ms = divmod(pulled_message.stored_ms, 1000)
    own = pb.SystemProperties(
        store_timestamp=Timestamp(seconds=seconds, nanos=ms * 1_000_000),
        store_host=store_host.decode(),
        queue_id=queue_id,
        queue_offset=pulled_message.queue_offset,
    ).SerializeToString()
    return chunk(
        _MESSAGE, pulled_message.head + chunk(_SYSTEM_PROPERTIES, pulled_message.properties + own)
    )
