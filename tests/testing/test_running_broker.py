"""A whole popmq in the test's process, on a real port, under a clock that the test moves."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from testing.receivers import broker_client, parked, queue_of, wait_until_parked

from popmq.common.errors import ConfigError, PopmqError
from popmq.testing import broker
from popmq.testing.running_broker import RunningBroker

DAY_MS = 86_400_000


def test_an_unacked_message_comes_back_when_its_time_is_skipped(b: RunningBroker) -> None:
    b.send("orders", b"one")
    (first,) = b.receive("orders", "workers", invisible="12h")
    b.advance("11h")
    assert b.receive("orders", "workers") == []
    b.advance("1h")
    (again,) = b.receive("orders", "workers")
    assert (first.attempt, again.attempt, again.body) == (1, 2, b"one")


def test_a_message_becomes_a_dead_letter_in_no_time(b: RunningBroker) -> None:
    b.create_group("workers", max_attempts=3)
    b.send("orders", "poison", tag="t", keys=["k"], properties={"colour": "red"})
    started = time.monotonic()
    attempts = []
    for _ in range(3):
        attempts += [message.attempt for message in b.receive("orders", "workers", invisible="12h")]
        b.advance("12h")
    took_ms = (time.monotonic() - started) * 1000
    assert b.receive("orders", "workers") == []
    (dead,) = b.receive("%DLQ%workers", "undertaker")
    print(f"\n3 attempts of 12 hours in {took_ms:.0f} ms")
    assert attempts == [1, 2, 3]
    assert (dead.body, dead.tag, dead.keys, dead.properties) == (
        b"poison",
        "t",
        ("k",),
        {"colour": "red"},
    )
    assert took_ms < 2_000


def test_a_delayed_message_comes_when_its_time_is_skipped(b: RunningBroker) -> None:
    b.send("orders", b"later", delay="3d")
    b.send("orders", b"far", delay="200d")
    b.advance(timedelta(days=3, seconds=-10))
    assert b.receive("orders", "workers") == []
    b.advance("10s")
    assert [message.body for message in b.receive("orders", "workers")] == [b"later"]
    b.crash()
    b.advance("197d")
    assert b"far" in [message.body for message in b.receive("orders", "workers")]


def test_a_waiting_receive_gets_a_delayed_message_that_became_due(
    b: RunningBroker, waiting: ThreadPoolExecutor
) -> None:
    b.send("orders", b"later", delay="1h")
    answer = waiting.submit(b.receive, "orders", "workers", wait="20s")
    wait_until_parked(b, answer)
    b.advance("1h")
    assert [message.body for message in answer.result()] == [b"later"]


def test_what_was_acked_never_comes_back(b: RunningBroker) -> None:
    b.send("orders", b"one")
    b.ack(*b.receive("orders", "workers"))
    b.advance("3d")
    assert b.receive("orders", "workers") == []


def test_a_handle_of_a_skipped_delivery_is_refused(b: RunningBroker) -> None:
    b.send("orders", b"one")
    (late,) = b.receive("orders", "workers")
    b.advance("60s")
    with pytest.raises(PopmqError, match="revived as attempt 2"):
        b.ack(late)


def test_a_waiting_receive_gets_what_became_due(
    b: RunningBroker, waiting: ThreadPoolExecutor
) -> None:
    b.send("orders", b"one")
    b.receive("orders", "workers", invisible="1h")
    answer = waiting.submit(b.receive, "orders", "workers", wait="20s")
    wait_until_parked(b, answer)
    b.advance("1h")  # the 20 s are over by then as well
    assert [message.attempt for message in answer.result()] == [2]


def test_a_waiting_receive_whose_time_is_skipped_is_answered_with_nothing(
    b: RunningBroker, waiting: ThreadPoolExecutor
) -> None:
    b.create_topic("orders")
    started = time.monotonic()
    answer = waiting.submit(b.receive, "orders", "workers", wait="20s")
    wait_until_parked(b, answer)
    b.advance("19s")
    assert parked(b) == 1
    b.advance("1s")
    assert parked(b) == 0
    assert answer.result() == []
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("freeze", [False, True])
def test_a_receive_waits_in_real_time_when_nobody_skips_it(freeze: bool) -> None:
    with broker(freeze=freeze) as b:
        b.create_topic("orders")
        started = time.monotonic()
        assert b.receive("orders", "workers", wait="150ms") == []
        assert 0.15 <= time.monotonic() - started < 5


def test_time_flows_unless_it_is_frozen() -> None:
    with broker() as flowing, broker(freeze=True) as frozen:
        flowing_from_ms, frozen_from_ms = flowing.now_ms(), frozen.now_ms()
        frozen.create_topic("orders")
        frozen.send("orders", b"one")
        frozen.receive("orders", "workers", invisible="1ms")
        assert frozen.receive("orders", "workers", wait="50ms") == []
        assert frozen.now_ms() == frozen_from_ms
        assert flowing.now_ms() >= flowing_from_ms + 50
        frozen.advance("1ms")
        assert frozen.now_ms() == frozen_from_ms + 1
        assert [message.attempt for message in frozen.receive("orders", "workers")] == [2]


def test_frozen_time_is_exact_to_the_millisecond() -> None:
    with broker(freeze=True) as b:
        b.send("orders", b"one")
        b.receive("orders", "workers", invisible="60s")
        b.advance("59999ms")
        assert b.receive("orders", "workers") == []
        b.advance(timedelta(milliseconds=1))
        assert len(b.receive("orders", "workers")) == 1


def test_skipped_time_is_what_messages_are_stamped_with(b: RunningBroker) -> None:
    before_ms = time.time_ns() // 1_000_000
    b.advance("3d")
    assert b.now_ms() - before_ms >= 3 * DAY_MS
    b.send("orders", b"one")
    b.advance("1h")
    with broker_client(b) as client:
        (message,) = client.receive(
            "workers", queue_of("orders"), limit=1, wait_ms=0, invisible_ms=1_000
        )
    stored_ms = message.system_properties.store_timestamp.ToMilliseconds()
    assert 0 <= stored_ms - before_ms - 3 * DAY_MS < 60_000


def test_messages_of_a_topic_with_a_retention_expire_when_it_is_skipped(b: RunningBroker) -> None:
    b.create_topic("prices", retention="2h")
    b.send("prices", b"old")
    b.advance("1h")
    b.send("prices", b"young")
    b.advance("90m")
    assert [message.body for message in b.receive("prices", "readers")] == [b"young"]


def test_old_segments_go_when_the_retention_of_the_store_is_skipped() -> None:
    settings = {
        "store.segment_bytes": "256KiB",
        "store.snapshot_bytes": "64KiB",
        "message.max_body_bytes": "64KiB",
    }
    with broker(settings=settings) as b:
        for number in range(60):
            b.send("orders", b"%02d" % number + bytes(20_000))
        store = b._running().broker.broker.store
        assert store._log.start == 0
        b.advance("73h")
        b.advance("10s")  # retention looks each 10 s
        assert store._log.start > 0
        left = [message.body[:2] for _ in range(9) for message in b.receive("orders", "readers")]
        assert 0 < len(left) < 60
        assert b"59" in left


def test_a_group_that_was_made_with_start_newest_misses_what_was_before(b: RunningBroker) -> None:
    b.create_topic("orders", queues=2)
    b.create_group("late", start="newest")
    b.send("orders", b"before")
    assert b.receive("orders", "late") == []
    b.send("orders", b"after")
    assert [message.body for message in b.receive("orders", "late")] == [b"after"]


def test_two_brokers_have_their_own_time_and_messages() -> None:
    with broker() as running_broker, broker() as other:
        assert running_broker.endpoint != other.endpoint
        for b in (running_broker, other):
            b.send("orders", b"x")
            b.receive("orders", "workers")
        running_broker.advance("1h")
        assert len(running_broker.receive("orders", "workers")) == 1
        assert other.receive("orders", "workers") == []


@pytest.mark.parametrize(
    ("duration", "complaint"),
    [
        ("-3d", "'-3d' is negative: time does not go back"),
        (timedelta(seconds=-1), "is negative: time does not go back"),
        ("3 days", "'3 days' is not a duration: write 250ms, 90s, 5m, 1h30m or 3d"),
        ("", "'' is not a duration: write 250ms, 90s, 5m, 1h30m or 3d"),
        ("--3d", "'--3d' is not a duration: write 250ms, 90s, 5m, 1h30m or 3d"),
        (90, "90 is not a duration: write '90s', '3d' or a timedelta"),
        ("36501d", "'36501d' is over the limit of 36500d"),
        ("9" * 5_000 + "d", "is over the limit of 36500d"),
    ],
)
def test_a_duration_that_is_none_is_refused_and_moves_nothing(
    duration: str, complaint: str
) -> None:
    with broker(freeze=True) as b:
        before_ms = b.now_ms()
        with pytest.raises(ValueError, match=complaint):
            b.advance(duration)
        assert b.now_ms() == before_ms


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group\.max_attempt.* nearest .* group\.max_attempts"):
        broker(settings={"group.max_attempt": 3})


def test_settings_are_those_of_the_broker() -> None:
    with broker(settings={"group.max_attempts": 1}) as b:
        b.send("orders", b"one")
        b.receive("orders", "workers")
        b.advance("60s")
        assert len(b.receive("%DLQ%workers", "undertaker")) == 1


def test_the_environment_of_the_machine_is_no_part_of_a_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POPMQ_BROKER_DATA", "/nowhere")
    monkeypatch.setenv("POPMQ_NO_SUCH_SETTING", "1")
    with broker() as b:
        b.send("orders", b"one")
