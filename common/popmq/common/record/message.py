"""The one binary record of the log, and its checksum (docs/concepts/store.md).

Every record starts with the same 56 bytes (big-endian):

    0  size u32         the whole record, these bytes included
    4  crc32c u32       over bytes [8, size)
    8  version u8 = 1
    9  kind u8          RecordKind
    10 flags u16
    12 epoch u32        of the master that wrote it
    16 position u64     its own first byte in the log: a stale record never matches
    24 log_ms u64       log time (never goes back)
    32 wall_ms u64      the writer's wall clock
    40 topic_id u32
    44 queue_id u32
    48 queue_offset u64

A MESSAGE goes on with 24 bytes and four parts:

    56 tag_hash u64
    64 head_size u32         the client's message without its system properties, verbatim
    68 properties_size u32   the content of its system_properties
    72 token_size u16        0, or a token: of a revival (`RevivalToken`), a timer, a firing, ...
    74 attempt u16           delivery attempt that this stored copy stands for, from 1
    76 unconfirmed u32  bytes of log before this record that were not confirmed yet
    80 token | head | properties

Every other kind has its own body after byte 56 (`pop_check_point.py`, `registry.py`).
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from crc32c import crc32c

from popmq.common.record.message_deadline import ExpiryToken
from popmq.common.record.timer_token import (
    FIRING_VERSION,
    LARGEST_TIMER_TOKEN,
    TIMER_VERSION,
    FiringToken,
    TimerToken,
)
from popmq.common.record.transaction_token import (
    END_VERSION,
    HALF_VERSION,
    HalfToken,
    TransactionEndToken,
)

RECORD_VERSION = 1
HEADER_SIZE = 56
MESSAGE_HEADER_SIZE = 80
# size, crc | version, kind, flags, epoch, position, log_ms, wall_ms, topic, queue, offset
_FRONT = struct.Struct(">II")
_REST = struct.Struct(">BBHIQQQIIQ")
_HEADER = struct.Struct(">IIBBHIQQQIIQ")
_MESSAGE = struct.Struct(">QIIHHI")
_HEADER_AND_MESSAGE = struct.Struct(">IIBBHIQQQIIQQIIHHI")
_REST_AND_MESSAGE = struct.Struct(">BBHIQQQIIQQIIHHI")
_TOKEN = struct.Struct(">BBHIQIIQQ")  # version 1
_TOKEN_2 = struct.Struct(">BBHIQIIQQQ")
_DEAD, _REDRIVEN, _PARKED = 1, 2, 4  # flags of a token
_new = tuple.__new__

assert _FRONT.size + _REST.size == _HEADER.size == HEADER_SIZE
assert _HEADER_AND_MESSAGE.size == _HEADER.size + _MESSAGE.size == MESSAGE_HEADER_SIZE


class RecordKind(IntEnum):
    MESSAGE = 1
    PADDING = 2  # fills a segment's end; the rest of the segment follows it unread
    META = 3  # a topic, group or secret: rmq_sys_meta
    REVIVE = 4  # check point, ack, change ...: the revive topic's own record
    OFFSET = 5  # a group's offset set by hand or at first use: rmq_sys_offsets
    EPOCH_START = 6  # first record of each start as master
    TIMER = 8  # how a timer ended that leaves no message: a firing token
    SNAPSHOT_MARK = 9  # tables of all replicas are compared as they are behind it
    STATE_HASH = 10  # what came out on the master (store/replica_records.py)
    LOG_START = 11  # the master deletes its segments below a position
    TRANSACTION = 12  # how a half message ended that leaves no message, or a check of it
    LITE_TOPIC = 13  # a lite topic was made or removed (meta/lite_topics.py)
    MOVED = 7  # a MESSAGE again, whose first place retention deletes; same identity, no new unit


WITH_MESSAGE = (int(RecordKind.MESSAGE), int(RecordKind.MOVED))


class BadRecord(Exception):
    """The bytes are not a whole, intact record of this position."""


class Header(NamedTuple):
    size: int
    kind: int
    flags: int
    epoch: int
    position: int
    log_ms: int
    wall_ms: int
    topic_id: int
    queue_id: int
    queue_offset: int

    @property
    def end(self) -> int:
        return self.position + self.size


class Stamp(NamedTuple):
    """What every record of one step shares."""

    epoch: int
    log_ms: int
    wall_ms: int


class DeadReason(IntEnum):
    """Why a message became a dead letter."""

    MAX_ATTEMPTS = 0  # also of every dead letter that a token of version 1 names
    REJECTED = 1  # by its consumer, at once


class EndedDelivery(NamedTuple):
    """A retry or dead-letter record ends the delivery of this member of a check point."""

    epoch: int
    sequence: int
    member: int


class RedrivenLetter(NamedTuple):
    """A redriven copy ends the dead letter (docs/concepts/dead_letters.md)."""

    topic_id: int
    offset: int


class ParkedMessage(NamedTuple):
    """A dead letter out of a parking topic ends the parked message there."""

    topic_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class RevivalToken:
    """Names what a retry, parking, dead-letter or redriven record ends, and the first copy.

        0  version u8 = 2 (1: without the last field)
        1  member u8 | 2 flags u16: 1 dead, 2 redriven, 4 parked; from bit 8 on the DeadReason
        4  u32 | 8 u64        epoch and sequence of the check point; id and offset of what a
                              RedrivenLetter or a ParkedMessage names
        16 topic_id u32 | 20 queue_id u32 | 24 queue_offset u64   of the first copy
        32 first_log_ms u64   first delivery
        40 last_log_ms u64    delivery that this record ends; 0: not known

    The record *is* the revival: whoever applies it marks that member of that check point as
    done, so a revival is written once whatever crashes.
    A dead letter that a pull consumer sent back ends no delivery: the epoch is 0, the sequence
    the position of the copy's record, or 0 (it was a client's own send, or an older popmq's).
    """

    SIZE = _TOKEN_2.size
    dead: bool
    ends: EndedDelivery | RedrivenLetter | ParkedMessage | None  # None: the place named below
    topic_id: int
    queue_id: int
    queue_offset: int
    first_log_ms: int
    last_log_ms: int = 0
    reason: DeadReason = DeadReason.MAX_ATTEMPTS

    @property
    def is_sent_back(self) -> bool:
        return self.dead and isinstance(self.ends, EndedDelivery) and self.ends.epoch == 0

    def encode(self) -> bytes:
        ends, member, named = self.ends, 0, self.ends or (0, 0)
        flags = (_DEAD if self.dead else 0) | self.reason << 8
        if isinstance(ends, EndedDelivery):
            member = ends.member
        else:
            flags |= _REDRIVEN if isinstance(ends, RedrivenLetter) else _PARKED
        return _TOKEN_2.pack(
            2,
            member,
            flags,
            named[0],
            named[1],
            self.topic_id,
            self.queue_id,
            self.queue_offset,
            self.first_log_ms,
            self.last_log_ms,
        )

    @classmethod
    def decode(cls, data: bytes) -> "RevivalToken":
        """BadRecord for a version or a reason that this build does not know."""
        version = data[0] if data else 0
        layout = {1: _TOKEN, 2: _TOKEN_2}.get(version)
        if layout is None or len(data) != layout.size:
            raise BadRecord(f"revival token version {version} of {len(data)} bytes is unknown")
        _, member, flags, first, second, *rest = layout.unpack(data)
        try:
            reason = DeadReason(flags >> 8)
        except ValueError as error:
            raise BadRecord(f"a dead letter's reason {flags >> 8} is unknown") from error
        ends: EndedDelivery | RedrivenLetter | ParkedMessage | None
        if flags & _PARKED:
            ends = ParkedMessage(first, second) if flags & _DEAD else None
        elif flags & _REDRIVEN:
            ends = RedrivenLetter(first, second)
        else:
            ends = EndedDelivery(first, second, member)
        topic, queue, offset, first_ms, *last = rest
        last_ms = last[0] if last else 0
        return cls(bool(flags & _DEAD), ends, topic, queue, offset, first_ms, last_ms, reason)


Token = RevivalToken | TimerToken | FiringToken | HalfToken | TransactionEndToken | ExpiryToken
LARGEST_TOKEN = max(RevivalToken.SIZE, LARGEST_TIMER_TOKEN)


class StoredMessage(NamedTuple):
    """A MESSAGE record taken apart; `head` and `properties` are the client's bytes."""

    header: Header
    tag_hash: int
    attempt: int
    any_token: Token | None
    head: bytes
    properties: bytes

    @property
    def token(self) -> RevivalToken | None:
        """Its revival token."""
        return self.any_token if isinstance(self.any_token, RevivalToken) else None


