"""What proxies ask of a broker: the kinds of frames and the fixed payloads of the frequent ones.

Sent, popped, acked and changed messages travel as structs (big-endian, strings with a length
in front); everything rare is protobuf (`wire/admin.proto`).  The same bytes are used when
proxy and broker share a process, so a test of one way is a test of both.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, Protocol

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.payload import U16, PayloadReader, fitting, sentence, text


class Kind(IntEnum):
    """Second byte of a frame's header (docs/concepts/frames.md)."""

    HELLO = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4
    PUT = 16
    POP = 17
    ACK = 18
    CHANGE = 19
    CLIENTS = 20
    REJECT = 28
    DESCRIBE_TOPIC = 32
    CREATE_TOPIC = 33
    ALTER_TOPIC = 34
    DELETE_TOPIC = 35
    LIST_TOPICS = 36
    DESCRIBE_GROUP = 37
    CREATE_GROUP = 38
    ALTER_GROUP = 39
    DELETE_GROUP = 40
    LIST_GROUPS = 41
    FIND_MESSAGES = 42
    RECALL = 43
    RESCHEDULE = 44
    LIST_TIMERS = 45
    FORECAST_TIMERS = 46
    EXPLAIN = 48
    LAG = 49
    RESET_OFFSET = 50
    LIST_DEAD_LETTERS = 51
    REDRIVE = 52
    UNPARK = 56
    DRAIN = 57
    END_TRANSACTION = 58
    CHECKS = 59
    REGISTER = 64
    ROUTES = 65
    ALTER_SYNC_STATE_SET = 66
    WATCH_GROUP = 67
    LIST_REPLICAS = 68
    FAILOVER = 69
    HANDSHAKE = 80
    FETCH = 81
    ACKED = 82
    READ_SNAPSHOT = 83
    TIMER_CHECK_POINT = 84
    HAND_OVER = 85
    DESCRIBE_ROLE = 86
    COPY_META = 87


OnReply = Callable[[bytes | PopmqError], None]


class Port(Protocol):
    """A way to one peer: over frames, or a call in the same process."""

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        """Ask; `on_reply` is called once, on the loop, with the reply's body or the refusal.

        Returns an id for `cancel`.  A refusal may come before this returns.
        """
        ...

    def cancel(self, request_id: int) -> None:
        """The asker is gone: `on_reply` will not be called, a waiting pop is given up, and one
        whose answer the asker did not take is undone."""
        ...


class FilterType(IntEnum):
    NONE = 0
    TAG = 1
    SQL = 2


class TimerOutcome(StrEnum):
    """What RECALL and RESCHEDULE came to."""

    DONE = "DONE"  # of a recall that is repeated too
    ALREADY_VISIBLE = "ALREADY_VISIBLE"
    NOT_FOUND = "NOT_FOUND"


# The frequent values are NamedTuples: a frozen dataclass takes three times as long to make, which
# was a fifth of a send's CPU (bench/broker_cost.py).
class PutEntry(NamedTuple):
    """One message to store. `queue_id` -1 lets the broker choose; `head` and `properties` are
    the two slices of D5.

    `due_ms` is wall milliseconds; negative: so many after the broker got it; 0: it is not delayed.
    Of a TRANSACTION message it is the time to its first check, 0 for the broker's own.
    A timer is released at some time within `spread_ms` after it is due.
    """

    type: int
    head: bytes
    properties: bytes
    tag_hash: int = 0
    queue_id: int = -1
    due_ms: int = 0
    message_id: str = ""
    spread_ms: int = 0


class PutRequest(NamedTuple):
    topic: str
    entries: Sequence[PutEntry]
    auto_create: bool = False


class PutResult(NamedTuple):
    """`due_ms`: of a timer, wall milliseconds; 0: the message is visible at once.

    `message` says why it was refused; of a half message that was stored it is the transaction id.
    """

    code: int = Code.OK
    message: str = ""
    queue_id: int = 0
    queue_offset: int = 0
    due_ms: int = 0


class ClientsReport(NamedTuple):
    """Ids of clients that a proxy heard lately, and of those that said good-bye."""

    heard: Sequence[str] = ()
    gone: Sequence[str] = ()


AUTO_RENEW = 1


class PopRequest(NamedTuple):
    topic: str
    group: str
    client_id: str
    limit: int
    invisible_ms: int  # 0: the broker's default
    poll_ms: int
    queue_id: int = -1
    auto_renew: bool = False
    filter_type: int = FilterType.NONE
    expression: str = ""
    attempt_id: str = ""
    reply_bytes: int = 8 << 20


