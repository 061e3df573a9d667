"""Offsets that do not follow from other records.

The committed offset of a group itself is no record: it follows from check points and acks (D1).
Where a group that starts at the newest message begins does not, nor a reset, nor what a group
acked whose check points stay in memory.  That is written to `rmq_sys_offsets`, 24 bytes a
record (big-endian):

    0 version u8 = 1 | 1 reason u8 (`OffsetReason`) | 2 reserved u16
    4 group_id u32 | 8 topic_id u32 | 12 queue_id u32 | 16 queue_offset u64

Version 2 has the reason COMMITTED and 20 bytes more for each check point whose acks it makes
durable: epoch u32 | sequence u64 | acked u64, a bit for each member.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from popmq.common.errors import StoreDamaged

OFFSET_VERSION = 2
_LAYOUT = struct.Struct(">BBHIIIQ")
_ACKED = struct.Struct(">IQQ")


class OffsetReason(IntEnum):
    START_AT_NEWEST = 1
    COMMITTED = 2  # everything below is over, and has no record of its own (buffered groups)
    RESET = 3
    PULLED = 4  # a pull consumer says where its group reads on


@dataclass(frozen=True, slots=True)
class OffsetRecord:
    group_id: int
    topic_id: int
    queue_id: int
    queue_offset: int
    reason: OffsetReason
    # Epoch and sequence of check points that are no records, and their members that are acked.
    acked: tuple[tuple[int, int, int], ...] = ()

    def encode(self) -> bytes:
        head = _LAYOUT.pack(
            OFFSET_VERSION if self.acked else 1,
            self.reason,
            0,
            self.group_id,
            self.topic_id,
            self.queue_id,
            self.queue_offset,
        )
        return head + b"".join(_ACKED.pack(*names) for names in self.acked)

    @classmethod
    def decode(cls, body: bytes) -> "OffsetRecord":
        version, reason, _, group_id, topic_id, queue_id, offset = _LAYOUT.unpack_from(body)
        if not 1 <= version <= OFFSET_VERSION:
            raise StoreDamaged(
                f"a record of rmq_sys_offsets has version {version}, this build reads "
                f"{OFFSET_VERSION}: start a newer popmq"
            )
        acked = tuple(_ACKED.iter_unpack(body[_LAYOUT.size :]))
        return cls(group_id, topic_id, queue_id, offset, OffsetReason(reason), acked)
