"""Records by which replicas stay equal: none of them belongs to a queue (big-endian).

    SNAPSHOT_MARK  0 classified u64                   the master begins a snapshot after this record
    STATE_HASH     0 position u64 | 8 hash 16 bytes   of the master's snapshot of that position
    LOG_START      0 position u64 | 8 classified u64  the master deletes what lies below

`classified` is how many records of the timer queue its timers have taken: the one thing in the
tables that is no function of the records before (each firing has it, common/record/timer_token.py).
"""

import struct
from dataclasses import dataclass

_MARK = struct.Struct(">Q")
_HASH = struct.Struct(">Q16s")
_START = struct.Struct(">QQ")


@dataclass(frozen=True, slots=True)
class SnapshotMark:
    classified: int

    def encode(self) -> bytes:
        return _MARK.pack(self.classified)

    @classmethod
    def decode(cls, body: bytes) -> "SnapshotMark":
        return cls(*_MARK.unpack(body))


@dataclass(frozen=True, slots=True)
class StateHash:
    position: int
    hash: int

    def encode(self) -> bytes:
        return _HASH.pack(self.position, self.hash.to_bytes(16, "big"))

    @classmethod
    def decode(cls, body: bytes) -> "StateHash":
        position, state_hash = _HASH.unpack(body)
        return cls(position, int.from_bytes(state_hash, "big"))


@dataclass(frozen=True, slots=True)
class LogStart:
    position: int
    classified: int

    def encode(self) -> bytes:
        return _START.pack(self.position, self.classified)

    @classmethod
    def decode(cls, body: bytes) -> "LogStart":
        return cls(*_START.unpack(body))