def encode_record(
    *,
    kind: int,
    stamp: Stamp,
    position: int,
    topic_id: int,
    queue_id: int,
    queue_offset: int,
    body: bytes = b"",
    size: int = 0,
    flags: int = 0,
) -> bytes:
    """A record with an opaque body. `size` beyond the bytes is for PADDING only."""
    rest = _REST.pack(
        RECORD_VERSION,
        kind,
        flags,
        stamp.epoch,
        position,
        stamp.log_ms,
        stamp.wall_ms,
        topic_id,
        queue_id,
        queue_offset,
    )
    tail = rest + body
    return _FRONT.pack(size or HEADER_SIZE + len(body), crc32c(tail)) + tail


def encode_message(
    *,
    stamp: Stamp,
    position: int,
    topic_id: int,
    queue_id: int,
    queue_offset: int,
    tag_hash: int,
    head: bytes,
    properties: bytes,
    token: bytes = b"",
    attempt: int = 1,
    kind: int = RecordKind.MESSAGE,
    unconfirmed: int = 0,
) -> bytes:
    rest = _REST_AND_MESSAGE.pack(
        RECORD_VERSION,
        kind,
        0,
        stamp.epoch,
        position,
        stamp.log_ms,
        stamp.wall_ms,
        topic_id,
        queue_id,
        queue_offset,
        tag_hash,
        len(head),
        len(properties),
        len(token),
        attempt,
        min(unconfirmed, 0xFFFF_FFFF),
    )
    tail = b"".join((rest, token, head, properties))
    return _FRONT.pack(8 + len(tail), crc32c(tail)) + tail


