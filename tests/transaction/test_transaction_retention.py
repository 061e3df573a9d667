"""Retention and transactions: half messages move for as long as they are pending."""

from dataclasses import replace

import pytest
from transaction.rig import begin, broker, checks, crash, end, received, wait

from popmq.common.settings.settings import MessageSettings, StoreSettings
from popmq.testing.harness.core_broker import SMALL, CoreBroker

HOUR_MS = 3_600_000
SHORT = replace(
    SMALL,
    store=StoreSettings(segment_bytes=64 << 10, snapshot_bytes=32 << 10, retention_hours=1),
    message=MessageSettings(max_body_bytes=16 << 10),
)


@pytest.fixture
def core() -> CoreBroker:
    new_broker = broker(SHORT, keep_ms=48 * HOUR_MS)
    new_broker.topic("noise", queues=1)
    return new_broker


def pass_hours(core: CoreBroker, hours: int) -> None:
    """With traffic that fills two segments an hour."""
    for _ in range(hours * 10):
        core.send("noise", bytes(12_000))
        core.advance(HOUR_MS // 10)


def test_a_pending_one_outlives_its_segment_and_is_committed(core: CoreBroker) -> None:
    halves = [begin(core, f"m-{number}") for number in range(3)]
    end(core, "m-1", halves[1].message, commit=False)
    pass_hours(core, 6)
    store = core.broker.store
    assert store.start > 100_000
    assert store.retention.relocated >= 4  # two of them, again and again
    assert end(core, "m-0", halves[0].message) is None
    assert received(core) == ["m-0"]
    proxy = wait(core)
    core.advance(10)
    (check,) = checks(proxy) or []
    assert (check.head, check.transaction_id) == (b"body of m-2", halves[2].message)


def test_where_it_was_moved_to_survives_a_crash(core: CoreBroker) -> None:
    half = begin(core, "a")
    for _ in range(4):
        pass_hours(core, 2)
        crash(core)
    assert core.broker.store.start > 100_000
    assert end(core, "a", half.message) is None
    assert received(core) == ["a"]


def test_an_end_waits_for_the_moved_body_to_be_confirmed(core: CoreBroker) -> None:
    half = begin(core, "a")
    unit = core.broker.transactions.table.pending[0].unit
    pass_hours(core, 1)
    (bodies,) = core.broker.transactions.bodies.bodies_below(core.broker.store.end)
    core.broker.transactions.bodies.move(bodies[0])
    assert core.broker.transactions.table.pending[0].unit.position > unit.position
    assert end(core, "a", half.message) is None
    assert received(core) == ["a"]


def test_what_ended_since_it_was_found_is_not_moved(core: CoreBroker) -> None:
    half = begin(core, "a")
    (bodies,) = core.broker.transactions.bodies.bodies_below(core.broker.store.end)
    end(core, "a", half.message)
    before = core.broker.store.end
    core.broker.transactions.bodies.move(bodies[0])
    assert core.broker.store.end == before
