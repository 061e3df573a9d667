"""Role: what the group's record asks of this broker (R6 to R8).

An order of an epoch below the accepted one is void, for ever.  A broker becomes master only by
an epoch that is new to it, so one that restarts waits for the next.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum

from popmq.common.protocol.group_record import GroupRecord, TimerCheckPoint


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
class Member:
    """A broker of the group as a controller knows it."""

    store_id: str
    node: str
    address: str
    alive: bool


@dataclass(frozen=True, slots=True)
class GroupView:
    """What a controller said of the group."""

    record: GroupRecord | None
    members: tuple[Member, ...] = ()
    timers: TimerCheckPoint | None = None
    trouble: str = ""
    view: int = 0

    def address_of(self, store_id: str) -> str:
        """Where that store's broker is; empty when it is not known."""
        addresses = [member.address for member in self.members if member.store_id == store_id]
        return addresses[0] if addresses else ""


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
