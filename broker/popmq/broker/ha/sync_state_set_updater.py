"""SyncStateSetUpdater: when a master asks for another SyncStateSet.

SyncState says what is safe; this says what is wanted: laggards and stores with other tables out,
who caught up in, and no candidate that died waited for.  One request is on its way at a time, again
and again until the record that answers it was read (R18, R20).
"""

import logging
from collections.abc import Mapping
from typing import Protocol

from popmq.broker.ha.slave_progress import SlaveProgress
from popmq.broker.ha.sync_state import AlterSyncStateSet, SyncState
from popmq.common.protocol.replication_payloads import TablesMark

logger = logging.getLogger(__name__)

ASK_AGAIN_MS = 300


class SyncStateSetOwner(Protocol):
    """The controllers, who alone change a SyncStateSet."""

    @property
    def reachable(self) -> bool:
        """Whether one of them answered lately."""
        ...

    def alter(self, alter: AlterSyncStateSet) -> None:
        """Ask for a change."""
        ...


class SyncStateSetUpdater:
    def __init__(
        self,
        sync: SyncState,
        followers: Mapping[str, SlaveProgress],
        owner: SyncStateSetOwner,
        *,
        laggard_ms: int,
        near_bytes: int,
        began_ms: int,
    ) -> None:
        self._sync = sync
        self._followers = followers
        self._owner = owner
        self._laggard_ms = laggard_ms
        self._near_bytes = near_bytes
        self._began_ms = began_ms
        self._asked_ms = 0
        self._stepped_ms = began_ms

    def step(self, *, end: int, now_ms: int) -> int:
        """Look at everybody; ask for at most one change. Returns how much was done."""
        stood_ms = now_ms - self._stepped_ms
        self._stepped_ms = now_ms
        if stood_ms > self._laggard_ms // 2:
            logger.warning("this master stood still", extra={"ms": stood_ms})
            self._began_ms += stood_ms
            for follower in self._followers.values():
                follower.extend_deadlines(stood_ms)
        for follower in self._followers.values():
            follower.check_caught_up(end=end, now_ms=now_ms)
        for store_id in self._sync.joining:
            if self._is_gone(store_id, now_ms) or self._lags(store_id, now_ms):
                self._sync.stop_waiting_for(store_id)
        proposal = self._sync.proposal
        if proposal is not None:
            dead = [name for name in self._sync.pending if self._is_gone(name, now_ms)]
            if dead and proposal.sync_state_set != self._sync.members:
                return self._send(self._sync.cancel(), now_ms)
            if now_ms - self._asked_ms >= ASK_AGAIN_MS:
                return self._send(proposal, now_ms)
            return 0
        return self._send(self._shrink(now_ms) or self._expand(end, now_ms), now_ms)

    def reachable_members(self, now_ms: int) -> int:
        """Members of the set that are there, this broker counted: they are who can confirm."""
        others = self._sync.members - {self._sync.own_id}
        return 1 + sum(1 for store_id in others if not self._lags(store_id, now_ms))

    def _shrink(self, now_ms: int) -> AlterSyncStateSet | None:
        members = sorted(self._sync.members - {self._sync.own_id})
        laggards = [member for member in members if self._lags(member, now_ms)]
        # The one that is the furthest behind: it is waited for the longest.
        laggards.sort(key=lambda name: self._sync.acked.get(name, -1))
        leaving = laggards
        if self._has_equal_member(now_ms):
            # A store with other tables holds all that is confirmed: it leaves after the laggards.
            leaving = laggards + [member for member in members if self._differs(member)]
        return self._sync.shrink(leaving[0]) if leaving else None

    def _has_equal_member(self, now_ms: int) -> bool:
        """Whether another member has this master's tables. If none has, the master may be wrong.
        The log of a store with other tables is a complete copy, so it stays in the set then."""
        others = self._sync.members - {self._sync.own_id}
        return any(not self._differs(name) and not self._lags(name, now_ms) for name in others)

    def _expand(self, end: int, now_ms: int) -> AlterSyncStateSet | None:
        """Only with a controller there: whoever is being added cannot be dropped without one."""
        if not self._owner.reachable:
            return None
        takes_differing = self.reachable_members(
            now_ms
        ) < self._sync.min_in_sync or not self._has_equal_member(now_ms)
        for store_id, follower in self._followers.items():
            near = end - follower.acked <= self._near_bytes
            if store_id in self._sync.maximal_set or not near or self._is_gone(store_id, now_ms):
                continue
            if self._differs(store_id) and not takes_differing:
                continue  # its copy of the log counts where it is needed, its tables do not
            alter = self._sync.expand(store_id)
            if alter is not None:
                return alter
        return None

    def _lags(self, store_id: str, now_ms: int) -> bool:
        follower = self._followers.get(store_id)
        if follower is None:  # not heard of in this epoch
            return now_ms - self._began_ms >= self._laggard_ms
        return follower.lags(now_ms, self._laggard_ms)

    def _differs(self, store_id: str) -> bool:
        follower = self._followers.get(store_id)
        return follower is not None and follower.tables is not TablesMark.EQUAL

    def _is_gone(self, store_id: str, now_ms: int) -> bool:
        follower = self._followers.get(store_id)
        return follower is None or follower.is_silent(now_ms, self._laggard_ms)

    def _send(self, alter: AlterSyncStateSet | None, now_ms: int) -> int:
        if alter is None:
            return 0
        self._asked_ms = now_ms
        self._owner.alter(alter)
        return 1
