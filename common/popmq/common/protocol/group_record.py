"""What controllers and brokers both know of a broker group: its record, and a master's timers."""

from dataclasses import dataclass

from popmq.common.wire import controller_pb2 as pb


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The one record of a broker group: who leads, in which epoch, and who may be elected (R1).

    Store ids, not names: a disk that was lost or wiped has a new one and is in no set (R9).
    `sync_state_set` is sorted and holds the leader; `version` is 1 for the first record.
    """

    leader: str
    epoch: int
    sync_state_set: tuple[str, ...]
    version: int

    def check_invariants(self) -> None:
        """For a controller, before it writes the record and after it read one."""
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
    """Where a master's timers were. The fields are in the order in which one is newer."""

    epoch: int
    queue_offset: int
    last_read_ms: int  # wall time
    taken_ms: int  # boot time of the process that has it

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
