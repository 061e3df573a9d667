"""What people ask about timers: recall, reschedule, list and forecast, as requests."""

import random
from dataclasses import replace

import pytest
from timer.test_timer_check import damage_body
from timer.timer_client import (
    HOUR,
    MINUTE,
    SECOND,
    core_with_topic,
    crash,
    forecast,
    list_timers,
    listed,
    recall,
    received,
    reschedule,
    send,
    send_all,
)

from popmq.broker.handlers import timer_requests as timer_jobs
from popmq.broker.store import lookup
from popmq.broker.timer import timer_scan
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Kind, PutEntry, PutRequest, RecallResult
from popmq.common.settings.send_settings import DedupSettings
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as pb
from popmq.testing.harness.core_broker import SMALL, WITHOUT_TAIL, CoreBroker


@pytest.fixture
def core() -> CoreBroker:
    return core_with_topic(settings=WITHOUT_TAIL)


def test_a_recall_is_answered_when_it_survives_a_crash(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE})
    request = pb.RecallRequest(topic="orders", message_id="A").SerializeToString()
    answer = core.ask(Kind.RECALL, request, settle=False)
    assert not answer.heard
    core.run_until_idle()
    assert answer.body is not None
    assert pb.RecallReply.FromString(answer.body).outcome == RecallResult.DONE
    crash(core)
    core.advance(2 * MINUTE)
    assert received(core) == []


def test_a_handle_from_before_a_rescheduling_cancels_the_timer_all_the_same(
    core: CoreBroker,
) -> None:
    due_ms = core.clock.wall_ms() + MINUTE
    send(core, "A", due_ms)
    assert reschedule(core, "A", due_ms + HOUR).due_ms == due_ms + HOUR
    assert recall(core, "A", due_ms=due_ms) is RecallResult.DONE
    core.advance(2 * HOUR)
    assert received(core) == []


def test_a_rescheduled_timer_that_fired_is_visible_and_not_recalled(core: CoreBroker) -> None:
    due_ms = core.clock.wall_ms() + HOUR
    send(core, "A", due_ms)
    reschedule(core, "A", due_ms - HOUR + SECOND)
    core.advance(2 * SECOND)
    assert recall(core, "A", due_ms=due_ms) is RecallResult.ALREADY_VISIBLE
    assert reschedule(core, "A", -1).outcome == RecallResult.ALREADY_VISIBLE
    assert received(core) == [b"A"]


def test_a_timer_is_recalled_until_it_fires_and_then_it_is_visible(core: CoreBroker) -> None:
    send_all(core, {"A": MINUTE})
    core.advance(MINUTE)
    assert recall(core, "A") is RecallResult.ALREADY_VISIBLE
    assert reschedule(core, "A", -1).outcome == RecallResult.ALREADY_VISIBLE
    assert received(core) == [b"A"]
    assert recall(core, "B") is RecallResult.NOT_FOUND


def test_a_timer_that_is_about_to_fire_is_recalled(core: CoreBroker) -> None:
    send_all(core, {"A": 500, "B": 500})
    assert core.broker.timers.service.due.next_due_ms is not None  # its slot is loaded
    assert recall(core, "A") is RecallResult.DONE
    core.advance(SECOND)
    assert received(core) == [b"B"]


def test_what_is_asked_about_nothing_is_refused(core: CoreBroker) -> None:
    for kind, request in (
        (Kind.RECALL, pb.RecallRequest(topic="orders")),
        (Kind.RECALL, pb.RecallRequest(topic="nowhere", message_id="A")),
        (Kind.RESCHEDULE, pb.RescheduleRequest(topic="orders", message_id="A")),
        (Kind.LIST_TIMERS, pb.ListTimersRequest(limit=-1)),
        (Kind.LIST_TIMERS, pb.ListTimersRequest(topic="nowhere")),
        (Kind.FORECAST_TIMERS, pb.ForecastTimersRequest(topic="nowhere")),
    ):
        error = core.ask(kind, request.SerializeToString()).error
        assert isinstance(error, PopmqError)
        assert error.code in (Code.ILLEGAL_MESSAGE_ID, Code.TOPIC_NOT_FOUND) or (
            error.code in (Code.ILLEGAL_DELIVERY_TIME, Code.BAD_REQUEST)
        )
    assert core.server.runner.running == 0


@pytest.fixture
def repeating() -> CoreBroker:
    """Every send of an id is another message."""
    return core_with_topic(settings=replace(SMALL, dedup=DedupSettings(window_ms=0)))


