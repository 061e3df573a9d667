"""`popmq timers`: what it asks for, and how answers are shown."""

import pytest

from cli import parsing
from popmq.cli.__main__ import main
from popmq.cli.terminal.command_line import Args
from popmq.cli.timers import (
    check_outcome,
    forecast_lines,
    forecast_rows,
    named,
    reschedule_request,
    run_forecast,
    run_list,
    timer_cells,
    timer_fields,
)
from popmq.common.errors import Code, PopmqError
from popmq.common.record.recall_handle import RecallHandle
from popmq.common.wire import admin_pb2 as admin

DUE_MS = 1_700_000_000_123
HANDLE = RecallHandle("later", "broker-a", DUE_MS, "01AB").encode()
TIMER = admin.Timer(
    topic="later",
    queue_id=2,
    message_id="01AB",
    due_ms=DUE_MS,
    stored_ms=DUE_MS - 5_000,
    position=1_000,
    offset=7,
    state="PENDING",
    broker="broker-a",
)
Pending, Bucket = admin.ForecastTimersReply.Pending, admin.ForecastTimersReply.Bucket


def parsed(*argv: str) -> Args:
    return parsing.parsed("timers", *argv)


def test_without_an_action_it_is_the_forecast_of_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POPMQ_ENDPOINT", "there:1")
    alone = parsing.invoked("timers")
    args = alone.args
    assert (alone.run, args.endpoint, args.json, args.topic) == (run_forecast, "there:1", False, "")
    named_one = parsing.invoked(
        "timers", "forecast", "--topic", "later", "--json", "--endpoint", "here:2"
    )
    args = named_one.args
    assert (named_one.run, args.endpoint, args.json, args.topic) == (
        run_forecast,
        "here:2",
        True,
        "later",
    )


@pytest.mark.parametrize(
    "argv",
    [
        ["--endpoint", "here:2", "list"],
        ["dance"],
        ["cancel"],
        ["reschedule", "01AB", "--topic", "t"],
        ["reschedule", "01AB", "--topic", "t", "--delay", "1s", "--at", "2030-01-31T00:00Z"],
        ["list", "--from", "soon"],
        ["list", "--limit", "0"],
    ],
)
def test_what_would_be_misunderstood_is_wrong_usage(argv: list[str]) -> None:
    assert main(["timers", *argv]) == 2


def test_a_list_has_a_topic_a_time_from_one_to_another_and_a_limit() -> None:
    args = parsed("list")
    assert (
        parsing.invoked("timers", "list").run,
        args.topic,
        args.begin,
        args.end,
        args.limit,
    ) == (run_list, "", 0, 0, 100)
    args = parsed("list", "--from", "1970-01-01T00:00:02Z", "--to", "1700000000123", "--limit", "5")
    assert (args.begin, args.end, args.limit) == (2_000, DUE_MS, 5)


@pytest.mark.parametrize("action", ["show", "cancel"])
def test_a_message_is_pending_promotion_id_and_topic_or_by_its_handle(action: str) -> None:
    assert named(parsed(action, "01AB", "--topic", "t")) == ("t", "01AB", 0)
    assert named(parsed(action, HANDLE)) == ("later", "01AB", DUE_MS)
    assert named(parsed(action, "01AB")) == ("", "01AB", 0)
    with pytest.raises(PopmqError, match=r"by its recall handle, or by its id$") as caught:
        named(parsed(action, "neither"))
    assert caught.value.code is Code.BAD_REQUEST


