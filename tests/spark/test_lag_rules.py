"""Statuses, speeds and the time until it is done, out of samples that tell a story each."""

from collections.abc import Callable
from typing import Any

import pytest

from popmq.reports.records.tables import OFFSETS, TIMERS, TOPICS

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

NOW_MS = 1_700_000_000_000
SAMPLES = 10
APART_MS = 30_000

# A story: of sample n, (max offset, next to pop, committed, in flight).
Story = Callable[[int], tuple[int, int, int, int]]
STORIES: dict[str, Story] = {
    "OK": lambda n: (1_000 * n, 1_000 * n, 1_000 * n - 20, 20),
    "STOPPED": lambda n: (5_000 + 100 * n, 1_000, 1_000, 0),
    "STALLED": lambda n: (9_000, 1_000 + 50 * n, 1_000, 50 * n),
    "REWIND": lambda n: (2_000, *((2_000, 2_000) if n < 5 else (1_000, 1_000)), 0),
    "WARN": lambda n: (1_000 * n + 2_000, 500 * n, 500 * n, 0),
    "FALLS": lambda n: (20_000, 1_000 * n, 1_000 * n, 0),
}


def frame(spark: Any, columns: Any, rows: list[dict[str, Any]]) -> Any:
    schema = ", ".join(f"`{name}` {kind}" for name, kind in columns)
    return spark.createDataFrame(
        [tuple(row.get(name) for name, _ in columns) for row in rows], schema
    )


def moment(broker: str, number: int, epoch: int = 1) -> dict[str, Any]:
    wall_ms = NOW_MS - (SAMPLES - 1 - number) * APART_MS
    return {"broker": broker, "epoch": epoch, "sample": number, "wall_ms": wall_ms}


def offset(
    group: str, number: int, state: tuple[int, int, int, int], **more: Any
) -> dict[str, Any]:
    end, popped, committed, in_flight = state
    row = moment("a", number) | {
        **{"group": group, "topic": "t", "read_topic": "t", "queue": 0},
        **dict.fromkeys(("fifo", "retry", "parked", "newest", "buffered"), False),
        **{"first": True, "min_offset": 0, "max_offset": end, "next_offset": popped},
        **{"committed_offset": committed, "ready": end - popped, "in_flight": in_flight},
        **{"blocked": 0, "expired": 0, "filtered": 0},
        **{"delivered": popped, "acked": committed},
    }
    return row | more


def kept(broker: str, count: int) -> dict[str, Any]:
    """The sample of topic t at a broker group that keeps so many messages of it."""
    return (
        moment(broker, SAMPLES - 1)
        | {"topic": "t", "queue": 0, "min_offset": 0, "max_offset": count, "stored": 0}
        | {"pending_timers": 0}
    )


def planned(spark: Any, offsets: list[dict[str, Any]], topics: list[dict[str, Any]]) -> Any:
    from popmq.reports.jobs import lag

    rules = lag.LagRules(window_ms=SAMPLES * APART_MS)
    timers = [moment(broker, number) for broker in "ab" for number in range(SAMPLES)]
    tables = (
        frame(spark, OFFSETS, offsets),
        frame(spark, TOPICS, topics),
        frame(spark, TIMERS, timers),
    )
    queues = lag.plan_queues(*tables, rules)
    return {row["group"]: row for row in lag.plan_groups(queues, *tables, rules).collect()}


def test_each_story_has_its_status(spark: Any) -> None:
    offsets = [
        offset(name, number, story(number))
        for name, story in STORIES.items()
        for number in range(SAMPLES)
    ]
    # Few messages, and nobody takes them.
    offsets += [
        offset("FORGOTTEN", number, (3, 0, 0, 0), oldest_ready_ms=NOW_MS - 3_600_000)
        for number in range(SAMPLES)
    ]
    offsets += [offset("NEW", number, (5_000, 0, 0, 0)) for number in range(6, SAMPLES)]
    # Another start of the broker, whose counters begin at 0: no speed comes out of the difference.
    restarted = [
        offset("RESTARTED", number, (1_000 * number, 1_000 * number, 1_000 * number, 0))
        for number in range(SAMPLES)
    ]
    for row in restarted[:5]:
        row |= {"epoch": 0, "delivered": row["delivered"] + 10**6, "acked": row["acked"] + 10**6}
    topics = [kept("a", 9_000), kept("b", 0)]
    result = planned(spark, offsets + restarted, topics)
    statuses = {name: row["status"] for name, row in result.items()}
    assert statuses.pop("FORGOTTEN") == "STOPPED"
    assert statuses.pop("NEW") == "UNKNOWN"
    assert statuses.pop("FALLS") == "OK"
    assert statuses.pop("RESTARTED") == "OK"
    assert statuses == {name: name for name in statuses}
    falls = result["FALLS"]
    assert (falls["lag"], falls["ready"]) == (11_000, 11_000)
    assert falls["in_rate"] == 0
    assert falls["ack_rate"] == pytest.approx(1_000 / 30)
    assert falls["eta_s"] == pytest.approx(11_000 / (1_000 / 30))
    assert result["WARN"]["eta_s"] is None, "never"
    assert result["RESTARTED"]["ack_rate"] == pytest.approx(1_000 / 30)
    assert result["FORGOTTEN"]["waits_ms"] == 3_600_000