def test_every_timer_of_an_id_is_recalled_however_many_there_are(repeating: CoreBroker) -> None:
    """A client may send the same id again and again."""
    core = repeating
    for _ in range(100):
        send(core, "A", core.clock.wall_ms() + HOUR)
    core.run_steps()
    assert core.broker.timers.state.pending_total == 100
    assert recall(core, "A") is RecallResult.DONE
    assert core.broker.timers.state.pending == {}
    core.advance(HOUR)
    assert received(core) == []


def test_what_was_recalled_with_another_of_its_id_is_not_called_visible() -> None:
    """Seed 100474: the newest was forgotten, an older one with a later time was not."""
    timer = replace(SMALL, dedup=replace(SMALL.dedup, window_ms=0))
    core = core_with_topic(settings=timer)
    send_all(core, {"A": 3 * HOUR, "fires": 2 * HOUR})
    send_all(core, {"A": HOUR})
    assert recall(core, "A") is RecallResult.DONE
    core.advance(2 * HOUR)
    assert received(core) == [b"fires"]
    assert recall(core, "A") is RecallResult.NOT_FOUND


def test_a_message_that_was_rescheduled_very_often_is_recalled_and_rescheduled(
    core: CoreBroker,
) -> None:
    send(core, "A", core.clock.wall_ms() + HOUR, body=b"first")
    for _ in range(100):
        assert reschedule(core, "A", -2 * HOUR).outcome == "DONE"
    assert reschedule(core, "A", -MINUTE).outcome == "DONE"
    core.advance(MINUTE)
    assert received(core) == [b"first"]
    assert recall(core, "A") is RecallResult.ALREADY_VISIBLE


