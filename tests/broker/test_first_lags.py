"""Groups that somebody created and that never read: what an autoscaler sees of them."""

import pytest

from popmq.broker.node.metrics import broker_metrics
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.topics import MessageType, StartAt
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.core_broker import CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    core = CoreBroker()
    core.topic("orders", queues=2)
    core.topic("empty")
    core.group("never")
    for number in range(20):
        core.send("orders", b"%d" % number, queue_id=number % 2)
    return core


def lags(core: CoreBroker, group: str) -> dict[str, int]:
    reply = pb.LagReply.FromString(
        core.reply(Kind.LAG, pb.LagRequest(group=group, never_read=True).SerializeToString())
    )
    assert all(lag.never_read for lag in reply.lags)
    return {lag.topic: lag.ready for lag in reply.lags}


def series(core: CoreBroker, group: str) -> dict[str, float]:
    return {
        metric.labels["topic"]: metric.value
        for metric in broker_metrics(core.broker)
        if metric.name == "consumer_lag_messages" and metric.labels["group"] == group
    }


def test_its_lag_is_what_each_topic_holds_for_it(core: CoreBroker) -> None:
    assert lags(core, "never") == series(core, "never") == {"orders": 20, "empty": 0}


def test_one_that_starts_at_the_newest_message_has_nothing_to_do(core: CoreBroker) -> None:
    core.group("late", start_at=StartAt.NEWEST)
    assert lags(core, "late") == series(core, "late") == {"orders": 0, "empty": 0}


def test_once_it_has_read_a_topic_the_others_are_not_its_own(core: CoreBroker) -> None:
    core.receive("empty", "never")
    assert series(core, "never") == {"empty": 0}


def test_a_group_that_a_receive_made_counts_for_what_it_reads_only(core: CoreBroker) -> None:
    core.receive("empty", "curious")
    assert series(core, "curious") == {"empty": 0}


def test_topics_of_other_namespaces_and_lite_topics_are_left_out(core: CoreBroker) -> None:
    core.group("team%workers")
    core.topic("team%jobs")
    core.topic("rooms", type=MessageType.LITE, queues=1)
    assert set(series(core, "team%workers")) == {"team%jobs"}
    assert set(series(core, "never")) == {"orders", "empty"}
