"""Lag: what each group has still to do, how fast it does it, and whether that is healthy.

Counts are of the newest sample of each broker group, speeds are of the samples before it.  A status
is a verdict of the table that brokers judge by (`common/metric_table/verdicts.py`), on the samples
of its five minutes; of several broker groups the most urgent one counts.

A sample may lack the age of a queue's oldest ready message, its head.  The time at which a message
was stored does not change, so any sample in which the same head has a time fills that gap.  An age
that no sample has is unknown: it is never 0, and a group that it could make worse is not OK.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import or_
from typing import Any

from pyspark.sql import functions as F

from popmq.common.metric_table import verdicts
from popmq.common.metric_table.verdicts import Facts, Verdict, VerdictRules
from popmq.common.topics import DLQ_PREFIX, INTERNAL_PREFIXES

DataFrame = Any
Column = Any

PAIR = ("group", "topic")
QUEUE = ("broker", "group", "topic", "read_topic", "queue")
SAMPLE = ("broker", "epoch", "sample")
_ENDS = ("delivered", "acked", "returned", "dead")
_GROWING = 1.01  # a group that acks only this much faster than messages come never gets there


@dataclass(frozen=True, slots=True)
class LagRules:
    window_ms: int = 300_000  # of speeds
    of_brokers: Mapping[str, VerdictRules] = field(default_factory=dict)  # of verdicts


def plan_groups(
    queues: DataFrame, offsets: DataFrame, topics: DataFrame, timers: DataFrame, rules: LagRules
) -> DataFrame:
    """One row for each group in each topic, over all broker groups; the most urgent first.

    `queues` is what `plan_queues` made of the same tables.
    """
    rates = _rates(offsets, timers, rules)
    own = F.when(~F.col("retry") & ~F.col("parked"), F.col("lag"))
    totals = queues.groupBy(*PAIR).agg(
        *(F.sum(name).alias(name) for name in ("lag", "ready", "in_flight", "blocked")),
        F.sum(F.when(F.col("retry"), F.col("ready")).otherwise(0)).alias("retries"),
        F.sum("expired").alias("expired"),
        F.min("oldest_ready_ms").alias("oldest_ready_ms"),
        F.max("waits_ms").alias("waits_ms"),
        _count(_age_unknown()).alias("unknown_ages"),
        _count(F.col("stands")).alias("standing"),
        F.try_divide(F.max(own), F.avg(own)).alias("skew"),
    )
    gain = F.col("ack_rate") - F.col("in_rate")
    pending = newest(topics, timers).groupBy("topic").agg(F.sum("pending_timers").alias("delayed"))
    return (
        totals.join(rates, list(PAIR), "left")
        .join(pending, "topic", "left")
        .join(plan_verdicts(queues, offsets, timers, rules), list(PAIR))
        .withColumn("eta_s", F.when(F.col("acked") > 0, _eta(gain)))
        .select(
            *PAIR,
            "status",
            "lag",
            "ready",
            "in_flight",
            "blocked",
            "retries",
            "delayed",
            "expired",
            "waits_ms",
            "oldest_ready_ms",
            "unknown_ages",
            "standing",
            "in_rate",
            "pop_rate",
            "ack_rate",
            "eta_s",
            "skew",
            "level",
        )
        .orderBy(F.desc("level"), F.desc("lag"), *PAIR)
    )


def plan_verdicts(
    queues: DataFrame, offsets: DataFrame, timers: DataFrame, rules: LagRules
) -> DataFrame:
    """`status` of each group in each topic, and `level`: the larger, the more urgent."""
    now = queues.groupBy("broker", *PAIR).agg(
        *(F.sum(name).alias(name) for name in ("lag", "ready")),
        F.max("waits_ms").alias("age_ms"),
        _count(_age_unknown()).alias("unknown_ages"),
        _count(F.col("moved")).alias("moved"),
        _count(F.col("stands")).alias("standing"),
    )
    pairs = (
        now.join(_ended(offsets, timers), ["broker", *PAIR], "left")
        .fillna(0, list(Facts._fields))
        .withColumn("level", verdict_of(own_rules(rules)))
    )
    worst = pairs.groupBy(*PAIR).agg(F.max("level").alias("level"))
    words = F.array(*(F.lit(verdict.name) for verdict in Verdict))
    return worst.withColumn("status", F.element_at(words, F.col("level") + 1))


def verdict_of(rules: VerdictRules) -> Column:
    """The number of the verdict of a row that has a column for each of the facts."""
    facts = Facts(**{name: F.col(name) for name in Facts._fields})
    rows = (F.when(row.fits(facts, rules), F.lit(int(row.verdict))) for row in verdicts.TABLE)
    return F.coalesce(*rows, F.lit(int(Verdict.OK)))


def plan_queues(
    offsets: DataFrame, topics: DataFrame, timers: DataFrame, rules: LagRules
) -> DataFrame:
    """One row for each queue that a group reads, as it is in the newest sample; worst first."""
    lag = F.col("ready") + F.col("in_flight") + F.col("blocked")
    offsets = _with_known_ages(offsets)
    queues = newest(offsets, timers).withColumn("lag", lag)
    queues = queues.unionByName(_never_met(queues, newest(topics, timers)), True)
    waits = F.when(
        F.col("oldest_ready_ms").isNotNull(),
        F.greatest(F.lit(0), F.col("wall_ms") - F.col("oldest_ready_ms")),
    )
    return (
        queues.join(_fronts(offsets, timers), list(QUEUE), "left")
        .fillna(False, ["moved", "stands"])
        .withColumn("waits_ms", waits)
        .select(
            *QUEUE,
            "retry",
            "parked",
            "fifo",
            "stands",
            "lag",
            "ready",
            "in_flight",
            "blocked",
            "expired",
            "min_offset",
            "max_offset",
            "next_offset",
            "committed_offset",
            "oldest_ready_ms",
            "waits_ms",
            "moved",
        )
        .orderBy(F.desc("stands"), F.desc_nulls_last("waits_ms"), F.desc("lag"), *QUEUE)
    )


def plan_dead_letters(topics: DataFrame, timers: DataFrame) -> DataFrame:
    """Dead letters that are kept, by group."""
    return (
        newest(topics, timers)
        .where(F.col("topic").startswith(DLQ_PREFIX))
        .withColumn("group", F.substring(F.col("topic"), len(DLQ_PREFIX) + 1, 1_000))
        .groupBy("group")
        .agg(F.sum(F.col("max_offset") - F.col("min_offset")).alias("dead_letters"))
        .orderBy(F.desc("dead_letters"), "group")
    )


def plan_topics(topics: DataFrame, timers: DataFrame) -> DataFrame:
    """What each topic keeps: messages, and timers that wait for their time."""
    return (
        newest(topics, timers)
        .where(~reduce(or_, (F.col("topic").startswith(prefix) for prefix in INTERNAL_PREFIXES)))
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
    """The lag of each pair over time, for charts: one row for each sample of a broker group."""
    lag = F.col("ready") + F.col("in_flight") + F.col("blocked")
    return (
        offsets.groupBy(*SAMPLE, *PAIR)
        .agg(F.max("wall_ms").alias("wall_ms"), F.sum(lag).alias("lag"))
        .orderBy("wall_ms", "broker", *PAIR)
    )


# -- inside


def _moments(timers: DataFrame) -> DataFrame:
    """The newest sample of each broker group: every sample has rows of timers."""
    newest = F.max(F.struct("epoch", "sample", "wall_ms")).alias("newest")
    return timers.groupBy("broker").agg(newest).select("broker", "newest.*")


def newest(table: DataFrame, timers: DataFrame) -> DataFrame:
    """Of a sampled table, the rows of the newest sample."""
    moments = _moments(timers).drop("wall_ms")
    return table.join(F.broadcast(moments), list(SAMPLE), "left_semi")


def _never_met(queues: DataFrame, topics: DataFrame) -> DataFrame:
    """What a group reads at one broker group it reads at all: messages wait there as well."""
    pairs = queues.groupBy(*PAIR).agg(F.max("newest").alias("newest"))
    met = queues.select("broker", *PAIR).distinct()
    places = topics.select(
        "broker", "topic", "queue", "min_offset", "max_offset", "epoch", "sample", "wall_ms"
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
            "*",
            *(F.lit(False).alias(name) for name in ("retry", "parked", "fifo")),
            *(F.lit(0).cast("bigint").alias(name) for name in ("in_flight", "blocked", "expired")),
        )
        .drop("newest")
    )


def _judged(offsets: DataFrame, timers: DataFrame) -> DataFrame:
    """The samples that verdicts look at: of the newest start of each broker group, back to `from`.

    That is the oldest one of the last five minutes; where samples are so rare that it tells
    nothing, the newest one before them.
    """
    now = _moments(timers).select("broker", "epoch", F.col("wall_ms").alias("now_ms"))
    ago = F.col("now_ms") - F.col("wall_ms")
    watched_ms = VerdictRules().watched_ms
    recent = F.when(ago.between(watched_ms, verdicts.WINDOW_MS), F.col("wall_ms"))
    before = F.when(ago > verdicts.WINDOW_MS, F.col("wall_ms"))
    begin = F.coalesce(F.min(recent), F.max(before), F.min("wall_ms"))
    spans = (
        timers.join(F.broadcast(now), ["broker", "epoch"])
        .groupBy("broker", "epoch", "now_ms")
        .agg(begin.alias("from_ms"))
    )
    return offsets.join(F.broadcast(spans), ["broker", "epoch"]).where(
        F.col("wall_ms") >= F.col("from_ms")
    )


def _ended(offsets: DataFrame, timers: DataFrame) -> DataFrame:
    """Of each pair at each broker group: for how long it was watched, and what ended meanwhile."""
    samples = (
        _judged(offsets, timers)
        .groupBy("broker", *PAIR, "sample", "wall_ms", "now_ms", "from_ms")
        .agg(*(F.sum(F.coalesce(name, F.lit(0))).alias(name) for name in _ENDS))
    )
    # A pair that an earlier sample does not have did nothing before that.
    known = F.min("wall_ms") == F.first("from_ms")
    return samples.groupBy("broker", *PAIR).agg(
        (F.first("now_ms") - F.min("wall_ms")).alias("watched_ms"),
        *(
            (F.max_by(name, "sample") - F.when(known, F.min_by(name, "sample")).otherwise(0)).alias(
                name
            )
            for name in _ENDS
        ),
    )


def _fronts(offsets: DataFrame, timers: DataFrame) -> DataFrame:
    """Of each queue, whether its offset `moved`, and whether it `stands`."""
    state = F.struct(
        "sample",
        "wall_ms",
        F.col("committed_offset").alias("front"),
        (F.col("in_flight") + F.col("blocked") > 0).alias("busy"),
    )
    states = (
        _judged(offsets, timers)
        .groupBy(*QUEUE)
        .agg(F.sort_array(F.collect_list(state)).alias("s"), F.first("now_ms").alias("now_ms"))
    )
    first, last = F.col("s")[0], F.element_at("s", -1)
    other = F.filter("s", lambda each: (each["front"] != last["front"]) | ~each["busy"])
    since = F.filter(
        "s",
        lambda each: (
            each["sample"] > F.coalesce(F.try_element_at("other", F.lit(-1))["sample"], F.lit(-1))
        ),
    )
    return (
        states.withColumn("other", other)
        .withColumn("since_ms", F.try_element_at(since, F.lit(1))["wall_ms"])
        .withColumn("moved", last["front"] != first["front"])
        .withColumn("stands", F.col("now_ms") - F.col("since_ms") >= verdicts.STANDS_MS)
        .select(*QUEUE, "moved", "stands")
    )


def own_rules(rules: LagRules) -> VerdictRules:
    """Columns in place of numbers: the settings of each row's broker group."""

    def of(name: str) -> Column:
        default = F.lit(getattr(VerdictRules(), name))
        if not rules.of_brokers:
            return default
        pairs = [
            F.lit(part)
            for broker, own in sorted(rules.of_brokers.items())
            for part in (broker, getattr(own, name))
        ]
        return F.coalesce(F.try_element_at(F.create_map(*pairs), F.col("broker")), default)

    return VerdictRules(**{each.name: of(each.name) for each in fields(VerdictRules)})


