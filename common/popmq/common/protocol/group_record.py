"""GroupRecord and TimerCheckPoint: what controllers and brokers exchange of a broker group."""

from dataclasses import dataclass

from popmq.common.wire import controller_pb2 as pb


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The only record of a broker group: its master, its epoch, and who may be elected (R1).

    Replicas are named by store id: a lost or wiped disk gets a new id, which is in no set (R9).
    `sync_state_set` is sorted and holds the leader; `version` is 1 for the first record.
    """

    leader: str
    epoch: int
    sync_state_set: tuple[str, ...]
    version: int

    def check_invariants(self) -> None:
        """A controller calls it before it writes a record and after it read one."""
        assert self.leader in self.sync_state_set, "the leader is in its SyncStateSet"
        assert tuple(sorted(set(self.sync_state_set))) == self.sync_state_set, "a sorted set"
        assert self.version > 0 < self.epoch, "versions and epochs count from 1"

    def to_wire(self) -> pb.GroupRecord:
        return pb.GroupRecord(
            leader=self.leader,
            epoch=self.epoch,
            sync_state_set=self.sync_state_set,
            version=self.version,
        )

    @classmethod
    def from_wire(cls, record: pb.GroupRecord) -> "GroupRecord":
        return cls(record.leader, record.epoch, tuple(record.sync_state_set), record.version)


@dataclass(frozen=True, slots=True)
class TimerCheckPoint:
    """The progress of a master's timers. The newest has the largest epoch, offset, time."""

    epoch: int
    queue_offset: int
    last_read_ms: int  # wall time
    taken_ms: int  # boot time in this process when it was taken

    def is_newer_than(self, other: "TimerCheckPoint | None") -> bool:
        return other is None or self._order > other._order

    @property
    def _order(self) -> tuple[int, int, int]:
        return self.epoch, self.queue_offset, self.last_read_ms

    def to_wire(self, now_ms: int) -> pb.TimerCheckPoint:
        return pb.TimerCheckPoint(
            epoch=self.epoch,
            last_read_ms=self.last_read_ms,
            master_timer_queue_offset=self.queue_offset,
            age_ms=max(0, now_ms - self.taken_ms),
        )

    @classmethod
    def from_wire(cls, timers: pb.TimerCheckPoint, now_ms: int) -> "TimerCheckPoint":
        offset = timers.master_timer_queue_offset
        return cls(timers.epoch, offset, timers.last_read_ms, now_ms - timers.age_ms)