class Delivery(NamedTuple):
    """One message handed out; times in wall milliseconds."""

    queue_id: int
    queue_offset: int
    attempt: int
    stored_ms: int
    handle: bytes
    head: bytes
    properties: bytes


class PopReply(NamedTuple):
    deliveries: Sequence[Delivery] = ()
    rest: int = 0  # messages still readable in the queues that were visited
    popped_ms: int = 0  # wall time from which the invisible time counts; 0 with no deliveries


class AckRequest(NamedTuple):
    topic: str
    group: str
    handles: Sequence[bytes]


class AckResult(NamedTuple):
    code: int = Code.OK
    message: str = ""


ACKED = AckResult()


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    topic: str
    group: str
    handle: bytes
    invisible_ms: int


_PUT = struct.Struct(">BH")
_ENTRY = struct.Struct(">BiQqIHII")
_PUT_RESULT = struct.Struct(">IIQQH")
_POP = struct.Struct(">HIQIIiBBI")
_POP_REPLY = struct.Struct(">HQQ")
_DELIVERY = struct.Struct(">IQHQHII")
_ACK_RESULT = struct.Struct(">IH")
_ACKED_ENTRY = _ACK_RESULT.pack(Code.OK, 0)
_CHANGE = struct.Struct(">qH")
_ERROR = struct.Struct(">I")


def encode_error(error: PopmqError) -> bytes:
    return _ERROR.pack(error.code) + sentence(str(error))


def decode_error(body: bytes) -> PopmqError:
    (code,) = _ERROR.unpack_from(body)
    try:
        known = Code(code)
    except ValueError:
        known = Code.INTERNAL_ERROR
    return Refused(known, body[_ERROR.size :].decode(errors="replace"))


@fitting
def encode_put(request: PutRequest) -> bytes:
    parts = [text(request.topic), _PUT.pack(request.auto_create, len(request.entries))]
    for entry in request.entries:
        name = entry.message_id.encode()
        parts += (
            _ENTRY.pack(
                entry.type,
                entry.queue_id,
                entry.tag_hash,
                entry.due_ms,
                entry.spread_ms,
                len(name),
                len(entry.head),
                len(entry.properties),
            ),
            name,
            entry.head,
            entry.properties,
        )
    return b"".join(parts)


def decode_put(body: bytes) -> PutRequest:
    """Written out by hand: this runs for every message that is sent."""
    entries = []
    try:
        (size,) = U16.unpack_from(body)
        at = 2 + size
        topic = body[2:at].decode()
        auto_create, count = _PUT.unpack_from(body, at)
        at += _PUT.size
        for _ in range(count):
            fields = _ENTRY.unpack_from(body, at)
            kind, queue, tag, due, spread, id_size, head_size, properties_size = fields
            head_at = at + _ENTRY.size + id_size
            properties_at = head_at + head_size
            name = body[head_at - id_size : head_at].decode()
            at = properties_at + properties_size
            head, properties = body[head_at:properties_at], body[properties_at:at]
            entries.append(PutEntry(kind, head, properties, tag, queue, due, name, spread))
    except (struct.error, UnicodeDecodeError) as error:
        raise Refused(Code.BAD_REQUEST, f"the frame's payload is no put: {error}") from error
    if at > len(body):
        raise Refused(Code.BAD_REQUEST, "the frame's payload ends early")
    return PutRequest(topic, entries, bool(auto_create))


def encode_put_reply(results: Sequence[PutResult]) -> bytes:
    parts = [U16.pack(len(results))]
    for result in results:
        code, message, queue_id, offset, due_ms = result
        text = sentence(message)
        parts.append(_PUT_RESULT.pack(code, queue_id, offset, due_ms, len(text)) + text)
    return b"".join(parts)


def decode_put_reply(body: bytes) -> list[PutResult]:
    reader = PayloadReader(body)
    (count,) = reader.fields(U16)
    results = []
    for _ in range(count):
        code, queue, offset, due, size = reader.fields(_PUT_RESULT)
        results.append(PutResult(code, reader.take(size).decode(), queue, offset, due))
    return results


@fitting
def encode_pop(request: PopRequest) -> bytes:
    return b"".join(
        (
            _POP.pack(
                request.limit,
                request.poll_ms,
                request.invisible_ms,
                request.reply_bytes,
                0,
                request.queue_id,
                AUTO_RENEW if request.auto_renew else 0,
                request.filter_type,
                0,
            ),
            text(request.topic),
            text(request.group),
            text(request.client_id),
            text(request.expression),
            text(request.attempt_id),
        )
    )


