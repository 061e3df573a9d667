"""EPOCH_START: the first record of an epoch, and what its master thinks of the one before.

    0 unanswered_from_ms u64

Log time. A master that dies takes answers with it: what it popped shortly before its end is on
the disks, and the consumer may know nothing of it.  How long it lived at least is told by its
newest record and by its TimerCheckPoint (docs/concepts/pop.md, auto-renew).  By log time, which
no clock that is set moves.
"""

import struct
from typing import NamedTuple, Self

from popmq.broker.log.store_metrics import EpochLogTime

UNANSWERED_MS = 5_000  # at most, between a record of a delivery and its answer
NOTHING = (1 << 64) - 1

_LAYOUT = struct.Struct(">Q")


class EpochStart(NamedTuple):
    """Answers to what is of `unanswered_from_ms` or later may have been lost."""

    unanswered_from_ms: int = NOTHING

    @classmethod
    def after(cls, newest: EpochLogTime, reply: EpochLogTime) -> Self:
        """`newest` is of the newest record known to be confirmed; `reply` counts if it is of the
        same master, and younger."""
        told_ms = reply.log_ms if reply.epoch == newest.epoch else 0
        lived_ms = max(newest.log_ms, told_ms)
        return cls(max(0, min(newest.log_ms + 1, lived_ms - UNANSWERED_MS)))

    def encode(self) -> bytes:
        return _LAYOUT.pack(*self)

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Of a log that began before these bytes were written: nothing is in doubt."""
        return cls(*_LAYOUT.unpack(body)) if body else cls()
