"""FIFO topics and the groups that read them: which keep the order, and what is said of others."""

import logging

import pytest
from broker.meta_pair import Two

from popmq.common.errors import PopmqError
from popmq.common.topics import GroupType, MessageType, SubscriptionGroup
from popmq.testing.harness.core_broker import CoreBroker, bodies


@pytest.fixture
def core() -> CoreBroker:
    core = CoreBroker()
    core.topic("steps", type=MessageType.FIFO, queues=1)
    core.topic("orders", queues=1)
    return core


def test_a_group_that_a_receive_from_a_fifo_topic_made_keeps_the_order(core: CoreBroker) -> None:
    for number in range(4):
        core.send("steps", b"%d" % number, message_group="order-1")
    (first,) = core.receive("steps", "readers", limit=1)
    core.change("steps", "readers", first.handle, 500)
    assert core.receive("steps", "readers") == []  # not behind later ones
    core.advance(1_000)
    assert bodies(core.receive("steps", "readers")) == [b"0", b"1", b"2", b"3"]


def test_a_group_that_another_receive_made_is_normal(core: CoreBroker) -> None:
    core.receive("orders", "readers")
    assert core.broker.registry.group("readers").type is GroupType.NORMAL


def test_a_group_that_a_broker_group_that_follows_asked_for_is_fifo_too() -> None:
    two = Two()
    two.owner.topic("steps", type=MessageType.FIFO)
    two.owner.topic("orders")
    two.follow()
    for topic, group in (("steps", "ordered"), ("orders", "plain")):
        with pytest.raises(PopmqError, match="does not exist"):
            two.other.receive(topic, group)
    two.follow(0)
    kinds = {name: two.owner.broker.registry.group(name).type for name in ("ordered", "plain")}
    assert kinds == {"ordered": GroupType.FIFO, "plain": GroupType.NORMAL}
    assert two.same()


def test_a_normal_group_that_reads_a_fifo_topic_is_a_warning_once(
    core: CoreBroker, caplog: pytest.LogCaptureFixture
) -> None:
    core.group("plain")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            core.receive("steps", "plain")
            core.receive("orders", "plain")
    (record,) = caplog.records
    assert record.getMessage() == "a group does not keep the order of a topic"
    assert "group plain is normal and reads FIFO topics (steps)" in str(vars(record)["why"])


def test_the_refusal_of_another_type_names_the_way(core: CoreBroker) -> None:
    core.group("plain")
    with pytest.raises(PopmqError) as caught:
        core.broker.registry.alter_group(SubscriptionGroup(0, "plain", GroupType.FIFO))
    assert "`popmq group delete plain`" in str(caught.value)
    assert "`popmq group create plain --type fifo`" in str(caught.value)
