"""What timers count for an operator."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
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

from popmq.broker.node import timer_metrics
from popmq.broker.node.metrics import broker_metrics
from popmq.broker.timer import timer_scan
from popmq.common.observability import counters_collector
from popmq.common.topics import MessageType
from popmq.testing.harness.core_broker import CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    return core_with_topic()


def metrics(core: CoreBroker) -> dict[str, float]:
    found_metrics: dict[str, float] = {}
    for metric in broker_metrics(core.broker):
        if metric.name.startswith("timer_"):
            found_metrics[metric.name[6:] + metric.labels.get("topic", "")] = metric.value
    return found_metrics


def test_the_life_of_timers_is_counted(core: CoreBroker) -> None:
    send_all(core, {"A": SECOND, "B": HOUR, "C": HOUR, "D": 10 * HOUR})
    recall(core, "B")
    reschedule(core, "C", core.clock.wall_ms() + MINUTE)
    core.run_steps()
    found_metrics = metrics(core)
    assert (found_metrics["enqueue"], found_metrics["dequeue"]) == (5, 0)
    assert (
        found_metrics["recalled"],
        found_metrics["rescheduled"],
        found_metrics["cancelled_held"],
    ) == (1, 1, 2)
    assert found_metrics["timing_messagesorders"] == 3
    core.clock.advance(SECOND + 250)
    core.run_steps()
    core.advance(2 * HOUR)
    found_metrics = metrics(core)
    assert found_metrics["dequeue"] == 2
    assert found_metrics["lateness_seconds"] >= 0.25
    assert found_metrics["rolled"] > 0
    assert found_metrics["timing_messagesorders"] == 1
    assert (found_metrics["enqueue_lag_seconds"], found_metrics["dequeue_lag_seconds"]) == (0, 0)


def test_an_enqueue_that_is_stuck_has_a_lag_that_grows(core: CoreBroker) -> None:
    core.advance(MINUTE)
    waiting = core.broker.timers.service.cold._waiting
    waiting |= {"enqueue", "load"}  # the disk never answers
    send(core, "A", core.clock.wall_ms() + HOUR)
    core.advance(5 * SECOND)
    send(core, "B", core.clock.wall_ms() + HOUR)
    core.advance(5 * SECOND)
    found_metrics = metrics(core)
    assert found_metrics["enqueue_lag_messages"] == 2
    assert found_metrics["enqueue_lag_seconds"] == 10
    assert found_metrics["dequeue_lag_seconds"] > 8
    waiting.clear()
    core.run_steps()
    found_metrics = metrics(core)
    assert (found_metrics["enqueue_lag_messages"], found_metrics["enqueue_lag_seconds"]) == (0, 0)
    assert found_metrics["dequeue_lag_seconds"] == 0


def test_topics_are_labels_up_to_a_limit(core: CoreBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_metrics, "TOPICS_LIMIT", 1)
    core.topic("others", type=MessageType.DELAY)
    core.topic("deleted", type=MessageType.DELAY)
    send_all(core, {"A": HOUR, "B": HOUR})
    send_all(core, {"C": HOUR}, topic="others")
    send_all(core, {"D": HOUR}, topic="deleted")
    core.broker.registry.delete_topic("deleted")
    found_metrics = metrics(core)
    assert found_metrics["timing_messagesorders"] == 2
    assert found_metrics["timing_messages_others"] == 2
    assert "timing_messagesothers" not in found_metrics


def forecast(core: CoreBroker) -> dict[str, float]:
    return {
        metric.labels["within_seconds"]: metric.value
        for metric in broker_metrics(core.broker)
        if metric.name == "timer_forecast_messages" and metric.value
    }


def test_what_is_due_within_which_time_is_counted_when_somebody_asks(core: CoreBroker) -> None:
    send_all(core, {"A": 2 * SECOND, "B": 40 * SECOND, "C": 50 * SECOND, "D": 3 * HOUR})
    core.advance(1)
    pieces = core.broker.timers.forecast
    assert pieces.step() == 0, "nobody asked"
    assert forecast(core) == {}
    core.run_steps()
    assert forecast(core) == {"5": 1, "60": 2, "3600": 1}, "D is on its way, rolling"
    core.advance(30 * SECOND)
    assert forecast(core) == {"5": 1, "60": 2, "3600": 1}, "once a minute"
    core.advance(31 * SECOND)
    assert forecast(core) == {"3600": 1}


def test_a_recalled_timer_is_not_in_the_forecast(core: CoreBroker) -> None:
    send_all(core, {"A": 40 * SECOND, "B": 40 * SECOND, "C": 3 * MINUTE})
    recall(core, "A")
    recall(core, "C")
    core.advance(1)
    forecast(core)
    core.run_steps()
    assert forecast(core) == {"60": 1}


def test_a_forecast_counts_late_ones_once_and_is_made_in_pieces(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_scan, "_SLOTS_A_PIECE", 3)
    send_all(core, {"first": 10 * MINUTE})
    core.advance(10 * MINUTE)
    core.clock.step_wall(-6 * MINUTE)
    send_all(core, {"late": 2 * MINUTE})
    send_all(core, {f"T{number}": (7 + number) * MINUTE for number in range(7)})
    core.clock.advance(MINUTE)  # since samples for reports asked for one
    forecast(core)
    pieces = 0
    while core.broker.timers.forecast.step():
        pieces += 1
    assert pieces == 4
    assert forecast(core) == {"900": 9}, "by slots: of the late one, and of the first's too"


def test_how_late_timers_fired_is_a_histogram(core: CoreBroker) -> None:
    send_all(core, {"A": SECOND, "B": SECOND, "C": MINUTE})
    core.clock.advance(SECOND + 20)
    core.run_steps()
    core.clock.advance(MINUTE)
    core.run_steps()
    registry = CollectorRegistry()
    registry.register(counters_collector("popmq_", lambda: broker_metrics(core.broker)))
    page = generate_latest(registry).decode()
    assert 'popmq_timer_lateness_seconds_bucket{le="0.01"} 0.0' in page
    assert 'popmq_timer_lateness_seconds_bucket{le="0.02"} 2.0' in page
    assert 'popmq_timer_lateness_seconds_bucket{le="5"} 3.0' in page
    assert 'popmq_timer_lateness_seconds_bucket{le="+Inf"} 3.0' in page
    assert "popmq_timer_lateness_seconds_sum 1.06" in page
