"""Revive: what became of deliveries, out of check points, acks, retries and dead letters.

A delivery whose reply nobody took is undone, and counts as none.  Times are log time of one broker
group each.  Groups with buffered check points leave few records,
so only their retries and dead letters are told.
"""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import functions as F

DataFrame = Any
Column = Any

PAIR = ("group", "topic")
DELIVERY = ("broker", "epoch", "sequence")
_HOPS = 3  # of pointers to pointers: changes of up to 8 in a row lead to their delivery
_END = ("kind", "messages", "log_ms", "attempt", "reason", "queue", "start_offset")
_ENDS = ("ACK", "RETRY", "DEAD", "RETURNED", "LOST", "UNDONE")
COUNTS = {one: one.lower() for one in _ENDS} | {
    "ACK": "acked",
    "RETRY": "retried",
    "DEAD": "dead_lettered",
}
_PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class ReviveRules:
    """`now_log_ms` by broker group, and since when events count (0: all that is kept)."""

    now_log_ms: dict[str, int]
    since_log_ms: dict[str, int]
    silent_ms: int = 60_000  # a consumer that holds messages and acked none for longer is stuck


def plan_ends(revive: DataFrame) -> DataFrame:
    """Each end of deliveries with the delivery that it ends; one row for each record."""
    opened = revive.where(F.col("kind").isin("CHECK_POINT", "CHANGE")).select(
        *DELIVERY,
        *PAIR,
        *("kind", "client", "revive_at_ms", "old_epoch", "old_sequence"),
        F.col("log_ms").alias("opened_ms"),
    )
    ends = revive.where(F.col("kind").isin(*_ENDS)).select(
        *DELIVERY,
        *_END,
        *(F.col(name).alias(f"end_{name}") for name in PAIR),
    )
    known = _delivered(opened)
    return ends.join(known, list(DELIVERY), "left").select(
        *DELIVERY,
        *_END,
        *(F.coalesce(F.col(name), F.col(f"end_{name}")).alias(name) for name in PAIR),
        *("client", "revive_at_ms", "popped_ms"),
    )


def plan_groups(revive: DataFrame, rules: ReviveRules) -> DataFrame:
    """One row for each group in each topic, most retried first."""
    counted = _since(revive, rules)
    deliveries = (
        counted.where(F.col("kind") == "CHECK_POINT")
        .groupBy(*PAIR)
        .agg(F.sum("messages").alias("delivered"))
    )
    changes = (
        counted.where(F.col("kind") == "CHANGE")
        .groupBy(*PAIR)
        .agg(F.sum("messages").alias("changed"))
    )
    ends = _since(plan_ends(revive), rules).where(F.col("group").isNotNull())
    late = F.when(F.col("kind").isin("RETRY", "RETURNED"), F.col("log_ms") - F.col("revive_at_ms"))
    taken = F.when(F.col("kind") == "ACK", F.col("log_ms") - F.col("popped_ms"))
    weights = F.col("messages").cast("bigint")
    by_end = ends.groupBy(*PAIR).agg(
        *(
            F.sum(F.when(F.col("kind") == kind, F.col("messages")).otherwise(0)).alias(name)
            for kind, name in COUNTS.items()
        ),
        _percentiles(taken, weights, "ack_ms"),
        F.max(taken).alias("ack_max_ms"),
        _percentiles(late, weights, "revive_late_ms"),
        F.max(late).alias("revive_late_max_ms"),
    )
    seconds = _span_s(counted)
    return (
        deliveries.join(by_end, list(PAIR), "full")
        .join(changes, list(PAIR), "left")
        .crossJoin(F.broadcast(seconds))
        .fillna(0, ["delivered", "changed", *COUNTS.values()])
        .withColumn("delivered", F.col("delivered") - F.col("undone"))
        .withColumn("retry_rate", F.try_divide("retried", "seconds"))
        .withColumn("retry_ratio", F.try_divide("retried", "delivered"))
        .select(
            *PAIR,
            *("delivered", *COUNTS.values(), "changed", "retry_rate", "retry_ratio"),
            *_apart("ack_ms"),
            "ack_max_ms",
            *_apart("revive_late_ms"),
            "revive_late_max_ms",
        )
        .orderBy(F.desc("retried"), F.desc("dead_lettered"), *PAIR)
    )


def plan_attempts(revive: DataFrame, rules: ReviveRules) -> DataFrame:
    """Of messages that came back: how many were delivered how often at most, by group."""
    message = ("broker", "group", "topic", "queue", "start_offset")
    return (
        _since(revive, rules)
        .where(F.col("kind").isin("RETRY", "DEAD"))
        .groupBy(*message)
        .agg(F.max("attempt").alias("attempts"))
        .groupBy("group", "attempts")
        .agg(F.count("*").alias("messages"))
        .orderBy("group", "attempts")
    )


