"""StateHashes: whether a slave's tables are its master's, by the hashes of their snapshots."""

import logging
from collections.abc import Callable
from typing import NamedTuple

logger = logging.getLogger(__name__)

_KEPT = 8  # of each side, until the other one's comes


class Compared(NamedTuple):
    """The tables of a slave and of the master of `epoch` at one position of the log."""

    position: int
    epoch: int
    own: int  # state hashes
    masters: int

    @property
    def equal(self) -> bool:
        return self.own == self.masters


class StateHashes:
    def __init__(self, on_compared: Callable[[Compared], None]) -> None:
        self._own: dict[int, int] = {}
        self._masters: dict[int, tuple[int, int]] = {}  # epoch of the master, hash
        self.compared = 0
        self.diverged = 0
        self.on_compared = on_compared

    def add_own(self, position: int, state_hash: int) -> None:
        """Of a snapshot made here."""
        self._own[position] = state_hash
        self._compare(position)

    def add_masters(self, position: int, state_hash: int, epoch: int) -> None:
        """Of a snapshot that the master of `epoch` made, as its record says."""
        self._masters[position] = epoch, state_hash
        self._compare(position)

    def _compare(self, position: int) -> None:
        for known in (self._own, self._masters):
            while len(known) > _KEPT:
                known.pop(min(known))
        if position not in self._own or position not in self._masters:
            return
        epoch, masters = self._masters.pop(position)
        compared = Compared(position, epoch, self._own.pop(position), masters)
        self.compared += 1
        if not compared.equal:
            self.diverged += 1
            logger.critical(
                "the tables are not the master's",
                extra={
                    "position": position,
                    "epoch": epoch,
                    "ours": f"{compared.own:032x}",
                    "masters": f"{masters:032x}",
                },
            )
        self.on_compared(compared)
