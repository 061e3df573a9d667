"""TablesCheck: whether this store's tables are its master's, and what follows from that.

A slave compares its tables with the master's at each snapshot.  One with other tables stays out
of the SyncStateSet and may rebuild its store once, when the controller allows it.  If the tables
differ again after that rebuild the store is kept for `popmq doctor diff`.  What was found is on
the disk, so that a restart changes nothing (docs/concepts/diverging-tables.md, "State on slaves").
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from popmq.broker.ha.text_slots import TextSlots
from popmq.broker.persistence.state_hashes import Compared
from popmq.common.disk import Disk
from popmq.common.errors import StoreDamaged
from popmq.common.protocol.replication_payloads import TablesMark

logger = logging.getLogger(__name__)

FILE_NAME = "divergence"
_KIND = "divergence"
_SLOT_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class Divergence:
    """What the file says. `rebuilt_at`: the store was rebuilt because of that position, and no
    comparison at or behind it has been equal since; 0: it was not. The first comparison of a
    difference says why the store is rebuilt, and which snapshots are kept."""

    differs_at: int = 0  # position of the first comparison that was not equal; 0: they are equal
    epoch: int = 0  # of the master that it was compared with
    own_hash: int = 0
    masters_hash: int = 0
    rebuilt_at: int = 0
    rebuild_begun: int = 0  # 1: this store is being removed because of differs_at
    newest_at: int = 0  # position of the newest comparison that was not equal; 0: the first one
    newest_hash: int = 0  # this store's own


class RebuildWish(NamedTuple):
    """Why this store should be rebuilt from the master's."""

    reason: str
    because_of_tables: bool  # else the log cannot be brought to the master's


class TablesCheck:
    """`epoch` is the accepted one: only a comparison with the present master counts.
    `copying`: the store on the disk is no whole copy."""

    def __init__(
        self, disk: Disk, path: str, epoch: Callable[[], int], *, copying: bool = False
    ) -> None:
        self._path = path
        self.file = TextSlots(disk, path, _KIND, _SLOT_BYTES)
        self._epoch = epoch
        self._equal = (0, 0)  # epoch, position of the newest comparison that was equal
        self._leads_in = 0  # the newest epoch in which this store was the master's
        self.diverged = 0  # comparisons that were not equal, since the start of the process
        self.known = self._read()
        if not copying:  # a rebuild that was about to begin before a crash did not begin
            self.known = replace(self.known, rebuild_begun=0)

    # -- what is known

    @property
    def equal_at(self) -> int:
        """The newest position at which the tables were the present master's; 0: none is known."""
        epoch, position = self._equal
        return position if epoch == self._epoch() else 0

    @property
    def differs(self) -> bool:
        """Whether the newest comparison was not equal, with this master or an earlier one.
        A master is compared with no other broker."""
        if self.known.rebuild_begun or self._leads_in == self._epoch():
            return False
        return self.known.differs_at > 0

    @property
    def differs_now(self) -> bool:
        """Whether the tables were not those of the present master."""
        return self.differs and self.known.epoch == self._epoch()

    @property
    def newest(self) -> tuple[int, int]:
        """Position and own hash of the newest comparison that was not equal. Replicas are told
        apart by these: one of them may have missed the first comparison of another."""
        known = self.known
        if not known.newest_at:
            return known.differs_at, known.own_hash
        return known.newest_at, known.newest_hash

    @property
    def mark(self) -> TablesMark:
        """For the master, with each acknowledgement."""
        if not self.differs:
            return TablesMark.EQUAL
        return TablesMark.DIFFER if self.differs_now else TablesMark.COMPARE

    @property
    def kept(self) -> bool:
        """The store was rebuilt already and differs again: it is not rebuilt a second time."""
        return self.differs and self.known.rebuilt_at > 0

    @property
    def wants_rebuild(self) -> bool:
        return self.differs_now and not self.kept

    # -- what happens

    def compared(self, result: Compared) -> None:
        """The hashes of both snapshots of one position are known."""
        self.diverged += not result.equal
        if result.epoch != self._epoch() or self.known.rebuild_begun:
            return  # of an earlier master, which no slave follows any more, or of a removed store
        known = self.known
        if result.equal:
            self._equal = result.epoch, result.position
            rebuilt_at = known.rebuilt_at if result.position < known.rebuilt_at else 0
            if known.differs_at:
                logger.info("the tables are the master's again", extra=self._fields(result))
            self._set(Divergence(rebuilt_at=rebuilt_at))
            return
        if self.differs_now:
            self._set(replace(known, newest_at=result.position, newest_hash=result.own))
            return
        self._set(
            Divergence(result.position, result.epoch, result.own, result.masters, known.rebuilt_at)
        )
        if self.kept:
            logger.error(
                "the tables differ again after a rebuild: this store is kept for popmq doctor",
                extra=self._fields(result),
            )

    def begin_rebuild(self, *, because_of_tables: bool) -> None:
        """The store is about to be removed. Until `wiped` a crash may leave it as it is."""
        self._write(replace(self.known, rebuild_begun=int(because_of_tables)))
        self._equal = (0, 0)

    def keep_store(self) -> None:
        """The rebuild that was about to begin does not begin now."""
        self.known = replace(self.known, rebuild_begun=0)

    def wiped(self) -> None:
        """The store's files are gone; it is not removed again for the same reason."""
        known = self.known
        rebuilt_at = known.differs_at if known.rebuild_begun else known.rebuilt_at
        self._write(Divergence(rebuilt_at=rebuilt_at))

    def leads(self) -> None:
        """In this epoch the others are compared with this store. What is known of it stays: the
        next master compares it again, and it is not rebuilt twice."""
        self._leads_in = self._epoch()

    # -- inside

    def _fields(self, result: Compared) -> dict[str, object]:
        return {"position": result.position, "epoch": result.epoch}

    def _set(self, known: Divergence) -> None:
        if known == self.known:
            return
        self.known = known
        try:
            self._write(known)
        except OSError as error:  # a restart then knows less: it compares again
            logger.error("not written", extra={"path": self._path, "reason": str(error)})

    def _write(self, known: Divergence) -> None:
        self.file.write([(name, f"{value:x}") for name, value in asdict(known).items()])
        self.known = known

    def _read(self) -> Divergence:
        try:
            lines = self.file.read()
            self.file.upgrade()
        except StoreDamaged:
            logger.error("not readable, taken for absent", extra={"path": self._path})
            return Divergence()
        names = asdict(Divergence()).keys()
        hashes = {name: int(value, 16) for name, value in lines or () if name in names}
        return replace(Divergence(), **hashes)