def _count(holds: Column) -> Column:
    return F.sum(F.when(holds, 1).otherwise(0)).cast("bigint")


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
        *(F.try_divide(F.sum(name), F.sum("seconds")).alias(rate) for name, rate in names.items()),
        F.sum("acked").alias("acked"),
    )
    return by_broker.groupBy(*PAIR).agg(
        *(F.sum(name).alias(name) for name in (*names.values(), "acked"))
    )


def _eta(gain: Column) -> Column:
    """Seconds until the lag is nothing, of a group that acks; NULL: it does not shrink."""
    shrinks = F.col("ack_rate") > _GROWING * F.col("in_rate")
    return F.when(F.col("lag") <= 0, F.lit(0.0)).when(shrinks, F.try_divide("lag", gain))


def _with_known_ages(offsets: DataFrame) -> DataFrame:
    """Samples that lack an age get it from any other sample of the same queue and head."""
    # As the broker counts (broker/diagnostics/lag.py): the oldest ready message.
    start = F.when(F.col("fifo"), F.col("committed_offset")).otherwise(F.col("next_offset"))
    head = F.when(F.col("ready") > 0, F.greatest(start, F.col("min_offset")))
    headed = offsets.withColumn("head", head)
    known = (
        headed.where(F.col("head").isNotNull() & F.col("oldest_ready_ms").isNotNull())
        .groupBy(*QUEUE, "head")
        .agg(F.max("oldest_ready_ms").alias("known_ms"))
    )
    return (
        headed.join(known, [*QUEUE, "head"], "left")
        .withColumn("oldest_ready_ms", F.coalesce("oldest_ready_ms", "known_ms"))
        .select(*offsets.columns)
    )


def _age_unknown() -> Column:
    return (F.col("ready") > 0) & F.col("oldest_ready_ms").isNull()
