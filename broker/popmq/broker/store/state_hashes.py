"""StateHashes: whether a slave's tables are its master's, told by the hashes of their snapshots."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

_KEPT = 8  # of each side, until the other one's comes


class StateHashes:
    def __init__(self) -> None:
        self._own: dict[int, int] = {}
        self._masters: dict[int, int] = {}
        self.compared = 0
        self.diverged = 0
        # Told the position at which the tables were not the same; the slave then builds itself
        # anew from its master (docs/concepts/replication.md).
        self.on_diverged: Callable[[int], None] = lambda position: None

    def own(self, position: int, state_hash: int) -> None:
        """Of a snapshot made here."""
        self._own[position] = state_hash
        self._compare(position)

    def masters(self, position: int, state_hash: int) -> None:
        self._masters[position] = state_hash
        self._compare(position)

    def _compare(self, position: int) -> None:
        for known in (self._own, self._masters):
            while len(known) > _KEPT:
                del known[min(known)]
        ours, theirs = self._own.get(position), self._masters.get(position)
        if ours is None or theirs is None:
            return
        del self._own[position], self._masters[position]
        self.compared += 1
        if ours != theirs:
            self.diverged += 1
            logger.critical(
                "the tables are not the master's",
                extra={"position": position, "ours": f"{ours:032x}", "masters": f"{theirs:032x}"},
            )
            self.on_diverged(position)
