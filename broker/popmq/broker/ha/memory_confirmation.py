"""What clients may get as an answer before disks have it (D2;
docs/concepts/replication.md).

A send of a topic with `memory` waits until all of the set hold its bytes; a receive that wrote
nothing waits until all of them spoke in this epoch after it.  Both are for the same reason: a
master that is cut off must not answer once another may lead.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping

from popmq.broker.ha.slave_progress import SlaveProgress
from popmq.broker.ha.sync_state import SyncState
from popmq.common.protocol.replication_payloads import Fetch

logger = logging.getLogger(__name__)

Callback = Callable[[], None]


class MemoryConfirmation:
    """`end` is that of the log, which this broker holds itself; `nudge` answers the fetches that
    wait, at the end of this turn of the loop, so that everybody speaks again."""

    def __init__(
        self,
        sync: SyncState,
        followers: Mapping[str, SlaveProgress],
        *,
        end: Callable[[], int],
        soon: Callable[[Callback], object],
        nudge: Callback,
    ) -> None:
        self.heartbeat_round = 0  # the newest that somebody waits for
        self._sync = sync
        self._followers = followers
        self._end = end
        self._soon = soon
        self._nudge = nudge
        self._nudging = False
        self._sends: deque[tuple[int, Callback]] = deque()
        self._receives: deque[tuple[int, Callback]] = deque()

    def when_in_memory(self, then: Callback) -> None:
        """Once everything appended so far is with all of the set."""
        self._sends.append((self._end(), then))
        self.release_ready()

    def when_leadership_confirmed(self, then: Callback) -> None:
        """Once all of the set have said something in this epoch that they say after now."""
        if not self._nudging:
            self._nudging = True
            self.heartbeat_round += 1
            self._soon(self._begin_round)
        self._receives.append((self.heartbeat_round, then))

    def on_fetch(self, follower: SlaveProgress, asked: Fetch) -> None:
        """It asks for what comes behind that which it holds."""
        holds = self._sync.received_positions
        held = min(asked.position, self._end())
        holds[follower.store_id] = max(holds.get(follower.store_id, 0), held)
        follower.seen_round = max(follower.seen_round, min(asked.round, follower.sent_round))

    def release_ready(self) -> None:
        """Somebody spoke, or the set is another one: tell who has waited long enough."""
        if self._sends:
            self._sync.received_positions[self._sync.own_id] = self._end()
            received = self._sync.received
            while self._sends and self._sends[0][0] <= received:
                position, then = self._sends.popleft()
                self._sync.acknowledge_early(position)
                _tell(then)
        if self._receives:
            connected = self._heard()
            while self._receives and self._receives[0][0] <= connected:
                _tell(self._receives.popleft()[1])

    def stop(self) -> None:
        """Not the master any more: nobody is told anything."""
        self._sends.clear()
        self._receives.clear()

    def _begin_round(self) -> None:
        self._nudging = False
        self._nudge()
        self.release_ready()

    def _heard(self) -> int:
        """The newest round in which all of the set spoke; -1 with too small a set."""
        sync = self._sync
        if not sync.has_quorum:
            return -1
        newest = self.heartbeat_round
        for store_id in sync.maximal_set - {sync.own_id}:
            follower = self._followers.get(store_id)
            newest = min(newest, follower.seen_round if follower else -1)
        return newest


def _tell(then: Callback) -> None:
    """One answer that fails spoils no other."""
    try:
        then()
    except Exception:
        logger.exception("a reply could not be given")
