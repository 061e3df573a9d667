"""What the simulator found in timers, each in its smallest form."""

from dataclasses import replace

import pytest

from popmq.broker.timer.timer_recall import TimerRecall
from popmq.broker.timer.timer_state import Timer, TimerState
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest, RecallResult
from popmq.common.record.timer_token import FiringToken, TimerToken
from popmq.common.settings.settings import Settings, StoreSettings
from popmq.common.topics import MessageType
from popmq.proxy.api.definition_pb2 import SystemProperties
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.core_broker import SMALL, WITHOUT_TAIL, CoreBroker

HOUR = 3_600_000


@pytest.fixture
def core() -> CoreBroker:
    return core_with()


def core_with(settings: Settings = WITHOUT_TAIL) -> CoreBroker:
    broker = CoreBroker(settings=settings)
    broker.topic("orders", queues=1, type=MessageType.MIXED)
    broker.group("g")
    return broker


def send(core: CoreBroker, name: str, due_ms: int) -> None:
    """A delayed message whose id and body are its name."""
    properties = SystemProperties(message_id=name).SerializeToString()
    entry = PutEntry(MessageType.DELAY, name.encode(), properties, 0, 0, due_ms, name)
    (result,) = hop.decode_put_reply(
        core.reply(Kind.PUT, hop.encode_put(PutRequest("orders", [entry])))
    )
    assert result.due_ms == due_ms


def received(core: CoreBroker) -> list[bytes]:
    deliveries = core.receive("orders", "g")
    core.ack("orders", "g", *(delivery.handle for delivery in deliveries))
    return [delivery.head for delivery in deliveries]


def recalls(core: CoreBroker) -> tuple[TimerRecall, int]:
    return core.broker.timers.recall, core.broker.registry.topic("orders").id


def fire(core: CoreBroker, timers: int) -> None:
    """Step until so many fired; nothing of it is confirmed."""
    service = core.broker.timers.service
    expected = service.fired + timers
    for _ in range(100):
        core.broker.step()
        if service.fired == expected:
            return
    raise AssertionError(f"{service.fired} fired, not {expected}")


def test_a_wheel_of_which_nothing_fired_yet_goes_on_where_it_stood(core: CoreBroker) -> None:
    """Seed 1: it was looked for from the year 1970 on, for a lap."""
    due_ms = core.clock.wall_ms() + 5 * HOUR
    send(core, "far", due_ms)
    core.run_steps()
    core.stop()
    core.clock.advance(2 * HOUR)
    core.start()
    core.advance(due_ms - core.clock.wall_ms())
    assert received(core) == [b"far"]


def test_a_timer_that_fired_earlier_than_it_was_first_to_is_not_called_recalled(
    core: CoreBroker,
) -> None:
    """Seed 2: the timer that it replaced is remembered as cancelled."""
    send(core, "A", core.clock.wall_ms() + HOUR)
    recall, topic_id = recalls(core)
    recall.reschedule(topic_id, "A", -1_000)
    core.run_until_idle()
    core.advance(2_000)
    assert received(core) == [b"A"]
    assert recall.recall(topic_id, "A") is RecallResult.ALREADY_VISIBLE
    assert recall.reschedule(topic_id, "A", -1_000)[0] is RecallResult.ALREADY_VISIBLE


def test_a_recall_right_behind_a_reschedule_finds_the_new_timer(core: CoreBroker) -> None:
    """Seed 13: no lookup finds what is not confirmed."""
    send(core, "A", core.clock.wall_ms() + HOUR)
    recall, topic_id = recalls(core)
    assert recall.reschedule(topic_id, "A", -1_000)[0] is RecallResult.DONE
    assert recall.reschedule(topic_id, "A", -2_000)[0] is RecallResult.DONE
    assert recall.recall(topic_id, "A") is RecallResult.DONE
    core.run_until_idle()
    core.advance(2 * HOUR)
    assert received(core) == []
    assert core.broker.timers.state.pending == {}


