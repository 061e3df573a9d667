"""The unit of the TimerLog: one timer in one slot, 52 bytes, big-endian (docs/concepts/timer.md).

    0 check u16 | 2 size u16 = 52 | 4 prevPos i64 | 12 magic u32 | 16 currWriteTimeMs i64
    24 delayed i32 | 28 offsetPy u64 | 36 sizePy u32 | 40 topic u32 | 44 due_ms u64

The check is a CRC-16 over bytes [2, 52) and the unit's position: a flipped bit, and a unit that
stands where another belongs, do not pass.
"""

import struct
from binascii import crc_hqx
from typing import NamedTuple

UNIT_SIZE = 52
BLANK_SIZE = 16
DEFAULT, ROLL, MOVED = 1, 2, 8
_UNIT = struct.Struct(">HHqIqiQIIQ")
_REST = struct.Struct(">HqIqiQIIQ")
_BLANK_REST = struct.Struct(">HqI")
_BLANK_MAGIC = 0xCBD43194
_MAGICS = frozenset((DEFAULT, DEFAULT | ROLL, DEFAULT | MOVED, DEFAULT | ROLL | MOVED))
_I32 = (1 << 31) - 1


class TimerDamaged(Exception):
    """The wheel or the TimerLog is not what was written: begin anew from the timer queue."""


class TimerUnit(NamedTuple):
    """`position` and `size` are the record's in the CommitLog, `prev` is the TimerLog's."""

    prev: int
    roll: bool
    moved: bool
    position: int
    size: int
    topic_id: int
    due_ms: int
    identity: int
    slot_time_ms: int


def encode_unit(at: int, unit: TimerUnit, *, slot_ms: int, now_ms: int) -> bytes:
    """The unit as it stands at `at` of the TimerLog."""
    prev, roll, moved, position, size, topic_id, due_ms, identity, slot_time_ms = unit
    magic = DEFAULT
    if roll:
        magic |= ROLL
    if moved:
        magic |= MOVED
        written_ms = identity
        delayed = (due_ms - due_ms % slot_ms - slot_time_ms) // slot_ms
    else:
        delayed = slot_time_ms - now_ms
        if not -_I32 <= delayed <= _I32:  # 24.8 days: the slot's time is what has to be right
            delayed = max(-_I32, min(_I32, delayed))
        written_ms = slot_time_ms - delayed
    rest = _REST.pack(UNIT_SIZE, prev, magic, written_ms, delayed, position, size, topic_id, due_ms)
    return crc_hqx(rest, (at ^ at >> 16 ^ at >> 32) & 0xFFFF).to_bytes(2, "big") + rest


def intact_unit(data: bytes | bytearray, offset: int, at: int, slot_ms: int) -> TimerUnit | None:
    """The unit that stands in `data` at `offset`, which is `at` of the TimerLog."""
    end = offset + UNIT_SIZE
    if len(data) < end:
        return None
    check, unit_size, prev, magic, written_ms, delayed, position, size, topic_id, due_ms = (
        _UNIT.unpack_from(data, offset)
    )
    if (
        unit_size != UNIT_SIZE
        or magic not in _MAGICS
        or crc_hqx(data[offset + 2 : end], (at ^ at >> 16 ^ at >> 32) & 0xFFFF) != check
    ):
        return None
    if magic & MOVED:
        slot_time_ms = due_ms - due_ms % slot_ms - delayed * slot_ms
        return TimerUnit(
            prev,
            bool(magic & ROLL),
            True,
            position,
            size,
            topic_id,
            due_ms,
            written_ms,
            slot_time_ms,
        )
    # Half of what calling the class costs: two million of them may be due in one second.
    roll, slot_time_ms = magic != DEFAULT, written_ms + delayed
    return tuple.__new__(
        TimerUnit,
        (prev, roll, False, position, size, topic_id, due_ms, position, slot_time_ms),
    )


def encode_blank(at: int, remaining: int, latest_ms: int) -> bytes:
    """What ends a segment: 0 check u16 | 2 remaining u16 | 4 latest slot time i64 | 12 magic u32,
    and zeros up to `remaining` bytes."""
    rest = _BLANK_REST.pack(remaining, latest_ms, _BLANK_MAGIC)
    check = crc_hqx(rest, (at ^ at >> 16 ^ at >> 32) & 0xFFFF)
    return (check.to_bytes(2, "big") + rest).ljust(remaining, b"\0")


def intact_blank(data: bytes, at: int, remaining: int) -> int | None:
    """The latest slot time that the blank at `at` tells of; None when it is no intact one."""
    if len(data) < BLANK_SIZE:
        return None
    rest = data[2:BLANK_SIZE]
    size, latest_ms, magic = _BLANK_REST.unpack(rest)
    check = crc_hqx(rest, (at ^ at >> 16 ^ at >> 32) & 0xFFFF).to_bytes(2, "big")
    if (size, magic, check) != (remaining, _BLANK_MAGIC, data[:2]):
        return None
    return int(latest_ms)
