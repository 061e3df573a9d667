"""Rows of timer.md that no other test shows."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from timer.timer_client import (
    HOUR,
    MINUTE,
    SECOND,
    core_with_topic,
    crash,
    listed,
    recall,
    received,
    reschedule,
    send,
    send_all,
)

from popmq.broker.timer.timer_checkpoint import read_checkpoint, write_checkpoint
from popmq.common.errors import Code, PopmqError, TooManyRequests
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest, RecallResult
from popmq.common.topics import TIMER_TOPIC, TIMER_TOPIC_ID, MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, CoreBroker

SEGMENT = 1 << 20


@pytest.fixture
def core() -> CoreBroker:
    return core_with_topic()


def test_timers_of_several_topics_come_each_in_its_topic_and_at_its_time(core: CoreBroker) -> None:
    names = ["orders", *(f"topic-{number}" for number in range(4))]
    for name in names[1:]:
        core.topic(name, type=MessageType.DELAY)
    start_ms = core.clock.wall_ms()
    for number in range(40):
        name = names[number % len(names)]
        send(core, f"{name} {number}", start_ms + 500 + 700 * number, topic=name)
    seen = []
    for number in range(40):
        core.advance(start_ms + 499 + 700 * number - core.clock.wall_ms())
        assert all(received(core, name) == [] for name in names)
        core.advance(1)
        name = names[number % len(names)]
        seen += [(name, body.decode()) for body in received(core, name)]
    assert seen == [
        (names[number % len(names)], f"{names[number % len(names)]} {number}")
        for number in range(40)
    ]


def until_refused(core: CoreBroker, act: Callable[[int], object]) -> int:
    """Act until the disk is too full for it; returns how often that went well."""
    number = 0
    while True:
        try:
            act(number)
        except TooManyRequests:
            return number
        core.run_steps()
        core.clock.advance(50)
        number += 1


def on_a_small_disk() -> tuple[LyingDisk, CoreBroker]:
    disk = LyingDisk()
    disk.capacity = 8 * SEGMENT
    store = replace(SMALL.store, disk_stop_percent=100, reserved_segments=2)
    return disk, core_with_topic(disk=disk, settings=replace(SMALL, store=store))


def test_a_firing_that_finds_no_room_waits_for_it_and_is_not_dropped() -> None:
    disk, core = on_a_small_disk()
    due_ms = core.clock.wall_ms() + HOUR

    def send_one(number: int) -> None:
        send(core, f"M{number}", due_ms + number, body=b"%04d" % number + bytes(100_000))

    count = until_refused(core, send_one)
    core.clock.advance(2 * HOUR)
    for _ in range(50):
        core.broker.step()
        core.run_until_idle()
    timers = core.broker.timers
    assert 0 < timers.state.pending_total < count
    disk.capacity = 40 * SEGMENT
    core.advance(3 * SECOND)
    assert timers.state.pending_total == 0
    got: list[bytes] = []
    while batch := received(core):
        got += batch
    assert [int(data[:4]) for data in got] == list(range(count))


def test_a_checkpoint_beyond_the_end_of_the_queue_is_cut_back_to_it(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE, "B": HOUR})
    core.advance(SECOND)
    core.stop()
    path = f"{core.settings.broker.data}/timercheckpoint"
    known = read_checkpoint(core.disk, path)
    assert known is not None
    beyond = replace(known, queue_offset=10_000, master_offset=10_000, counter=known.counter + 1)
    write_checkpoint(core.disk, path, beyond)
    core.start()
    send_all(core, {"C": MINUTE})
    assert core.broker.timers.service.enqueue.behind == 0
    core.advance(2 * HOUR)
    assert received(core) == [b"A", b"C", b"B"]


def test_a_message_is_delivered_with_the_bytes_it_was_sent_with(core: CoreBroker) -> None:
    message = SystemProperties(message_id="A", tag="blue", keys=["k"])
    properties = message.SerializeToString()
    due_ms = core.clock.wall_ms() + MINUTE
    entry = PutEntry(MessageType.DELAY, b"head", properties, 77, 0, due_ms, "A", 0)
    core.reply(Kind.PUT, hop.encode_put(PutRequest("orders", [entry])))
    crash(core)
    core.advance(MINUTE)
    (first,) = core.receive("orders", "g", invisible_ms=SECOND)
    core.advance(2 * SECOND)
    (again,) = core.receive("orders", "g")
    assert (first.head, first.properties) == (b"head", properties)
    assert (again.head, again.properties, again.attempt) == (b"head", properties, 2)


def test_a_delayed_message_counts_as_stored_once_and_in_its_own_topic(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE})
    assert core.broker.sends.stored_by_topic == {"orders": 1}
    core.advance(MINUTE)
    assert received(core) == [b"A"]
    assert core.broker.sends.stored_by_topic == {"orders": 1}


def test_the_count_of_a_deleted_topic_ends_with_its_timers(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE, "B": HOUR})
    core.broker.registry.delete_topic("orders")
    core.advance(2 * MINUTE)
    (count,) = core.broker.timers.state.pending.values()
    assert count == 1
    core.advance(HOUR)
    assert core.broker.timers.state.pending == {}


def test_a_recall_is_served_on_a_full_disk_and_a_rescheduling_is_not() -> None:
    _, core = on_a_small_disk()
    send_all(core, {"A": HOUR, "B": HOUR})
    until_refused(core, lambda number: core.send("orders", bytes(50_000)))
    assert recall(core, "A") is RecallResult.DONE
    request = pb.RescheduleRequest(topic="orders", message_id="B", new_due_ms=-HOUR)
    error = core.ask(Kind.RESCHEDULE, request.SerializeToString()).error
    assert isinstance(error, PopmqError)
    assert error.code == Code.TOO_MANY_REQUESTS
    assert listed(core) == ["B"]


def test_timers_of_one_moment_are_cancelled_one_by_one(core: CoreBroker) -> None:
    due_ms = core.clock.wall_ms() + MINUTE
    for number in range(200):
        send(core, f"M{number:03}", due_ms)
    core.run_steps()
    for number in range(0, 200, 3):
        assert recall(core, f"M{number:03}") is RecallResult.DONE
    reschedule(core, "M001", due_ms + MINUTE)
    core.advance(MINUTE)
    left = [f"M{number:03}".encode() for number in range(200) if number % 3 and number != 1]
    got: list[bytes] = []
    while batch := received(core):
        got += batch
    assert got == left
    core.advance(MINUTE)
    assert received(core) == [b"M001"]


def test_a_record_of_the_timer_queue_that_is_no_timer_holds_up_no_other(core: CoreBroker) -> None:
    """Nobody can send one; a disk may damage one."""
    put = PutRequest(TIMER_TOPIC, [PutEntry(MessageType.NORMAL, b"poison", b"")])
    error = core.ask(Kind.PUT, hop.encode_put(put)).error
    assert isinstance(error, PopmqError)
    assert error.code == Code.ILLEGAL_TOPIC
    send_all(core, {"A": MINUTE})
    store, timers = core.broker.store, core.broker.timers
    store.put_message(
        topic_id=TIMER_TOPIC_ID, queue_id=0, head=b"poison", properties=b"", tag_hash=0, token=b""
    )
    send_all(core, {"B": MINUTE})
    assert (timers.service.enqueue.lost, timers.service.enqueue.behind) == (1, 0)
    core.advance(MINUTE)
    assert received(core) == [b"A", b"B"]
    crash(core)
    send_all(core, {"C": MINUTE})
    core.advance(MINUTE)
    assert received(core) == [b"C"]
