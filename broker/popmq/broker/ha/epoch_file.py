"""EpochFile: which master wrote which part of the log, and where two logs begin to differ.

An entry is durable before the first record of its epoch is (R6), so no record ever counts as
one of another epoch.  Follows RocketMQ's EpochFileCache, except that an epoch may begin where
the last one does: then the older one left nothing behind and its entry goes (R12).
"""

from collections.abc import Sequence

from popmq.broker.ha.text_slots import TextSlots
from popmq.common.disk import Disk
from popmq.common.protocol.replication_payloads import EpochEntry

FILE_NAME = "epochs"
_KIND = "epochs"
_SLOT_BYTES = 48 << 10  # a thousand entries of the largest numbers


class EpochFile:
    """The entries in order; every change is on the disk when the method returns."""

    def __init__(self, disk: Disk, path: str, *, limit: int = 1_000) -> None:
        self.file = TextSlots(disk, path, _KIND, _SLOT_BYTES)
        self._limit = limit
        lines = self.file.read()
        self.file.upgrade()
        self.is_new = lines is None
        self.entries = [EpochEntry(int(epoch), int(start)) for epoch, start in lines or ()]

    @property
    def last_epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else 0

    @property
    def starts(self) -> list[int]:
        """Where epochs begin, oldest first."""
        return [entry.start for entry in self.entries]

    def append(self, epoch: int, start: int) -> None:
        """From `start` on it is `epoch`; entries of a tail that is no more are dropped."""
        kept = [entry for entry in self.entries if entry.start < start]
        last = kept[-1].epoch if kept else 0
        assert epoch > last, f"epoch {epoch} begins at {start}, behind epoch {last}"
        self._write([*kept, EpochEntry(epoch, start)][-self._limit :])

    def cut_suffix(self, position: int) -> None:
        """The log ends at `position` now."""
        self._write([entry for entry in self.entries if entry.start < position])

    def clear(self) -> None:
        """The store is empty again."""
        self._write([])

    def entry_at(self, position: int) -> EpochEntry | None:
        """The epoch of the record at `position`; None for one older than all that is known."""
        epoch_entry = None
        for entry in self.entries:
            if entry.start > position:
                break
            epoch_entry = entry
        return epoch_entry

    def end_of_epoch(self, position: int, log_end: int) -> int:
        """Where the epoch of the record at `position` ends: a block may go no further."""
        later = (entry.start for entry in self.entries if entry.start > position)
        return min([log_end, *later])

    def _write(self, entries: list[EpochEntry]) -> None:
        if entries == self.entries and not self.is_new:
            return
        self.file.write(entries)
        self.entries = entries
        self.is_new = False


def consistent_point(
    own: Sequence[EpochEntry],
    own_end: int,
    masters: Sequence[EpochEntry],
    master_end: int,
) -> int | None:
    """Up to where both logs are the same: that of the newest epoch in both (R21).

    One master wrote all of an epoch, so two logs that have it from the same position on differ at
    most in how far they got.  None: they have no epoch in common.
    """
    known = {entry: _end(masters, number, master_end) for number, entry in enumerate(masters)}
    for number in reversed(range(len(own))):
        if own[number] in known:
            return min(_end(own, number, own_end), known[own[number]])
    return None


def _end(entries: Sequence[EpochEntry], number: int, log_end: int) -> int:
    return entries[number + 1].start if number + 1 < len(entries) else log_end
