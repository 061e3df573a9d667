"""Statuses, speeds and the time until it is done, out of samples that tell a story each."""

from collections.abc import Callable
from typing import Any

import pytest

from popmq.reports.tables import OFFSETS, TIMERS, TOPICS

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

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
    topics = [
        moment(broker, SAMPLES - 1)
        | {"topic": "t", "queue": 0, "min_offset": 0, "max_offset": count, "stored": 0}
        | {"pending_timers": 0}
        for broker, count in (("a", 9_000), ("b", 7))
    ]
    found = planned(spark, offsets + restarted, topics)
    statuses = {name: row["status"] for name, row in found.items()}
    assert statuses.pop("FORGOTTEN") == "STOPPED"
    assert statuses.pop("NEW") == "UNKNOWN"
    assert statuses.pop("FALLS") == "OK"
    assert statuses.pop("RESTARTED") == "OK"
    assert statuses == {name: name for name in statuses}
    falls = found["FALLS"]
    # 11,000 in broker group a, and 7 that wait in b, to which the group has not come yet.
    assert (falls["lag"], falls["ready"]) == (11_007, 11_007)
    assert falls["in_rate"] == 0
    assert falls["ack_rate"] == pytest.approx(1_000 / 30)
    assert falls["eta_s"] == pytest.approx(11_007 / (1_000 / 30))
    assert found["WARN"]["eta_s"] is None, "never"
    assert found["RESTARTED"]["ack_rate"] == pytest.approx(1_000 / 30)
    assert found["FORGOTTEN"]["waits_ms"] == 3_600_000
