"""A reader of dead letters counts its own attempts, and a letter that fails again has no letter."""

import pytest

from popmq.common.errors import Code
from popmq.common.topics import GroupType
from popmq.testing.harness.core_broker import CoreBroker

LETTERS = "%DLQ%shop"


@pytest.fixture
def core() -> CoreBroker:
    """`shop` gave a message up after three attempts."""
    new_core = CoreBroker()
    new_core.topic("orders", queues=1)
    new_core.group("shop", max_attempts=3)
    new_core.send("orders", b"poison")
    assert fail(new_core, "orders", "shop", receives=5) == [1, 2, 3]
    return new_core


def fail(core: CoreBroker, topic: str, group: str, *, receives: int) -> list[int]:
    """The attempts that come while none is acked."""
    attempts = []
    for _ in range(receives):
        attempts += [item.attempt for item in core.receive(topic, group, invisible_ms=1_000)]
        core.advance(100_000)
    return attempts


def letters(core: CoreBroker, group: str) -> int:
    topic = core.broker.registry.find_topic(f"%DLQ%{group}")
    return core.broker.store.queue(topic.id, 0).count if topic is not None else 0


@pytest.mark.parametrize("limit", [1, 2, 5])
@pytest.mark.parametrize("kind", [GroupType.NORMAL, GroupType.FIFO])
def test_another_group_reads_a_dead_letter_from_attempt_1_on(
    core: CoreBroker, limit: int, kind: GroupType
) -> None:
    core.group("undertaker", max_attempts=limit, type=kind)
    assert fail(core, LETTERS, "undertaker", receives=8) == list(range(1, limit + 1))
    assert (letters(core, "shop"), letters(core, "undertaker")) == (1, 0)
    assert core.broker.pop.revive.kept == 1


def test_a_group_that_fails_on_its_own_dead_letters_gets_each_no_more_than_its_limit(
    core: CoreBroker,
) -> None:
    assert fail(core, LETTERS, "shop", receives=30) == [1, 2, 3]
    assert letters(core, "shop") == 1
    assert core.broker.pop.revive.dead_lettered == 1


def test_two_groups_that_read_each_others_dead_letters_come_to_an_end(core: CoreBroker) -> None:
    core.group("other", max_attempts=1)
    core.send("orders", b"second")
    fail(core, "orders", "other", receives=3)
    before = letters(core, "shop"), letters(core, "other")
    for _ in range(10):
        fail(core, LETTERS, "other", receives=2)
        fail(core, "%DLQ%other", "shop", receives=2)
    assert (letters(core, "shop"), letters(core, "other")) == before


def test_a_dead_letter_that_failed_again_can_be_sent_back_to_its_own_group(
    core: CoreBroker,
) -> None:
    core.group("undertaker", max_attempts=1)
    fail(core, LETTERS, "undertaker", receives=2)
    core.stop()
    core.start()
    assert fail(core, LETTERS, "undertaker", receives=2) == []
    (again,) = core.receive(LETTERS, "shop")
    assert core.ack(LETTERS, "shop", again.handle)[0].code == Code.OK
