"""SyncState: what a master may call confirmed, and how its SyncStateSet changes (R13-R20).

No time and no messages: the acks, the records that were read and the wish to change the set come
in; the confirmed position and the request to send come out.  The invariant: whatever is
confirmed is fsynced by every store that an election can pick, now or once any request that is
still on its way has landed (docs/concepts/replication.md).
"""

from collections.abc import Set
from typing import NamedTuple


class AlterSyncStateSet(NamedTuple):
    """The request for another SyncStateSet; it goes out as it is, as often as needed (R4)."""

    epoch: int
    expected_version: int
    sync_state_set: frozenset[str]


class SyncState:
    """Of the master `own_id` in its `epoch`, whose first record is at `epoch_start`.

    `members` and `version` are the record's, as the role order had it; `confirmed` is what this
    broker knew as a slave (R13).
    """

    def __init__(
        self,
        own_id: str,
        *,
        epoch: int,
        epoch_start: int,
        members: Set[str],
        version: int,
        min_in_sync: int,
        confirmed: int = 0,
    ) -> None:
        assert own_id in members, "a master is always in its own SyncStateSet"
        self.own_id = own_id
        self.epoch = epoch
        self.epoch_start = epoch_start
        self.members = frozenset(members)  # K
        self.version = version  # v
        self.pending: frozenset[str] = frozenset()  # P: proposed, not seen decided
        self.confirmed = confirmed
        self.min_in_sync = min_in_sync
        self.acked: dict[str, int] = {}  # fsynced by each store, told in this epoch
        self.proposal: AlterSyncStateSet | None = None  # the newest that is not seen decided
        # What each store received since it connected last: clients are told of it before disks
        # have it (D2, `memory`).
        self.received_positions: dict[str, int] = {}
        self.joining: frozenset[str] = frozenset()  # about to be proposed
        self.acknowledged_early = confirmed  # clients were told of something up to here

    # -- confirming

    def on_fsynced(self, store_id: str, position: int) -> bool:
        """A store, this one included, has everything below `position` on its disk; it said so in
        this epoch. True if more is confirmed now."""
        if position > self.acked.get(store_id, -1):
            self.acked[store_id] = position
        return self._confirm()

    @property
    def maximal_set(self) -> frozenset[str]:
        """Whose fsync everything waits for: the set, and whoever is being added (R15)."""
        return self.members | self.pending

    @property
    def has_quorum(self) -> bool:
        """Who is only being added does not count (R16)."""
        return len(self.members) >= self.min_in_sync

    def _confirm(self) -> bool:
        if not self.has_quorum:
            return False
        position = min(self.acked.get(store_id, 0) for store_id in self.maximal_set)
        if position <= self.confirmed:
            return False
        self.confirmed = position
        return True

    # -- before disks have it

    def received_position(self, store_id: str) -> int:
        """Everything below is with that store: on its disk, or in its memory."""
        return max(self.acked.get(store_id, 0), self.received_positions.get(store_id, 0))

    @property
    def received(self) -> int:
        """Everything below is with all of the set, and with whoever is or will be added; never less
        than is promised. Too small a set has received nothing."""
        if not self.has_quorum:
            return self.acknowledged_early
        return max(
            self.acknowledged_early,
            min(map(self.received_position, self.maximal_set | self.joining)),
        )

    def acknowledge_early(self, position: int) -> None:
        """Clients are told: from now on nobody joins the set who does not hold it."""
        self.acknowledged_early = max(self.acknowledged_early, position)

    def stop_waiting_for(self, store_id: str) -> None:
        """A candidate that fell behind again is not waited for."""
        self.joining -= {store_id}

    # -- the set

    def can_shrink(self) -> bool:
        """Not below min_in_sync: the smaller set could confirm nothing, and who left it held
        everything that is confirmed (R18)."""
        return len(self.members) > self.min_in_sync

    def shrink(self, store_id: str) -> AlterSyncStateSet | None:
        """Ask for the set without a laggard; it is waited for until that is known to be so."""
        if store_id not in self.members or store_id == self.own_id or not self.can_shrink():
            return None
        return self._propose(self.members - {store_id})

    def may_join(self, store_id: str) -> bool:
        """It has all that is confirmed, and all that may have been before this epoch (R19)."""
        position = self.acked.get(store_id)
        return position is not None and position >= max(self.confirmed, self.epoch_start)

    def expand(self, store_id: str) -> AlterSyncStateSet | None:
        """Ask for the set with one more; from now on nothing is confirmed without it (R19)."""
        if store_id in self.maximal_set or not self.may_join(store_id):
            return None
        if self.received_position(store_id) < self.acknowledged_early:
            self.joining |= {store_id}  # what is promised from now on, it holds, too
            return None
        self.stop_waiting_for(store_id)
        self.pending |= {store_id}
        return self._propose(self.members | {store_id})

    def cancel(self) -> AlterSyncStateSet | None:
        """Give up on who is being added: the same set under the next version. Of this request and
        the one that adds it one wins, and both are known by the version that follows (R20)."""
        if not self.pending:
            return None
        return self._propose(self.members)

    def on_record(self, *, epoch: int, version: int, members: Set[str]) -> bool:
        """The record was read. Only a newer one of this epoch says anything (R18, R20).

        True if more is confirmed now.
        """
        if epoch != self.epoch or version <= self.version:
            return False
        self.version = version
        self.members = frozenset(members)
        self.pending = frozenset()
        self.proposal = None
        return self._confirm()

    def _propose(self, members: frozenset[str]) -> AlterSyncStateSet:
        self.proposal = AlterSyncStateSet(self.epoch, self.version, members)
        return self.proposal
