"""The checkpoint file: up to where every index file is known to be on the disk.

    0 magic "popmqckp" | 8 version u32 = 2 | 12 crc32c u32 over bytes [16, 48)
    16 position u64   records below it are durable, dispatched, and their units synced
    24 epoch u32      | 28 reserved u32 | 32 wall_ms u64
    40 durable u64    records below it are durable, whatever became of their units
    48 log_start u64  the log's first segment begins here, or before: a crash keeps what was to be
                      deleted; all ones where nothing is known
    56 crc32c u32     over bytes [0, 56)
    60 log_ms u64     log time when this machine's wall clock showed wall_ms; 0: not known
    68 crc32c u32     over bytes [0, 68)

`durable` is ahead of `position` while a start writes units anew: a loss below it is still a loss
of what clients were told is safe.  `log_start` tells a first segment that retention deleted from
one that somebody removed.  wall_ms and log_ms tell a start how long the store was down, by this
machine's own clock.  Older versions of popmq wrote 48 or 60 bytes, and read no more of them.
Version 1 ends at 40; its index has no checks, so it vouches for records only.

Written by atomic replace.  It only says where to look; the log says what is true, so a
missing or damaged checkpoint costs time and nothing else.
"""

import struct
from dataclasses import dataclass

from crc32c import crc32c

from popmq.common.disk import Disk, write_atomically

_MAGIC = b"popmqckp"
_FRONT = struct.Struct(">8sII")
_BODY = struct.Struct(">QIIQQ")
_BODY_1 = struct.Struct(">QIIQ")
_MORE = struct.Struct(">QI")  # log_start, and then log_ms, each with a checksum
UNKNOWN = (1 << 64) - 1  # where the log starts


@dataclass(frozen=True, slots=True)
class StoreCheckpoint:
    position: int = 0
    epoch: int = 0
    wall_ms: int = 0
    durable: int = 0
    log_start: int = UNKNOWN
    log_ms: int = 0

    @property
    def vouched(self) -> int:
        """Every record below this position was durable when the checkpoint was written."""
        return max(self.position, self.durable)

    def encode(self) -> bytes:
        body = _BODY.pack(self.position, self.epoch, 0, self.wall_ms, self.vouched)
        data = _FRONT.pack(_MAGIC, 2, crc32c(body)) + body
        for field in (self.log_start, self.log_ms):
            data += field.to_bytes(8, "big")
            data += crc32c(data).to_bytes(4, "big")
        return data


def read_checkpoint(disk: Disk, path: str) -> StoreCheckpoint | None:
    """The checkpoint at `path`; None when it is missing or damaged."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        data = file.read(_FRONT.size + _BODY.size + 2 * _MORE.size, 0)
    finally:
        file.close()
    if len(data) < _FRONT.size:
        return None
    behind = _FRONT.size + _BODY.size
    (magic, version, crc), body = _FRONT.unpack_from(data), data[_FRONT.size : behind]
    if magic != _MAGIC or crc32c(body) != crc:
        return None
    if (version, len(body)) == (1, _BODY_1.size):
        position, epoch, _, wall_ms = _BODY_1.unpack(body)
        return StoreCheckpoint(0, epoch, wall_ms, durable=position)
    if (version, len(body)) != (2, _BODY.size):
        return None
    more = [UNKNOWN, 0]
    for number, at in enumerate(range(behind, len(data), _MORE.size)):
        if len(data) < at + _MORE.size:
            return None
        more[number], crc = _MORE.unpack_from(data, at)
        if crc32c(data[: at + 8]) != crc:
            return None
    position, epoch, _, wall_ms, durable = _BODY.unpack(body)
    return StoreCheckpoint(position, epoch, wall_ms, durable, *more)


def write_checkpoint(disk: Disk, path: str, checkpoint: StoreCheckpoint) -> None:
    write_atomically(disk, path, checkpoint.encode())
