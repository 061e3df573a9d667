"""What the load asks, encoded ahead, and how its answers are read (the public API of RocketMQ 5).

A send differs from the next in its message id and in a stamp of 20 digits at the start of its
body: when it was due, in nanoseconds of the loader's clock, so that whoever receives it can tell
how long it took.
"""

import random
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from google.protobuf.duration_pb2 import Duration

from popmq.cli.load.http2 import grpc_message, grpc_payloads
from popmq.cli.load.reactor import LoadError
from popmq.common.errors import Code
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service

SERVICE = "/apache.rocketmq.v2.MessagingService/"
SEND, RECEIVE, ACK = SERVICE + "SendMessage", SERVICE + "ReceiveMessage", SERVICE + "AckMessage"
TELEMETRY, HEARTBEAT = SERVICE + "Telemetry", SERVICE + "Heartbeat"

STAMP_BYTES = 20
MIN_BODY_BYTES = 32
BATCH = 32

# Field 1 of a Status with the value 20000.  In an answer it cannot be part of anything else:
# 0xa0 after 0x08 is no UTF-8, and no varint of these messages is followed by a tag of 0xa0.
_OK = b"\x08\xa0\x9c\x01"
_ID_PLACE, _STAMP_PLACE = "?" * 34, b"!" * STAMP_BYTES


class SendTemplate:
    """Requests to store one message each, of `body` bytes."""

    def __init__(self, topic: str, body: int) -> None:
        if body < MIN_BODY_BYTES:
            raise LoadError(f"a body of {body} bytes is too short, at least {MIN_BODY_BYTES}")
        filler = random.Random(body).randbytes(body - STAMP_BYTES).replace(b"!", b".")
        self._message = api.Message(
            topic=api.Resource(name=topic),
            system_properties=api.SystemProperties(
                message_id=_ID_PLACE,
                body_encoding=api.IDENTITY,
                message_type=api.NORMAL,
                born_host="127.0.0.1",
            ),
            body=_STAMP_PLACE + filler,
        )
        self._message.system_properties.born_timestamp.GetCurrentTime()
        data = self._encoded()
        self._before, rest = data.split(_ID_PLACE.encode(), 1)
        self._between, self._after = rest.split(_STAMP_PLACE, 1)
        # Version 01 and a process of its own, then a counter: the public form of an id.
        self._id = f"01{secrets.token_hex(6)}{secrets.token_hex(6)}".upper().encode()
        self._numbers = count()

    def _encoded(self) -> bytes:
        request = service.SendMessageRequest(messages=[self._message])
        return grpc_message(request.SerializeToString())

    def request(self, stamp: int) -> bytes:
        return b"%b%b%08X%b%020d%b" % (
            self._before,
            self._id,
            next(self._numbers),
            self._between,
            stamp,
            self._after,
        )

    def delayed(self, stamp: int, deliver_at_ms: int) -> bytes:
        """The same for a message that is delivered at that wall time."""
        message = api.Message()
        message.CopyFrom(self._message)
        message.system_properties.message_type = api.DELAY
        message.system_properties.delivery_timestamp.FromMilliseconds(deliver_at_ms)
        message.system_properties.message_id = (self._id + b"%08X" % next(self._numbers)).decode()
        message.body = b"%020d%b" % (stamp, message.body[STAMP_BYTES:])
        return grpc_message(service.SendMessageRequest(messages=[message]).SerializeToString())


def send_refusal(status: str, data: bytes) -> str:
    """Why a send was not stored; empty if gRPC, the answer and its entry all say OK."""
    if status == "0" and data.count(_OK) == 2 and _one_entry(data):
        return ""
    if status != "0":
        return f"grpc-status {status}"
    (payload,) = grpc_payloads(data) if data else (b"",)
    answer = service.SendMessageResponse.FromString(payload)
    for status_of in (*(entry.status for entry in answer.entries), answer.status):
        if int(status_of.code) != Code.OK:
            return _refusal(status_of)
    return "" if len(answer.entries) == 1 else f"{len(answer.entries)} entries instead of one"


def _one_entry(data: bytes) -> bool:
    """Whether the answer is a short Status and then one entry; not knowing is False."""
    if len(data) < 10 or data[6] & 0x80:
        return False
    place = 7 + data[6]
    if place + 3 > len(data) or data[place] != 0x12:
        return False
    low, high = data[place + 1], data[place + 2]
    if low & 0x80:
        return place + 3 + (low & 0x7F | high << 7) == len(data)
    return place + 2 + low == len(data)


@dataclass(frozen=True, slots=True)
class LoadMessage:
    message_id: str
    handle: str
    stamp: int
    attempt: int


