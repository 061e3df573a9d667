"""A timer's way: stored, kept back, delivered once at its time, whatever happens meanwhile."""

from dataclasses import replace

import pytest

from popmq.broker.core.broker import Broker
from popmq.broker.timer import due_timers, timer_queue
from popmq.common.errors import Code, Refused, TooManyRequests
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PutEntry,
    PutRequest,
    PutResult,
    RecallResult,
)
from popmq.common.record.message import LARGEST_TOKEN, MESSAGE_HEADER_SIZE
from popmq.common.topics import TIMER_DLQ_TOPIC, MessageType
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.harness.core_broker import SMALL, CoreBroker, bodies

HOUR = 3_600_000


@pytest.fixture
def core() -> CoreBroker:
    broker = CoreBroker()
    broker.topic("orders", queues=2, type=MessageType.MIXED)
    broker.group("g")
    return broker


def send(
    core: CoreBroker, body: bytes, due_ms: int, *, message_id: str = "", spread_ms: int = 0
) -> PutResult:
    """A DELAY message; `due_ms` as in PutEntry."""
    properties = SystemProperties(message_id=message_id).SerializeToString()
    entry = PutEntry(MessageType.DELAY, body, properties, 0, 0, due_ms, message_id, spread_ms)
    reply = core.reply(Kind.PUT, hop.encode_put(PutRequest("orders", [entry])))
    (result,) = hop.decode_put_reply(reply)
    return result


def sent(core: CoreBroker, body: bytes, due_ms: int, **more: object) -> PutResult:
    result = send(core, body, due_ms, **more)  # type: ignore[arg-type]
    assert result.code == Code.OK, result.message
    return result


def received(core: CoreBroker) -> list[bytes]:
    deliveries = core.receive("orders", "g")
    for delivery in deliveries:
        assert core.ack("orders", "g", delivery.handle)[0].code == Code.OK
    return [entry.head for entry in deliveries]


def advance_to(core: CoreBroker, wall_ms: int) -> None:
    core.advance(wall_ms - core.clock.wall_ms())


def crash(core: CoreBroker) -> None:
    """The process is killed; what was confirmed is on the disk."""
    core.broker.release_files()
    core.start()


def recall(core: CoreBroker, message_id: str) -> RecallResult:
    broker: Broker = core.broker
    outcome = broker.timers.recall.recall(broker.registry.topic("orders").id, message_id)
    core.run_until_idle()
    return outcome


def test_a_message_with_a_due_time_is_delivered_at_it_and_not_a_millisecond_before(
    core: CoreBroker,
) -> None:
    due_ms = core.clock.wall_ms() + 90_000
    result = sent(core, b"late", due_ms)
    assert result.due_ms == due_ms
    assert received(core) == []
    advance_to(core, due_ms - 1)
    assert received(core) == []
    advance_to(core, due_ms)
    assert received(core) == [b"late"]
    core.advance(HOUR)
    assert received(core) == []


def test_a_due_time_that_is_over_is_no_timer(core: CoreBroker) -> None:
    result = sent(core, b"now", core.clock.wall_ms() - 1)
    assert result.due_ms == 0
    assert received(core) == [b"now"]
    assert core.broker.timers.state.pending_total == 0


def test_a_delay_counts_from_the_arrival_at_the_broker(core: CoreBroker) -> None:
    result = sent(core, b"later", -5_000)
    assert result.due_ms == core.clock.wall_ms() + 5_000


def test_timers_come_in_the_order_of_their_due_times_and_equal_ones_as_they_were_sent(
    core: CoreBroker,
) -> None:
    now = core.clock.wall_ms()
    for number, ms in enumerate([5_003, 5_001, 5_002, 5_001, 4_000, 61_000]):
        sent(core, b"%d" % number, now + ms)
    advance_to(core, now + 6_000)
    assert received(core) == [b"4", b"1", b"3", b"2", b"0"]
    advance_to(core, now + 61_000)
    assert received(core) == [b"5"]


