"""Lag: what each group has still to do, how fast it does it, and whether that is well.

Counts are of the newest sample of each broker group; speeds and statuses are of the samples
before it.  Statuses follow Burrow's idea, on samples that come by the clock instead of on commits.
"""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import functions as F

DataFrame = Any
Column = Any

# Worst last.
STATUSES = ("OK", "UNKNOWN", "REWIND", "WARN", "STALLED", "STOPPED")
PAIR = ("group", "topic")
QUEUE = ("broker", "group", "topic", "read_topic", "queue")
SAMPLE = ("broker", "epoch", "sample")
_GROWING = 1.01  # a group that acks only this much faster than messages come never gets there


@dataclass(frozen=True, slots=True)
class LagRules:
    window_ms: int = 300_000
    samples: int = 10  # that a status looks at, the newest
    least: int = 5  # with fewer it is UNKNOWN
    allowed: int = 100  # messages of lag in a queue that are well
    allowed_ms: int = 60_000  # age of its oldest ready message that is well


def plan_groups(
    queues: DataFrame, offsets: DataFrame, topics: DataFrame, timers: DataFrame, rules: LagRules
) -> DataFrame:
    """One row for each group in each topic, over all broker groups; the worst first.

    `queues` is what `plan_queues` made of the same tables.
    """
    rates = _rates(offsets, timers, rules)
    own = F.when(~F.col("retry") & ~F.col("parked"), F.col("lag"))
    found = queues.groupBy(*PAIR).agg(
        *(F.sum(name).alias(name) for name in ("lag", "ready", "in_flight", "blocked")),
        F.sum(F.when(F.col("retry"), F.col("ready")).otherwise(0)).alias("retries"),
        F.sum("expired").alias("expired"),
        F.min("oldest_ready_ms").alias("oldest_ready_ms"),
        F.max("waits_ms").alias("waits_ms"),
        F.max("level").alias("level"),
        F.sum(F.when(F.col("level") > 0, 1).otherwise(0)).cast("bigint").alias("queues_not_ok"),
        F.try_divide(F.max(own), F.avg(own)).alias("skew"),
    )
    gain = F.col("ack_rate") - F.col("in_rate")
    pending = _newest(topics, timers).groupBy("topic").agg(F.sum("pending_timers").alias("delayed"))
    return (
        found.join(rates, list(PAIR), "left")
        .join(pending, "topic", "left")
        .withColumn(
            "eta_s",
            F.when(F.col("lag") <= 0, F.lit(0.0)).when(
                F.col("ack_rate") > _GROWING * F.col("in_rate"), F.try_divide("lag", gain)
            ),
        )
        .withColumn("status", _word(F.col("level")))
        .select(
            *PAIR,
            *("status", "lag", "ready", "in_flight", "blocked", "retries", "delayed", "expired"),
            *("waits_ms", "oldest_ready_ms", "in_rate", "pop_rate", "ack_rate", "eta_s", "skew"),
            *("queues_not_ok", "level"),
        )
        .orderBy(F.desc("level"), F.desc("lag"), *PAIR)
    )


def plan_queues(
    offsets: DataFrame, topics: DataFrame, timers: DataFrame, rules: LagRules
) -> DataFrame:
    """One row for each queue that a group reads, as it is in the newest sample."""
    lag = F.col("ready") + F.col("in_flight") + F.col("blocked")
    newest = _newest(offsets, timers).withColumn("lag", lag)
    newest = newest.unionByName(_never_met(newest, _newest(topics, timers)), True)
    statuses = _statuses(offsets, timers, rules)
    waits = F.when(
        F.col("oldest_ready_ms").isNotNull(),
        F.greatest(F.lit(0), F.col("wall_ms") - F.col("oldest_ready_ms")),
    )
    return (
        newest.join(statuses, list(QUEUE), "left")
        .withColumn("waits_ms", waits)
        .withColumn("level", F.coalesce(F.col("level"), F.lit(STATUSES.index("UNKNOWN"))))
        .withColumn("level", F.when(_well(rules), F.lit(0)).otherwise(F.col("level")))
        .withColumn("status", _word(F.col("level")))
        .select(
            *QUEUE,
            *("retry", "parked", "fifo", "status", "lag", "ready", "in_flight", "blocked"),
            *("expired", "min_offset", "max_offset", "next_offset", "committed_offset"),
            *("oldest_ready_ms", "waits_ms", "level"),
        )
    )