class ReceiveTemplate:
    """The one request to receive, as it is sent again and again."""

    def __init__(
        self,
        topic: str,
        group: str,
        broker: str,
        *,
        limit: int = BATCH,
        wait_ms: int,
        invisible_ms: int = 60_000,
    ) -> None:
        request = service.ReceiveMessageRequest(
            group=api.Resource(name=group),
            message_queue=api.MessageQueue(
                topic=api.Resource(name=topic),
                id=-1,
                permission=api.READ_WRITE,
                broker=api.Broker(name=broker),
            ),
            filter_expression=api.FilterExpression(type=api.TAG, expression="*"),
            batch_size=limit,
            invisible_duration=_duration(invisible_ms),
            long_polling_timeout=_duration(wait_ms),
        )
        self.message = grpc_message(request.SerializeToString())


def received(status: str, data: bytes) -> tuple[list[LoadMessage], str]:
    """What a receive brought, and why it brought nothing; empty also when there was nothing."""
    if status != "0":
        return [], f"grpc-status {status}"
    messages, refusal = [], ""
    for payload in grpc_payloads(data):
        part = service.ReceiveMessageResponse.FromString(payload)
        match part.WhichOneof("content"):
            case "message":
                messages.append(_delivered(part.message))
            case "status" if int(part.status.code) not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                refusal = _refusal(part.status)
    return messages, refusal


def _delivered(message: api.Message) -> LoadMessage:
    properties = message.system_properties
    stamp = message.body[:STAMP_BYTES]
    return LoadMessage(
        properties.message_id,
        properties.receipt_handle,
        int(stamp) if stamp.isdigit() else 0,
        properties.delivery_attempt,
    )


class AckTemplate:
    """Acks of one group in one topic."""

    def __init__(self, topic: str, group: str) -> None:
        request = service.AckMessageRequest(
            group=api.Resource(name=group), topic=api.Resource(name=topic)
        )
        self._head = request.SerializeToString()

    def request(self, delivered: Iterable[LoadMessage]) -> bytes:
        return grpc_message(self._head + b"".join(map(_ack_entry, delivered)))


def _ack_entry(message: LoadMessage) -> bytes:
    """Field 3 of the request: the id in field 1, the handle in field 2."""
    message_id, handle = message.message_id.encode(), message.handle.encode()
    entry = b"\x0a%b%b\x12%b%b" % (
        _varint(len(message_id)),
        message_id,
        _varint(len(handle)),
        handle,
    )
    return b"\x1a" + _varint(len(entry)) + entry


def _varint(number: int) -> bytes:
    return (
        bytes((number,)) if number < 0x80 else bytes((0x80 | number & 0x7F,)) + _varint(number >> 7)
    )


def ack_refusals(status: str, data: bytes, count: int) -> Sequence[str]:
    """Why acks were refused, a reason each; empty if all `count` are done."""
    if status == "0" and data.count(_OK) == count + 1:
        return ()
    if status != "0":
        return [f"grpc-status {status}"] * count
    (payload,) = grpc_payloads(data) if data else (b"",)
    answer = service.AckMessageResponse.FromString(payload)
    refusals = [_refusal(e.status) for e in answer.entries if int(e.status.code) != Code.OK]
    if not refusals and int(answer.status.code) != Code.OK:
        refusals = [_refusal(answer.status)] * count
    missing = count - len(answer.entries)
    return refusals or ["the answer has no entry for it"] * missing


def settings_command(group: str, topics: Sequence[str]) -> bytes:
    """What a consumer says first on its Telemetry stream; RocketMQ refuses its receives without."""
    subscription = api.Subscription(
        group=api.Resource(name=group),
        subscriptions=[
            api.SubscriptionEntry(
                topic=api.Resource(name=topic),
                expression=api.FilterExpression(type=api.TAG, expression="*"),
            )
            for topic in topics
        ],
        receive_batch_size=BATCH,
        long_polling_timeout=_duration(20_000),
    )
    settings = api.Settings(
        client_type=api.SIMPLE_CONSUMER,
        request_timeout=_duration(3_000),
        subscription=subscription,
        user_agent=api.UA(language=api.JAVA, version="5.0.7", hostname="bench"),
    )
    return grpc_message(service.TelemetryCommand(settings=settings).SerializeToString())


def heartbeat(group: str) -> bytes:
    request = service.HeartbeatRequest(
        group=api.Resource(name=group), client_type=api.SIMPLE_CONSUMER
    )
    return grpc_message(request.SerializeToString())


def _refusal(status: api.Status) -> str:
    name = next((n for n, v in api.Code.items() if v == status.code), "unknown code")
    return f"{name} ({status.code}): {status.message}"


def _duration(milliseconds: int) -> Duration:
    seconds, rest = divmod(milliseconds, 1000)
    return Duration(seconds=seconds, nanos=rest * 1_000_000)
