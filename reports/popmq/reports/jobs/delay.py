"""Delay: how punctual delayed messages were, by topic and hour, out of their firing records."""

from typing import Any

from pyspark.sql import functions as F

DataFrame = Any
_PERCENTILES = (0.5, 0.95, 0.99)


def plan_topics(fired: DataFrame) -> DataFrame:
    """One row for each topic, the latest first."""
    return _late(fired, "topic").orderBy(F.desc("late_max_ms"), "topic")


def plan_hours(fired: DataFrame) -> DataFrame:
    """One row for each topic and hour of the due time."""
    hour = F.date_trunc("hour", F.timestamp_millis("due_ms"))
    return _late(fired.withColumn("hour", hour), "topic", "hour").orderBy("topic", "hour")


def plan_waiting(timers: DataFrame) -> DataFrame:
    """Timers that wait, by how far ahead they are due, in the newest sample of each broker."""
    newest = timers.groupBy("broker").agg(F.max(F.struct("epoch", "sample")).alias("newest"))
    newest = newest.select("broker", "newest.*")
    windows = timers.join(F.broadcast(newest), ["broker", "epoch", "sample"], "left_semi")
    within = F.when(F.col("key") > 0, F.col("key") / 1_000).alias("within_s")
    return (
        windows.where(F.col("kind") == "DUE_WITHIN")
        .groupBy(within)
        .agg(F.sum("count").alias("timers"))
        .orderBy(F.asc_nulls_last("within_s"))
    )


def _late(fired: DataFrame, *by: str) -> DataFrame:
    late = F.col("lateness_ms")
    shares = F.percentile(late, F.array(*map(F.lit, _PERCENTILES)))
    totals = fired.groupBy(*by).agg(
        F.count("*").alias("fired"),
        F.sum(F.when(late < 0, 1).otherwise(0)).cast("bigint").alias("early"),
        F.sum(F.when(late > 1_000, 1).otherwise(0)).cast("bigint").alias("over_1s"),
        F.avg(late).alias("late_mean_ms"),
        shares.alias("shares"),
        F.max(late).alias("late_max_ms"),
    )
    return totals.select(
        *by,
        "fired",
        "early",
        "over_1s",
        "late_mean_ms",
        *(
            F.col("shares")[at].alias(f"late_p{round(100 * share)}_ms")
            for at, share in enumerate(_PERCENTILES)
        ),
        "late_max_ms",
    )
