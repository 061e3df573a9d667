"""A replica enqueues timers and fires none; what it knows when it becomes master is the log's."""

import pytest
from timer.timer_client import core_with_topic, send

from popmq.common.record.timer_token import FiringToken
from popmq.testing.harness.core_broker import CoreBroker, bodies


@pytest.fixture
def core() -> CoreBroker:
    return core_with_topic()


@pytest.mark.parametrize("rest", [0, 100])
def test_a_replica_that_becomes_master_fires_what_the_master_had_not_enqueued(
    core: CoreBroker, rest: int
) -> None:
    """The master's firing passed over it, and would have called it late: the replica enqueued it
    before it heard of the firing."""
    service, now_ms = core.broker.timers.service, core.clock.wall_ms()
    service.run_as_slave()
    topic_id = core.broker.registry.topic("orders").id
    send(core, "fired", now_ms + 60_000)
    send(core, "behind", now_ms + 30_000)
    for number in range(rest):
        send(core, f"T{number}", now_ms + 90_000)
    first = core.broker.timers.service.queue.read(0, 1)[0].timer
    core.run_steps()
    assert service.enqueue.behind == 0
    assert first is not None
    service.apply_ended(FiringToken(topic_id, first.due_ms, first.identity, 1, 0))
    core.run_steps()
    assert core.broker.timers.state.classified == 1
    core.clock.advance(60_000)
    service.promote()
    service.enqueue_limit = 7
    core.run_steps()
    assert bodies(core.receive("orders", "g", limit=200)) == [b"behind"]
    core.advance(30_000)
    assert service.fired == 1 + rest


def test_a_replica_keeps_what_its_master_called_late(core: CoreBroker) -> None:
    service, now_ms = core.broker.timers.service, core.clock.wall_ms()
    service.run_as_slave()
    topic_id = core.broker.registry.topic("orders").id
    send(core, "fired", now_ms + 60_000)
    send(core, "late", now_ms + 30_000)
    send(core, "next", now_ms + 61_000)
    core.run_steps()
    first, _, third = (entry.timer for entry in service.queue.read(0, 3))
    assert first is not None
    assert third is not None
    service.apply_ended(FiringToken(topic_id, first.due_ms, first.identity, 1, 0))
    service.apply_ended(FiringToken(topic_id, third.due_ms, third.identity, 3, 2))
    assert len(core.broker.timers.state.late) == 1
    core.clock.advance(60_000)
    service.promote()
    core.run_steps()
    assert bodies(core.receive("orders", "g")) == [b"late"]
