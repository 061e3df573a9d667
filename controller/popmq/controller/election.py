"""Who may lead a broker group next: rules R2, R3 and R5, as functions of what is known.

Nothing here writes: a result is a proposal for one compare-and-set, and a proposal made from old
knowledge fails there (R1).
"""

from collections.abc import Iterable, Sequence

from popmq.common.protocol.group_record import GroupRecord
from popmq.controller.replicas import ReplicaHeartbeat


def best(candidates: Iterable[ReplicaHeartbeat]) -> ReplicaHeartbeat | None:
    """By (epoch, position, priority): it loses the fewest unacknowledged records.

    Any member of the set would be as safe.  One whose tables are not the master's comes last.  Of
    equals the smallest priority wins, then the first name.
    """
    ranked = sorted(
        candidates,
        key=lambda heartbeat: (
            heartbeat.tables_differ_at > 0,
            -heartbeat.epoch,
            -heartbeat.end,
            heartbeat.priority,
            heartbeat.node,
        ),
    )
    return ranked[0] if ranked else None


def candidates(record: GroupRecord, living: Sequence[ReplicaHeartbeat]) -> list[ReplicaHeartbeat]:
    """Members of the recorded set whose store is alive, and nobody else (R2, R5)."""
    return [heartbeat for heartbeat in living if heartbeat.store_id in record.sync_state_set]


def record_after_election(
    record: GroupRecord,
    leader: ReplicaHeartbeat,
    living: Sequence[ReplicaHeartbeat],
    *,
    min_in_sync: int,
) -> GroupRecord:
    """The record that makes `leader`, a member of the set, master of the next epoch (R2)."""
    assert leader.store_id in record.sync_state_set, "only a member of the set is elected"
    kept = _kept(record, leader, living, min_in_sync=min_in_sync)
    return GroupRecord(leader.store_id, record.epoch + 1, kept, record.version + 1)


def _kept(
    record: GroupRecord,
    leader: ReplicaHeartbeat,
    living: Sequence[ReplicaHeartbeat],
    *,
    min_in_sync: int,
) -> tuple[str, ...]:
    """The set without the dead, but with the leader and not smaller than min_in_sync (R3).

    A dead member that stays holds everything confirmed, and can be elected when it comes back.
    """
    alive = {heartbeat.store_id for heartbeat in living}
    kept = [
        member for member in record.sync_state_set if member in alive or member == leader.store_id
    ]
    dead = [member for member in record.sync_state_set if member not in kept]
    missing = max(0, min_in_sync - len(kept))
    return tuple(sorted(kept + dead[:missing]))


def first_record(living: Sequence[ReplicaHeartbeat]) -> GroupRecord | str:
    """The first record of a group that has none, or why there can be none yet.

    All its brokers have to be there: a record that is missing may be one that was lost, and a new
    disk must not lead while those with the messages are down.  A store with something in it leads
    if it is the only one: the group may have been a single broker before.  New stores lack
    nothing that anybody was told, so all of them are the set.
    """
    if not living:
        return "no broker of the group sends heartbeats"
    requested = max(heartbeat.replicas for heartbeat in living)
    written = [heartbeat for heartbeat in living if not heartbeat.is_empty]
    if len(written) > 1:
        names = ", ".join(
            f"{heartbeat.node} (epoch {heartbeat.epoch}, {heartbeat.end} bytes)"
            for heartbeat in written
        )
        return (
            f"the metadata store has no record of this group, and {len(written)} brokers have "
            f"data: {names}. Nobody leads until somebody says who: popmq failover GROUP --to "
            "NODE --unclean; what only the others have is lost"
        )
    if len(living) < requested:
        return (
            f"the metadata store has no record of this group, and {len(living)} of {requested} "
            "brokers are heard: start the others, or say who leads: popmq failover GROUP --to "
            "NODE --unclean"
        )
    if written:
        only = written[0]
        return GroupRecord(only.store_id, only.epoch + 1, (only.store_id,), 1)
    first = min(living, key=lambda heartbeat: heartbeat.node)
    return GroupRecord(
        first.store_id, 1, tuple(sorted(heartbeat.store_id for heartbeat in living)), 1
    )


def record_after_unclean_election(
    record: GroupRecord | None, leader: ReplicaHeartbeat, *, highest_epoch: int
) -> GroupRecord:
    """An unclean election: what only the old set has is lost (R5).

    The epoch is above all that any broker is known to have accepted, or it would be refused (R7).
    """
    epoch = max(record.epoch if record else 0, highest_epoch, leader.epoch) + 1
    version = record.version + 1 if record else 1
    return GroupRecord(leader.store_id, epoch, (leader.store_id,), version)