def message_size(head: bytes, properties: bytes, token: bytes = b"") -> int:
    return MESSAGE_HEADER_SIZE + len(token) + len(head) + len(properties)


def decode_header(data: bytes | memoryview, offset: int = 0) -> Header:
    """The header alone, unchecked. Raises BadRecord when the bytes end or cannot be one."""
    if len(data) - offset < HEADER_SIZE:
        raise BadRecord("the bytes end inside a record header")
    size, _crc, version, *fields = _HEADER.unpack_from(data, offset)
    if version != RECORD_VERSION:
        raise BadRecord(f"record version {version} is unknown (this build reads 1)")
    if size < HEADER_SIZE:
        raise BadRecord(f"record size {size} is below the header's {HEADER_SIZE}")
    return Header(size, *fields)


def check_record(data: bytes | memoryview, offset: int, position: int) -> Header:
    """The header of an intact record that says it stands at `position`; else BadRecord."""
    header = decode_header(data, offset)
    if header.position != position:
        raise BadRecord(f"record says position {header.position}, read at {position}")
    end = offset + header.size
    if header.kind == RecordKind.PADDING:
        end = offset + HEADER_SIZE
    if end > len(data):
        raise BadRecord("the bytes end inside a record")
    expected = _FRONT.unpack_from(data, offset)[1]
    with memoryview(data)[offset + 8 : end] as checked:
        if crc32c(checked) != expected:
            raise BadRecord("crc32c does not match")
    return header