def test_a_group_whose_messages_all_become_dead_letters_is_failing_with_a_lag_of_0(
    spark: Any,
) -> None:
    """Each message was delivered twice, and none was acked."""
    offsets = [
        offset(
            name,
            number,
            (200 * number, 200 * number, 200 * number, 0),
            delivered=400 * number,
            acked=acked * number,
        )
        for name, acked in (("FAILING", 0), ("RETRIES", 300), ("FEW RETRIES", 330))
        for number in range(SAMPLES)
    ]
    # Two of three deliveries are still in flight, which is no failure.
    offsets += [
        offset("IN FLIGHT", number, (300 * number, 300 * number, 100 * number, 200 * number))
        for number in range(SAMPLES)
    ]
    result = planned(spark, offsets, [kept("a", 9_000)])
    statuses = {name: row["status"] for name, row in result.items()}
    assert statuses.pop("RETRIES") == "FAILING"  # 25 % came back
    assert statuses.pop("FEW RETRIES") == "OK"
    assert statuses.pop("FAILING") == "FAILING"
    assert statuses.pop("IN FLIGHT") != "FAILING"
    assert result["FAILING"]["lag"] == 0
    assert result["FAILING"]["eta_s"] is None, "it is not done: nothing was acked"
    assert result["RETRIES"]["eta_s"] == 0


def stands(group: str, number: int, **more: Any) -> dict[str, Any]:
    """Three messages wait, and the consumer does nothing."""
    return offset(group, number, (3, 0, 0, 0), **more)


def test_an_age_counts_in_every_sample_in_which_the_same_message_waits(spark: Any) -> None:
    """Most samples lack the age, because the message is on the disk alone."""
    hour_ago = {"oldest_ready_ms": NOW_MS - 3_600_000}
    offsets = [
        stands(group, number, **(hour_ago if number == known else {}))
        for group, known in (("FIRST KNEW", 0), ("MIDDLE KNEW", 4), ("LAST KNEW", SAMPLES - 1))
        for number in range(SAMPLES)
    ]
    # Read from the committed offset, as groups that keep order are.
    offsets += [
        offset("IN ORDER", number, (9, 5, 2, 0), fifo=True, **(hour_ago if number == 1 else {}))
        for number in range(SAMPLES)
    ]
    result = planned(spark, offsets, [kept("a", 3)])
    assert {name: row["status"] for name, row in result.items()} == dict.fromkeys(result, "STOPPED")
    assert {row["waits_ms"] for row in result.values()} == {3_600_000}
    assert {row["unknown_ages"] for row in result.values()} == {0}


def test_an_age_that_no_sample_knows_is_unknown_and_not_ok(spark: Any) -> None:
    offsets = [stands("NEVER KNOWN", number) for number in range(SAMPLES)]
    for number in range(SAMPLES):
        # The age is that of a message which was taken meanwhile.
        moved = min(number, 5)
        age = {"oldest_ready_ms": NOW_MS - 3_600_000} if number == 0 else {}
        offsets.append(offset("MOVED", number, (50, moved, moved, 0), **age))
        # Nothing is ready, so there is no age to know.
        offsets.append(offset("IDLE", number, (50, 50, 50, 0)))
        # The newest message is young, whatever was unknown before.
        age = {"oldest_ready_ms": NOW_MS - 10_000} if number == SAMPLES - 1 else {}
        offsets.append(offset("YOUNG", number, (5 + number, 2 + number, 2 + number, 0), **age))
        # The newest age is unknown, though the group works.
        offsets.append(offset("WORKS", number, (5 + number, 2 + number, 2 + number, 0)))
        # So far behind that the age does not matter.
        offsets.append(offset("BEHIND", number, (5_000, 0, 0, 0)))
    result = planned(spark, offsets, [kept("a", 3)])
    assert {name: row["status"] for name, row in result.items()} == {
        "NEVER KNOWN": "UNKNOWN",
        "MOVED": "UNKNOWN",
        "IDLE": "OK",
        "YOUNG": "OK",
        "WORKS": "UNKNOWN",
        "BEHIND": "STOPPED",
    }
    assert result["NEVER KNOWN"]["waits_ms"] is None
    assert result["NEVER KNOWN"]["unknown_ages"] == result["MOVED"]["unknown_ages"] == 1
    assert result["IDLE"]["unknown_ages"] == 0


def test_messages_of_unknown_age_at_a_broker_group_not_read_yet_are_not_ok(spark: Any) -> None:
    offsets = [offset("g", number, (50, 50, 50, 0)) for number in range(SAMPLES)]
    result = planned(spark, offsets, [kept("a", 50), kept("b", 7)])
    row = result["g"]
    assert (row["lag"], row["ready"], row["status"], row["unknown_ages"]) == (7, 7, "UNKNOWN", 1)
    result = planned(spark, offsets, [kept("a", 50), kept("b", 0)])
    assert result["g"]["status"] == "OK"


def test_the_revive_report_calls_failing_what_the_lag_report_does(spark: Any) -> None:
    from popmq.reports.jobs import revive

    columns = ("group", "acked", "retried", "returned", "dead_lettered")
    groups = [
        ("all dead letters", 0, 10, 0, 20),
        ("good", 40, 0, 0, 0),
        ("19 percent", 41, 5, 5, 0),
        ("20 percent", 40, 5, 5, 0),
        ("nine", 0, 9, 0, 0),
    ]
    frame = spark.createDataFrame(groups, columns)
    rows = frame.withColumn("status", revive._status(revive.ReviveRules({}, {}))).collect()
    failing = {row["group"] for row in rows if row["status"] == "FAILING"}
    assert failing == {"all dead letters", "20 percent"}