def test_what_cannot_be_looked_through_in_one_request_is_refused_and_left_as_it_is(
    repeating: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = repeating
    monkeypatch.setattr(lookup, "_READS_LIMIT", 10)
    for _ in range(11):
        send(core, "A", core.clock.wall_ms() + HOUR)
    core.run_steps()
    for kind, request in (
        (Kind.RECALL, pb.RecallRequest(topic="orders", message_id="A")),
        (Kind.RESCHEDULE, pb.RescheduleRequest(topic="orders", message_id="A", new_due_ms=-1)),
    ):
        error = core.ask(kind, request.SerializeToString()).error
        assert isinstance(error, PopmqError)
        assert "none was changed: gave up after 10 messages" in str(error)
    assert core.broker.timers.state.pending_total == 11
    assert "gave up after 10" in list_timers(core, message_id="A").incomplete


def test_a_timer_whose_body_is_damaged_is_not_said_to_be_recalled_or_unknown(
    core: CoreBroker,
) -> None:
    send_all(core, {"A": HOUR})
    damage_body(core, "A")
    for kind, request in (
        (Kind.RECALL, pb.RecallRequest(topic="orders", message_id="A")),
        (Kind.RESCHEDULE, pb.RescheduleRequest(topic="orders", message_id="A", new_due_ms=-1)),
    ):
        error = core.ask(kind, request.SerializeToString()).error
        assert "is damaged" in str(error)
    assert core.broker.timers.state.pending_total == 1


def test_timers_are_listed_by_due_time_with_all_that_names_them(core: CoreBroker) -> None:
    now_ms = core.clock.wall_ms()
    core.topic("others", type=MessageType.DELAY)
    send_all(core, {"later": HOUR, "soon": 500, "far": 200 * 24 * HOUR})
    send_all(core, {"other": MINUTE}, topic="others")
    assert listed(core) == ["soon", "other", "later", "far"]
    assert listed(core, topic="orders") == ["soon", "later", "far"]
    assert listed(core, limit=2) == ["soon", "other"]
    assert listed(core, begin_ms=now_ms + 501) == ["other", "later", "far"]
    assert listed(core, begin_ms=now_ms + MINUTE, end_ms=now_ms + HOUR) == ["other"]
    assert listed(core, message_id="later") == ["later"]
    assert listed(core, topic="others", message_id="later") == []
    (first, *_) = list_timers(core).timers
    record = core.broker.timers.recall.find(None, "soon").stored[0]
    assert (first.topic, first.queue_id, first.state) == ("orders", 0, "PENDING")
    assert (first.due_ms, first.stored_ms) == (now_ms + 500, now_ms)
    assert (first.position, first.offset) == (record.timer.identity, record.timer.offset)


def test_what_is_not_in_the_wheel_yet_is_listed_too(core: CoreBroker) -> None:
    core.broker.timers.service.enqueue_limit = 0  # no step enqueues meanwhile
    send(core, "A", core.clock.wall_ms() + MINUTE)
    assert listed(core) == ["A"]
    assert forecast(core).next_due_ms == core.clock.wall_ms() + MINUTE
    crash(core)
    core.broker.timers.service.enqueue_limit = 0
    reply = list_timers(core)
    assert [timer.message_id for timer in reply.timers] == []
    assert "1 timers are on their way" in reply.incomplete


def test_what_is_over_is_listed_no_more(core: CoreBroker) -> None:
    send_all(core, {"fired": SECOND, "recalled": MINUTE, "moved": HOUR, "kept": 2 * HOUR})
    recall(core, "recalled")
    reschedule(core, "moved", core.clock.wall_ms() + 3 * HOUR)
    core.advance(2 * SECOND)
    assert listed(core) == ["kept", "moved"]
    assert listed(core, message_id="fired") == []
    assert listed(core, message_id="recalled") == []


def test_a_timer_that_waits_beside_the_wheel_is_late(core: CoreBroker) -> None:
    send_all(core, {"fired": 2 * HOUR})
    core.advance(3 * HOUR)
    core.clock.step_wall(-2 * HOUR)
    send_all(core, {"late": HOUR // 2})
    (late,) = list_timers(core).timers
    assert (late.message_id, late.state) == ("late", "LATE")
    assert forecast(core).next_due_ms == late.due_ms


def test_a_timer_that_stands_in_a_later_slot_than_its_own_is_listed_first(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came when its slot was about to be over, and the crash took back what was."""
    monkeypatch.setattr(timer_scan, "_UNITS_A_PIECE", 1)
    now_ms = core.clock.wall_ms()
    service = core.broker.timers.service
    service.enqueue.over(service.enqueue.base_ms, closing_ms=now_ms - now_ms % SECOND + MINUTE)
    send_all(core, {"early": 5 * SECOND})
    core.broker.timers.files.flush_now(service.cursors())
    crash(core)
    send_all(core, {"A": 10 * SECOND, "B": 10 * SECOND, "C": 30 * SECOND})
    assert listed(core, limit=1) == ["early"]
    assert listed(core, limit=2) == ["early", "A"]
    core.advance(5 * SECOND)
    assert received(core) == [b"early"]


def test_a_timer_whose_body_was_moved_is_listed_once(core: CoreBroker) -> None:
    send_all(core, {"A": HOUR})
    bodies = core.broker.timers.bodies
    (piece,) = bodies.bodies_below(core.broker.store.end)
    bodies.move(piece[0])
    core.run_until_idle()
    assert listed(core) == ["A"]  # not enqueued yet
    core.run_steps()
    assert listed(core) == ["A"]
    assert listed(core, message_id="A") == ["A"]
    (timer,) = list_timers(core).timers
    assert timer.position == piece[0].unit.position


def test_a_list_that_would_take_too_long_says_so(
    core: CoreBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_jobs, "LOOKED_LIMIT", 50)
    monkeypatch.setattr(timer_scan, "_UNITS_A_PIECE", 10)
    send_all(core, {f"M{number}": 10 * SECOND + SECOND * number for number in range(100)})
    begin_ms = core.clock.wall_ms() + 105 * SECOND
    assert "were looked at" in list_timers(core, begin_ms=begin_ms, limit=3).incomplete
    assert listed(core, limit=3) == ["M0", "M1", "M2"]


def test_a_deleted_topic_is_listed_by_the_name_that_it_had(core: CoreBroker) -> None:
    send_all(core, {"A": HOUR})
    number = core.broker.registry.topic("orders").id
    core.broker.registry.delete_topic("orders")
    core.run_until_idle()
    (timer,) = list_timers(core).timers
    assert timer.topic == "orders (deleted)"
    core.stop()  # with a snapshot, which has no deleted topics
    core.start()
    (timer,) = list_timers(core).timers
    assert timer.topic == f"(deleted, topic id {number})"


def test_a_list_beside_traffic_is_what_a_plain_list_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timer_scan, "_UNITS_A_PIECE", 3)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    core = core_with_topic(seed=seed)
    waiting: dict[str, int] = {}
    for number in range(400):
        due_ms = core.clock.wall_ms() + rng.choice((5 * SECOND, MINUTE, 3 * HOUR)) + number
        send(core, f"M{number}", due_ms)
        waiting[f"M{number}"] = due_ms
        if rng.random() < 0.1:
            gone = rng.choice(list(waiting))
            assert recall(core, gone) in (RecallResult.DONE, RecallResult.ALREADY_VISIBLE)
            del waiting[gone]
        if rng.random() < 0.1:
            core.advance(rng.randrange(5 * MINUTE))
            now_ms = core.clock.wall_ms()
            waiting = {name: due_ms for name, due_ms in waiting.items() if due_ms > now_ms}
            limit = rng.randrange(1, 50)
            expected = sorted(waiting, key=waiting.__getitem__)
            assert listed(core, limit=limit) == expected[:limit]


def with_a_damaged_slot(core: CoreBroker) -> None:
    """Timers `A` and `B` are in it, due in half an hour."""
    send_all(core, {"A": HOUR // 2, "B": HOUR // 2})
    core.advance(5 * SECOND)
    files = core.broker.timers.files
    slot = next(files.wheel.occupied(core.clock.wall_ms(), 1 << 62))
    time = slot.time_ms // SECOND
    files.wheel._dirty[time % 3_600] = (time, slot.first, slot.last, 7)


def test_a_damaged_wheel_is_a_refusal_and_the_next_answer_is_whole(core: CoreBroker) -> None:
    with_a_damaged_slot(core)
    error = core.ask(Kind.LIST_TIMERS, b"").error
    assert isinstance(error, PopmqError)
    assert error.code == Code.INTERNAL_ERROR
    core.run_steps()
    assert listed(core) == ["A", "B"]
    core.advance(HOUR)
    assert received(core) == [b"A", b"B"]


def test_a_send_into_a_damaged_slot_of_a_bounded_wheel_is_refused_and_goes_on_soon() -> None:
    """Seed 272 of the simulator: the damage came up in the sender's request."""
    settings = replace(SMALL, timer=replace(SMALL.timer, slot_limit=3))
    core = core_with_topic(settings=settings)
    due_ms = core.clock.wall_ms() + HOUR // 2
    with_a_damaged_slot(core)
    core.broker.timers.admission._counts.clear()  # other slots came up since then
    entry = PutEntry(MessageType.DELAY, b"C", b"", 0, 0, due_ms, "C", 0)
    body = hop.encode_put(PutRequest("orders", [entry]))
    (refused,) = hop.decode_put_reply(core.reply(Kind.PUT, body))
    assert (refused.code, "is made anew" in refused.message) == (Code.TOO_MANY_REQUESTS, True)
    core.run_steps()
    (stored,) = hop.decode_put_reply(core.reply(Kind.PUT, body))
    assert stored.code == Code.OK
    core.advance(HOUR)
    assert received(core) == [b"A", b"B", b"C"]


def test_a_forecast_counts_by_topic_and_by_time(core: CoreBroker) -> None:
    core.topic("others", type=MessageType.DELAY)
    ahead = {"a": 2_500, "b": 30_000, "c": 30_001, "d": 10 * MINUTE, "e": 40 * MINUTE}
    send_all(core, ahead)
    send_all(core, {"f": 3 * MINUTE}, topic="others")
    reply = forecast(core)
    assert [(item.topic, item.count) for item in reply.pending] == [("orders", 5), ("others", 1)]
    assert {bucket.within_ms: bucket.count for bucket in reply.buckets if bucket.count} == {
        5 * SECOND: 1,
        MINUTE: 2,
        5 * MINUTE: 1,
        15 * MINUTE: 1,
        HOUR: 1,
    }
    assert reply.buckets[-1].within_ms == -1
    assert reply.next_due_ms == core.clock.wall_ms() + 2_500
    one_topic = forecast(core, "others")
    assert [(item.topic, item.count) for item in one_topic.pending] == [("others", 1)]
    assert {bucket.within_ms: bucket.count for bucket in one_topic.buckets if bucket.count} == {
        5 * MINUTE: 1
    }
    assert one_topic.next_due_ms == core.clock.wall_ms() + 3 * MINUTE


def test_a_forecast_does_not_count_what_was_recalled(core: CoreBroker) -> None:
    """Nor do others in the same slot go uncounted; one whose unit rolls counts where that is."""
    send_all(core, {"a": 30_000, "b": 30_000, "c": 10 * MINUTE, "far": 3 * HOUR})
    recall(core, "a")
    assert {
        bucket.within_ms: bucket.count for bucket in forecast(core).buckets if bucket.count
    } == {
        MINUTE: 1,
        15 * MINUTE: 1,
        HOUR: 1,
    }
    for message_id in ("b", "far"):
        recall(core, message_id)
    send_all(core, {"d": 2 * MINUTE})
    assert {
        bucket.within_ms: bucket.count for bucket in forecast(core).buckets if bucket.count
    } == {
        5 * MINUTE: 1,
        15 * MINUTE: 1,
        HOUR: 1,
    }
    for message_id in ("c", "d"):
        recall(core, message_id)
    assert sum(bucket.count for bucket in forecast(core).buckets) == 0, "nothing is pending"


def test_a_forecast_of_nothing_is_empty(core: CoreBroker) -> None:
    reply = forecast(core)
    assert list(reply.pending) == []
    assert reply.next_due_ms == 0
    assert sum(bucket.count for bucket in reply.buckets) == 0
    send_all(core, {"A": MINUTE})
    recall(core, "A")
    assert forecast(core).next_due_ms == 0
