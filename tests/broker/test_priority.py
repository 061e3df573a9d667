"""Topics of type PRIORITY: the highest first, and a bound on how long the others wait."""

from dataclasses import replace

import pytest

from popmq.broker.pop.priority_order import PLACES_LIMIT, PriorityOrder
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import GroupType, MessageType
from popmq.testing.harness.core_broker import SMALL, CoreBroker, bodies

PLACE = (1, 2)


def made(turn: int = 8, queues: int = 4) -> CoreBroker:
    pop = PopSettings(priority_turn=turn, retry_first_percent=0)
    core = CoreBroker(settings=replace(SMALL, pop=pop))
    core.topic("ranked", queues=queues, type=MessageType.PRIORITY)
    return core


def fill(core: CoreBroker, *priorities: int, count: int = 1) -> None:
    for number in range(count):
        for priority in priorities:
            core.put_ranked("ranked", b"%d-%d" % (priority, number), priority)


def test_a_receive_gets_the_highest_priority_first_and_older_ones_before_newer_ones() -> None:
    core = made()
    fill(core, 1, 3, 0, 2, count=2)
    got = [delivery.head for delivery in core.receive("ranked", "g", limit=5)]
    assert got == [b"3-0", b"3-1", b"2-0", b"2-1", b"1-0"]


def test_a_higher_priority_that_comes_later_is_received_earlier() -> None:
    core = made()
    fill(core, 0, count=3)
    assert bodies(core.receive("ranked", "g", limit=1)) == [b"0-0"]
    fill(core, 2)
    assert bodies(core.receive("ranked", "g", limit=1)) == [b"2-0"]


@pytest.mark.parametrize("type_", [GroupType.NORMAL, GroupType.FIFO])
@pytest.mark.parametrize("turn", [2, 5])
def test_no_priority_waits_longer_than_its_bound_however_many_higher_ones_come(
    turn: int, type_: GroupType
) -> None:
    core = made(turn)
    core.group("g", type=type_)
    fill(core, 0, 1, 2, count=4)
    waited = dict.fromkeys((0, 1, 2), 0)
    first: list[int] = []
    for _ in range(turn * 3 * 3):
        fill(core, 3, count=2)
        (delivery,) = core.receive("ranked", "g", limit=1)
        core.ack("ranked", "g", delivery.handle)
        first.append(int(delivery.head[:1]))
        for priority in waited:
            waited[priority] = 0 if first[-1] == priority else waited[priority] + 1
            assert waited[priority] < turn * 3, f"priority {priority} starves in {first}"
    assert first.count(3) == turn * 3 * 3 - 9


def test_the_turn_of_lower_priorities_goes_to_those_in_which_something_waits() -> None:
    order = PriorityOrder(3)
    waiting = {5, 1, 3}.__contains__
    begun = [order.order(PLACE, 6, waiting)[0] for _ in range(12)]
    assert begun == [5, 5, 3, 5, 5, 1, 5, 5, 3, 5, 5, 1]
    alone = [order.order(PLACE, 6, {1}.__contains__)[0] for _ in range(6)]
    assert alone == [5] * 6  # that one is reached anyway


def test_every_queue_is_visited_once_in_each_receive_and_groups_have_turns_of_their_own() -> None:
    order = PriorityOrder(2)
    everything = set(range(4)).__contains__
    for _ in range(5):
        assert sorted(order.order(PLACE, 4, everything)) == [0, 1, 2, 3]
    assert order.order((7, 2), 4, everything) == [3, 2, 1, 0]


def test_turns_of_many_groups_are_forgotten_from_the_oldest_on() -> None:
    order = PriorityOrder(2)
    everything = set(range(2)).__contains__
    order.order(PLACE, 2, everything)
    for group in range(PLACES_LIMIT):
        order.order((group + 10, 2), 2, everything)
    assert order.order(PLACE, 2, everything) == [1, 0]  # the first of a round again


def test_a_message_that_comes_back_is_received_again_through_the_retry_topic() -> None:
    core = made()
    fill(core, 0, 3)
    core.receive("ranked", "g", limit=2, invisible_ms=1_000)
    core.advance(2_000)
    assert bodies(core.receive("ranked", "g")) == [b"0-0", b"3-0"]
