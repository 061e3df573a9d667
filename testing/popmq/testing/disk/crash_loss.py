"""What a crash leaves of bytes that were written and not synced, drawn from a seed."""

import random
from collections.abc import Sequence
from enum import Enum

# What the platter takes whole: a sector, or a cache line of persistent memory.
SECTOR_SIZES = (512, 64)


class Loss(Enum):
    """What a crash does to bytes and names that were not synced."""

    NOTHING = "nothing"  # only the process died: the page cache is still there
    ALL = "all"
    KEPT = "kept"  # the power went, but everything had reached the platter
    TORN = "torn"  # of each file the first operations, the last of them cut at a sector
    SCATTERED = "scattered"  # of each file any sectors, whatever was written first


Operation = tuple[int, bytes | None]  # a write at an offset; None: the file got this size


class FileContent:
    """What programs see of a file, what is on the platter, and what happened in between."""

    __slots__ = ("kept", "now", "pending", "synced")

    def __init__(self) -> None:
        self.now = bytearray()
        self.kept = bytearray()
        self.pending: list[Operation] = []
        self.synced = 0  # how many operations are not pending any more


class Losses:
    """The dice of one disk's crashes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.sector_bytes = rng.choice(SECTOR_SIZES)

    def name_survives(self, loss: Loss) -> bool:
        """Whether a name that was not synced is what the next start finds."""
        if loss is Loss.KEPT:
            return True
        return loss is not Loss.ALL and self._rng.random() < 0.5

    def drop_replies(self, content: FileContent, loss: Loss) -> None:
        """Bring to the platter what the crash spares of the pending operations."""
        pending, content.pending = content.pending, []
        content.synced += len(pending)
        match loss:
            case Loss.KEPT:
                apply(content.kept, pending)
            case Loss.TORN:
                self._tear(content.kept, pending)
            case Loss.SCATTERED if len(pending) > 1 or self._rng.random() < 0.8:
                self._scatter(content, pending)
            case _:
                pass

    def _tear(self, kept: bytearray, pending: list[Operation]) -> None:
        whole = self._rng.randrange(len(pending) + 1)
        apply(kept, pending[:whole])
        if whole == len(pending):
            return
        offset, data = pending[whole]
        if data is not None:
            size = self.sector_bytes
            first = size - offset % size
            sectors = self._rng.randrange(1 + max(0, len(data) - first) // size + 1)
            cut = first + (sectors - 1) * size if sectors else 0
            apply(kept, [(offset, data[:cut])])

    def _scatter(self, content: FileContent, pending: list[Operation]) -> None:
        """Each sector shows the state after some of the writes that touched it, or before all."""
        share = self._rng.choice((0.2, 0.5, 0.8))
        seen: dict[int, int] = {}  # sector -> number of operations that it shows
        for number, (offset, data) in enumerate(pending):
            if data is None:
                apply(content.kept, [(offset, None)])
                continue
            at = 0
            while at < len(data):
                sector = (offset + at) // self.sector_bytes
                end = min(len(data), (sector + 1) * self.sector_bytes - offset)
                if sector not in seen:
                    seen[sector] = self._version(share, len(pending))
                if number < seen[sector]:
                    apply(content.kept, [(offset + at, data[at:end])])
                at = end
        if len(content.kept) < len(content.now) and self._rng.random() < 0.4:
            content.kept.extend(bytes(len(content.now) - len(content.kept)))

    def _version(self, share: float, newest: int) -> int:
        if self._rng.random() < 0.15:
            return self._rng.randrange(newest + 1)
        return newest if self._rng.random() < share else 0


def apply(target: bytearray, operations: Sequence[Operation]) -> None:
    for offset, data in operations:
        if data is None:
            del target[offset:]
            target.extend(bytes(offset - len(target)))
        elif data:
            if offset > len(target):
                target.extend(bytes(offset - len(target)))
            target[offset : offset + len(data)] = data
