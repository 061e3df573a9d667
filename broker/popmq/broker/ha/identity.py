"""Identity: which store this is, whose, and the newest epoch that it accepted (R6, R7, R9).

The id belongs to the bytes, not to the broker's name: a store that was wiped, or rebuilt from
another broker's snapshot, gets a new one and is in no SyncStateSet.  The epoch is on the disk
before the broker does anything in it, so that it never obeys an older order after a crash.
The cluster's name is there so that a data directory that was copied or mounted elsewhere does
not become part of another cluster without a word (docs/concepts/store.md).
"""

import logging
import random

from popmq.broker.ha.text_slots import TextSlots
from popmq.common.disk import Disk
from popmq.common.errors import ConfigError
from popmq.common.settings.cluster_settings import ClusterSettings

logger = logging.getLogger(__name__)

FILE_NAME = "identity"
_KIND = "identity"
_SLOT_BYTES = 4 << 10
STORE_ID_BYTES = 16


class Identity:
    def __init__(
        self, disk: Disk, path: str, rng: random.Random, *, cluster: ClusterSettings
    ) -> None:
        """Read it; a store that has none becomes a new one, and one without a cluster's name, as
        older versions left it, gets `cluster.name`.

        Raises ConfigError, with nothing changed, for a store of a cluster that is neither
        `cluster.name` nor `cluster.formerly`; one of the latter is renamed.
        """
        self._path = path
        self.file = TextSlots(disk, path, _KIND, _SLOT_BYTES)
        self._rng = rng
        self.cluster = cluster.name
        self.store_id = ""
        self.epoch = 0  # accepted
        self.copying = False  # the log is not whole yet: its records count for nothing
        lines = self.file.read()
        self.is_new = lines is None
        if lines is None:
            self.renew(copying=False)
            return
        fields = dict(lines)
        self.store_id = fields["store_id"]
        self.epoch = int(fields["epoch"])
        self.copying = fields["copying"] == "1"
        if (before := fields.get("cluster")) != cluster.name:
            self._rename(before, cluster)
        self.file.upgrade()

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

    def _rename(self, before: str | None, cluster: ClusterSettings) -> None:
        folder = self._path.rpartition("/")[0]
        if before is not None:
            if before != cluster.formerly:
                raise ConfigError(
                    f"data directory {folder} belongs to cluster {before}, and cluster.name is "
                    f"{cluster.name}: set cluster.name to {before}, or name another directory "
                    f"(broker.data, --data); or, for {cluster.name} to take it over for good, as "
                    f"after a restore under another name, set cluster.formerly to {before}"
                )
            logger.warning(
                "took over the store of another cluster",
                extra={"data": folder, "formerly": before, "cluster": cluster.name},
            )
        self._write(self.store_id, self.epoch, self.copying)

    def _write(self, store_id: str, epoch: int, copying: bool) -> None:
        lines = (
            ("store_id", store_id),
            ("epoch", epoch),
            ("copying", int(copying)),
            ("cluster", self.cluster),
        )
        self.file.write(lines)
        self.store_id, self.epoch, self.copying = store_id, epoch, copying


def stored_cluster(disk: Disk, path: str) -> str:
    """The name in that file; empty when there is no file, or no name in it. Raises StoreDamaged."""
    lines = TextSlots(disk, path, _KIND, _SLOT_BYTES).read()
    return dict(lines or ()).get("cluster", "")