def decode_message(
    data: bytes | memoryview, offset: int = 0, header: Header | None = None
) -> StoredMessage:
    """A MESSAGE that `check_record` has passed (which gave `header`), or that was read behind the
    confirmed position."""
    header = header or decode_header(data, offset)
    tag_hash, head_size, properties_size, token_size, attempt, _ = _MESSAGE.unpack_from(
        data, offset + HEADER_SIZE
    )
    token_at = offset + MESSAGE_HEADER_SIZE
    head_at = token_at + token_size
    properties_at = head_at + head_size
    end = properties_at + properties_size
    if header.kind not in WITH_MESSAGE or end != offset + header.size or end > len(data):
        raise BadRecord(f"record at {header.position} is not a message")
    token = decode_token(bytes(data[token_at:head_at])) if token_size else None
    return StoredMessage(
        header,
        tag_hash,
        attempt,
        token,
        bytes(data[head_at:properties_at]),
        bytes(data[properties_at:end]),
    )


def intact_message(
    data: bytes | memoryview, at: int, position: int, size: int
) -> StoredMessage | None:
    """`check_record` and `decode_message` in one go, because this runs for all that is delivered.

    The record of `size` bytes is at byte `at` of `data`.  None when `check_record` would raise or
    find another size: it can say why.  Raises BadRecord for a token that nobody can read.
    """
    end = at + size
    if size < MESSAGE_HEADER_SIZE or end > len(data):
        return None
    (
        said_size, crc, version, kind, flags, epoch, said_position, log_ms, wall_ms,
        topic_id, queue_id, queue_offset, tag, head_size, properties_size, token_size, attempt, _,
    ) = _HEADER_AND_MESSAGE.unpack_from(data, at)  # fmt: skip
    head_at = at + MESSAGE_HEADER_SIZE + token_size
    properties_at = head_at + head_size
    if (
        said_size != size
        or said_position != position
        or version != RECORD_VERSION
        or kind not in WITH_MESSAGE
        or properties_at + properties_size != end
        or crc32c(data[at + 8 : end]) != crc
    ):
        return None
    token = decode_token(bytes(data[head_at - token_size : head_at])) if token_size else None
    head, properties = bytes(data[head_at:properties_at]), bytes(data[properties_at:end])
    # Half of what calling the classes costs; the header's fields stand in the record's order.
    header = _new(
        Header,
        (size, kind, flags, epoch, position, log_ms, wall_ms, topic_id, queue_id, queue_offset),
    )
    return _new(StoredMessage, (header, tag, attempt, token, head, properties))


def decode_token(data: bytes) -> Token:
    """BadRecord for a version or a content that this build does not know."""
    try:
        if data[0] == TIMER_VERSION:
            return TimerToken.decode(data)
        if data[0] == FIRING_VERSION:
            return FiringToken.decode(data)
        if data[0] == HALF_VERSION:
            return HalfToken.decode(data)
        if data[0] == END_VERSION:
            return TransactionEndToken.decode(data)
        if data == ExpiryToken().encode():
            return ExpiryToken()
    except (struct.error, ValueError) as error:
        raise BadRecord(f"token version {data[0]} of {len(data)} bytes: {error}") from error
    return RevivalToken.decode(data)


def peek_message(data: bytes | memoryview) -> tuple[int, Token | None]:
    """Tag hash and token of a checked MESSAGE record, without its content."""
    tag, _, _, token_size, _, _ = _MESSAGE.unpack_from(data, HEADER_SIZE)
    if not token_size:
        return tag, None
    token_at = MESSAGE_HEADER_SIZE
    return tag, decode_token(bytes(data[token_at : token_at + token_size]))


def unconfirmed_bytes(data: bytes) -> int:
    """How far the confirmed position was behind when this message was appended, or more."""
    distance: int = _MESSAGE.unpack_from(data, HEADER_SIZE)[5]
    return distance if distance < 0xFFFF_FFFF else 1 << 62


def tag_hash(tag: str) -> int:
    """64 bits of a tag for the index; 0 stands for no tag. Equality is checked on the text."""
    if not tag:
        return 0
    return int.from_bytes(blake2b(tag.encode(), digest_size=8).digest(), "big") or 1
