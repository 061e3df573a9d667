"""`popmq lag` and `popmq reset-offset`: what they ask for, and what they print."""

import pytest

from cli import parsing
from popmq.cli.__main__ import main
from popmq.cli.consumer_offsets import (
    SHOWN_QUEUES,
    lag_lines,
    lag_rows,
    queue_lines,
    reset_lines,
    reset_request,
)
from popmq.cli.terminal.command_line import Args
from popmq.common.wire import admin_pb2 as admin

NOW_MS = 1_700_000_100_000


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """All columns, however wide the terminal of the tests is."""
    monkeypatch.delenv("COLUMNS", raising=False)


def parsed(*argv: str) -> Args:
    return parsing.parsed("reset-offset", "--group", "g", "--topic", "t", *argv)


def lags(*more: admin.Lag) -> admin.LagReply:
    first = admin.Lag(
        broker="a",
        group="g",
        topic="t",
        ready=5,
        in_flight=2,
        retries=1,
        oldest_ready_ms=NOW_MS - 90_500,
    )
    dead = admin.DeadLetterCount(broker="a", group="g", stored=3, redriven=1)
    return admin.LagReply(lags=[first, *more], dead_letters=[dead], now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("argv", "request_"),
    [
        (["--to", "oldest"], admin.ResetOffsetRequest(oldest=True)),
        (["--to", "newest", "--dry-run"], admin.ResetOffsetRequest(newest=True, dry_run=True)),
        (["--to", "earliest"], admin.ResetOffsetRequest(oldest=True)),
        (["--to", "latest"], admin.ResetOffsetRequest(newest=True)),
        (["--to", "now"], admin.ResetOffsetRequest(newest=True)),
        (["--to", "1700000000000"], admin.ResetOffsetRequest(stored_ms=1_700_000_000_000)),
        (["--to", "0", "--queue", "0"], admin.ResetOffsetRequest(offset=0, queue_id=0)),
        (["--to", "1970-01-01T00:00:02Z"], admin.ResetOffsetRequest(stored_ms=2_000)),
        (["--to", "7", "--skip-retries"], admin.ResetOffsetRequest(offset=7, skip_retries=True)),
        (
            ["--to", "newest", "--keep-retries"],
            admin.ResetOffsetRequest(newest=True, skip_retries=False),
        ),
    ],
)
def test_the_arguments_become_one_reset(
    argv: list[str], request_: admin.ResetOffsetRequest
) -> None:
    request_.group, request_.topic = "g", "t"
    assert reset_request(parsed(*argv)) == request_


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--to", "yesterday"],
        ["--to", "-1"],
        ["--to", "9" * 30],
        ["--to", "newest", "--queue", "x"],
        ["--to", "newest", "--skip-retries", "--keep-retries"],
    ],
)
def test_a_reset_that_makes_no_sense_is_wrong_usage(argv: list[str]) -> None:
    assert main(["reset-offset", "--group", "g", "--topic", "t", *argv]) == 2


def test_a_reset_is_shown_queue_by_queue() -> None:
    queue = admin.ResetQueue(broker="a", topic="t", queue_id=1, before=9, after=4, in_flight=2)
    reply = admin.ResetOffsetReply(queues=[queue])
    assert reset_lines(reply, dry_run=False) == (
        "BROKER  TOPIC  QUEUE  BEFORE  AFTER  ENDED\na       t      1      9       4      2"
    )
    assert "WOULD-END" in reset_lines(reply, dry_run=True)


def test_the_brokers_rows_of_one_group_and_topic_are_one_row() -> None:
    other = admin.Lag(
        broker="b", group="g", topic="t", ready=1, in_flight=1, oldest_ready_ms=NOW_MS - 200_000
    )
    other.verdict = "STOPPED"
    rows, _, dead = lag_lines(lags(other))
    expected = ["g", "t", "9", "6", "3", "0", "0", "1", "0", "3m", "STOPPED"]
    assert rows.splitlines()[1].split() == expected
    assert dead.splitlines()[1].split() == ["g", "3", "1"]


def test_several_rows_have_a_total() -> None:
    rows = lag_lines(lags(admin.Lag(group="h", topic="u", ready=1)))[0].splitlines()
    assert rows[-2].split() == ["h", "u", "1", "1", "0", "0", "0", "0", "0", "-", "-"]
    assert rows[-1].split() == ["total", "8", "6", "2", "0", "0", "1", "0", "-", "-"]


def test_what_waits_for_its_delivery_time_is_no_lag() -> None:
    reply = lags(admin.Lag(group="h", topic="u", ready=1, delayed=50))
    rows = lag_lines(reply)[0].splitlines()
    assert rows[-2].split() == ["h", "u", "1", "1", "0", "50", "0", "0", "0", "-", "-"]
    assert [row.get("lag") for row in lag_rows(reply)] == [7, 1, None]


def test_as_json_each_row_is_an_object_and_so_is_each_groups_dead_letters() -> None:
    row, dead = lag_rows(lags())
    assert row["lag"] == 7
    assert (row["ready"], row["in_flight"], row["oldest_ready_age_ms"]) == (5, 2, 90_500)
    assert dead == {"group": "g", "dead_letters": 3, "redriven": 1}


def spans(*ages_ms: int) -> admin.TimeSpansReply:
    """A queue for each; with 0 the group has been given all of it."""
    return admin.TimeSpansReply(
        now_ms=NOW_MS,
        spans=[
            admin.TimeSpan(
                broker="a",
                topic="t",
                queue_id=number,
                newest_ms=NOW_MS - 1_000,
                next_ms=NOW_MS - age_ms if age_ms else 0,
                unread=age_ms // 1_000,
            )
            for number, age_ms in enumerate(ages_ms)
        ],
    )


def test_the_queues_that_wait_for_longest_are_shown_first() -> None:
    table, others = queue_lines(spans(60_000, 0, 200_000))
    header, *rows = (line.split() for line in table.splitlines())
    assert header == ["TOPIC", "QUEUE", "BROKER", "UNREAD", "OLDEST", "NEWEST"]
    assert rows == [["t", "2", "a", "200", "3m", "1s"], ["t", "0", "a", "60", "1m", "1s"]]
    assert others == "queues without unread messages: 1"
    assert queue_lines(spans(0, 0)) == ["queues without unread messages: 2"]
    assert queue_lines(spans()) == ["the group has read no queue yet"]
    table, others = queue_lines(spans(*[1_000] * (SHOWN_QUEUES + 3)))
    assert len(table.splitlines()) == 1 + SHOWN_QUEUES
    assert others == "more queues with unread messages: 3"


def test_a_broker_that_does_not_count_unread_messages_shows_none() -> None:
    reply = spans(5_000)
    reply.spans[0].ClearField("unread")
    assert queue_lines(reply)[0].splitlines()[1].split()[3] == "-"
