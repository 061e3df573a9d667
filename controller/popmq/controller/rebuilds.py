"""Which replica of a broker group may rebuild its store, and when it is the master that is wrong.

One replica at a time, and only one whose store nothing depends on.  Nobody can tell from two
copies with other tables which one is right: a replica is rebuilt only when another one has the
master's tables, and never when more replicas agree with each other than with the master
(docs/concepts/diverging-tables.md, "State on slaves").
"""

import logging
from collections.abc import Sequence

from popmq.common.protocol.group_record import GroupRecord
from popmq.common.wire import controller_pb2 as pb
from popmq.controller.election import best
from popmq.controller.replicas import SERVING, ReplicaHeartbeat, Role

logger = logging.getLogger(__name__)


class Rebuilds:
    """Of one broker group. A grant holds until that node follows again, or is silent."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._granted: ReplicaHeartbeat | None = None
        self._refused: dict[str, str] = {}  # store id -> the reason that was logged

    def ask(
        self,
        asking: ReplicaHeartbeat,
        record: GroupRecord | None,
        living: Sequence[ReplicaHeartbeat],
        least: int,
        *,
        trouble: str = "",
    ) -> bool:
        """Whether that replica may rebuild its store now. `least` is the group's min_in_sync;
        `trouble`: why `record` may be an old one."""
        if asking.asks_rebuild == pb.NO_REBUILD:
            self._refused.pop(asking.store_id, None)
            return False
        reason = (
            trouble
            or self._busy(asking, living)
            or refusal(asking, record, living, least)
            or _queued(asking, record, living, least)
        )
        extra = {"broker": self._group, "node": asking.node, "tables_at": asking.tables_differ_at}
        if reason:
            if self._refused.get(asking.store_id) != reason:
                self._refused[asking.store_id] = reason
                logger.warning("a rebuild has to wait", extra={**extra, "reason": reason})
            return False
        self._refused.clear()
        if self._granted is None or self._granted.store_id != asking.store_id:
            logger.warning("a replica may rebuild its store", extra=extra)
        self._granted = asking
        return True

    def _busy(self, asking: ReplicaHeartbeat, living: Sequence[ReplicaHeartbeat]) -> str:
        """Another replica is being rebuilt, or copies what it lacks."""
        granted = self._granted
        for heartbeat in living:
            if heartbeat.node == asking.node:
                continue
            waits = granted is not None and heartbeat.store_id == granted.store_id
            if heartbeat.role == Role.COPYING or (
                waits and heartbeat.asks_rebuild != pb.NO_REBUILD
            ):
                return f"{heartbeat.node} is not a whole copy yet"
        return ""


def refusal(
    asking: ReplicaHeartbeat,
    record: GroupRecord | None,
    living: Sequence[ReplicaHeartbeat],
    least: int,
) -> str:
    """Why this replica may not rebuild its store; empty: it may."""
    # A master that opens may wait for this very replica, whose log cannot be brought to its own.
    roles = SERVING if asking.asks_rebuild == pb.LOG_DIFFERS else (Role.MASTER,)
    leader = _leader(record, living, roles)
    if record is None or leader is None:
        return "no master serves the group"
    if asking.store_id == leader.store_id or asking.epoch != record.epoch:
        return f"it does not follow the master of epoch {record.epoch}"
    if asking.asks_rebuild == pb.LOG_DIFFERS:
        return ""
    if asking.store_id in record.sync_state_set:
        return "it is in the SyncStateSet, which would be too small without it"
    whole = [heartbeat for heartbeat in living if heartbeat.store_id in record.sync_state_set]
    if len(whole) < least:
        return f"{len(whole)} members of the SyncStateSet are heard, {least} have to be"
    position = asking.tables_differ_at
    agree = [
        heartbeat
        for heartbeat in whole
        if heartbeat.store_id != leader.store_id
        and not heartbeat.tables_differ_at
        and heartbeat.tables_equal_at >= position
    ]
    if not agree:
        return f"no other replica is known to have the master's tables at {position}"
    if _most_that_may_agree(record, living) > len(agree):
        return "more replicas agree with each other than with the master"
    return ""


def _queued(
    asking: ReplicaHeartbeat,
    record: GroupRecord | None,
    living: Sequence[ReplicaHeartbeat],
    least: int,
) -> str:
    """Of several the first by name goes first, whichever controller is asked."""
    for heartbeat in living:
        asks = heartbeat.asks_rebuild != pb.NO_REBUILD and heartbeat.node < asking.node
        if asks and not refusal(heartbeat, record, living, least):
            return f"{heartbeat.node} goes first"
    return ""


def successor_of_suspect(
    record: GroupRecord | None, living: Sequence[ReplicaHeartbeat]
) -> ReplicaHeartbeat | None:
    """Who should lead in place of a master whose tables are not those that most replicas have: one
    of the two or more that agree with each other, in the SyncStateSet; None: nobody."""
    leader = _leader(record, living, (Role.MASTER,))
    if record is None or leader is None:
        return None
    party = _largest_party(record, living)
    position = min((heartbeat.tables_differ_at for heartbeat in party), default=0)
    with_master = [
        heartbeat
        for heartbeat in living
        if not heartbeat.tables_differ_at and position <= heartbeat.tables_equal_at
    ]
    if len(party) < 2 or len(party) <= 1 + len(with_master):
        return None
    return best([heartbeat for heartbeat in party if heartbeat.store_id in record.sync_state_set])


def _leader(
    record: GroupRecord | None, living: Sequence[ReplicaHeartbeat], roles: Sequence[int]
) -> ReplicaHeartbeat | None:
    return next(
        (
            heartbeat
            for heartbeat in living
            if record is not None
            and heartbeat.store_id == record.leader
            and heartbeat.role in roles
            and heartbeat.epoch == record.epoch
        ),
        None,
    )


def _parties(
    record: GroupRecord, living: Sequence[ReplicaHeartbeat]
) -> list[list[ReplicaHeartbeat]]:
    """The replicas that differ from the master, by their own tables at the newest position."""
    parties: dict[tuple[int, str], list[ReplicaHeartbeat]] = {}
    for heartbeat in living:
        if heartbeat.tables_differ_at and heartbeat.epoch == record.epoch:
            parties.setdefault((heartbeat.tables_hash_at, heartbeat.tables_hash), []).append(
                heartbeat
            )
    return list(parties.values())


def _largest_party(
    record: GroupRecord, living: Sequence[ReplicaHeartbeat]
) -> list[ReplicaHeartbeat]:
    """The replicas that have the same tables at a position where the master has others."""
    return max(_parties(record, living), key=len, default=[])


def _most_that_may_agree(record: GroupRecord, living: Sequence[ReplicaHeartbeat]) -> int:
    """With each other, and not with the master. Whether two that name different positions agree
    is not known before both name the same one."""
    parties = _parties(record, living)

    def with_unknown(party: list[ReplicaHeartbeat]) -> int:
        position = party[0].tables_hash_at
        return sum(
            len(heartbeats)
            for heartbeats in parties
            if heartbeats is party or heartbeats[0].tables_hash_at != position
        )

    return max(map(with_unknown, parties), default=0)
