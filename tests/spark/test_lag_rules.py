"""Verdicts, speeds and the time until it is done, out of samples that tell a story each."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from popmq.common.metric_table import verdicts
from popmq.common.metric_table.verdicts import Facts, Verdict, VerdictRules
from popmq.reports.records.tables import OFFSETS, TIMERS, TOPICS

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

NOW_MS = 1_700_000_000_000
SAMPLES = 10
APART_MS = 30_000
HOUR_AGO = {"oldest_ready_ms": NOW_MS - 3_600_000}
SOON = {"oldest_ready_ms": NOW_MS - 10_000}

# A story: of sample n, (max offset, next to pop, committed, in flight).
Story = Callable[[int], tuple[int, int, int, int]]
STORIES: dict[str, Story] = {
    "OK": lambda n: (1_000 * n, 1_000 * n, 1_000 * n - 20, 20),
    "STOPPED": lambda n: (5_000 + 100 * n, 1_000, 1_000, 0),
    "STUCK": lambda n: (9_000, 1_000 + 50 * n, 1_000, 50 * n),
    "BEHIND": lambda n: (1_000 * n + 2_000, 500 * n, 500 * n, 0),
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
        **{"delivered": popped, "acked": committed, "returned": 0, "dead": 0},
    }
    return row | more


def kept(broker: str, count: int) -> dict[str, Any]:
    """The sample of topic t at a broker group that keeps so many messages of it."""
    return (
        moment(broker, SAMPLES - 1)
        | {"topic": "t", "queue": 0, "min_offset": 0, "max_offset": count, "stored": 0}
        | {"pending_timers": 0}
    )


def planned(
    spark: Any, offsets: list[dict[str, Any]], topics: list[dict[str, Any]], **given: Any
) -> Any:
    from popmq.reports.jobs import lag

    rules = lag.LagRules(**given)
    timers = [moment(broker, number) for broker in "ab" for number in range(SAMPLES)]
    timers += [moment("a", number, epoch=0) for number in range(5)]
    tables = (
        frame(spark, OFFSETS, offsets),
        frame(spark, TOPICS, topics),
        frame(spark, TIMERS, timers),
    )
    queues = lag.plan_queues(*tables, rules)
    return {row["group"]: row for row in lag.plan_groups(queues, *tables, rules).collect()}


def statuses(result: Any) -> dict[str, str]:
    return {name: row["status"] for name, row in result.items()}


def test_spark_and_brokers_judge_by_one_table(spark: Any) -> None:
    """Each combination of facts on both sides of every bound."""
    from popmq.reports.jobs import lag

    values = {
        "watched_ms": (59_999, 60_000),
        "lag": (0, 50),
        "ready": (0, 40),
        "age_ms": (60_000, 60_001),
        "unknown_ages": (0, 1),
        "delivered": (0, 100),
        "acked": (0, 40, 41),
        "returned": (0, 4),
        "dead": (0, 6),
        "moved": (0, 1),
        "standing": (0, 1),
    }
    assert tuple(values) == Facts._fields
    facts = [Facts(*each) for each in product(*values.values())]
    rules = VerdictRules()
    table = spark.createDataFrame(facts, ", ".join(f"{name} bigint" for name in values))
    columns = lag.LagRules()
    rows = table.withColumn("level", lag.verdict_of(lag.own_rules(columns))).collect()
    judged_by_spark = {Facts(*row[:-1]): Verdict(row["level"]) for row in rows}
    assert judged_by_spark == {each: verdicts.verdict_of(each, rules) for each in facts}
    assert set(judged_by_spark.values()) == set(Verdict)


def test_each_story_has_its_verdict(spark: Any) -> None:
    offsets = [
        offset(name, number, story(number), **(HOUR_AGO if name == "BEHIND" else SOON))
        for name, story in STORIES.items()
        for number in range(SAMPLES)
    ]
    # Few messages, and nobody takes them.
    offsets += [offset("FORGOTTEN", number, (3, 0, 0, 0), **HOUR_AGO) for number in range(SAMPLES)]
    offsets += [offset("NEW", number, (5_000, 0, 0, 0), **SOON) for number in range(8, SAMPLES)]
    # A pull consumer receives and acks nothing: its offset moves.
    offsets += [
        offset("PULLS", number, (5_000, 9 * number, 9 * number, 0), delivered=0, acked=0, **SOON)
        for number in range(SAMPLES)
    ]
    offsets += [
        offset("FALLS", number, (20_000, 1_000 * number, 1_000 * number, 0), **SOON)
        for number in range(SAMPLES)
    ]
    # Another start of the broker, whose counters begin at 0: no speed comes out of the difference.
    restarted = [
        offset("RESTARTED", number, (1_000 * number, 1_000 * number, 1_000 * number, 0))
        for number in range(SAMPLES)
    ]
    for row in restarted[:5]:
        row |= {"epoch": 0, "delivered": row["delivered"] + 10**6, "acked": row["acked"] + 10**6}
    topics = [kept("a", 9_000), kept("b", 0)]
    result = planned(spark, offsets + restarted, topics)
    assert statuses(result) == {name: name for name in STORIES} | {
        **{"FORGOTTEN": "STOPPED", "NEW": "UNKNOWN", "PULLS": "OK", "FALLS": "OK"},
        "RESTARTED": "OK",
    }
    assert list(result)[:3] == ["STOPPED", "FORGOTTEN", "STUCK"], "the most urgent first"
    falls = result["FALLS"]
    assert (falls["lag"], falls["ready"]) == (11_000, 11_000)
    assert falls["in_rate"] == 0
    assert falls["ack_rate"] == pytest.approx(1_000 / 30)
    assert falls["eta_s"] == pytest.approx(11_000 / (1_000 / 30))
    assert result["BEHIND"]["eta_s"] is None, "never"
    assert result["RESTARTED"]["ack_rate"] == pytest.approx(1_000 / 30)
    assert result["FORGOTTEN"]["waits_ms"] == 3_600_000
    assert result["STUCK"]["standing"] == 1


def test_a_queue_stands_when_its_offset_did_not_move_for_two_minutes(spark: Any) -> None:
    def waits_since(sample: int) -> Story:
        return lambda n: (9_000, 1_000 + 50 * n, 1_000 * min(n, sample), 50)

    offsets = [
        offset(name, number, waits_since(since)(number), **SOON)
        for name, since in (("FOUR", SAMPLES - 5), ("THREE", SAMPLES - 4))
        for number in range(SAMPLES)
    ]
    # Busy again after it had nothing to do: that is no standstill.
    offsets += [
        offset("AGAIN", number, (50, 50, 50, int(number != SAMPLES - 2)))
        for number in range(SAMPLES)
    ]
    verdicts_by_group = statuses(planned(spark, offsets, [kept("a", 9_000)]))
    assert verdicts_by_group == {"FOUR": "STUCK", "THREE": "OK", "AGAIN": "OK"}


def ends(name: str, acked: int, dead: int, returned: int, **more: Any) -> list[dict[str, Any]]:
    """So many in each sample, of a group with nothing left to do."""
    return [
        offset(
            name,
            number,
            (200 * number, 200 * number, 200 * number, 0),
            **{"delivered": 400 * number, "acked": acked * number},
            **{"returned": returned * number, "dead": dead * number},
            **more,
        )
        for number in range(SAMPLES)
    ]


def test_a_group_whose_messages_all_become_dead_letters_is_failing_with_a_lag_of_0(
    spark: Any,
) -> None:
    offsets = ends("FAILING", 0, 200, 200) + ends("RETRIES", 300, 0, 100)
    offsets += ends("FEW RETRIES", 330, 0, 70)
    # All of it since the sample before this one, which does not know the pair.
    offsets += ends("SUDDEN", 0, 10, 10)[-1:]
    result = planned(spark, offsets, [kept("a", 9_000)])
    assert statuses(result) == {
        **{"FAILING": "FAILING", "RETRIES": "FAILING", "SUDDEN": "FAILING"},
        "FEW RETRIES": "OK",
    }
    assert result["FAILING"]["lag"] == 0
    assert result["FAILING"]["eta_s"] is None, "it is not done: nothing was acked"
    assert result["RETRIES"]["eta_s"] == 0


def test_samples_of_a_broker_from_before_it_counted_ends_are_judged_without_them(
    spark: Any,
) -> None:
    offsets = [row | {"returned": None, "dead": None} for row in ends("OLD", 0, 0, 0)]
    assert statuses(planned(spark, offsets, [kept("a", 9_000)])) == {"OLD": "OK"}


def test_each_broker_group_is_judged_by_its_own_settings(spark: Any) -> None:
    offsets = ends("a alone", 95, 5, 0)
    offsets += [row | {"broker": "b", "group": "b alone"} for row in ends("", 95, 5, 0)]
    rules = {"b": VerdictRules(failing_percent=5, failing_least=3)}
    result = planned(spark, offsets, [kept("a", 0), kept("b", 0)], of_brokers=rules)
    assert statuses(result) == {"a alone": "OK", "b alone": "FAILING"}


def test_rare_samples_are_compared_with_the_one_before_the_five_minutes(spark: Any) -> None:
    from popmq.reports.jobs import lag

    hours = [NOW_MS - hours * 3_600_000 for hours in (2, 1, 0)]
    offsets = [
        offset("g", number, (5_000, 1_000, 1_000, 0), **SOON)
        | {"wall_ms": wall_ms, "delivered": 0 if number == 0 else 1_000}
        for number, wall_ms in enumerate(hours)
    ]
    timers = [moment("a", number) | {"wall_ms": wall_ms} for number, wall_ms in enumerate(hours)]
    tables = (
        frame(spark, OFFSETS, offsets),
        frame(spark, TOPICS, [kept("a", 5_000) | {"sample": 2}]),
        frame(spark, TIMERS, timers),
    )
    rules = lag.LagRules()
    queues = lag.plan_queues(*tables, rules)
    (row,) = lag.plan_groups(queues, *tables, rules).collect()
    assert row["status"] == "STOPPED", "of the last hour, not of the last two"


def stands(group: str, number: int, **more: Any) -> dict[str, Any]:
    """Three messages wait, and the consumer does nothing."""
    return offset(group, number, (3, 0, 0, 0), **more)


def test_an_age_counts_in_every_sample_in_which_the_same_message_waits(spark: Any) -> None:
    """Most samples lack the age, because the message is on the disk alone."""
    offsets = [
        stands(group, number, **(HOUR_AGO if number == known else {}))
        for group, known in (("FIRST KNEW", 0), ("MIDDLE KNEW", 4), ("LAST KNEW", SAMPLES - 1))
        for number in range(SAMPLES)
    ]
    # Read from the committed offset, as groups that keep order are.
    offsets += [
        offset("IN ORDER", number, (9, 5, 2, 0), fifo=True, **(HOUR_AGO if number == 1 else {}))
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
        age = HOUR_AGO if number == 0 else {}
        offsets.append(offset("MOVED", number, (50, moved, moved, 0), **age))
        # Nothing is ready, so there is no age to know.
        offsets.append(offset("IDLE", number, (50, 50, 50, 0)))
        # The newest message is young, whatever was unknown before.
        age = SOON if number == SAMPLES - 1 else {}
        offsets.append(offset("YOUNG", number, (5 + number, 2 + number, 2 + number, 0), **age))
        # The newest age is unknown, though the group works.
        offsets.append(offset("WORKS", number, (5 + number, 2 + number, 2 + number, 0)))
    result = planned(spark, offsets, [kept("a", 3)])
    assert statuses(result) == {
        "NEVER KNOWN": "STOPPED",  # whatever its age is
        "MOVED": "UNKNOWN",
        "IDLE": "OK",
        "YOUNG": "OK",
        "WORKS": "UNKNOWN",
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