def test_a_delay_beyond_the_longest_is_refused_with_value_limit_and_setting(
    core: CoreBroker,
) -> None:
    limit = SMALL.timer.max_delay_ms
    result = send(core, b"far", core.clock.wall_ms() + limit + 1)
    assert result.code == Code.ILLEGAL_DELIVERY_TIME
    assert "366d1ms ahead, over the limit of 366d (timer.max_delay_ms)" in result.message
    assert sent(core, b"at the limit", core.clock.wall_ms() + limit).due_ms


@pytest.mark.more
def test_a_delay_of_half_a_year_comes_on_time_though_the_wheel_holds_an_hour(
    core: CoreBroker,
) -> None:
    due_ms = core.clock.wall_ms() + 183 * 24 * HOUR
    sent(core, b"far", due_ms)
    while core.clock.wall_ms() < due_ms - 1:
        core.advance(min(6 * HOUR, due_ms - 1 - core.clock.wall_ms()))
        assert received(core) == []
    core.advance(1)
    assert received(core) == [b"far"]
    assert core.broker.timers.service.enqueue.rolled > 1_000


def test_timers_of_a_broker_that_was_down_longer_than_its_wheel_are_late_and_not_lost(
    core: CoreBroker,
) -> None:
    now = core.clock.wall_ms()
    for minutes in (1, 30, 59, 61, 600):
        sent(core, b"%d" % minutes, now + minutes * 60_000)
    core.stop()
    core.clock.advance(9 * HOUR)
    core.start()
    core.advance(1_000)
    assert received(core) == [b"1", b"30", b"59", b"61"]
    sent(core, b"new", core.clock.wall_ms() + 1_000)
    core.advance(HOUR)
    assert sorted(received(core)) == [b"600", b"new"]


def test_a_timer_fires_once_however_often_the_broker_dies(core: CoreBroker) -> None:
    now = core.clock.wall_ms()
    for number in range(40):
        sent(core, b"%d" % number, now + 500 * number + 250)
    got: list[bytes] = []
    for _ in range(20):
        crash(core)
        core.advance(1_300)
        crash(core)
        core.run_steps()
        got += received(core)
    assert got == [b"%d" % number for number in range(40)]


def test_timers_survive_the_loss_of_wheel_log_and_checkpoint(core: CoreBroker) -> None:
    now = core.clock.wall_ms()
    for number in range(30):
        sent(core, b"%d" % number, now + 1_000 * number + 500)
    core.advance(10_000)
    got = received(core)
    core.stop()
    disk = core.disk
    folder = core.settings.broker.data
    for name in ("timerwheel", "timercheckpoint"):
        disk.remove(f"{folder}/{name}")
    for name in disk.names(f"{folder}/timerlog"):
        disk.remove(f"{folder}/timerlog/{name}")
    core.start()
    core.advance(30_000)
    assert got + received(core) == [b"%d" % number for number in range(30)]


def test_a_timer_that_arrives_for_the_slot_that_is_firing_is_not_late(core: CoreBroker) -> None:
    now = core.clock.wall_ms()
    first = now - now % 1_000 + 2_000
    sent(core, b"early in the slot", first + 10)
    advance_to(core, first + 100)
    sent(core, b"late in the slot", first + 700)
    advance_to(core, first + 699)
    assert received(core) == [b"early in the slot"]
    advance_to(core, first + 700)
    assert received(core) == [b"late in the slot"]


def test_after_a_step_back_of_the_clock_new_timers_come_at_their_time_and_old_ones_not_twice(
    core: CoreBroker,
) -> None:
    now = core.clock.wall_ms()
    sent(core, b"fired", now + 2 * HOUR)
    core.advance(3 * HOUR)
    assert received(core) == [b"fired"]
    core.clock.step_wall(-2 * HOUR)
    due_ms = core.clock.wall_ms() + HOUR // 2  # before the newest firing
    sent(core, b"between", due_ms)
    core.run_steps()
    assert len(core.broker.timers.state.late) == 1
    crash(core)
    advance_to(core, due_ms - 1)
    assert received(core) == []
    advance_to(core, due_ms)
    assert received(core) == [b"between"]
    crash(core)
    core.advance(3 * HOUR)
    assert received(core) == []


