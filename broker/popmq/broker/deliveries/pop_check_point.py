"""PopCheckPoint: what was delivered, until when, and how it ended.

Everything about pop that must survive is one fixed-width record of the revive topic: 72
bytes (big-endian) behind the record header, 128 in all.

    0  version u8 = 1
    1  kind u8          1 check point, 2 ack, 3 change, 4 lost (its body cannot be read),
                        5 returned (FIFO: waits in place for its next attempt),
                        6 unparked (FIFO: what an operator says of a parked key)
    2  flags u16        1 auto renew, 2 of a push consumer, 4 of a FIFO group; of returned: 8 not
                        counted as an attempt (nobody saw the delivery)
    4  epoch u32        of the check point
    8  sequence u64     of the check point
    16 members u64      bit i = the message at start_offset + i: handed out / acked / changed /
                        lost / returned
    24 start_offset u64
    32 topic_id u32     the topic that was read, a retry topic included
    36 group_id u32
    40 queue_id u32
    44 u32              check point of a FIFO group: 32 bits of the receive's attempt id, 0 for
                        none; change: epoch of the check point whose member it takes over
    48 u64              check point: where the next pop goes on (FIFO: the committed offset, below
                        which all is over); change: the old sequence; unparked: the end
    56 revive_at_ms u64 log time at which unacked members come back
    64 client u64       hash of the client that received them

Unparked has the parking topic's id, the group's, in `start_offset` the offset there of one of the
key's messages, in `flags` the UnparkAction, and the messages it speaks of are those from
`members` to below the u64 at 48.

A change makes a new check point and ends the old one's member in the same record, so there
is no moment with two live ones (RocketMQ writes two records).
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from popmq.common.errors import StoreDamaged
from popmq.common.record.message import BadRecord

CHECK_POINT_VERSION = 1
MEMBER_LIMIT = 64  # a wider span makes several check points
AUTO_RENEW = 1  # invisible while its client lives; a change ends that
PUSH = 2
FIFO = 4
UNCOUNTED = 8
# As a due time: it waits in no bucket (revive_buckets.py), and what it rounds to is none either.
NEVER_DUE = -(1 << 62)
_LAYOUT = struct.Struct(">BBHIQQQIIIIQQQ")
RECORD_SIZE = 128
assert _LAYOUT.size == 72
# Members without a gap between them: one object for all check points that have the same.
_RUNS = {mask: mask for mask in ((1 << count) - 1 for count in range(1, MEMBER_LIMIT + 1))}


class ReviveKind(IntEnum):
    CHECK_POINT = 1
    ACK = 2
    CHANGE = 3
    LOST = 4
    RETURNED = 5
    UNPARKED = 6


_NOTHING = (0,) * 4  # what the record of an end does not say


class UnparkAction(IntEnum):
    """What is to become of a parked key's messages."""

    RESUME = 1
    SKIP = 2
    DEAD_LETTER = 3


class CheckPointRecord(NamedTuple):
    """A receive: its messages, and until when they are invisible."""

    epoch: int
    sequence: int
    members: int
    start_offset: int
    topic_id: int
    group_id: int
    queue_id: int
    attempt_id: int
    next_offset: int
    revive_at_ms: int
    client: int
    flags: int = 0

    def encode(self) -> bytes:
        return _LAYOUT.pack(CHECK_POINT_VERSION, ReviveKind.CHECK_POINT, self.flags, *self[:-1])

    def check_point(self, log_ms: int) -> "PopCheckPoint":
        """What the record makes, written at `log_ms`."""
        return PopCheckPoint(
            (self.epoch, self.sequence),
            (self.group_id, self.topic_id, self.queue_id),
            _RUNS.get(self.members, self.members),
            self.start_offset,
            self.next_offset - self.start_offset,
            log_ms,
            self.revive_at_ms,
            self.client,
            self.flags,
            attempt_id=self.attempt_id,
        )


class EndRecord(NamedTuple):
    """Deliveries ended: acked, lost, or (FIFO) returned to their place."""

    kind: ReviveKind
    epoch: int
    sequence: int
    members: int
    counted: bool = True  # returned: as an attempt; not, of LOST: a dead letter stays where it is
    # Of the check point, for reports; 0 in records of earlier brokers.
    topic_id: int = 0
    group_id: int = 0
    queue_id: int = 0

    def encode(self) -> bytes:
        flags = 0 if self.counted else UNCOUNTED
        start = (CHECK_POINT_VERSION, self.kind, flags)
        return _LAYOUT.pack(*start, *self[1:4], 0, *self[5:], *_NOTHING)


class ChangeRecord(NamedTuple):
    """The invisible time of one delivery was changed: a check point of its own takes it over."""

    epoch: int
    sequence: int
    offset: int
    topic_id: int
    group_id: int
    queue_id: int
    old_epoch: int
    old_sequence: int
    revive_at_ms: int
    client: int
    flags: int = 0

    def encode(self) -> bytes:
        start = (CHECK_POINT_VERSION, ReviveKind.CHANGE, self.flags, self.epoch, self.sequence)
        return _LAYOUT.pack(*start, 1, *self[2:-1])

    def check_point(self, log_ms: int) -> "PopCheckPoint":
        """What the record makes, written at `log_ms`."""
        return PopCheckPoint(
            (self.epoch, self.sequence),
            (self.group_id, self.topic_id, self.queue_id),
            1,
            self.offset,
            self.old_sequence - self.offset,  # says nothing; snapshots have it
            log_ms,
            self.revive_at_ms,
            self.client,
            self.flags,
        )


