"""The one record of a broker group: who leads, in which epoch, and who may be elected (R1).

Store ids, not names: a disk that was lost or wiped has a new one and is in no set (R9).
"""

from dataclasses import dataclass

from popmq.common.wire import controller_pb2 as pb


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """`sync_state_set` is sorted and holds the leader; `version` is 1 for the first record."""

    leader: str
    epoch: int
    sync_state_set: tuple[str, ...]
    version: int

    def __post_init__(self) -> None:
        assert self.leader in self.sync_state_set, "the leader is in its SyncStateSet"
        assert tuple(sorted(set(self.sync_state_set))) == self.sync_state_set, "a sorted set"
        assert self.version > 0 < self.epoch, "versions and epochs count from 1"


def record_to_wire(record: GroupRecord) -> pb.GroupRecord:
    return pb.GroupRecord(
        leader=record.leader,
        epoch=record.epoch,
        sync_state_set=record.sync_state_set,
        version=record.version,
    )