def test_a_step_forward_of_the_clock_fires_what_is_due_then(core: CoreBroker) -> None:
    sent(core, b"soon", core.clock.wall_ms() + HOUR)
    core.clock.step_wall(HOUR)
    core.run_steps()
    assert received(core) == [b"soon"]


def test_a_recalled_timer_never_comes_and_the_recall_may_be_repeated(core: CoreBroker) -> None:
    due_ms = core.clock.wall_ms() + 60_000
    sent(core, b"recalled", due_ms, message_id="A")
    sent(core, b"kept", due_ms, message_id="B")
    core.broker.metadata_resolver.topic("orders")
    assert recall(core, "A") is RecallResult.DONE
    assert recall(core, "A") is RecallResult.DONE
    crash(core)
    assert recall(core, "A") is RecallResult.DONE
    core.advance(120_000)
    assert received(core) == [b"kept"]
    assert recall(core, "B") is RecallResult.ALREADY_VISIBLE
    assert recall(core, "nobody") is RecallResult.NOT_FOUND


def test_a_recall_of_the_same_id_in_another_topic_finds_nothing(core: CoreBroker) -> None:
    core.topic("others", type=MessageType.MIXED)
    sent(core, b"kept", core.clock.wall_ms() + 1_000, message_id="A")
    other = core.broker.registry.topic("others").id
    assert core.broker.timers.recall.recall(other, "A") is RecallResult.NOT_FOUND
    core.advance(2_000)
    assert received(core) == [b"kept"]


def test_long_after_its_time_a_recalled_timer_is_not_called_visible(core: CoreBroker) -> None:
    now = core.clock.wall_ms()
    sent(core, b"recalled", now + 1_000, message_id="A")
    sent(core, b"fired", now + 1_000, message_id="B")
    recall(core, "A")
    sent(core, b"later", now + 24 * HOUR)
    core.advance(25 * HOUR)
    assert received(core) == [b"fired", b"later"]
    assert recall(core, "A") is RecallResult.NOT_FOUND
    assert recall(core, "B") is RecallResult.ALREADY_VISIBLE


def test_a_rescheduled_timer_comes_at_its_new_time_only(core: CoreBroker) -> None:
    now = core.clock.wall_ms()
    for name in ("A", "B"):
        sent(core, name.encode(), now + 60_000, message_id=name)
    timers = core.broker.timers
    topic = core.broker.registry.topic("orders").id
    assert timers.recall.reschedule(topic, "A", now + 90_000) == (RecallResult.DONE, now + 90_000)
    assert timers.recall.reschedule(topic, "B", -5_000) == (RecallResult.DONE, now + 5_000)
    core.run_until_idle()
    crash(core)
    advance_to(core, now + 5_000)
    assert received(core) == [b"B"]
    advance_to(core, now + 89_999)
    assert received(core) == []
    advance_to(core, now + 90_000)
    assert received(core) == [b"A"]


def test_a_rescheduled_timer_names_its_new_time(core: CoreBroker) -> None:
    """On whole seconds too: nothing of the time before is left."""
    now = core.clock.wall_ms() // 1_000 * 1_000
    sent(core, b"body", now + 60_789, message_id="A")
    topic = core.broker.registry.topic("orders").id
    for due_ms in (now + 90_123, now + 30_000):
        core.broker.timers.recall.reschedule(topic, "A", due_ms)
        core.run_until_idle()
    advance_to(core, now + 30_000)
    (delivery,) = core.receive("orders", "g")
    properties = SystemProperties.FromString(delivery.properties)
    assert properties.delivery_timestamp.ToMilliseconds() == now + 30_000


