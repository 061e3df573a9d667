"""What popmq's own admin service answers, as messages of the public Admin service."""

from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import Delivery
from popmq.common.topics import MessageType, is_system_topic
from popmq.common.wire import admin_pb2 as own
from popmq.proxy.api import admin_pb2 as api
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.rpc.convert import duration, name_of, stored_message
from popmq.proxy.rpc.validate import time_ms


def public_type(name: str) -> pb.MessageType.ValueType:
    """Of a topic; MIXED, which takes several types, has no number in the protocol."""
    kind = MessageType[name.upper()]
    return pb.MessageType.ValueType(0 if kind is MessageType.MIXED else int(kind))


def summed(
    lags: Sequence[own.Lag], now_ms: int
) -> api.DescribeGroupAccumulationResponse.GroupAccumulation:
    known = [lag.oldest_ready_ms for lag in lags if lag.oldest_ready_ms]
    unknown = not known and any(lag.unknown_ages for lag in lags)
    oldest_ms = min(known, default=now_ms)
    ready, in_flight = sum(lag.ready for lag in lags), sum(lag.in_flight for lag in lags)
    return api.DescribeGroupAccumulationResponse.GroupAccumulation(
        inflight_messages=in_flight,
        ready_messages=ready,
        accumulation=ready + in_flight + sum(lag.blocked for lag in lags),
        # Absent while nobody knows it.
        deliver_delay_time=None if unknown else duration(max(0, now_ms - oldest_ms)),
    )


def queue_span(time_span: own.TimeSpan, now_ms: int) -> api.QueryTimeSpanResponse.QueueTimeSpan:
    """As RocketMQ: a group that has read nothing stands at the oldest message, and its delay is the
    age of the first one that it has not been given."""
    return api.QueryTimeSpanResponse.QueueTimeSpan(
        message_queue=pb.MessageQueue(
            topic=pb.Resource(name=time_span.topic),
            id=time_span.queue_id,
            broker=pb.Broker(name=time_span.broker),
        ),
        min_timestamp=time_span.oldest_ms,
        max_timestamp=time_span.newest_ms,
        consume_timestamp=time_span.read_ms or time_span.oldest_ms,
        delay_time_ms=max(0, now_ms - time_span.next_ms) if time_span.next_ms else 0,
    )


def lookup(request: api.ListMessageRequest) -> own.FindMessagesRequest:
    for name in ("subscription", "lite_topic", "scroll_id", "page_num", "page_size"):
        if request.HasField(name):
            raise Refused(
                Code.UNSUPPORTED,
                f"messages are found by id, by key, or in a queue from a time on: not by {name}",
            )
    topic = name_of(request.topic)
    if is_system_topic(topic):
        raise Refused(Code.ILLEGAL_TOPIC, f"{topic} is a system topic; clients cannot use it")
    asked = own.FindMessagesRequest(topic=topic, limit=request.max_message_nums)
    match request.WhichOneof("search_key"):
        case "message_id":
            asked.message_id = request.message_id
        case "message_key":
            asked.key = request.message_key
            asked.begin_ms = wall_ms(request.begin_timestamp)
            asked.end_ms = wall_ms(request.end_timestamp)
        case _:
            if not request.HasField("queue_id"):
                raise Refused(
                    Code.BAD_REQUEST, "name a message_id, a message_key, or a queue_id and a time"
                )
            asked.queue_id = request.queue_id
            asked.stored_ms = wall_ms(request.begin_timestamp)
    return asked


def wall_ms(given: Timestamp) -> int:
    return time_ms(given.seconds, given.nanos)


def found_message(result: own.FoundMessage) -> pb.Message:
    stored = Delivery(
        result.queue_id,
        result.queue_offset,
        result.attempt,
        result.stored_ms,
        b"",
        result.head,
        result.properties,
    )
    return stored_message(stored, result.broker.encode())