def test_a_recall_between_a_firing_and_its_confirmation_says_visible(core: CoreBroker) -> None:
    """Seed 13: the next timer that fired was due so much later that this one was forgotten."""
    for name, ms in (("A", 1_000), ("B", HOUR // 2)):
        send(core, name, core.clock.wall_ms() + ms)
    core.run_steps()
    core.clock.advance(2 * HOUR)
    fire(core, 2)
    recall, topic_id = recalls(core)
    assert recall.recall(topic_id, "A") is RecallResult.ALREADY_VISIBLE


def test_a_timer_survives_a_recall_that_a_crash_took_back(core: CoreBroker) -> None:
    """Seed 64: it was not enqueued any more, and the one behind it was."""
    due_ms = core.clock.wall_ms() + 60_000
    for name in ("A", "B"):
        send(core, name, due_ms)
    recall, topic_id = recalls(core)
    recall.recall(topic_id, "A")
    service = core.broker.timers.service
    service.enqueue.step(100)
    core.broker.timers.files.flush_now(service.cursors())
    assert isinstance(core.disk, LyingDisk)
    core.disk.restore_power()
    core.start()
    core.advance(60_000)
    assert received(core) == [b"A", b"B"]


def test_a_timer_fires_again_when_a_crash_took_its_firing_though_its_slot_was_over(
    core: CoreBroker,
) -> None:
    """The wheel is on the disk before the log is: its slot is kept until the log has the firing."""
    due_ms = core.clock.wall_ms() + 5_000
    send(core, "A", due_ms)
    core.advance(3_000)  # it is in the files
    core.clock.advance(2_000)
    fire(core, 1)
    core.clock.advance(10_000)
    for _ in range(3):
        core.broker.step()
    service = core.broker.timers.service
    assert service.due.over_until(core.clock.wall_ms()) > due_ms
    assert core.broker.store.confirmed < core.broker.store.end
    core.broker.timers.files.flush_now(service.cursors())
    assert isinstance(core.disk, LyingDisk)
    core.disk.restore_power()
    core.start()
    core.run_steps()
    assert received(core) == [b"A"]


def test_a_recall_is_remembered_until_its_timer_was_looked_at() -> None:
    """Seed 291: forgotten before, it was taken for a late one and fired."""
    core = core_with(replace(SMALL, timer=replace(SMALL.timer, wheel_slots=72_000)))
    begin_ms = core.clock.wall_ms()
    send(core, "first", begin_ms + 2 * HOUR)
    core.advance(3 * HOUR)
    core.clock.step_wall(-3 * HOUR)
    send(core, "A", begin_ms + 4 * HOUR)
    send(core, "B", begin_ms + 5 * HOUR // 2)
    core.run_steps()
    recall, topic_id = recalls(core)
    assert recall.reschedule(topic_id, "A", -60_000)[0] is RecallResult.DONE
    assert recall.recall(topic_id, "A") is RecallResult.DONE
    core.clock.step_wall(3 * HOUR)
    fire(core, 1)
    core.run_until_idle()
    core.advance(2 * HOUR)
    assert received(core) == [b"first", b"B"]


def test_a_timer_of_a_clock_that_went_back_is_on_time_over_a_restart(core: CoreBroker) -> None:
    """Seed 28: it is in the wheel's oldest slot, which is an hour ahead by then."""
    send(core, "first", core.clock.wall_ms() + 60_000)
    core.advance(2 * HOUR)
    core.clock.step_wall(-HOUR)
    due_ms = core.clock.wall_ms() + 120_000
    send(core, "second", due_ms)
    core.run_steps()
    core.stop()
    core.start()
    send(core, "third", due_ms + 60_000)
    core.advance(due_ms - 1 - core.clock.wall_ms())
    assert received(core) == [b"first"]
    core.advance(1)
    assert received(core) == [b"second"]
    core.advance(60_000)
    assert received(core) == [b"third"]


def with_retention_of_an_hour() -> CoreBroker:
    store = StoreSettings(segment_bytes=1 << 20, snapshot_bytes=64 << 10, retention_hours=1)
    wheel = replace(SMALL.timer, wheel_slots=72_000)
    core = core_with(replace(SMALL, store=store, timer=wheel))
    core.topic("noise", queues=1)
    return core


def come_due_with_a_moved_body_that_is_not_enqueued(core: CoreBroker, due_ms: int) -> None:
    service, retention = core.broker.timers.service, core.broker.store.retention
    moved, deleted = core.broker.timers.bodies.relocated, retention.deleted_segments
    service.enqueue_limit = 0
    while core.clock.wall_ms() < due_ms - 60_000:
        core.clock.advance(60_000)
        core.send("noise", bytes(50_000))
        core.run_steps()
    assert core.broker.timers.bodies.relocated > moved
    assert retention.deleted_segments > deleted
    core.advance(60_000)


def test_a_timer_whose_moved_body_is_not_enqueued_yet_waits_for_it() -> None:
    """Seed 48: its first body was gone with its segment, and it was given up as lost."""
    core = with_retention_of_an_hour()
    due_ms = core.clock.wall_ms() + 5 * HOUR
    send(core, "A", due_ms)
    core.run_steps()
    service = core.broker.timers.service
    come_due_with_a_moved_body_that_is_not_enqueued(core, due_ms)
    assert (service.fired, service.lost) == (0, 0)
    service.enqueue_limit = 512
    core.run_steps()
    assert (service.fired, service.lost) == (1, 0)
    assert received(core) == [b"A"]


def test_a_second_timer_waits_for_its_moved_body_as_the_first_one_did() -> None:
    """Seed 30: how far was looked for the first one counted for the second, which was lost."""
    core = with_retention_of_an_hour()
    dues = [core.clock.wall_ms() + 5 * HOUR, core.clock.wall_ms() + 10 * HOUR]
    for name, due_ms in zip("AB", dues, strict=True):
        send(core, name, due_ms)
    core.run_steps()
    service = core.broker.timers.service
    for fired, due_ms in enumerate(dues):
        come_due_with_a_moved_body_that_is_not_enqueued(core, due_ms)
        assert (service.fired, service.lost) == (fired, 0)
        service.enqueue_limit = 512
        core.run_steps()
        assert (service.fired, service.lost) == (fired + 1, 0)
    assert received(core) == [b"A", b"B"]


def test_a_late_timer_that_moved_is_known_though_its_first_record_is_gone() -> None:
    """A start from a snapshot that is older than its classification finds the moved record only."""
    state = TimerState()
    state.ended(FiringToken(64, 5_000, 10, 0, 0))
    moved = Timer(4_000, 20, 900, 150, 64, 7)
    state.skip(7)
    state.is_late(moved)
    assert state.classify(moved, moved=True) is False
    assert state.late == {20: moved}
    state.ended(FiringToken(64, 4_000, 20, 8, 7, late=True))
    assert state.late == {}


def test_the_place_of_a_body_that_moved_is_not_forgotten_for_its_first_one() -> None:
    state = TimerState()
    state.ended(FiringToken(64, 5_000, 10, 0, 0))
    moved = Timer(4_000, 20, 900, 150, 64, 7)
    state.is_late(moved)
    state.classify(Timer(4_000, 20, 20, 150, 64, 0))
    assert state.late == {20: moved}


def test_a_moved_body_says_whether_its_timer_is_late() -> None:
    for late in (False, True):
        token = TimerToken(64, 3, 99, moved_from=20, late=late)
        assert TimerToken.decode(token.encode()) == token


def test_retention_leaves_records_alone_that_are_not_enqueued_yet(core: CoreBroker) -> None:
    """Judged only after it moved, a timer that the cursor has passed meanwhile would be over."""
    now = core.clock.wall_ms()
    send(core, "A", now + HOUR)
    core.run_steps()
    bodies, store = core.broker.timers.bodies, core.broker.store
    assert bodies.keeps_from >= store.end
    send(core, "B", now + HOUR)
    assert bodies.keeps_from == store.last_position
    core.run_steps()
    assert bodies.keeps_from >= store.end


def test_a_slot_that_is_damaged_when_the_broker_stops_does_not_keep_it_from_stopping(
    core: CoreBroker,
) -> None:
    """Seed 101074: the next start finds the damage, and begins the wheel anew."""
    due_ms = core.clock.wall_ms() + 5_000
    for name, later_ms in (("A", 0), ("B", HOUR // 2)):
        send(core, name, due_ms + later_ms)
    core.advance(3_000)  # it is in the files
    core.clock.advance(4_000)
    fire(core, 1)
    core.broker.step()
    slot = due_ms // 1_000 % SMALL.timer.wheel_slots
    file = core.disk.open(f"{core.settings.broker.data}/timerwheel")
    file.write(bytes([file.read(1, slot * 32 + 9)[0] ^ 1]), slot * 32 + 9)
    core.stop()
    core.start()
    core.advance(HOUR)
    assert received(core) == [b"A", b"B"]


def test_a_recall_of_a_record_that_is_gone_is_forgotten_in_a_start_from_an_older_snapshot() -> None:
    """Seed 500235: the newer snapshot had forgotten the recall, which is classified once only."""
    state = TimerState()
    state.cancel(5_000, 700, 64)
    state.skip(1, log_start=4_096)
    state.ended(FiringToken(64, 5_000 + 2 * HOUR, 9_000, 1, 0))
    assert not state.cancelled


def test_a_start_from_a_snapshot_before_records_were_judged_that_are_gone_goes_on() -> None:
    core = with_retention_of_an_hour()
    service, store = core.broker.timers.service, core.broker.store
    service.enqueue_limit = 0
    send(core, "A", core.clock.wall_ms() + 5 * HOUR)
    position = store.last_position
    recall, topic_id = recalls(core)
    assert recall.recall(topic_id, "A") is RecallResult.DONE
    for _ in range(30):  # segments, and in neither of two snapshots it is classified
        core.send("noise", bytes(60_000))
        core.run_steps()
    core.clock.advance(3 * HOUR)
    service.enqueue_limit = 512
    core.run_steps()
    assert (core.broker.timers.state.classified, store.start > position) == (1, True)
    core.broker.release_files()
    core.start()
    assert core.broker.timers.state.classified == 1
    send(core, "B", core.clock.wall_ms() + HOUR)
    core.advance(HOUR)
    assert received(core) == [b"B"]
