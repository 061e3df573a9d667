"""What stands in the token of a half message, and of the record that ends it.

Told from other tokens by their first byte, the version (docs/concepts/transactions.md).  All
numbers are big-endian.  A half message is named by its offset in the half queue, for ever.
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
    """What became of a half message, or what was done about it."""

    COMMITTED = 1  # the record is the message in its topic
    ROLLED_BACK = 2
    GIVEN_UP = 3  # no producer knew: the record is the dead letter
    LOST = 4  # its body could not be read
    CHECKED = 5  # a producer is asked; it is pending still


class HalfToken(NamedTuple):
    """Of a record in the half queue: where the message goes when it is committed.

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
        """struct.error for another number of bytes."""
        _, _, _, *fields = _HALF.unpack(data)
        return cls(*fields)


class TransactionEndToken(NamedTuple):
    """Of a message that ends a half message, and the whole of an op record, which is none.

    0 version u8 = 6 | 1 ending u8 (`TransactionEnd`) | 2 checks u16   with CHECKED: how many by now
    4 topic_id u32 | 8 half_offset u64

    A check (CHECKED) is of version 8, which has in the topic's place

    4 next_check_ms u32   log time from its record to the next check

    because an older popmq takes these 16 bytes only.  It decodes a check of either version alike,
    and uses the topic of none.  A check that it wrote is of version 6: its `next_check_ms` is 0.
    """

    ending: TransactionEnd
    topic_id: int  # 0: of a check of version 8
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
        """struct.error for another number of bytes; ValueError for an unknown ending."""
        version, ending, checks, third, half_offset = _END.unpack(data)
        if version == CHECK_VERSION:
            return cls(TransactionEnd(ending), 0, half_offset, checks, next_check_ms=third)
        return cls(TransactionEnd(ending), third, half_offset, checks)
