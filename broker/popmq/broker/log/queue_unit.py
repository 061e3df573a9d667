"""A ConsumeQueue's unit, and the check in it.

The 16 upper bits of a unit's position are a CRC-16 over its other bits, its queue and its
offset: a flipped bit, a unit of another offset or of another queue does not pass.  Positions
therefore end at 2^48 (281 TB).  The record that a damaged unit stood for lies in the log between
those of its neighbours, so one unit costs one look there (`find_unit`), not a rebuilt index.
"""

import struct
from binascii import crc_hqx
from collections.abc import Callable
from typing import NamedTuple

UNIT = struct.Struct(">QIQ")
UNIT_SIZE = UNIT.size
_CHECKED = struct.Struct(">2x18s")  # of a unit, what its check is over
POSITION_LIMIT = 1 << 48
_POSITION_MASK = POSITION_LIMIT - 1
_BLANK = UNIT.pack(0, 1, 0)


class QueueUnit(NamedTuple):
    position: int
    size: int
    tag_hash: int


# (topic and queue, queue offset, first and last position to look at) -> the unit, or None
FindUnit = Callable[[tuple[int, int], int, int, int | None], QueueUnit | None]


def index_unit(position: int, size: int, tag_hash: int) -> bytes:
    """What dispatch hands to a queue, which adds the check."""
    return UNIT.pack(position, size, tag_hash)


def queue_seed(folder: str) -> int:
    """Stands for the queue in its checks; from <topic>@<id>/<queue>, wherever the data is."""
    topic, queue = folder.rsplit("/", 2)[-2:]
    return crc_hqx(f"{topic}/{queue}".encode(), 0xFFFF)


def with_check(unit: bytes, seed: int, offset: int) -> bytes:
    """The unit as it stands in the queue at `offset`."""
    rest = unit[2:]
    return crc_hqx(rest, seed ^ (offset & 0xFFFF)).to_bytes(2, "big") + rest


def intact_unit(data: bytes, at: int, seed: int, offset: int) -> QueueUnit | None:
    """The unit that stands in `data` at byte `at`; None when it is not what was written."""
    marked, size, tag_hash = UNIT.unpack_from(data, at)
    if size and marked >> 48 == crc_hqx(data[at + 2 : at + UNIT_SIZE], seed ^ (offset & 0xFFFF)):
        return QueueUnit(marked & _POSITION_MASK, size, tag_hash)
    return QueueUnit(0, 1, 0) if data[at : at + UNIT_SIZE] == _BLANK else None


def intact_units(data: bytes, seed: int, offset: int) -> list[QueueUnit | None]:
    """`intact_unit` of all that stand in `data`, the first of which is number `offset`.

    In one go, because this runs for all that is delivered.
    """
    units: list[QueueUnit | None] = []
    make, first = tuple.__new__, offset
    both = zip(UNIT.iter_unpack(data), _CHECKED.iter_unpack(data), strict=True)
    for (marked, size, tag_hash), (rest,) in both:
        if size and marked >> 48 == crc_hqx(rest, seed ^ (offset & 0xFFFF)):
            units.append(make(QueueUnit, (marked & _POSITION_MASK, size, tag_hash)))
        else:
            units.append(intact_unit(data, (offset - first) * UNIT_SIZE, seed, offset))
        offset += 1
    return units