class UnparkRecord(NamedTuple):
    """What an operator says of a parked key: of its messages from `begin` to below `end`."""

    action: UnparkAction
    epoch: int
    sequence: int  # 0: it has no check point
    begin: int
    key_offset: int
    parking_id: int
    group_id: int
    end: int

    def encode(self) -> bytes:
        start = (CHECK_POINT_VERSION, ReviveKind.UNPARKED, self.action)
        return _LAYOUT.pack(*start, *self[1:7], 0, 0, self.end, 0, 0)


ReviveRecord = CheckPointRecord | EndRecord | ChangeRecord | UnparkRecord


def decode_revive(body: bytes) -> ReviveRecord:
    """StoreDamaged for a version of a newer popmq, BadRecord for what no popmq writes."""
    version, number, flags, *fields = _LAYOUT.unpack(body)
    if version != CHECK_POINT_VERSION:
        raise StoreDamaged(
            f"a record of the revive topic has version {version}, this build reads "
            f"{CHECK_POINT_VERSION}: start a newer popmq"
        )
    try:
        kind = ReviveKind(number)
        if kind is ReviveKind.CHECK_POINT:
            return CheckPointRecord._make((*fields, flags))
        if kind is ReviveKind.CHANGE:
            return ChangeRecord._make((*fields[:2], *fields[3:], flags))
        if kind is ReviveKind.UNPARKED:
            return UnparkRecord._make((UnparkAction(flags), *fields[:6], fields[8]))
    except ValueError as error:
        raise BadRecord(f"a record of the revive topic: {error}") from error
    return EndRecord._make((kind, *fields[:3], not flags & UNCOUNTED, *fields[4:7]))


class _Mark:
    """A bit of a check point's `marks`, like an attribute: an attribute takes 8 bytes."""

    def __init__(self, bit: int) -> None:
        self._bit = bit

    def __get__(self, ck: "PopCheckPoint", owner: type) -> bool:
        return ck.marks & self._bit != 0

    def __set__(self, ck: "PopCheckPoint", value: bool) -> None:
        ck.marks = ck.marks | self._bit if value else ck.marks & ~self._bit


@dataclass(slots=True, eq=False)
class PopCheckPoint:
    """A check point in memory, where there may be many: what it takes is counted in
    tests/broker/test_check_point_memory.py.  Bits of its members say what became of them.

    A member that is both acked and revived became a dead letter.
    `moved` members live on in a check point of their own (made by a change), whose `root`
    is this one; when that ends, the outcome is entered here too, because the committed
    offset of the queue waits for this one.
    """

    key: tuple[int, int]  # epoch, sequence
    place: tuple[int, int, int]  # group, topic, queue; one object for all of a queue
    members: int
    start_offset: int
    span: int  # from `start_offset` to `next_offset`: mostly a number that Python has once
    popped_at_ms: int
    revive_at_ms: int
    client: int
    flags: int
    acked: int = 0
    revived: int = 0
    superseded: int = 0
    first_check_point: "PopCheckPoint | None" = None
    attempt_id: int = 0  # FIFO: 32 bits of the receive's attempt id
    marks: int = 0
    snapshot: int = 0  # number of the last snapshot that has it
    due_ms: int = NEVER_DUE  # when to look at it; soft, `revive_at_ms` is the record's

    buffered = _Mark(1)  # no record yet (check_point_buffer.py)
    rolled_back = _Mark(2)  # soft: its reply reached nobody (pop/pop_rollback.py)
    doubted = _Mark(8)  # soft: its reply may have been lost with the proxy's connection
    repeated = _Mark(4)  # soft: to a second receive of the same attempt id

    @property
    def epoch(self) -> int:
        return self.key[0]

    @property
    def sequence(self) -> int:
        return self.key[1]

    @property
    def group_id(self) -> int:
        return self.place[0]

    @property
    def topic_id(self) -> int:
        return self.place[1]

    @property
    def queue_id(self) -> int:
        return self.place[2]

    @property
    def next_offset(self) -> int:
        """Where the next pop goes on (FIFO: the committed offset)."""
        return self.start_offset + self.span

    @property
    def waiting(self) -> int:
        """Members that this check point itself would revive."""
        return self.members & ~(self.acked | self.revived | self.superseded)

    @property
    def finished(self) -> bool:
        """Every member is acked or revived, by this check point or by one it moved to."""
        return self.members & ~(self.acked | self.revived) == 0

    @property
    def receive(self) -> tuple[int, int, int, int]:
        """Names the receive that a FIFO check point answers, as long as it has an attempt id."""
        group_id, topic_id, _ = self.place
        return (group_id, topic_id, self.client, self.attempt_id)

    def end_record(self, kind: ReviveKind, members: int, *, counted: bool = True) -> EndRecord:
        group_id, topic_id, queue_id = self.place
        return EndRecord(kind, *self.key, members, counted, topic_id, group_id, queue_id)

    def offset_of(self, member: int) -> int:
        return self.start_offset + member

    def offsets(self, bits: int) -> list[int]:
        """Those of the members whose bits are set, lowest first."""
        return [self.start_offset + member for member in member_bits(bits)]


def member_bits(mask: int) -> list[int]:
    """The numbers of the set bits, lowest first."""
    bit_lengths = []
    while mask:
        low = mask & -mask
        bit_lengths.append(low.bit_length() - 1)
        mask ^= low
    return bit_lengths