def plan_dead_letters(revive: DataFrame, rules: ReviveRules, limit: int = 20) -> DataFrame:
    """The last dead letters."""
    return (
        _since(revive, rules)
        .where(F.col("kind") == "DEAD")
        .select(
            *("wall_time", "group", "topic", "queue"),
            F.col("start_offset").alias("offset"),
            *("attempt", "reason", "broker"),
        )
        .orderBy(F.desc("wall_time"), "group", "topic", "queue", "offset")
        .limit(limit)
    )


def plan_consumers(revive: DataFrame, rules: ReviveRules) -> DataFrame:
    """What each client got and did, those that hold messages and ack none first."""
    now = _by_broker(rules.now_log_ms)
    deliveries = (
        revive.where(F.col("kind") == "CHECK_POINT")
        .groupBy("broker", "group", "client")
        .agg(F.sum("messages").alias("delivered"), F.max("log_ms").alias("last_pop"))
    )
    ends = (
        plan_ends(revive)
        .where(F.col("client").isNotNull())
        .groupBy("broker", "group", "client")
        .agg(
            F.sum("messages").alias("ended"),
            F.sum(F.when(F.col("kind") == "UNDONE", F.col("messages")).otherwise(0)).alias(
                "undone"
            ),
            F.sum(F.when(F.col("kind") == "ACK", F.col("messages")).otherwise(0)).alias("acked"),
            F.max(F.when(F.col("kind") == "ACK", F.col("log_ms"))).alias("last_ack"),
        )
    )
    rows = deliveries.join(ends, ["broker", "group", "client"], "left").fillna(
        0, ["ended", "acked", "undone"]
    )
    return (
        rows.withColumn("pop_ago_s", (now - F.col("last_pop")) / 1_000)
        .withColumn("ack_ago_s", (now - F.col("last_ack")) / 1_000)
        .groupBy("group", "client")
        .agg(
            F.sum(F.col("delivered") - F.col("undone")).alias("delivered"),
            F.sum("acked").alias("acked"),
            F.sum(F.col("delivered") - F.col("ended")).alias("in_flight"),
            F.min("pop_ago_s").alias("pop_ago_s"),
            F.min("ack_ago_s").alias("ack_ago_s"),
        )
        .withColumn(
            "stuck",
            ((F.col("in_flight") > 0) | ((F.col("acked") == 0) & (F.col("delivered") > 0)))
            & (F.coalesce(F.col("ack_ago_s"), F.col("pop_ago_s")) > F.lit(rules.silent_ms / 1_000)),
        )
        .orderBy(F.desc("stuck"), F.desc("in_flight"), "group", "client")
    )


# -- inside


def _delivered(opened: DataFrame) -> DataFrame:
    """With the time of the delivery: a change delivers nothing, it goes on from another one."""
    known = opened.withColumn("popped_ms", F.col("opened_ms"))
    for _ in range(_HOPS):
        before = known.select(
            F.col("broker"),
            F.col("epoch").alias("old_epoch"),
            F.col("sequence").alias("old_sequence"),
            F.col("popped_ms").alias("before_ms"),
            F.col("old_epoch").alias("next_epoch"),
            F.col("old_sequence").alias("next_sequence"),
        )
        known = known.join(before, ["broker", "old_epoch", "old_sequence"], "left").select(
            *DELIVERY,
            *PAIR,
            *("kind", "client", "revive_at_ms", "opened_ms"),
            F.coalesce(F.col("before_ms"), F.col("popped_ms")).alias("popped_ms"),
            F.col("next_epoch").alias("old_epoch"),
            F.col("next_sequence").alias("old_sequence"),
        )
    return known.select(*DELIVERY, *PAIR, "client", "revive_at_ms", "popped_ms")


def _since(table: DataFrame, rules: ReviveRules) -> DataFrame:
    if not any(rules.since_log_ms.values()):
        return table
    return table.where(F.col("log_ms") >= _by_broker(rules.since_log_ms))


def _by_broker(values: dict[str, int]) -> Column:
    found = F.lit(0)
    for broker, value in sorted(values.items()):
        found = F.when(F.col("broker") == broker, F.lit(value)).otherwise(found)
    return found


def _span_s(table: DataFrame) -> DataFrame:
    spans = table.groupBy("broker").agg(
        ((F.max("log_ms") - F.min("log_ms")) / 1_000).alias("seconds")
    )
    return spans.agg(F.max("seconds").alias("seconds"))


def _percentiles(value: Column, weights: Column, name: str) -> Column:
    return F.percentile(value, F.array(*map(F.lit, _PERCENTILES)), weights).alias(name)


def _apart(name: str) -> list[Column]:
    return [
        F.col(name)[at].alias(name.replace("_ms", f"_p{round(100 * share)}_ms"))
        for at, share in enumerate(_PERCENTILES)
    ]