def test_a_timer_whose_topic_was_deleted_becomes_a_dead_letter(core: CoreBroker) -> None:
    sent(core, b"orphan", core.clock.wall_ms() + 1_000)
    core.broker.registry.delete_topic("orders")
    core.topic("orders", type=MessageType.MIXED)
    core.advance(2_000)
    assert received(core) == []
    assert [delivery.head for delivery in core.receive(TIMER_DLQ_TOPIC, "g")] == [b"orphan"]
    crash(core)
    core.advance(2_000)
    assert core.broker.timers.service.dead_lettered == 0


def test_pending_timers_are_counted_by_topic_through_firing_recall_and_restart(
    core: CoreBroker,
) -> None:
    now = core.clock.wall_ms()
    topic = core.broker.registry.topic("orders").id
    for number in range(5):
        sent(core, b"x", now + 1_000 * (number + 1), message_id=f"M{number}")
    assert core.broker.timers.state.pending == {topic: 5}
    recall(core, "M4")
    core.advance(1_500)
    crash(core)
    assert core.broker.timers.state.pending == {topic: 3}
    core.advance(10_000)
    assert core.broker.timers.state.pending == {}


def test_a_full_slot_refuses_more_timers_of_a_topic_unless_they_may_be_spread() -> None:
    settings = replace(SMALL, timer=replace(SMALL.timer, slot_limit=3))
    core = CoreBroker(settings=settings)
    core.topic("orders", queues=1, type=MessageType.MIXED)
    core.group("g")
    due_ms = core.clock.wall_ms() + 60_000
    due_ms -= due_ms % 1_000
    for _ in range(3):
        sent(core, b"x", due_ms)
    refusal = send(core, b"x", due_ms + 999)
    assert refusal.code == Code.TOO_MANY_REQUESTS
    assert "timer.slot_limit" in refusal.message
    spread = [sent(core, b"x", due_ms, spread_ms=3_000).due_ms for _ in range(6)]
    assert all(due_ms < number <= due_ms + 3_000 for number in spread)
    sent(core, b"x", due_ms + 60_000)


def test_a_spread_releases_a_burst_over_its_window(core: CoreBroker) -> None:
    due_ms = core.clock.wall_ms() + 60_000
    found_due_ms = [
        sent(core, b"x", due_ms, message_id=f"M{number}", spread_ms=10_000).due_ms - due_ms
        for number in range(200)
    ]
    assert all(0 <= number <= 10_000 for number in found_due_ms)
    for start in range(0, 10_000, 2_500):
        assert sum(start <= number < start + 2_500 for number in found_due_ms) > 20


def test_late_timers_have_a_bound(core: CoreBroker) -> None:
    core.settings = replace(SMALL, timer=replace(SMALL.timer, late_limit=2))
    core.stop()
    core.start()
    sent(core, b"fired", core.clock.wall_ms() + HOUR)
    core.advance(2 * HOUR)
    core.clock.step_wall(-2 * HOUR)
    for _ in range(2):
        sent(core, b"x", core.clock.wall_ms() + 60_000)
        core.run_steps()
    refusal = send(core, b"x", core.clock.wall_ms() + 60_000)
    assert refusal.code == Code.TOO_MANY_REQUESTS
    assert "timer.late_limit" in refusal.message
    sent(core, b"y", core.clock.wall_ms() + 2 * HOUR)


def test_recalled_timers_have_a_bound(core: CoreBroker) -> None:
    core.settings = replace(SMALL, timer=replace(SMALL.timer, cancelled_limit=1))
    core.stop()
    core.start()
    for name in ("A", "B"):
        sent(core, b"x", core.clock.wall_ms() + 60_000, message_id=name)
    recall(core, "A")
    with pytest.raises(TooManyRequests, match=r"timer\.cancelled_limit"):
        recall(core, "B")


