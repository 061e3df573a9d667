"""Between the controller's protobuf and this package's values."""

from popmq.broker.ha.role import GroupRecord, GroupView, Member, TimersHeard
from popmq.broker.ha.sync_state import AlterSyncStateSet
from popmq.common.wire import controller_pb2 as pb


def view_from_wire(state: pb.GroupState, now_ms: int) -> GroupView:
    """`now_ms` is this broker's time since boot, from which an age is counted back."""
    timers = None
    if state.HasField("timer_check_point"):
        found = state.timer_check_point
        timers = TimersHeard(
            found.epoch,
            found.last_read_ms,
            found.master_timer_queue_offset,
            now_ms - found.age_ms,
        )
    return GroupView(
        record=record_from_wire(state.record) if state.HasField("record") else None,
        members=tuple(
            Member(
                one.broker.store_id,
                one.broker.node or one.broker.broker,
                one.broker.address,
                one.alive,
            )
            for one in state.members
        ),
        timers=timers,
        trouble=state.trouble,
        view=state.view,
    )


def record_from_wire(record: pb.GroupRecord) -> GroupRecord:
    return GroupRecord(
        record.leader, record.epoch, frozenset(record.sync_state_set), record.version
    )


def alter_to_wire(alter: AlterSyncStateSet, *, cluster: str, group: str, leader: str) -> bytes:
    return pb.AlterSyncStateSetRequest(
        cluster=cluster,
        group=group,
        leader=leader,
        epoch=alter.epoch,
        expected_version=alter.expected_version,
        sync_state_set=sorted(alter.sync_state_set),
    ).SerializeToString()


def timers_to_wire(timers: TimersHeard, now_ms: int) -> pb.TimerCheckPoint:
    return pb.TimerCheckPoint(
        epoch=timers.epoch,
        last_read_ms=timers.last_read_ms,
        master_timer_queue_offset=timers.queue_offset,
        age_ms=max(0, now_ms - timers.taken_ms),
    )
