"""Each table of a broker finds that it disagrees with itself, and the simulators ask it."""

from collections.abc import Callable

import pytest

from popmq.broker.deliveries.parked_keys import ParkedKey
from popmq.broker.deliveries.pop_check_point import PopCheckPoint
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.deliveries.revive_buckets import ReviveBuckets
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.transaction.transaction_table import HalfMessage
from popmq.common.topics import GroupType, MessageType
from popmq.testing.harness.core_broker import CoreBroker
from popmq.testing.harness.invariants import broken_invariant
from popmq.testing.sim.run import Simulator

Break = Callable[[CoreBroker], object]
KEY = ParkedKey(1, 2, 9, 0, b"k", since_ms=0)
HALF = HalfMessage(9, 1, 0, QueueUnit(0, 100, 0), first_ms=0, due_ms=1)


def fifo_progress(core: CoreBroker) -> FifoProgress:
    progress = [p for _, p in core.broker.table.progress_items() if isinstance(p, FifoProgress)]
    return progress[0]


def forget_a_message_in_line(core: CoreBroker) -> None:
    order = fifo_progress(core).order
    assert order is not None
    order._lines.clear()


def end_a_check_point_in_silence(core: CoreBroker) -> None:
    next(iter(core.broker.table)).acked = -1


def count_a_check_point_twice(core: CoreBroker) -> None:
    table = core.broker.table
    next(iter(table.due_times._buckets.values())).live += 1


BREAKS: dict[str, Break] = {
    "in all": lambda core: setattr(core.broker.table, "in_flight", 7),
    "wrong count": lambda core: fifo_progress(core).in_flight_offsets.add(4),
    "never offered": lambda core: setattr(fifo_progress(core).order, "_ready", []),
    "in no line": forget_a_message_in_line,
    "still live": end_a_check_point_in_silence,
    "there": count_a_check_point_twice,
    "ends out of order": lambda core: setattr(fifo_progress(core), "committed", 1_000),
    "another attempt": lambda core: fifo_progress(core).attempts.update({0: 1}),
    "without its key": lambda core: core.broker.table.parked._owner.update({(9, 9): KEY}),
    "self.held": lambda core: setattr(core.broker.buffer, "held", 3),
    "without an end": lambda core: core.broker.deliveries.redriven._borders.update({9: [1]}),
    "no place by age": lambda core: core.broker.transactions.table.pending.update({9: HALF}),
    "outlives its client": lambda core: core.broker.lites.subscriptions._of_client.update(
        {9: {(1, 2, 9)}}
    ),
}


@pytest.fixture
def busy() -> CoreBroker:
    """Messages of two groups: one is over, some are in flight, some wait behind them."""
    core = CoreBroker()
    core.topic("orders")
    core.topic("keyed", queues=1, type=MessageType.FIFO)
    core.group("g")
    core.group("fifo", type=GroupType.FIFO)
    for number in range(6):
        core.send("orders", b"%d" % number)
        core.send("keyed", b"%d" % number, message_group=f"k{number % 3}")
    core.receive("orders", "g", limit=3)
    first, *_ = core.receive("keyed", "fifo", limit=1)
    core.ack("keyed", "fifo", first.handle)
    core.receive("keyed", "fifo", limit=1)
    return core


def test_the_tables_of_a_busy_broker_agree(busy: CoreBroker) -> None:
    assert broken_invariant(busy.broker) == ""


def test_a_returned_message_that_a_filter_passes_over_keeps_its_attempts_until_a_record() -> None:
    core = CoreBroker()
    core.topic("keyed", queues=1, type=MessageType.FIFO)
    core.group("fifo", type=GroupType.FIFO)
    core.send("keyed", b"first", tag="A", message_group="k")
    core.receive("keyed", "fifo", expression="A", invisible_ms=1_000)
    core.advance(1_100)
    assert core.receive("keyed", "fifo", expression="B") == []
    assert fifo_progress(core).attempts == {0: 1}
    assert broken_invariant(core.broker) == ""
    core.send("keyed", b"second", tag="B", message_group="k")
    assert len(core.receive("keyed", "fifo", expression="B")) == 1
    assert fifo_progress(core).attempts == {}
    assert broken_invariant(core.broker) == ""


@pytest.mark.parametrize("broken", BREAKS)
def test_a_table_that_disagrees_with_itself_is_found(busy: CoreBroker, broken: str) -> None:
    BREAKS[broken](busy)
    assert broken in broken_invariant(busy.broker)


def test_a_simulator_reports_a_table_that_disagrees_with_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count that nothing else reads: no promise to clients is broken."""

    def without_counting(self: ReviveBuckets, ck: PopCheckPoint) -> None:
        ck.due_ms = -(1 << 62)

    monkeypatch.setattr(ReviveBuckets, "remove", without_counting)
    outcome = Simulator(2).run()
    assert [violation.invariant for violation in outcome.violations[:1]] == ["I19 tables-agree"]
