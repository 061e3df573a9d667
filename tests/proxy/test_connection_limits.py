"""What one connection may take of what all share at a proxy."""

from dataclasses import replace

import pytest

from popmq.common.errors import TooManyRequests
from popmq.common.protocol.messaging_payloads import FilterType
from popmq.common.settings.settings import PollSettings, Settings
from popmq.proxy.messaging.connection_limits import ConnectionLimits
from popmq.testing.harness.clock import ManualClock

SQL = FilterType.SQL


def limits(clock: ManualClock | None = None, *, waiters: int = 100) -> ConnectionLimits:
    settings = replace(Settings(), poll=PollSettings(waiters=waiters))
    return ConnectionLimits(settings, clock or ManualClock())


def waits(table: ConnectionLimits, connection: str) -> int:
    """How many receives it can have wait."""
    for count in range(1_000):
        try:
            table.begin_wait(connection)
        except TooManyRequests:
            return count
    raise AssertionError("there is no limit")


def test_a_connection_alone_waits_with_half_of_what_may_wait() -> None:
    assert waits(limits(), "10.0.0.1:1") == 50


def test_however_many_connections_wait_the_next_one_may_too() -> None:
    table = limits()
    counts = [waits(table, f"10.0.0.1:{port}") for port in range(20)]
    assert counts[:3] == [50, 25, 13]
    assert all(counts[:6])
    assert sum(counts) <= 100


def test_what_ended_may_begin_again() -> None:
    table = limits()
    assert waits(table, "a") == 50
    for _ in range(50):
        table.end_wait("a")
    assert waits(table, "b") == 50
    assert not table._waiting_of.get("a")


def test_a_refusal_names_the_setting_and_what_is_left() -> None:
    table = limits(waiters=2)
    assert waits(table, "a") == 1
    with pytest.raises(TooManyRequests, match=r"room for 1 more \(poll.waiters: 2\)"):
        table.begin_wait("a")


def test_new_sql_filters_have_a_rate_by_connection() -> None:
    clock = ManualClock()
    table = limits(clock)
    for number in range(100):
        table.check_filter("a", SQL, f"a = {number}")
    with pytest.raises(TooManyRequests, match="sql_filters_per_s"):
        table.check_filter("a", SQL, "a = 100")
    table.check_filter("a", SQL, "a = 99")  # is known
    table.check_filter("b", SQL, "a = 100")
    clock.advance(1_000)
    for number in range(10):
        table.check_filter("a", SQL, f"b = {number}")
    with pytest.raises(TooManyRequests):
        table.check_filter("a", SQL, "b = 10")


def test_tags_have_no_rate() -> None:
    table = limits()
    for number in range(1_000):
        table.check_filter("a", FilterType.TAG, f"tag-{number}")


def test_what_is_known_of_filters_is_bounded() -> None:
    table = limits()
    for number in range(1_000):
        table.check_filter(f"10.0.0.1:{number}", SQL, f"a = {number}")
    assert len(table._known) == 256
    for number in range(100):
        table.check_filter(f"10.0.0.2:{number}", SQL, f"a = '{number:04000}'")
    assert len(table._known) == 32