def plan_dead_letters(topics: DataFrame, timers: DataFrame) -> DataFrame:
    """Dead letters that are kept, by group."""
    prefix = "%DLQ%"
    return (
        _newest(topics, timers)
        .where(F.col("topic").startswith(prefix))
        .withColumn("group", F.substring(F.col("topic"), len(prefix) + 1, 1_000))
        .groupBy("group")
        .agg(F.sum(F.col("max_offset") - F.col("min_offset")).alias("dead_letters"))
        .orderBy(F.desc("dead_letters"), "group")
    )


def plan_topics(topics: DataFrame, timers: DataFrame) -> DataFrame:
    """What each topic keeps: messages, and timers that wait for their time."""
    return (
        _newest(topics, timers)
        .where(~F.col("topic").startswith("%"))
        .groupBy("topic")
        .agg(
            F.count("*").alias("queues"),
            F.sum("max_offset").alias("stored"),
            F.sum(F.col("max_offset") - F.col("min_offset")).alias("kept"),
            F.sum("pending_timers").alias("delayed"),
        )
        .orderBy("topic")
    )


def plan_history(offsets: DataFrame, rules: LagRules) -> DataFrame:
    """The lag of each pair over time, for charts: one row a sample, broker groups apart."""
    lag = F.col("ready") + F.col("in_flight") + F.col("blocked")
    return (
        offsets.groupBy(*SAMPLE, *PAIR)
        .agg(F.max("wall_ms").alias("wall_ms"), F.sum(lag).alias("lag"))
        .orderBy(*PAIR, "broker", "wall_ms")
    )


# -- inside


def _moments(timers: DataFrame) -> DataFrame:
    """The newest sample of each broker group: every sample has rows of timers."""
    newest = F.max(F.struct("epoch", "sample", "wall_ms")).alias("newest")
    return timers.groupBy("broker").agg(newest).select("broker", "newest.*")


def _newest(table: DataFrame, timers: DataFrame) -> DataFrame:
    moments = _moments(timers).drop("wall_ms")
    return table.join(F.broadcast(moments), list(SAMPLE), "left_semi")


def _never_met(newest: DataFrame, topics: DataFrame) -> DataFrame:
    """What a group reads at one broker group it reads at all: messages wait there as well."""
    pairs = newest.groupBy(*PAIR).agg(F.max("newest").alias("newest"))
    met = newest.select("broker", *PAIR).distinct()
    places = topics.select(
        *("broker", "topic", "queue", "min_offset", "max_offset", "epoch", "sample", "wall_ms")
    )
    kept = F.when(F.col("newest"), F.lit(0)).otherwise(F.col("max_offset") - F.col("min_offset"))
    return (
        places.join(pairs, "topic")
        .join(met, ["broker", *PAIR], "left_anti")
        .withColumn("ready", kept.cast("bigint"))
        .withColumn("lag", F.col("ready"))
        .withColumn("read_topic", F.col("topic"))
        .withColumn("next_offset", F.col("min_offset"))
        .withColumn("committed_offset", F.col("min_offset"))
        .select(
            *("*",),
            *(F.lit(False).alias(name) for name in ("retry", "parked", "fifo")),
            *(F.lit(0).cast("bigint").alias(name) for name in ("in_flight", "blocked", "expired")),
        )
        .drop("newest")
    )


def _in_window(table: DataFrame, timers: DataFrame, rules: LagRules) -> DataFrame:
    moments = _moments(timers).select("broker", F.col("wall_ms").alias("now_ms"))
    return table.join(F.broadcast(moments), "broker").where(
        F.col("wall_ms") > F.col("now_ms") - rules.window_ms
    )


