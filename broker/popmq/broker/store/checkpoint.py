"""The checkpoint file: up to where every index file is known to be on the disk.

    0 magic "popmqckp" | 8 version u32 = 2 | 12 crc32c u32 over bytes [16, 48)
    16 position u64   records below it are durable, dispatched, and their units synced
    24 epoch u32      | 28 reserved u32 | 32 wall_ms u64
    40 durable u64    records below it are durable, whatever became of their units

`durable` is ahead of `position` while a start writes units anew: a loss below it is still a loss
of what clients were told is safe.  Version 1 ends at 40; its index has no checks, so it vouches
for records only.

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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    position: int = 0
    epoch: int = 0
    wall_ms: int = 0
    durable: int = 0

    @property
    def vouched(self) -> int:
        """Every record below this position was durable when the checkpoint was written."""
        return max(self.position, self.durable)

    def encode(self) -> bytes:
        body = _BODY.pack(self.position, self.epoch, 0, self.wall_ms, self.vouched)
        return _FRONT.pack(_MAGIC, 2, crc32c(body)) + body


def read_checkpoint(disk: Disk, path: str) -> Checkpoint | None:
    """The checkpoint at `path`; None when it is missing or damaged."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        data = file.read(_FRONT.size + _BODY.size, 0)
    finally:
        file.close()
    if len(data) < _FRONT.size:
        return None
    (magic, version, crc), body = _FRONT.unpack_from(data), data[_FRONT.size :]
    if magic != _MAGIC or crc32c(body) != crc:
        return None
    if (version, len(body)) == (1, _BODY_1.size):
        position, epoch, _, wall_ms = _BODY_1.unpack(body)
        return Checkpoint(0, epoch, wall_ms, durable=position)
    if (version, len(body)) != (2, _BODY.size):
        return None
    position, epoch, _, wall_ms, durable = _BODY.unpack(body)
    return Checkpoint(position, epoch, wall_ms, durable)


def write_checkpoint(disk: Disk, path: str, checkpoint: Checkpoint) -> None:
    write_atomically(disk, path, checkpoint.encode())
