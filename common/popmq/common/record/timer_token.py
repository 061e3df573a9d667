"""What stands in the token of a timer's record, and of the record that ends it or counts again.

They are told from each other and from a revival token by their first byte, the version
(docs/concepts/timer.md).
All numbers are big-endian, times are wall milliseconds.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

TIMER_VERSION = 3
FIRING_VERSION = 4
RECOUNT_VERSION = 5
_TIMER = struct.Struct(">BBHIIIQQQ")
_FIRING = struct.Struct(">BBHIQQQQ")
_RECOUNT = struct.Struct(">BBHIQ")
_MOVED, _REPLACES, _WAITS_LATE, _TAKEN, _SENT_BACK = 1, 2, 4, 8, 16
_LATE = 1
# The upper bit of a timer record's tag hash, which is its due time otherwise: a moved body.
MOVED_BIT = 1 << 63
LARGEST_TIMER_TOKEN = max(_TIMER.size, _FIRING.size)


class TimerEnd(IntEnum):
    """How a timer ended."""

    FIRED = 0  # the record is the message in its topic
    DEAD_LETTERED = 1  # its topic was deleted: the record is the dead letter
    CANCELLED = 2
    LOST = 3  # its body could not be read


class TimerToken(NamedTuple):
    """Of a record in the timer queue: where the message goes, and which timer it is.

        0  version u8 = 3 | 1 flags u8: 1 moved, 2 replaces another timer, 4 moved and late,
                            8 taken over from a broker group that is drained,
                            16 a copy that a pull consumer sent back
        2  reserved u16
        4  topic_id u32 | 8 queue_id u32 | 12 reserved u32      where it is delivered
        16 tag_hash u64    of the message, whose own field holds the due time
        24 other u64       moved: the identity; replaces: the other timer's identity; taken: the
                           number of the move; sent back: the position of that copy's record
        32 other_due u64   replaces: when the other timer was due; taken: the origin, that is
                           the life of a master, which the move is of

    A timer that replaces another one cancels it: a rescheduling is one record.
    """

    topic_id: int
    queue_id: int
    tag_hash: int
    moved_from: int | None = None
    replaces: tuple[int, int] | None = None  # due time and identity
    late: bool = False  # moved out of the index of late timers
    taken: tuple[int, int] | None = None  # origin, and number of the move
    sent_back: int | None = None  # position of the copy

    def encode(self) -> bytes:
        flags = _MOVED if self.moved_from is not None else 0
        named = self.moved_from or self.sent_back or 0
        other_due, other = self.replaces or self.taken or (0, named)
        flags |= _SENT_BACK if self.sent_back is not None else 0
        flags |= _TAKEN if self.taken else 0
        flags |= _REPLACES if self.replaces else 0
        flags |= _WAITS_LATE if self.late else 0
        return _TIMER.pack(
            TIMER_VERSION,
            flags,
            0,
            self.topic_id,
            self.queue_id,
            0,
            self.tag_hash,
            other,
            other_due,
        )

    @classmethod
    def decode(cls, data: bytes) -> "TimerToken":
        """struct.error for another number of bytes."""
        _, flags, _, topic, queue, _, tag_hash, other, other_due = _TIMER.unpack(data)
        if not flags:  # nearly all, and each that fires is decoded
            return tuple.__new__(cls, (topic, queue, tag_hash, None, None, False, None, None))
        return cls(
            topic,
            queue,
            tag_hash,
            other if flags & _MOVED else None,
            (other_due, other) if flags & _REPLACES else None,
            bool(flags & _WAITS_LATE),
            (other_due, other) if flags & _TAKEN else None,
            other if flags & _SENT_BACK else None,
        )


class FiringToken(NamedTuple):
    """Of the record that ends a timer: it is the firing, and the delivery.

        0  version u8 = 4 | 1 flags u8: 1 late | 2 outcome u16 (`TimerEnd`) | 4 topic_id u32
        8  due_ms u64 | 16 identity u64      of the timer
        24 classified u64  records of the timer queue that had been enqueued
        32 offset u64      of the timer's newest record in its queue

    Whoever applies the record moves the cursor, or takes the late timer out.
    """

    topic_id: int  # where the message was to go
    due_ms: int
    identity: int
    classified: int
    offset: int
    late: bool = False
    outcome: TimerEnd = TimerEnd.FIRED

    def encode(self) -> bytes:
        topic_id, due_ms, identity, classified, offset, late, outcome = self
        flags = _LATE if late else 0
        return _FIRING.pack(
            FIRING_VERSION, flags, outcome, topic_id, due_ms, identity, classified, offset
        )

    @classmethod
    def decode(cls, data: bytes) -> "FiringToken":
        """struct.error for another number of bytes; ValueError for an unknown outcome."""
        _, flags, outcome, topic, due, identity, classified, offset = _FIRING.unpack(data)
        late = bool(flags & _LATE)
        return cls(topic, due, identity, classified, offset, late, TimerEnd(outcome))


def encode_fired(
    topic_id: int, due_ms: int, identity: int, classified: int, offset: int, late: bool
) -> bytes:
    """The bytes of a FiringToken of a timer that fired: this runs for all that do."""
    flags = _LATE if late else 0
    return _FIRING.pack(FIRING_VERSION, flags, 0, topic_id, due_ms, identity, classified, offset)


class TimerRecount(NamedTuple):
    """The body of a TIMER record by which the daily count mends what records had added up to.

        0  version u8 = 5 | 1 reserved u8 | 2 reserved u16 | 4 topic_id u32
        8  pending u64     timers of the topic that wait, where the record stands in the log

    Whoever applies the record has that count, whatever it was before.
    """

    topic_id: int
    pending: int

    def encode(self) -> bytes:
        return _RECOUNT.pack(RECOUNT_VERSION, 0, 0, self.topic_id, self.pending)

    @classmethod
    def decode(cls, data: bytes) -> "TimerRecount":
        """struct.error for another number of bytes."""
        _, _, _, topic, pending = _RECOUNT.unpack(data)
        return cls(topic, pending)
