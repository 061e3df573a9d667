"""How pending timers leave a broker group that is drained, as bodies of TIMER records.

Told from other TIMER records by their first byte, the version (docs/concepts/timer.md).
All numbers are big-endian, times are wall milliseconds.
"""

import struct
from typing import NamedTuple

from popmq.common.record.timer_token import RECOUNT_VERSION, FiringToken, TimerRecount

DEPARTURE_VERSION = 6
SETTLED_VERSION = 7
_HEAD = struct.Struct(">BBHIQQQ")
_LEAVING = struct.Struct(">QQQII")
_SETTLED = struct.Struct(">BBHIQ")


class MigratingTimer(NamedTuple):
    """A timer on its way to another broker group, and where its body is here."""

    due_ms: int
    identity: int
    position: int
    size: int
    topic_id: int


class TimerMigrationBatch(NamedTuple):
    """These timers are fired and recalled here no more: `target` is asked to take them.

        0  version u8 = 6 | 1 reserved u8 | 2 size of target's name u16 | 4 timers u32
        8  first u64       number of the first move; the others follow it
        16 classified u64  records of the timer queue that had been enqueued
        24 origin u64      whose moves they are: a number that each life of a master throws
        32 target          then of each timer:
           due_ms u64, identity u64, position u64, size u32, topic_id u32

    Whoever applies the record ends the timers as a recall does.
    """

    target: str
    first: int
    classified: int
    origin: int
    timers: tuple[MigratingTimer, ...]

    def encode(self) -> bytes:
        name = self.target.encode()
        head = _HEAD.pack(
            DEPARTURE_VERSION,
            0,
            len(name),
            len(self.timers),
            self.first,
            self.classified,
            self.origin,
        )
        return b"".join((head, name, *(_LEAVING.pack(*timer) for timer in self.timers)))

    @classmethod
    def decode(cls, data: bytes) -> "TimerMigrationBatch":
        """struct.error for another number of bytes."""
        _, _, name_size, count, first, classified, origin = _HEAD.unpack_from(data)
        at = _HEAD.size + name_size
        if len(data) != at + count * _LEAVING.size:
            raise struct.error(f"{count} timers that leave in {len(data)} bytes")
        timers = tuple(MigratingTimer(*fields) for fields in _LEAVING.iter_unpack(data[at:]))
        return cls(data[_HEAD.size : at].decode(), first, classified, origin, timers)


class TimerMigrationDone(NamedTuple):
    """The group that was asked has the timers, on its disks: nobody is asked for them again.

    0  version u8 = 7 | 1 reserved u8 | 2 reserved u16 | 4 reserved u32
    8  before u64      moves with a smaller number are settled
    """

    before: int

    def encode(self) -> bytes:
        return _SETTLED.pack(SETTLED_VERSION, 0, 0, 0, self.before)

    @classmethod
    def decode(cls, data: bytes) -> "TimerMigrationDone":
        """struct.error for another number of bytes."""
        return cls(_SETTLED.unpack(data)[4])


def decode_timer_record(
    body: bytes,
) -> FiringToken | TimerRecount | TimerMigrationBatch | TimerMigrationDone:
    """The body of a TIMER record."""
    match body[0]:
        case n if n == RECOUNT_VERSION:
            return TimerRecount.decode(body)
        case n if n == DEPARTURE_VERSION:
            return TimerMigrationBatch.decode(body)
        case n if n == SETTLED_VERSION:
            return TimerMigrationDone.decode(body)
        case _:
            return FiringToken.decode(body)
