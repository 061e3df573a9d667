"""TimerFilesCheckPoint: up to where the timer's files are known to be on the disk.

    0 lastReadTimeMs i64 | 8 lastTimerLogFlushPos i64 | 16 lastTimerQueueOffset i64
    24 masterTimerQueueOffset i64 | 32 stateVersion i64 | 40 timestamp i64 | 48 counter i64
    56 earlyMs i64 | 64 check u32, crc32c of bytes [0, 64)

Two copies in one file, at 0 and 2048, are written in turn: a torn write leaves the other one
(docs/concepts/timer.md).
"""

import struct
from dataclasses import dataclass

from crc32c import crc32c

from popmq.broker.log.store_metrics import EpochLogTime
from popmq.common.disk import Disk

FILE_BYTES = 4096
_COPIES_AT = (0, 2048)
_BODY = struct.Struct(">8q")
_CHECK = struct.Struct(">I")
COPY_SIZE = _BODY.size + _CHECK.size


@dataclass(frozen=True, slots=True)
class TimerFilesCheckPoint:
    last_read_ms: int = 0
    log_position: int = 0
    queue_offset: int = 0
    master_offset: int = 0
    epoch: int = 0
    log_ms: int = 0
    counter: int = 0
    early_ms: int = 0  # the latest slot with timers that are due before it

    @property
    def lived(self) -> EpochLogTime:
        """When its master still lived."""
        return EpochLogTime(self.epoch, self.log_ms)

    def encode(self) -> bytes:
        body = _BODY.pack(
            self.last_read_ms,
            self.log_position,
            self.queue_offset,
            self.master_offset,
            self.epoch,
            self.log_ms,
            self.counter,
            self.early_ms,
        )
        return body + _CHECK.pack(crc32c(body))


def decode_checkpoint(data: bytes) -> TimerFilesCheckPoint | None:
    """None when it is not what was written."""
    body = data[: _BODY.size]
    if len(data) != COPY_SIZE or _CHECK.pack(crc32c(body)) != data[_BODY.size :]:
        return None
    return TimerFilesCheckPoint(*_BODY.unpack(body))


def read_checkpoint(disk: Disk, path: str) -> TimerFilesCheckPoint | None:
    """The newer intact copy; None when there is none."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        copies = [decode_checkpoint(file.read(COPY_SIZE, at)) for at in _COPIES_AT]
    finally:
        file.close()
    intact = [copy for copy in copies if copy is not None]
    return max(intact, key=lambda copy: copy.counter, default=None)


def write_checkpoint(disk: Disk, path: str, checkpoint: TimerFilesCheckPoint) -> None:
    """Durable when this returns, over the older copy: a copy's place follows from its counter."""
    is_new = not disk.exists(path)
    file = disk.open(path, create=True)
    try:
        if file.size() != FILE_BYTES:
            file.truncate(FILE_BYTES)
        file.write(checkpoint.encode(), _COPIES_AT[checkpoint.counter % 2])
        file.sync()
    finally:
        file.close()
    if is_new:
        disk.sync_folder(path.rpartition("/")[0])
