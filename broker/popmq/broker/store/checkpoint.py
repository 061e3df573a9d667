"""The checkpoint file: up to where every index file is known to be on the disk.

    0 magic "popmqckp" | 8 version u32 = 1 | 12 crc32c u32 over bytes [16, 40)
    16 position u64   records below it are durable, dispatched, and their units synced
    24 epoch u32      | 28 reserved u32 | 32 wall_ms u64

Written by atomic replace.  It only says where to look; the log says what is true, so a
missing or damaged checkpoint costs time and nothing else.
"""

import struct
from dataclasses import dataclass

from crc32c import crc32c

from popmq.common.disk import Disk, write_atomically

_MAGIC = b"popmqckp"
_LAYOUT = struct.Struct(">8sII24s")
_BODY = struct.Struct(">QIIQ")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    position: int = 0
    epoch: int = 0
    wall_ms: int = 0

    def encode(self) -> bytes:
        body = _BODY.pack(self.position, self.epoch, 0, self.wall_ms)
        return _LAYOUT.pack(_MAGIC, 1, crc32c(body), body)


def read_checkpoint(disk: Disk, path: str) -> Checkpoint | None:
    """The checkpoint at `path`; None when it is missing or damaged."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        data = file.read(_LAYOUT.size, 0)
    finally:
        file.close()
    if len(data) != _LAYOUT.size:
        return None
    magic, version, crc, body = _LAYOUT.unpack(data)
    if magic != _MAGIC or version != 1 or crc32c(body) != crc:
        return None
    position, epoch, _, wall_ms = _BODY.unpack(body)
    return Checkpoint(position, epoch, wall_ms)


def write_checkpoint(disk: Disk, path: str, checkpoint: Checkpoint) -> None:
    write_atomically(disk, path, checkpoint.encode())