def test_a_rescheduling_beyond_the_longest_delay_is_refused_and_changes_nothing(
    core: CoreBroker,
) -> None:
    due_ms = core.clock.wall_ms() + 60_000
    sent(core, b"A", due_ms, message_id="A")
    topic = core.broker.registry.topic("orders").id
    with pytest.raises(Refused, match=r"timer\.max_delay_ms"):
        core.broker.timers.recall.reschedule(topic, "A", due_ms + 400 * 24 * HOUR)
    advance_to(core, due_ms)
    assert received(core) == [b"A"]


def test_a_replica_enqueues_and_fires_nothing_until_it_is_told(core: CoreBroker) -> None:
    core.broker.timers.service.firing = False
    for number in range(3):
        sent(core, b"%d" % number, core.clock.wall_ms() + 1_000 * number + 500)
    core.advance(60_000)
    assert received(core) == []
    assert core.broker.timers.service.enqueue.behind == 0
    core.broker.timers.service.firing = True
    core.run_steps()
    assert bodies(core.receive("orders", "g")) == [b"0", b"1", b"2"]


def test_more_timers_than_are_remembered_until_they_are_confirmed_are_read_from_the_log(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_queue, "_REMEMBERED", 200)
    now = core.clock.wall_ms()

    def put(number: int) -> None:
        entry = PutEntry(MessageType.DELAY, b"%d" % number, b"", 0, 0, now + 1_000 + number)
        core.ask(Kind.PUT, hop.encode_put(PutRequest("orders", [entry])), settle=False)

    for number in range(210):
        put(number)
    core.run_until_idle()
    core.broker.timers.service.enqueue.step(128)
    put(210)  # there is room again, but not for those that were passed over
    core.run_until_idle()
    core.advance(2_000)
    results: list[bytes] = []
    while batch := received(core):
        results += batch
    assert results == [b"%d" % number for number in range(211)]


def test_a_timer_whose_retries_would_not_fit_a_segment_is_refused() -> None:
    """The token of a retry is longer than a timer's."""
    store = replace(SMALL.store, segment_bytes=128 << 10)
    settings = replace(SMALL, store=store, message=replace(SMALL.message, max_body_bytes=1 << 10))
    core = CoreBroker(settings=settings)
    core.topic("orders", type=MessageType.MIXED)
    core.group("g")
    largest = (128 << 10) - MESSAGE_HEADER_SIZE - LARGEST_TOKEN
    assert send(core, bytes(largest + 1), -1_000).code == Code.PAYLOAD_TOO_LARGE
    sent(core, bytes(largest), -1_000)
    core.advance(2_000)
    assert len(core.receive("orders", "g", invisible_ms=1_000)) == 1
    core.advance(2_000)
    (again,) = core.receive("orders", "g")
    assert (again.attempt, again.head) == (2, bytes(largest))


@pytest.mark.parametrize(("ahead_ms", "at_least", "at_most"), [(900, 5, 12), (400, 1, 3)])
def test_timers_that_are_due_do_not_wait_for_the_load_of_a_slot_that_has_time(
    core: CoreBroker,
    monkeypatch: pytest.MonkeyPatch,
    ahead_ms: int,
    at_least: int,
    at_most: int,
) -> None:
    """Beside them it goes in small slices, until half a second before its time."""
    monkeypatch.setattr(due_timers, "EARLY_TIMERS", 0)  # so many are in memory
    now_ms = core.clock.wall_ms()
    slot_ms = now_ms - now_ms % 1_000 + 90_000
    for number in range(40):
        sent(core, b"due %d" % number, slot_ms - ahead_ms)
        sent(core, b"next %d" % number, slot_ms)
    advance_to(core, slot_ms - 5_000)
    service = core.broker.timers.service
    service.load_limit, service.load_limit_beside, service.fire_limit = 64, 8, 1
    core.clock.advance(5_000 - ahead_ms)
    steps = 0
    while service.due.ready_until <= slot_ms:
        fired = service.fired
        service.step()
        steps += 1
        assert service.fired == fired + 1, f"step {steps} fired nothing"
    assert at_least <= steps <= at_most