@pytest.mark.parametrize(
    ("argv", "due_ms", "new_due_ms"),
    [
        (["01AB", "--topic", "later", "--delay", "90s"], 0, -90_000),
        (["01AB", "--topic", "later", "--delay", "0s"], 0, -1),
        (["01AB", "--topic", "later", "--at", "1970-01-01T00:00:02Z"], 0, 2_000),
        (["01AB", "--topic", "later", "--at", "1969-01-01T00:00Z"], 0, 1),
        ([HANDLE, "--delay", "1ms"], DUE_MS, -1),
    ],
)
def test_a_new_time_is_a_time_or_a_duration(argv: list[str], due_ms: int, new_due_ms: int) -> None:
    assert reschedule_request(parsed("reschedule", *argv)) == admin.RescheduleRequest(
        topic="later", message_id="01AB", due_ms=due_ms, new_due_ms=new_due_ms
    )


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ("ALREADY_VISIBLE", "message 01AB of topic later is visible already"),
        ("NOT_FOUND", "no message 01AB of topic later waits"),
        ("", "no message 01AB of topic later waits"),
    ],
)
def test_what_was_not_done_is_refused_with_the_brokers_that_did_not_answer(
    outcome: str, words: str
) -> None:
    for reply in (admin.RecallReply(outcome=outcome), admin.RescheduleReply(outcome=outcome)):
        with pytest.raises(PopmqError) as caught:
            check_outcome(reply, "later", "01AB")
        assert str(caught.value) == words
        reply.incomplete = "broker b: away"
        with pytest.raises(PopmqError) as caught:
            check_outcome(reply, "later", "01AB")
        assert str(caught.value) == f"{words}; not everything: broker b: away"


def test_done_at_one_broker_is_done_and_says_who_did_not_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_outcome(admin.RecallReply(outcome="DONE"), "later", "01AB")
    assert capsys.readouterr().err == ""
    check_outcome(admin.RecallReply(outcome="DONE", incomplete="broker b: away"), "later", "01AB")
    assert capsys.readouterr().err == "popmq: not everything: broker b: away\n"


def test_a_timer_is_a_row_or_an_object() -> None:
    assert list(map(str, timer_cells(TIMER, DUE_MS - 90_000))) == [
        "in 1m",
        "01AB",
        "later",
        "2",
        "PENDING",
        "now",
        "broker-a",
        "1000",
        "7",
    ]
    assert timer_fields(TIMER) == {
        "topic": "later",
        "queue_id": 2,
        "message_id": "01AB",
        "due_ms": DUE_MS,
        "stored_ms": DUE_MS - 5_000,
        "position": 1_000,
        "offset": 7,
        "state": "PENDING",
        "broker": "broker-a",
    }


FORECAST = admin.ForecastTimersReply(
    pending=[Pending(topic="a", count=1), Pending(topic="later", count=9)],
    buckets=[
        Bucket(within_ms=5_000, count=1),
        Bucket(within_ms=60_000, count=0),
        Bucket(within_ms=-1, count=9),
    ],
    next_due_ms=DUE_MS,
)


def test_a_forecast_has_the_next_due_time_the_topics_and_a_histogram() -> None:
    first, *lines = "\n".join(forecast_lines(FORECAST)).splitlines()
    assert first.startswith("next due: 2023-11-14T22:13:20.123+00:00 (")
    assert lines == [
        "",
        "TOPIC  PENDING",
        "a      1",
        "later  9",
        "total  10",
        "",
        "DUE-WITHIN  TIMERS",
        "5s          1       ####",
        "1m          0",
        "later       9       " + "#" * 30,
    ]


def test_a_forecast_as_json_is_an_object_a_line() -> None:
    assert forecast_rows(FORECAST) == [
        {"next_due_ms": DUE_MS},
        {"topic": "a", "pending": 1},
        {"topic": "later", "pending": 9},
        {"within_ms": 5_000, "timers": 1},
        {"within_ms": 60_000, "timers": 0},
        {"within_ms": None, "timers": 9},
    ]


def test_a_forecast_of_nothing_says_so() -> None:
    empty = admin.ForecastTimersReply(buckets=[Bucket(within_ms=5_000)])
    assert forecast_lines(empty) == ["no message waits for its delivery time"]
    assert forecast_rows(empty)[0] == {"next_due_ms": None}
