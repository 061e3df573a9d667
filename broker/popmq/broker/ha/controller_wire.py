"""Between the controller's protobuf and this package's values."""

from popmq.broker.ha.role import GroupView, Member
from popmq.broker.ha.sync_state import AlterSyncStateSet
from popmq.common.protocol.group_record import GroupRecord, TimerCheckPoint
from popmq.common.wire import controller_pb2 as pb


def view_from_wire(state: pb.GroupState, now_ms: int) -> GroupView:
    """`now_ms` is this broker's time since boot, from which an age is counted back."""
    return GroupView(
        record=record_of(state),
        members=tuple(
            Member(
                member.broker.store_id,
                member.broker.node or member.broker.broker,
                member.broker.address,
                member.alive,
            )
            for member in state.members
        ),
        timers=(
            TimerCheckPoint.from_wire(state.timer_check_point, now_ms)
            if state.HasField("timer_check_point")
            else None
        ),
        trouble=state.trouble,
        view=state.view,
    )


def record_of(state: pb.GroupState) -> GroupRecord | None:
    return GroupRecord.from_wire(state.record) if state.HasField("record") else None


def alter_to_wire(alter: AlterSyncStateSet, *, cluster: str, group: str, leader: str) -> bytes:
    return pb.AlterSyncStateSetRequest(
        cluster=cluster,
        group=group,
        leader=leader,
        epoch=alter.epoch,
        expected_version=alter.expected_version,
        sync_state_set=sorted(alter.sync_state_set),
    ).SerializeToString()
