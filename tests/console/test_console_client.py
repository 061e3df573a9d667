"""What pages share: answers of the last second, an hour of readings, and redrives that run."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from popmq.common.errors import Code, PopmqError, Refused
from popmq.console.history import MAX_SERIES, READINGS, History
from popmq.console.markup import plot
from popmq.console.model import CountKey, GroupView, LagRow, Line, Overview
from popmq.console.page import to, to_message
from popmq.console.recent import MAX_ENTRIES, RecentAnswers


def row(
    group: str, *, ready: int = 0, in_flight: int = 0, oldest_age_ms: int | None = None
) -> LagRow:
    return LagRow(group, "orders", ready, in_flight, 0, 0, 0, 0, oldest_age_ms)


def overview(
    *rows: LagRow, now_ms: int = 1, counts: Mapping[CountKey, int] | None = None, lack: str = ""
) -> Overview:
    return Overview(now_ms, [], [], [], rows, 1, {}, 0, 0, 0, counts=counts or {}, lag_missing=lack)


def test_a_hundred_pages_at_a_time_ask_once() -> None:
    now_s = [0.0]
    answers = RecentAnswers(lambda: now_s[0])
    asked, go = [], threading.Event()

    def ask() -> int:
        asked.append(1)
        go.wait(10)
        return len(asked)

    with ThreadPoolExecutor(100) as pool:
        waiting = [pool.submit(answers.get, "key", ask) for _ in range(100)]
        go.set()
        assert {each.result() for each in waiting} == {1}
    now_s[0] = 0.4
    assert answers.get("key", ask) == 1
    now_s[0] = 0.6
    assert answers.get("key", ask) == 2


def test_what_takes_long_to_answer_is_asked_less_often() -> None:
    now_s = [0.0]
    answers = RecentAnswers(lambda: now_s[0])

    def ask() -> float:
        now_s[0] += 1
        return now_s[0]

    assert answers.get("key", ask) == 1
    now_s[0] = 2.4
    assert answers.get("key", ask) == 1
    now_s[0] = 2.6  # and yet no page is older than five seconds
    assert answers.get("key", ask) == 3.6


def test_a_failure_is_shown_for_half_a_second_whatever_it_took() -> None:
    now_s = [0.0]
    answers = RecentAnswers(lambda: now_s[0])

    def fail() -> float:
        now_s[0] += 2.5
        raise Refused(Code.HA_NOT_AVAILABLE, "no answer")

    with pytest.raises(PopmqError):
        answers.get("key", fail)
    now_s[0] = 2.9
    with pytest.raises(PopmqError):
        answers.get("key", lambda: 7.0)
    now_s[0] = 3.1
    assert answers.get("key", lambda: 7.0) == 7


def test_a_change_makes_earlier_answers_useless_and_their_number_is_bounded() -> None:
    answers = RecentAnswers(lambda: 0.0)
    assert answers.get("key", lambda: 1) == 1
    answers.clear()
    assert answers.get("key", lambda: 2) == 2
    for number in range(3 * MAX_ENTRIES):
        answers.get(number, lambda: 0)
    assert answers.get("key", lambda: 3) == 3  # it was dropped for newer ones


def test_every_page_that_waited_for_an_answer_gets_its_failure() -> None:
    def ask() -> int:
        raise Refused(Code.BAD_REQUEST, "no")

    answers = RecentAnswers(lambda: 0.0)
    for _ in range(2):
        with pytest.raises(PopmqError, match="no"):
            answers.get("key", ask)


def test_the_history_keeps_an_hour_of_the_groups_that_there_are() -> None:
    history = History()
    for number in range(2 * READINGS + 1):
        history.add(overview(row("a", ready=number), row("b"), now_ms=number + 1))
    assert len(history.of_all()) == len(history.of_group("a")) == READINGS
    assert len(history.of_topic("orders")) == READINGS
    assert history.of_group("a")[-1].lag == 2 * READINGS
    rows = (row(f"g{n}") for n in range(2 * MAX_SERIES))
    history.add(overview(*rows, now_ms=10 * READINGS))
    assert history.of_group("a") == []
    assert sum(bool(history.of_group(f"g{n}")) for n in range(2 * MAX_SERIES)) == MAX_SERIES


def test_rates_are_of_the_time_between_two_looks() -> None:
    history = History()
    first = {("a", "", "orders"): 100, ("b", "", "orders"): 5, ("a", "g", "orders"): 40}
    history.add(overview(row("g"), now_ms=1_000, counts=first))
    assert history.of_all() == []  # one look has no rate
    then = {
        **{("a", "", "orders"): 300, ("b", "", "orders"): 10, ("a", "g", "orders"): 140},
        ("a", "", "unread"): 30,
    }
    history.add(overview(row("g"), now_ms=11_000, counts=then))
    (total,), (group,) = history.of_all(), history.of_group("g")
    (topic,), (unread,) = history.of_topic("orders"), history.of_topic("unread")
    assert (total.stored, total.delivered) == (23.5, 10)
    assert (group.stored, group.delivered) == (topic.stored, topic.delivered) == (20.5, 10)
    assert (unread.stored, unread.delivered) == (3, 0)


def test_a_broker_that_starts_again_counts_from_zero_and_makes_no_negative_rate() -> None:
    history = History()
    for at_ms, count in ((1_000, 1_000), (11_000, 20)):
        history.add(overview(now_ms=at_ms, counts={("a", "", "orders"): count}))
    assert [reading.stored for reading in history.of_topic("orders")] == [2]


def test_a_look_that_did_not_see_every_broker_is_no_reading() -> None:
    """Else the plot would fall to nothing in a failover, and groups would lose their hour."""
    history = History()
    for at_ms in (1_000, 11_000):
        history.add(overview(row("a", ready=5), now_ms=at_ms))
    history.add(overview(now_ms=21_000, lack="broker b does not answer"))
    assert [reading.lag for reading in history.of_group("a")] == [5]
    assert [reading.lag for reading in history.of_all()] == [5]


def test_a_plot_has_no_line_over_a_time_without_readings() -> None:
    points = [(at, 1.0) for at in (0, 10, 20, 100, 110)]
    drawn = str(plot("Lag", [Line("messages", points)], str))
    assert drawn.count("<polyline") == 2
    assert "now 1.0, at most 1.0" in drawn


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("g", ready=3, oldest_age_ms=5)], "Stopped: no member is connected, and 3"),
        ([], ""),
    ],
)
def test_a_group_that_does_not_get_on_says_why(rows: list[LagRow], words: str) -> None:
    view = GroupView(1, "g", "normal", {}, rows, [], [], [], 0, 0, "")
    assert " ".join(view.findings).startswith(words)
    assert bool(view.findings) == bool(words)


def test_links_stay_paths_of_the_console_whatever_the_names_are() -> None:
    assert to("topics", "a/../b?c#d e") == "/topics/a%2F..%2Fb%3Fc%23d%20e"
    assert to("timers", topic="a&b", first=0) == "/timers?topic=a%26b"
    assert to_message("..") == "/messages?id=.."
