"""What a master applies carries the log time of its record, as on a slave that reads the record.

Every reading of the clock is a millisecond later than the one before: a master that applies a
record with another reading than the record's own has other tables than its slave.  Nor do the
tables depend on the settings of the replica that applies a record.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lite.lites import TOPIC, put
from replica.pair import OF_TWO, Pair
from timer.timer_client import recall, send_all
from transaction.rig import FIRST_MS, INTERVAL_MS, begin, end, names, wait

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.pop_check_point import UnparkAction
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.settings.lite_settings import LiteSettings
from popmq.common.settings.send_settings import DedupSettings, TransactionSettings
from popmq.common.settings.settings import GroupSettings, PopSettings, TimerSettings, TopicSettings
from popmq.common.topics import CheckPoints, GroupType, MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.common.wire import pull_pb2
from popmq.testing.harness.clock import TickingClock
from popmq.testing.harness.core_broker import CoreBroker

HOUR = 3_600_000
SETTINGS = replace(
    OF_TWO,
    pop=PopSettings(fifo_open_offsets=12, fifo_park_after_ms=5_000),
    transaction=TransactionSettings(max_checks=2),
)
# Of settings that tables, and services that change tables, are made with: other values.
OTHER_SETTINGS = replace(
    OF_TWO,
    store=replace(OF_TWO.store, snapshot_bytes=64 << 10, retention_hours=1, max_downtime_ms=0),
    pop=PopSettings(
        fifo_open_offsets=500,
        fifo_park_after_ms=1_000,
        fifo_parked_messages=1,
        invisible_default_ms=1_000,
        revive_step_ms=1_000,
        check_point_buffer_size=1,
        check_point_stay_ms=2_000,
    ),
    transaction=TransactionSettings(
        first_check_ms=1, check_interval_ms=1_000, max_checks=1, keep_ms=1_000, max_pending=1
    ),
    dedup=DedupSettings(window_ms=1_000, max_ids=1),
    lite=LiteSettings(max_topics=1, ttl_ms=HOUR),
    timer=TimerSettings(wheel_slots=60, slot_ms=10, late_limit=1, cancelled_limit=1),
    group=GroupSettings(max_attempts=1),
    topic=TopicSettings(queues=1),
)


def fill(core: CoreBroker, count: int = 10, topic: str = "orders") -> None:
    for number in range(count):
        core.send(topic, b"%d" % number, queue_id=0)


def buffered_check_points(core: CoreBroker) -> None:
    core.topic("orders", queues=2)
    core.group("g", check_points=CheckPoints.BUFFERED)
    for _ in range(3):
        fill(core)
        held = core.receive("orders", "g", limit=4, invisible_ms=HOUR)
        core.ack("orders", "g", held[0].handle)
        core.advance(PopSettings().check_point_stay_ms + 1_000)
        fill(core)
        held = core.receive("orders", "g", limit=64)
        core.ack("orders", "g", *(delivery.handle for delivery in held))
    assert core.broker.buffer.written > 0


def acks(core: CoreBroker) -> None:
    core.topic("orders", queues=2)
    core.group("g")
    fill(core)
    held = core.receive("orders", "g", invisible_ms=HOUR)
    core.ack("orders", "g", *(delivery.handle for delivery in held[:4]))
    fill(core)
    held += core.receive("orders", "g", invisible_ms=1_000)
    core.advance(2_000)
    core.ack("orders", "g", held[5].handle)


def changes(core: CoreBroker) -> None:
    core.topic("orders", queues=2)
    core.group("g", check_points=CheckPoints.BUFFERED)
    fill(core)
    held = core.receive("orders", "g", invisible_ms=HOUR)
    handles = [core.change("orders", "g", delivery.handle, 60_000) for delivery in held[:4]]
    core.ack("orders", "g", handles[0])
    core.change("orders", "g", handles[1], 1_000)
    core.advance(5_000)


def parked_keys(core: CoreBroker) -> None:
    core.topic("orders", queues=1, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO, max_attempts=100)
    core.send("orders", b"a1", message_group="a")
    core.receive("orders", "g", invisible_ms=HOUR)
    core.advance(6_000)
    for number in range(2, 14):
        core.send("orders", b"a%d" % number, message_group="a")
    for number in range(4):
        core.send("orders", b"b%d" % number, message_group="b")
        held = core.receive("orders", "g", invisible_ms=HOUR)
        core.ack("orders", "g", *(delivery.handle for delivery in held))
        core.advance(2_000)
    assert core.broker.fifo.parking.parked > 0


def parked_keys_that_operators_end(core: CoreBroker) -> None:
    parked_keys(core)
    registry = core.broker.registry
    owners = registry.group("g"), registry.topic("orders")
    core.broker.fifo.parking.apply_action(*owners, "a", UnparkAction.DEAD_LETTER)
    core.run_steps()
    assert core.broker.fifo.parking.dead_lettered > 0


def dead_letters(core: CoreBroker) -> None:
    core.topic("orders", queues=2)
    core.group("g", max_attempts=1)
    fill(core)
    held = core.receive("orders", "g", limit=5, invisible_ms=1_000)
    core.reject("orders", "g", held[0].handle)
    core.advance(2_000)
    assert core.broker.pop.revive.dead_lettered == 5


def retries(core: CoreBroker) -> None:
    core.topic("orders", queues=2)
    core.group("g")
    fill(core)
    core.receive("orders", "g", limit=5, invisible_ms=1_000)
    core.advance(2_000)
    core.receive("orders", "g", invisible_ms=HOUR)
    assert core.broker.pop.revive.retried == 5


def redrive(core: CoreBroker) -> None:
    dead_letters(core)
    core.reply(Kind.REDRIVE, pb.RedriveRequest(group="g").SerializeToString())


def offset_reset(core: CoreBroker) -> None:
    core.topic("orders", queues=1)
    core.group("g", check_points=CheckPoints.BUFFERED)
    fill(core)
    core.receive("orders", "g", limit=5, invisible_ms=HOUR)
    asked = pb.ResetOffsetRequest(group="g", topic="orders", offset=2)
    core.reply(Kind.RESET_OFFSET, asked.SerializeToString())


def offset_reset_of_parked_keys(core: CoreBroker) -> None:
    parked_keys(core)
    asked = pb.ResetOffsetRequest(group="g", topic="orders", offset=0)
    core.reply(Kind.RESET_OFFSET, asked.SerializeToString())


def pulled_offsets(core: CoreBroker) -> None:
    core.topic("orders", queues=1)
    core.group("g")
    fill(core)
    asked = pull_pb2.UpdateOffsetRequest(topic="orders", group="g", queue_id=0, offset=4)
    core.reply(Kind.UPDATE_OFFSET, asked.SerializeToString())


def timers(core: CoreBroker) -> None:
    core.topic("orders", queues=2, type=MessageType.MIXED)
    send_all(core, {"soon": 1_000, "recalled": 60_000, "later": HOUR})
    recall(core, "recalled")
    core.advance(5_000)
    assert core.broker.timers.service.fired == 1


def transactions(core: CoreBroker) -> None:
    core.topic("orders", queues=2, type=MessageType.TRANSACTION)
    core.group("g")
    halves = {name: begin(core, name).message for name in ("kept", "dropped", "open", "late")}
    end(core, "kept", halves["kept"])
    end(core, "dropped", halves["dropped"], commit=False)
    half = next(iter(core.broker.transactions.table.pending.values()))
    core.broker.transactions.halves.give_up(half)
    core.run_until_idle()


def checks_of_transactions(core: CoreBroker) -> None:
    core.topic("orders", queues=1, type=MessageType.TRANSACTION)
    begin(core, "open")
    for after_ms in (FIRST_MS, INTERVAL_MS):
        core.advance(after_ms)
        asked = wait(core)
        core.advance(1_000)
        assert names(asked) == ["open"]


def lite_topics(core: CoreBroker) -> None:
    core.topic(TOPIC, queues=1, type=MessageType.LITE)
    for name in ("one", "two", "one"):
        put(core, name, b"body")


ACTS = [
    buffered_check_points,
    acks,
    changes,
    parked_keys,
    parked_keys_that_operators_end,
    dead_letters,
    retries,
    redrive,
    offset_reset,
    offset_reset_of_parked_keys,
    pulled_offsets,
    timers,
    transactions,
    checks_of_transactions,
    lite_topics,
]


@pytest.mark.parametrize("act", ACTS)
def test_a_master_applies_what_it_writes_with_the_log_time_of_the_record(
    act: Callable[[CoreBroker], None], tmp_path: Path
) -> None:
    pair = Pair(tmp_path, SETTINGS, clock=TickingClock())
    act(pair.master)
    pair.master.broker.buffer.write_all()
    pair.master.run_until_idle()
    pair.follow()
    master, slave = pair.master.broker, pair.slave.broker
    assert dict(hashes(master)) == dict(hashes(slave))
    assert master.table.outcomes.order() == slave.table.outcomes.order()
    in_memory = master.table.acked_in_memory, slave.table.acked_in_memory
    assert in_memory[0].order() == in_memory[1].order()
    ended = master.transactions.table.endings(), slave.transactions.table.endings()
    assert list(ended[0]) == list(ended[1])
    assert list(master.send_deduplication.items()) == list(slave.send_deduplication.items())


@pytest.mark.parametrize("act", ACTS)
def test_replicas_with_other_settings_have_the_same_state_hash(
    act: Callable[[CoreBroker], None], tmp_path: Path
) -> None:
    pair = Pair(tmp_path, SETTINGS, slave_settings=OTHER_SETTINGS)
    act(pair.master)
    pair.master.broker.buffer.write_all()
    pair.master.run_until_idle()
    pair.follow()
    assert dict(hashes(pair.master.broker)) == dict(hashes(pair.slave.broker))


def hashes(broker: Broker) -> Iterator[tuple[str, int]]:
    """The part of each table in the state hash."""
    for table in broker.store.snapshots.tables:
        yield type(table).__name__, sum(part for _, part in table.begin_snapshot()) % (1 << 128)
