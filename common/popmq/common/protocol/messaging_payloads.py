"""What proxies ask of a broker: the kinds of frames and the fixed payloads of the frequent ones.

Sent, popped, acked and changed messages travel as structs (big-endian, strings with a length
in front); everything rare is protobuf (`wire/admin.proto`).  The same bytes are used when
proxy and broker share a process, so a test of one way is a test of both.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import NamedTuple, Protocol

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.frame_kinds import Kind as Kind
from popmq.common.protocol.payload import U16, PayloadReader, checked_encode, text, truncated_text

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


class RecallResult(StrEnum):
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
    Of a TRANSACTION message it is the time to its first check, 0 for the broker's own; of another
    type not 0 if the properties end with a deadline (`record/message_deadline.py`).
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
    """`topic_id` is the topic that the messages were placed for; 0: whichever has that name."""

    topic: str
    entries: Sequence[PutEntry]
    auto_create: bool = False
    topic_id: int = 0


class PutResult(NamedTuple):
    """`due_ms`: of a timer, wall milliseconds; 0: the message is visible at once.

    `message` says why it was refused; of a half message that was stored it is the transaction id.
    """

    code: int = Code.OK
    message: str = ""
    queue_id: int = 0
    queue_offset: int = 0
    due_ms: int = 0


DESCRIPTION_BYTES = 8 << 10  # of one client, in a report


class ClientsReport(NamedTuple):
    """Ids of clients that a proxy heard lately, and of those that said good-bye; and which of those
    it heard can be told there of lite topics that have ended.

    `described` is a DescribedClients of `wire/admin.proto`, or empty.
    """

    alive: Sequence[str] = ()
    closed: Sequence[str] = ()
    listening_clients: Sequence[str] = ()
    described: bytes = b""


AUTO_RENEW = 1


class PopRequest(NamedTuple):
    """With a `limit` of 0 it is a notification: nothing is handed out, and the reply's `rest` is
    not 0 if a receive might find something.

    `topic_id` and `group_id` are those that the sender knows, or 0; the broker serves them or newer
    ones."""

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
    topic_id: int = 0
    group_id: int = 0


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
    remaining: int = 0  # messages still readable in the queues that were visited
    popped_ms: int = 0  # wall time from which the invisible time counts; 0 with no deliveries
    first_look: bool = False  # it was ready to wait, and did not have to


class AckRequest(NamedTuple):
    """`group_id` as in `PopRequest`."""

    topic: str
    group: str
    handles: Sequence[bytes]
    group_id: int = 0


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
    group_id: int = 0  # as in `PopRequest`


_PUT = struct.Struct(">BH")
_ENTRY = struct.Struct(">BiQqIHII")
_PUT_RESULT = struct.Struct(">IIQQH")
_POP = struct.Struct(">HIQIIiBBI")
POP_REPLY = struct.Struct(">HQQ")
DELIVERY = struct.Struct(">IQHQHII")
_ACK_RESULT = struct.Struct(">IH")
_ACKED_ENTRY = _ACK_RESULT.pack(Code.OK, 0)
_CHANGE = struct.Struct(">qH")
_ID = struct.Struct(">I")
_new = tuple.__new__  # half of what calling the classes costs


@lru_cache(maxsize=4_096)
def encode_put_head(topic: str, auto_create: bool) -> bytes:
    """What a put begins with; the number of its entries and the entries follow."""
    return text(topic) + (b"\1" if auto_create else b"\0")


@checked_encode
def put_entry(entry: PutEntry) -> bytes:
    kind, head, properties, tag, queue_id, due_ms, message_id, spread_ms = entry
    name = message_id.encode()
    sizes = len(name), len(head), len(properties)
    fields = _ENTRY.pack(kind, queue_id, tag, due_ms, spread_ms, *sizes)
    return b"".join((fields, name, head, properties))


def plain_put_entry(
    kind: int, queue_id: int, tag_hash: int, message_id: bytes, head: bytes, properties: bytes
) -> bytes:
    """The entry of a message that is not delayed, whose values fit their fields."""
    sizes = len(message_id), len(head), len(properties)
    fields = _ENTRY.pack(kind, queue_id, tag_hash, 0, 0, *sizes)
    return b"".join((fields, message_id, head, properties))


@lru_cache(maxsize=4_096)
def id_tail(number: int) -> bytes:
    """The id of a topic or a group behind everything else, where brokers from before it look no
    more; nothing for 0."""
    return _ID.pack(number) if number else b""


@checked_encode
def encode_put(request: PutRequest) -> bytes:
    topic, entries, auto_create, topic_id = request
    head, count = encode_put_head(topic, auto_create), U16.pack(len(entries))
    return b"".join((head, count, *map(put_entry, entries), id_tail(topic_id)))


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
            entry = (kind, head, properties, tag, queue, due, name, spread)
            entries.append(_new(PutEntry, entry))
    except (struct.error, UnicodeDecodeError) as error:
        raise Refused(Code.BAD_REQUEST, f"the frame's payload is no put: {error}") from error
    if at > len(body):
        raise Refused(Code.BAD_REQUEST, "the frame's payload ends early")
    # The id that `id_tail` made; of no bytes it is 0.
    topic_id = int.from_bytes(body[at : at + 4], "big")
    return PutRequest(topic, entries, bool(auto_create), topic_id)


def encode_put_reply(results: Sequence[PutResult]) -> bytes:
    parts = [U16.pack(len(results))]
    for code, message, queue_id, offset, due_ms in results:
        text = truncated_text(message) if message else b""
        parts.append(_PUT_RESULT.pack(code, queue_id, offset, due_ms, len(text)) + text)
    return b"".join(parts)


def decode_put_reply(body: bytes) -> list[PutResult]:
    if len(body) == U16.size + _PUT_RESULT.size * int.from_bytes(body[:2], "big"):
        results = []
        for code, queue, offset, due, size in _PUT_RESULT.iter_unpack(body[U16.size :]):
            if size:
                break
            results.append(_new(PutResult, (code, "", queue, offset, due)))
        else:
            return results
    reader = PayloadReader(body)
    (count,) = reader.fields(U16)
    results = []
    for _ in range(count):
        code, queue, offset, due, size = reader.fields(_PUT_RESULT)
        message = reader.take(size).decode() if size else ""
        results.append(PutResult(code, message, queue, offset, due))
    return results


@checked_encode
def encode_pop(request: PopRequest) -> bytes:
    flags = AUTO_RENEW if request.auto_renew else 0
    times = request.limit, request.poll_ms, request.invisible_ms
    # Brokers from before the two ids pass over their fields.
    fields = *times, request.reply_bytes, request.topic_id, request.queue_id, flags
    return b"".join(
        (
            _POP.pack(*fields, request.filter_type, request.group_id),
            text(request.topic),
            text(request.group),
            text(request.client_id),
            text(request.expression),
            text(request.attempt_id),
        )
    )


def decode_pop(body: bytes) -> PopRequest:
    reader = PayloadReader(body)
    limit, poll, invisible, reply_bytes, topic_id, *rest = reader.fields(_POP)
    queue, flags, filter_type, group_id = rest
    names = reader.text(), reader.text(), reader.text()
    times = limit, invisible, poll
    renew, texts = bool(flags & AUTO_RENEW), (reader.text(), reader.text())
    ids = topic_id, group_id
    return PopRequest(*names, *times, queue, renew, filter_type, *texts, reply_bytes, *ids)


FIRST_LOOK = b"\1"  # behind the deliveries, where an older proxy reads nothing


def encode_pop_reply(reply: PopReply) -> bytes:
    parts = [POP_REPLY.pack(len(reply.deliveries), reply.remaining, reply.popped_ms)]
    add = parts.append  # four calls cost less than a tuple and its unpacking
    for queue, offset, attempt, stored, handle, head, properties in reply.deliveries:
        fields = DELIVERY.pack(
            queue, offset, attempt, stored, len(handle), len(head), len(properties)
        )
        add(fields)
        add(handle)
        add(head)
        add(properties)
    if reply.first_look:
        add(FIRST_LOOK)
    return b"".join(parts)


def decode_pop_reply(body: bytes) -> PopReply:
    """Without a PayloadReader: this runs for every message that is delivered."""
    deliveries: list[Delivery] = []
    make = tuple.__new__
    try:
        count, rest, popped_ms = POP_REPLY.unpack_from(body)
        at = POP_REPLY.size
        for _ in range(count):
            queue, offset, attempt, stored, handle, head, size = DELIVERY.unpack_from(body, at)
            handle_at = at + DELIVERY.size
            head_at = handle_at + handle
            properties_at = head_at + head
            at = properties_at + size
            fields = (
                *(queue, offset, attempt, stored),
                *(body[handle_at:head_at], body[head_at:properties_at], body[properties_at:at]),
            )
            deliveries.append(make(Delivery, fields))
    except struct.error as error:
        raise Refused(Code.BAD_REQUEST, "the frame's payload ends early") from error
    if at > len(body):
        raise Refused(Code.BAD_REQUEST, "the frame's payload ends early")
    return PopReply(deliveries, rest, popped_ms, body[at : at + 1] == FIRST_LOOK)


@lru_cache(maxsize=4_096)
def ack_head(topic: str, group: str) -> bytes:
    """What an ack begins with; the number of its handles and the handles follow."""
    return text(topic) + text(group)


def ack_entry(handle: bytes) -> bytes:
    return U16.pack(len(handle)) + handle


@checked_encode
def encode_ack(request: AckRequest) -> bytes:
    topic, group, handles, group_id = request
    head, count = ack_head(topic, group), U16.pack(len(handles))
    return b"".join((head, count, *map(ack_entry, handles), id_tail(group_id)))


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
    return AckRequest(topic, group, handles, from_bytes(body[at : at + 4], "big"))


def encode_ack_reply(results: Sequence[AckResult]) -> bytes:
    parts = [U16.pack(len(results))]
    for result in results:
        if result is ACKED:
            parts.append(_ACKED_ENTRY)
            continue
        text = truncated_text(result.message)
        parts.append(_ACK_RESULT.pack(result.code, len(text)) + text)
    return b"".join(parts)


def decode_ack_reply(body: bytes) -> list[AckResult]:
    count = int.from_bytes(body[:2], "big")
    if body[2:] == _ACKED_ENTRY * count:
        return [ACKED] * count
    reader = PayloadReader(body)
    (count,) = reader.fields(U16)
    results = []
    for _ in range(count):
        code, size = reader.fields(_ACK_RESULT)
        message = reader.take(size).decode() if size else ""
        results.append(ACKED if code == Code.OK and not size else AckResult(code, message))
    return results


@checked_encode
def encode_change(request: ChangeRequest) -> bytes:
    return b"".join(
        (
            text(request.topic),
            text(request.group),
            _CHANGE.pack(request.invisible_ms, len(request.handle)),
            request.handle,
            id_tail(request.group_id),
        )
    )


def decode_change(body: bytes) -> ChangeRequest:
    reader = PayloadReader(body)
    topic, group = reader.text(), reader.text()
    invisible_ms, size = reader.fields(_CHANGE)
    handle = reader.take(size)
    group_id = int.from_bytes(body[reader.at : reader.at + 4], "big")
    return ChangeRequest(topic, group, handle, invisible_ms, group_id)


def encode_clients(report: ClientsReport) -> bytes:
    parts = [U16.pack(len(report.alive)), U16.pack(len(report.closed))]
    names = (*map(text, report.alive), *map(text, report.closed))
    # Behind the rest, where brokers from before it look no more.
    return b"".join(
        (
            *parts,
            *names,
            U16.pack(len(report.listening_clients)),
            *map(text, report.listening_clients),
            report.described,
        )
    )


def decode_clients(body: bytes) -> ClientsReport:
    reader = PayloadReader(body)
    counts = (*reader.fields(U16), *reader.fields(U16))
    texts, gone = ([reader.text() for _ in range(count)] for count in counts)
    (listening,) = reader.fields(U16) if reader.at < len(body) else (0,)
    listening_clients = [reader.text() for _ in range(listening)]
    return ClientsReport(texts, gone, listening_clients, body[reader.at :])
