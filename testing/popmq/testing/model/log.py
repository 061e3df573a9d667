"""ModelLog: the log of a light replica, eight bytes a record, on a disk that keeps what was synced.

What is not synced when the power goes survives up to any point, records in their order; when
only the process dies, all of it does, and does not count until it is synced (R8).
"""

import random
import struct

RECORD = struct.Struct(">HHI")  # epoch, kind, number
RECORD_SIZE = RECORD.size
START, VALUE = 1, 2


class ModelLog:
    """`end` is what was appended, `durable` what is fsynced; positions are bytes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.data = bytearray()
        self.durable = 0
        self._platter = bytearray()
        self._pending: list[bytes] = []
        self._cuts = 0

    @property
    def end(self) -> int:
        return len(self.data)

    def append(self, data: bytes) -> None:
        self.data += data
        self._pending.append(data)

    def cut(self, position: int) -> None:
        """Durable when this returns, and so is what is left."""
        del self.data[position:]
        self._platter[:] = self.data
        self._pending.clear()
        self.durable = position
        self._cuts += 1

    def begin_sync(self) -> tuple[int, int, int]:
        """What a sync that begins now will cover; for `synced`."""
        return self._cuts, len(self._pending), self.end

    def synced(self, covered: tuple[int, int, int]) -> None:
        cuts, count, end = covered
        if cuts != self._cuts:
            return
        self._platter += b"".join(self._pending[:count])
        del self._pending[:count]
        self.durable = end

    def fill(self, data: bytes) -> None:
        """As a broker without replicas left it."""
        self.data += data
        self._platter += data

    @property
    def on_platter(self) -> int:
        """What would be there whatever happens."""
        return len(self._platter)

    @property
    def unsynced(self) -> bool:
        return bool(self._pending)

    def crash(self, *, power: bool) -> None:
        """What the next process finds; none of it counts yet."""
        if power:
            kept = self._rng.randrange(len(self._pending) + 1)
            self._platter += b"".join(self._pending[:kept])
            self._pending.clear()
            self.data = bytearray(self._platter)
        self._cuts += 1
        self.durable = 0


def values(data: bytes) -> list[int]:
    """The numbers of the values in a piece of log."""
    return [number for _, kind, number in RECORD.iter_unpack(data) if kind == VALUE]
