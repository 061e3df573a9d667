"""Role: what the group's record asks of this broker (R6 to R8).

An order of an epoch below the accepted one is void, for ever.  A broker becomes master only by
an epoch that is new to it, so one that restarts waits for the next.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum


class BrokerRole(IntEnum):
    """Numbered as in `controller.proto`, which says what each means."""

    NOBODY = 0
    SLAVE = 1
    COPYING = 2
    OPENING = 3
    MASTER = 4
    HANDING_OVER = 5


MASTERS = (BrokerRole.OPENING, BrokerRole.MASTER, BrokerRole.HANDING_OVER)


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The one record of a broker group: who leads, since which epoch, and who could (R1)."""

    leader: str  # store id
    epoch: int
    members: frozenset[str]  # the SyncStateSet: store ids
    version: int


@dataclass(frozen=True, slots=True)
class Member:
    """A broker of the group as a controller knows it."""

    store_id: str
    node: str
    address: str
    alive: bool


@dataclass(frozen=True, slots=True)
class TimersHeard:
    """The TimerCheckPoint of a master of `epoch`, and when it was so on this broker's clock."""

    epoch: int
    last_read_ms: int  # wall
    queue_offset: int
    taken_ms: int  # since boot, here

    def is_newer_than(self, other: "TimersHeard | None") -> bool:
        return other is None or self._age() > other._age()

    def _age(self) -> tuple[int, int, int]:
        return self.epoch, self.queue_offset, self.last_read_ms


@dataclass(frozen=True, slots=True)
class GroupView:
    """What a controller said of the group."""

    record: GroupRecord | None
    members: tuple[Member, ...] = ()
    timers: TimersHeard | None = None
    trouble: str = ""
    view: int = 0

    def address_of(self, store_id: str) -> str:
        """Where that store's broker is; empty when it is not known."""
        found = [one.address for one in self.members if one.store_id == store_id]
        return found[0] if found else ""


class RoleOrder(Enum):
    IGNORE = "ignore"  # it is old, or says nothing new
    LEARN = "learn"  # this broker leads, the set may have changed
    WAIT = "wait"  # this broker led that epoch in a former life (R8)
    FOLLOW = "follow"
    LEAD = "lead"


def newest(record: GroupRecord, known: GroupRecord | None) -> GroupRecord:
    """`record`, unless another controller read it before the known version was written."""
    if known is None or known.epoch != record.epoch or known.version <= record.version:
        return record
    return known


def order(record: GroupRecord, *, own_id: str, accepted: int, role: BrokerRole) -> RoleOrder:
    """What to do about a record that was read."""
    if record.epoch < accepted:
        return RoleOrder.IGNORE
    if record.leader != own_id:
        return RoleOrder.FOLLOW
    if record.epoch > accepted:
        return RoleOrder.LEAD
    return RoleOrder.LEARN if role in MASTERS else RoleOrder.WAIT
