"""What stands in the token of a half message, and of the record that ends it.

Told from other tokens by their first byte, the version (docs/concepts/transactions.md).  All
numbers are big-endian.  A half message is named by its offset in the half queue, for ever.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

HALF_VERSION = 5
END_VERSION = 6
_HALF = struct.Struct(">BBHIII")
_END = struct.Struct(">BBHIQ")


class Ending(IntEnum):
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


class EndToken(NamedTuple):
    """Of a message that ends a half message, and the whole of an op record, which is none.

    0 version u8 = 6 | 1 ending u8 (`Ending`) | 2 checks u16   with CHECKED: how many by now
    4 topic_id u32 | 8 half_offset u64
    """

    ending: Ending
    topic_id: int
    half_offset: int
    checks: int = 0

    def encode(self) -> bytes:
        fields = (self.ending, self.checks, self.topic_id, self.half_offset)
        return _END.pack(END_VERSION, *fields)

    @classmethod
    def decode(cls, data: bytes) -> "EndToken":
        """struct.error for another number of bytes; ValueError for an unknown ending."""
        _, ending, checks, topic_id, half_offset = _END.unpack(data)
        return cls(Ending(ending), topic_id, half_offset, checks)