def decode_pop(body: bytes) -> PopRequest:
    reader = PayloadReader(body)
    limit, poll, invisible, reply_bytes, _, queue, flags, filter_type, _ = reader.fields(_POP)
    topic, group, client_id = reader.text(), reader.text(), reader.text()
    expression, attempt_id = reader.text(), reader.text()
    return PopRequest(
        topic,
        group,
        client_id,
        limit,
        invisible,
        poll,
        queue,
        bool(flags & AUTO_RENEW),
        filter_type,
        expression,
        attempt_id,
        reply_bytes,
    )


def encode_pop_reply(reply: PopReply) -> bytes:
    parts = [_POP_REPLY.pack(len(reply.deliveries), reply.rest, reply.popped_ms)]
    add = parts.append  # four calls cost less than a tuple and its unpacking
    for queue, offset, attempt, stored, handle, head, properties in reply.deliveries:
        fields = _DELIVERY.pack(
            queue, offset, attempt, stored, len(handle), len(head), len(properties)
        )
        add(fields)
        add(handle)
        add(head)
        add(properties)
    return b"".join(parts)


def decode_pop_reply(body: bytes) -> PopReply:
    reader = PayloadReader(body)
    count, rest, popped_ms = reader.fields(_POP_REPLY)
    deliveries = []
    for _ in range(count):
        queue, offset, attempt, stored, handle, head, properties = reader.fields(_DELIVERY)
        content = reader.take(handle), reader.take(head), reader.take(properties)
        deliveries.append(Delivery(queue, offset, attempt, stored, *content))
    return PopReply(deliveries, rest, popped_ms)


@fitting
def encode_ack(request: AckRequest) -> bytes:
    parts = [text(request.topic), text(request.group), U16.pack(len(request.handles))]
    for handle in request.handles:
        parts += (U16.pack(len(handle)), handle)
    return b"".join(parts)


def decode_ack(body: bytes) -> AckRequest:
    """Without a PayloadReader: an ack is the smallest request and there are the most of them."""
    from_bytes = int.from_bytes
    topic_end = 2 + from_bytes(body[:2], "big")
    group_end = topic_end + 2 + from_bytes(body[topic_end : topic_end + 2], "big")
    at = group_end + 2
    handles = []
    for _ in range(from_bytes(body[group_end:at], "big")):
        end = at + 2 + from_bytes(body[at : at + 2], "big")
        handles.append(body[at + 2 : end])
        at = end
    if at > len(body):
        raise Refused(Code.BAD_REQUEST, "the frame's payload ends early")
    try:
        topic, group = body[2:topic_end].decode(), body[topic_end + 2 : group_end].decode()
    except UnicodeDecodeError as error:
        raise Refused(Code.BAD_REQUEST, "the frame's payload has bytes, not text") from error
    return AckRequest(topic, group, handles)


def encode_ack_reply(results: Sequence[AckResult]) -> bytes:
    parts = [U16.pack(len(results))]
    for result in results:
        if result is ACKED:
            parts.append(_ACKED_ENTRY)
            continue
        text = sentence(result.message)
        parts.append(_ACK_RESULT.pack(result.code, len(text)) + text)
    return b"".join(parts)


def decode_ack_reply(body: bytes) -> list[AckResult]:
    reader = PayloadReader(body)
    (count,) = reader.fields(U16)
    results = []
    for _ in range(count):
        code, size = reader.fields(_ACK_RESULT)
        results.append(AckResult(code, reader.take(size).decode()))
    return results


@fitting
def encode_change(request: ChangeRequest) -> bytes:
    return b"".join(
        (
            text(request.topic),
            text(request.group),
            _CHANGE.pack(request.invisible_ms, len(request.handle)),
            request.handle,
        )
    )


def decode_change(body: bytes) -> ChangeRequest:
    reader = PayloadReader(body)
    topic, group = reader.text(), reader.text()
    invisible_ms, size = reader.fields(_CHANGE)
    return ChangeRequest(topic, group, reader.take(size), invisible_ms)


def encode_clients(report: ClientsReport) -> bytes:
    parts = [U16.pack(len(report.heard)), U16.pack(len(report.gone))]
    return b"".join((*parts, *map(text, report.heard), *map(text, report.gone)))


def decode_clients(body: bytes) -> ClientsReport:
    reader = PayloadReader(body)
    (heard,) = reader.fields(U16)
    (gone,) = reader.fields(U16)
    return ClientsReport(
        [reader.text() for _ in range(heard)], [reader.text() for _ in range(gone)]
    )
