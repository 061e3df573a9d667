"""Lag: what each group has still to do, how fast it does it, and whether that is healthy.

Counts are of the newest sample of each broker group; speeds and statuses are of the samples
before it.  Statuses follow Burrow's idea, on samples that come by the clock instead of on commits.

A sample may lack the age of a queue's oldest ready message, its head.  The time at which a message
was stored does not change, so any sample in which the same head has a time fills that gap.  An age
that no sample has is unknown: it is never 0, and a queue that it could make worse is not OK.
"""

from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from pyspark.sql import functions as F

from popmq.common.metric_table.verdicts import VerdictRules
from popmq.common.topics import DLQ_PREFIX, INTERNAL_PREFIXES

DataFrame = Any
Column = Any

# Worst last.
STATUSES = ("OK", "UNKNOWN", "REWIND", "WARN", "STALLED", "STOPPED", "FAILING")
PAIR = ("group", "topic")
QUEUE = ("broker", "group", "topic", "read_topic", "queue")
SAMPLE = ("broker", "epoch", "sample")
_UNKNOWN = STATUSES.index("UNKNOWN")
_GROWING = 1.01  # a group that acks only this much faster than messages come never gets there


@dataclass(frozen=True, slots=True)
class LagRules:
    window_ms: int = 300_000
    samples: int = 10  # that a status looks at, the newest
    least: int = 5  # with fewer it is UNKNOWN
    allowed: int = 100  # messages of lag in a queue that are well
    allowed_ms: int = 60_000  # age of its oldest ready message that is well
    verdict: VerdictRules = field(default_factory=VerdictRules)  # FAILING, as brokers judge it