def _rates(offsets: DataFrame, timers: DataFrame, rules: LagRules) -> DataFrame:
    """Per second, over the window: of messages that came, were delivered and were acked.

    Increases are of one start of a broker each, since its counters begin at 0 with it.
    """
    window = _in_window(offsets, timers, rules)
    came = F.when(~F.col("retry") & ~F.col("parked"), F.col("max_offset")).otherwise(0)
    sums = window.groupBy(*SAMPLE, *PAIR).agg(
        F.sum(came).alias("came"),
        F.sum("delivered").alias("delivered"),
        F.sum("acked").alias("acked"),
        F.max("wall_ms").alias("wall_ms"),
    )
    spans = sums.groupBy("broker", "epoch", *PAIR).agg(
        *(
            (F.max_by(name, "sample") - F.min_by(name, "sample")).alias(name)
            for name in ("came", "delivered", "acked")
        ),
        ((F.max("wall_ms") - F.min("wall_ms")) / 1_000).alias("seconds"),
    )
    names = {"came": "in_rate", "delivered": "pop_rate", "acked": "ack_rate"}
    by_broker = spans.groupBy("broker", *PAIR).agg(
        *(F.try_divide(F.sum(name), F.sum("seconds")).alias(rate) for name, rate in names.items())
    )
    return by_broker.groupBy(*PAIR).agg(*(F.sum(rate).alias(rate) for rate in names.values()))


def _statuses(offsets: DataFrame, timers: DataFrame, rules: LagRules) -> DataFrame:
    """A level for each queue: the number of its status."""
    lag = F.col("ready") + F.col("in_flight") + F.col("blocked")
    state = F.struct(
        *("epoch", "sample", "wall_ms"),
        lag.alias("lag"),
        F.col("in_flight"),
        F.col("next_offset").alias("popped"),
        F.col("committed_offset").alias("committed"),
        F.coalesce(F.col("wall_ms") - F.col("oldest_ready_ms"), F.lit(0)).alias("waits"),
    )
    rows = (
        _in_window(offsets, timers, rules)
        .groupBy(*QUEUE)
        .agg(F.sort_array(F.collect_list(state)).alias("s"))
        .withColumn("s", F.slice("s", F.greatest(F.lit(1), F.size("s") - rules.samples + 1), 1_000))
        .withColumn("n", F.size("s"))
    )
    first, last = F.col("s")[0], F.element_at("s", -1)
    busy = F.forall(
        "s",
        lambda one: (one["lag"] > rules.allowed) | (one["waits"] > rules.allowed_ms),
    )
    unpopped = last["popped"] == first["popped"]
    idle = F.forall("s", lambda one: one["in_flight"] == 0)
    stuck = last["committed"] == first["committed"]
    back = last["committed"] < F.array_max(F.transform("s", lambda one: one["committed"]))
    grows = F.aggregate(
        F.zip_with(F.col("s.lag"), F.expr("slice(s.lag, 2, 1000)"), lambda a, b: b >= a),
        F.lit(True),
        lambda all_, one: all_ & F.coalesce(one, F.lit(True)),
    )
    level = (
        F.when(F.col("n") < rules.least, STATUSES.index("UNKNOWN"))
        .when(busy & unpopped & idle, STATUSES.index("STOPPED"))
        .when(busy & stuck, STATUSES.index("STALLED"))
        .when(back, STATUSES.index("REWIND"))
        .when(busy & (grows | (_slope() > 0)), STATUSES.index("WARN"))
        .otherwise(0)
    )
    return rows.withColumn("level", level).select(*QUEUE, "level")


def _slope() -> Column:
    """Sign of the least squares line through lag by sample."""
    middle = (F.col("n") - 1) / 2
    terms = F.transform("s", lambda one, at: (at - middle) * one["lag"])
    return F.aggregate(terms, F.lit(0.0), lambda total, one: total + one)


def _well(rules: LagRules) -> Column:
    waits = F.coalesce(F.col("waits_ms"), F.lit(0))
    return (F.col("lag") <= rules.allowed) & (waits <= rules.allowed_ms)


def _word(level: Column) -> Column:
    return F.element_at(F.array(*map(F.lit, STATUSES)), level + 1)
