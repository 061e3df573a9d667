"""What timers count for an operator."""

import pytest
from timer.timer_client import (
    HOUR,
    MINUTE,
    SECOND,
    core_with_topic,
    recall,
    reschedule,
    send,
    send_all,
)

from popmq.broker import timer_metrics
from popmq.broker.metrics import broker_metrics
from popmq.common.topics import MessageType
from popmq.testing.core import CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    return core_with_topic()


def metrics(core: CoreBroker) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in broker_metrics(core.broker):
        if one.name.startswith("timer_"):
            found[one.name[6:] + one.labels.get("topic", "")] = one.value
    return found


def test_the_life_of_timers_is_counted(core: CoreBroker) -> None:
    send_all(core, {"A": SECOND, "B": HOUR, "C": HOUR, "D": 10 * HOUR})
    recall(core, "B")
    reschedule(core, "C", core.clock.wall_ms() + MINUTE)
    core.run_steps()
    found = metrics(core)
    assert (found["enqueue"], found["dequeue"]) == (5, 0)
    assert (found["recalled"], found["rescheduled"], found["cancelled_held"]) == (1, 1, 2)
    assert found["timing_messagesorders"] == 3
    core.clock.advance(SECOND + 250)
    core.run_steps()
    core.advance(2 * HOUR)
    found = metrics(core)
    assert found["dequeue"] == 2
    assert found["delay_latency_ms"] >= 250
    assert found["rolled"] > 0
    assert found["timing_messagesorders"] == 1
    assert (found["enqueue_lag_ms"], found["dequeue_lag_ms"]) == (0, 0)


def test_an_enqueue_that_is_stuck_has_a_lag_that_grows(core: CoreBroker) -> None:
    core.advance(MINUTE)
    core.broker.timers.service._warming = True  # the disk never answers
    send(core, "A", core.clock.wall_ms() + HOUR)
    core.advance(5 * SECOND)
    send(core, "B", core.clock.wall_ms() + HOUR)
    core.advance(5 * SECOND)
    found = metrics(core)
    assert found["enqueue_lag_messages"] == 2
    assert found["enqueue_lag_ms"] == 10 * SECOND
    assert found["dequeue_lag_ms"] > 8 * SECOND
    core.broker.timers.service._warming = False
    core.run_steps()
    found = metrics(core)
    assert (found["enqueue_lag_messages"], found["enqueue_lag_ms"]) == (0, 0)
    assert found["dequeue_lag_ms"] == 0


def test_topics_are_labels_up_to_a_limit(core: CoreBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_metrics, "TOPICS_LIMIT", 1)
    core.topic("others", type=MessageType.DELAY)
    core.topic("deleted", type=MessageType.DELAY)
    send_all(core, {"A": HOUR, "B": HOUR})
    send_all(core, {"C": HOUR}, topic="others")
    send_all(core, {"D": HOUR}, topic="deleted")
    core.broker.registry.delete_topic("deleted")
    found = metrics(core)
    assert found["timing_messagesorders"] == 2
    assert found["timing_messages_others"] == 2
    assert "timing_messagesothers" not in found