def plan_groups(
    queues: DataFrame, offsets: DataFrame, topics: DataFrame, timers: DataFrame, rules: LagRules
) -> DataFrame:
    """One row for each group in each topic, over all broker groups; the worst first.

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
        F.sum(F.when(_age_unknown(), 1).otherwise(0)).cast("bigint").alias("unknown_ages"),
        F.max("level").alias("level"),
        F.sum(F.when(F.col("level") > 0, 1).otherwise(0)).cast("bigint").alias("queues_not_ok"),
        F.try_divide(F.max(own), F.avg(own)).alias("skew"),
    )
    gain = F.col("ack_rate") - F.col("in_rate")
    pending = newest(topics, timers).groupBy("topic").agg(F.sum("pending_timers").alias("delayed"))
    return (
        totals.join(rates, list(PAIR), "left")
        .join(pending, "topic", "left")
        .withColumn("level", _with_failures(rules.verdict))
        .withColumn("eta_s", F.when(F.col("acked") > 0, _eta(gain)))
        .withColumn("status", _word(F.col("level")))
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
            "in_rate",
            "pop_rate",
            "ack_rate",
            "eta_s",
            "skew",
            "queues_not_ok",
            "level",
        )
        .orderBy(F.desc("level"), F.desc("lag"), *PAIR)
    )


def plan_queues(
    offsets: DataFrame, topics: DataFrame, timers: DataFrame, rules: LagRules
) -> DataFrame:
    """One row for each queue that a group reads, as it is in the newest sample."""
    lag = F.col("ready") + F.col("in_flight") + F.col("blocked")
    offsets = _with_known_ages(offsets)
    queues = newest(offsets, timers).withColumn("lag", lag)
    queues = queues.unionByName(_never_met(queues, newest(topics, timers)), True)
    statuses = _statuses(offsets, timers, rules)
    waits = F.when(
        F.col("oldest_ready_ms").isNotNull(),
        F.greatest(F.lit(0), F.col("wall_ms") - F.col("oldest_ready_ms")),
    )
    return (
        queues.join(statuses, list(QUEUE), "left")
        .withColumn("waits_ms", waits)
        .withColumn("level", F.coalesce(F.col("level"), F.lit(_UNKNOWN)))
        .withColumn("level", _now(rules))
        .withColumn("status", _word(F.col("level")))
        .select(
            *QUEUE,
            "retry",
            "parked",
            "fifo",
            "status",
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
            "level",
        )
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
        F.sum("in_flight").alias("held"),
        F.max("wall_ms").alias("wall_ms"),
    )
    spans = sums.groupBy("broker", "epoch", *PAIR).agg(
        *(
            (F.max_by(name, "sample") - F.min_by(name, "sample")).alias(name)
            for name in ("came", "delivered", "acked", "held")
        ),
        ((F.max("wall_ms") - F.min("wall_ms")) / 1_000).alias("seconds"),
    )
    names = {"came": "in_rate", "delivered": "pop_rate", "acked": "ack_rate"}
    by_broker = spans.groupBy("broker", *PAIR).agg(
        *(F.try_divide(F.sum(name), F.sum("seconds")).alias(rate) for name, rate in names.items()),
        F.sum("acked").alias("acked"),
        # A delivery that is not in flight any more was acked, came back or became a dead letter.
        F.sum(F.col("delivered") - F.col("held")).alias("ended"),
    )
    return by_broker.groupBy(*PAIR).agg(
        *(F.sum(name).alias(name) for name in (*names.values(), "acked", "ended"))
    )


def fails(acked: Column, ended: Column, rules: VerdictRules) -> Column:
    """Whether a group is FAILING, as `verdict_of` says it; of unknown counts it is not."""
    bad = ended - acked
    too_many = (bad >= rules.failing_least) & (100 * bad >= rules.failing_percent * ended)
    return F.coalesce(too_many, F.lit(False))


def _with_failures(rules: VerdictRules) -> Column:
    """FAILING before all others."""
    failing = F.when(fails(F.col("acked"), F.col("ended"), rules), STATUSES.index("FAILING"))
    return F.coalesce(failing, F.col("level"))


def _eta(gain: Column) -> Column:
    """Seconds until the lag is nothing, of a group that acks; NULL: it does not shrink."""
    shrinks = F.col("ack_rate") > _GROWING * F.col("in_rate")
    return F.when(F.col("lag") <= 0, F.lit(0.0)).when(shrinks, F.try_divide("lag", gain))


def _statuses(offsets: DataFrame, timers: DataFrame, rules: LagRules) -> DataFrame:
    """A level for each queue: the number of its status."""
    lag = F.col("ready") + F.col("in_flight") + F.col("blocked")
    age = F.col("wall_ms") - F.col("oldest_ready_ms")
    state = F.struct(
        "epoch",
        "sample",
        "wall_ms",
        lag.alias("lag"),
        F.col("in_flight"),
        F.col("next_offset").alias("popped"),
        F.col("committed_offset").alias("committed"),
        F.when(F.col("ready") > 0, age).otherwise(F.lit(0)).alias("waits"),  # NULL: unknown
    )
    rows = (
        _in_window(offsets, timers, rules)
        .groupBy(*QUEUE)
        .agg(F.sort_array(F.collect_list(state)).alias("s"))
        .withColumn("s", F.slice("s", F.greatest(F.lit(1), F.size("s") - rules.samples + 1), 1_000))
        .withColumn("n", F.size("s"))
    )
    first, last = F.col("s")[0], F.element_at("s", -1)
    # NULL when unknown ages decide it: no sample is well, and of some it is not known.
    busy = F.forall(
        "s",
        lambda sample: (sample["lag"] > rules.allowed) | (sample["waits"] > rules.allowed_ms),
    )
    unpopped = last["popped"] == first["popped"]
    idle = F.forall("s", lambda sample: sample["in_flight"] == 0)
    stuck = last["committed"] == first["committed"]
    back = last["committed"] < F.array_max(F.transform("s", lambda sample: sample["committed"]))
    grows = F.aggregate(
        F.zip_with(F.col("s.lag"), F.expr("slice(s.lag, 2, 1000)"), lambda a, b: b >= a),
        F.lit(True),
        lambda all_, holds: all_ & F.coalesce(holds, F.lit(True)),
    )
    suspect = (unpopped & idle) | stuck | grows | (_slope() > 0)
    level = (
        F.when(F.col("n") < rules.least, _UNKNOWN)
        .when(busy & unpopped & idle, STATUSES.index("STOPPED"))
        .when(busy & stuck, STATUSES.index("STALLED"))
        .when(back, STATUSES.index("REWIND"))
        .when(busy & (grows | (_slope() > 0)), STATUSES.index("WARN"))
        .when(busy.isNull() & suspect, _UNKNOWN)
        .otherwise(0)
    )
    return rows.withColumn("level", level).select(*QUEUE, "level")


def _slope() -> Column:
    """Sign of the least squares line through lag by sample."""
    middle = (F.col("n") - 1) / 2
    terms = F.transform("s", lambda sample, at: (at - middle) * sample["lag"])
    return F.aggregate(terms, F.lit(0.0), lambda total, term: total + term)


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


def _now(rules: LagRules) -> Column:
    """The level, when the newest sample has its say: OK if it is well, not OK if nobody knows."""
    few = F.col("lag") <= rules.allowed
    fresh = F.coalesce(F.col("waits_ms"), F.lit(0)) <= rules.allowed_ms
    level = F.col("level")
    return (
        F.when(few & _age_unknown(), F.greatest(level, F.lit(_UNKNOWN)))
        .when(few & fresh, F.lit(0))
        .otherwise(level)
    )


def _word(level: Column) -> Column:
    return F.element_at(F.array(*map(F.lit, STATUSES)), level + 1)
