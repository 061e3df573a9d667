"""What a record that was read asks of a broker: every combination of R7 and R8."""

import itertools

import pytest

from popmq.broker.ha.role import MASTERS, BrokerRole, RoleOrder, order
from popmq.common.protocol.group_record import GroupRecord, TimerCheckPoint

OWN, OTHER = "own", "other"


def judged(*, leader: str, epoch: int, accepted: int, role: BrokerRole) -> RoleOrder:
    record = GroupRecord(leader, epoch, (OTHER, OWN), 1)
    return order(record, own_id=OWN, accepted=accepted, role=role)


@pytest.mark.parametrize(
    ("role", "leader", "epoch"), list(itertools.product(BrokerRole, (OWN, OTHER), (0, 4)))
)
def test_an_order_of_an_older_epoch_is_void(role: BrokerRole, leader: str, epoch: int) -> None:
    assert judged(leader=leader, epoch=epoch, accepted=5, role=role) is RoleOrder.IGNORE


@pytest.mark.parametrize("role", list(BrokerRole))
def test_a_new_epoch_makes_its_leader_master_whatever_it_was(role: BrokerRole) -> None:
    assert judged(leader=OWN, epoch=6, accepted=5, role=role) is RoleOrder.LEAD


@pytest.mark.parametrize(("role", "epoch"), list(itertools.product(BrokerRole, (5, 6))))
def test_who_is_not_the_leader_follows(role: BrokerRole, epoch: int) -> None:
    assert judged(leader=OTHER, epoch=epoch, accepted=5, role=role) is RoleOrder.FOLLOW


@pytest.mark.parametrize("role", list(BrokerRole))
def test_a_master_learns_and_one_that_was_it_before_a_restart_waits(role: BrokerRole) -> None:
    expected = RoleOrder.LEARN if role in MASTERS else RoleOrder.WAIT
    assert judged(leader=OWN, epoch=5, accepted=5, role=role) is expected


def test_of_two_timer_check_points_the_later_epoch_is_newer_and_then_the_further_one() -> None:
    old = TimerCheckPoint(1, 90, 900, taken_ms=5)
    assert old.is_newer_than(None)
    assert TimerCheckPoint(2, 10, 100, 1).is_newer_than(old)
    assert TimerCheckPoint(1, 91, 100, 1).is_newer_than(old)
    assert TimerCheckPoint(1, 90, 901, 1).is_newer_than(old)
    assert not TimerCheckPoint(1, 90, 900, 9).is_newer_than(old)
    assert not old.is_newer_than(TimerCheckPoint(2, 10, 100, 1))
