"""Tokens of a half message, and of the record that ends or checks it.

Their first byte, the version, differs from that of other tokens (docs/concepts/transactions.md).
All numbers are big-endian.  The offset in the half queue identifies a half message for ever.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

HALF_VERSION = 5
END_VERSION = 6
CHECK_VERSION = 8  # 7 is the version of another token (record/message_deadline.py)
_HALF = struct.Struct(">BBHIII")
_END = struct.Struct(">BBHIQ")


class TransactionEnd(IntEnum):
    """How a half message ended, or CHECKED for a check of it."""

    COMMITTED = 1  # the record is the message in its topic
    ROLLED_BACK = 2
    GIVEN_UP = 3  # no producer resolved it: the record is the dead letter
    LOST = 4  # its body could not be read
    CHECKED = 5  # a check was sent to a producer; the half message is still pending


class HalfToken(NamedTuple):
    """Token of a record in the half queue: the queue in which a commit stores the message.

    0 version u8 = 5 | 1 reserved u8 | 2 reserved u16
    4 topic_id u32 | 8 queue_id u32
    12 check_after_ms u32   log time from its record to the first check
    """

    topic_id: int
    queue_id: int
    check_after_ms: int

    def encode(self) -> bytes:
        return _HALF.pack(HALF_VERSION, 0, 0, *self)

    @classmethod
    def decode(cls, data: bytes) -> "HalfToken":
        """Raises struct.error if the size is not that of the layout."""
        _, _, _, *fields = _HALF.unpack(data)
        return cls(*fields)


class TransactionEndToken(NamedTuple):
    """Token of a message that ends a half message. An op record, which is no message, is only this.

    0 version u8 = 6 | 1 ending u8 (`TransactionEnd`) | 2 checks u16   with CHECKED: checks so far
    4 topic_id u32 | 8 half_offset u64

    A check (CHECKED) has version 8 and, in place of the topic,

    4 next_check_ms u32   log time from its record to the next check

    An older popmq accepts only tokens of 16 bytes.  It decodes a check of version 8 as one of
    version 6, and ignores its topic.  Checks that it wrote have version 6: their `next_check_ms`
    is 0.
    """

    ending: TransactionEnd
    topic_id: int  # 0 in a check of version 8
    half_offset: int
    checks: int = 0
    next_check_ms: int = 0

    def encode(self) -> bytes:
        version, third = END_VERSION, self.topic_id
        if self.next_check_ms:
            version, third = CHECK_VERSION, self.next_check_ms
        return _END.pack(version, self.ending, self.checks, third, self.half_offset)

    @classmethod
    def decode(cls, data: bytes) -> "TransactionEndToken":
        """Raises struct.error for another size, and ValueError for an unknown ending."""
        version, ending, checks, third, half_offset = _END.unpack(data)
        if version == CHECK_VERSION:
            return cls(TransactionEnd(ending), 0, half_offset, checks, next_check_ms=third)
        return cls(TransactionEnd(ending), third, half_offset, checks)
