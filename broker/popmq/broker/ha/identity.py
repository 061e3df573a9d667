"""Identity: which store this is, and the newest epoch that it accepted (R6, R7, R9).

The id belongs to the bytes, not to the broker's name: a store that was wiped, or rebuilt from
another broker's snapshot, gets a new one and is in no SyncStateSet.  The epoch is on the disk
before the broker does anything in it, so that it never obeys an older order after a crash.
"""

import random

from popmq.broker.ha.checked_text import read_lines, write_lines
from popmq.common.disk import Disk

FILE_NAME = "identity"
_KIND = "identity"
STORE_ID_BYTES = 16


class Identity:
    def __init__(self, disk: Disk, path: str, rng: random.Random) -> None:
        """Read it; a store that has none becomes a new one."""
        self._disk = disk
        self._path = path
        self._rng = rng
        self.store_id = ""
        self.epoch = 0  # accepted
        self.copying = False  # the log is not whole yet: its records count for nothing
        lines = read_lines(disk, path, _KIND)
        self.is_new = lines is None
        if lines is None:
            self.renew(copying=False)
            return
        fields = dict(lines)
        self.store_id = fields["store_id"]
        self.epoch = int(fields["epoch"])
        self.copying = fields["copying"] == "1"

    def accept(self, epoch: int) -> None:
        """Refuse everything older from now on, for ever."""
        assert epoch >= self.epoch, f"epoch {epoch} after epoch {self.epoch} was accepted"
        if epoch > self.epoch:
            self._write(self.store_id, epoch, self.copying)

    def renew(self, *, copying: bool) -> None:
        """Another store from now on, in no set. The epoch stays: an old order is still old."""
        self._write(self._rng.randbytes(STORE_ID_BYTES).hex(), self.epoch, copying)

    def copied(self) -> None:
        """The log is whole: this is a replica like any other."""
        self._write(self.store_id, self.epoch, False)

    def _write(self, store_id: str, epoch: int, copying: bool) -> None:
        lines = (("store_id", store_id), ("epoch", epoch), ("copying", int(copying)))
        write_lines(self._disk, self._path, _KIND, lines)
        self.store_id, self.epoch, self.copying = store_id, epoch, copying
