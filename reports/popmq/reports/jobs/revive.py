"""Revive: how deliveries ended, by check points, acks, retries, dead letters and resets.

A delivery whose reply did not reach the client is undone, and is not counted.  Times are log time
(ms) of their broker group.  Groups with buffered check points write few records, so only their
retries and dead letters are reported.

A delivery is in flight until a record ends it: an end (`_ENDS`), a change that replaces it, or a
later reset of the group's offset.  Deliveries of a deleted topic or to a deleted group have no such
record.  They are not counted: the newest sample has the topics that groups read (`plan_places`).
"""

from dataclasses import dataclass
from typing import Any

from pyspark.sql import functions as F

from popmq.common.metric_table.verdicts import Verdict
from popmq.reports.jobs.lag import newest

DataFrame = Any
Column = Any

PAIR = ("group", "topic")
DELIVERY = ("broker", "epoch", "sequence")
_PLACE = ("group_id", "topic_id", "queue")
_HOPS = 3  # each doubles the pointers: up to 2^3 changes in a row lead to their delivery
_END = ("kind", "messages", "log_ms", "attempt", "reason", "queue", "start_offset")
_ENDS = ("ACK", "RETRY", "DEAD", "RETURNED", "LOST", "KEPT", "UNDONE")
COUNTS = {end: end.lower() for end in _ENDS} | {
    "ACK": "acked",
    "RETRY": "retried",
    "DEAD": "dead_lettered",
}
_PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class ReviveRules:
    """The present and the first log time that counts (0: all that is kept), by broker group."""

    now_log_ms: dict[str, int]
    since_log_ms: dict[str, int]
    silent_ms: int = 60_000  # a consumer that holds messages and acked none for longer is stuck


def plan_places(offsets: DataFrame, timers: DataFrame) -> DataFrame:
    """The queues that groups read now, and the messages in flight there by the brokers' tables."""
    return newest(offsets, timers).select(
        "broker",
        *PAIR,
        "group_id",
        F.col("read_topic_id").alias("topic_id"),
        "queue",
        "in_flight",
    )


def plan_deliveries(revive: DataFrame, places: DataFrame) -> DataFrame:
    """One row for each check point and change. `open` counts its messages in flight, and `reset`
    those that a reset of the group's offset ended. `alive`: topic and group still exist."""
    opened = revive.where(F.col("kind").isin("CHECK_POINT", "CHANGE")).select(
        *DELIVERY,
        *PAIR,
        *_PLACE,
        "kind",
        "client",
        "revive_at_ms",
        "old_epoch",
        "old_sequence",
        "position",
        "start_offset",
        "members",
        "messages",
        "log_ms",
    )
    ended = (
        revive.where(F.col("kind").isin(*_ENDS) & F.col("sequence").isNotNull())
        .groupBy(*DELIVERY)
        .agg(F.bit_or("members").alias("ended"))
    )
    resets = revive.where(F.col("kind") == "RESET")
    last_reset = resets.groupBy("broker", *_PLACE).agg(
        F.max(F.struct("position", "log_ms")).alias("last_reset")
    )
    in_flight = places.groupBy("broker", *_PLACE).agg(F.sum("in_flight").alias("in_flight"))
    known = places.select("broker", "group_id", "topic_id", F.lit(True).alias("known")).distinct()
    was_reset = F.col("last_reset.position") > F.col("position")
    ended_or_moved = _or_0("ended").bitwiseOR(_or_0("moved"))
    remaining = F.col("members").bitwiseAND(F.bitwise_not(ended_or_moved))
    nothing_held = F.col("group_id").isNotNull() & (F.coalesce("in_flight", F.lit(0)) == 0)
    none_open = F.coalesce(was_reset, F.lit(False)) | nothing_held
    taken_back = _or_0("taken_back")
    return (
        _delivered(opened)
        .join(ended, list(DELIVERY), "left")
        .join(_moved(opened), list(DELIVERY), "left")
        .join(_taken_back(revive, resets, opened), list(DELIVERY), "left")
        .join(F.broadcast(last_reset), ["broker", *_PLACE], "left")
        .join(F.broadcast(in_flight), ["broker", *_PLACE], "left")
        .join(F.broadcast(known), ["broker", "group_id", "topic_id"], "left")
        .withColumn("alive", F.col("known").isNotNull() | F.col("group_id").isNull())
        .withColumn(
            "open", F.when(none_open, 0).otherwise(remaining.bitwiseAND(F.bitwise_not(taken_back)))
        )
        .withColumn(
            "reset",
            F.bit_count(F.when(was_reset, remaining).otherwise(remaining.bitwiseAND(taken_back))),
        )
        .withColumn("open", F.bit_count(F.col("open")))
        .withColumn(
            "reset_ms",
            F.when(was_reset, F.col("last_reset.log_ms")).otherwise(F.col("taken_back_ms")),
        )
        .select(
            *DELIVERY,
            *PAIR,
            "kind",
            "client",
            "messages",
            "log_ms",
            "popped_ms",
            "revive_at_ms",
            "alive",
            "open",
            "reset",
            "reset_ms",
        )
    )


def plan_ends(revive: DataFrame, deliveries: DataFrame, places: DataFrame) -> DataFrame:
    """One row for each record that ends deliveries, with the delivery that it ends."""
    ends = revive.where(F.col("kind").isin(*_ENDS)).select(
        *DELIVERY,
        *_END,
        *(F.col(name).alias(f"end_{name}") for name in PAIR),
        F.when(F.col("kind") == "DEAD", F.col("old_epoch")).alias("parking_id"),
    )
    known = deliveries.select(*DELIVERY, *PAIR, "client", "revive_at_ms", "popped_ms", "alive")
    # For ends whose check point was deleted, and ends of parked messages. A parking topic goes with
    # its group, so that a later group of the same name has another.
    pairs = places.select("broker", *PAIR, F.lit(True).alias("read")).distinct()
    parkings = places.select(
        "broker", F.col("topic_id").alias("parking_id"), F.lit(True).alias("parks")
    ).distinct()
    reads = F.when(F.col("parking_id").isNull(), F.col("read")).otherwise(F.col("parks"))
    return (
        ends.join(known, list(DELIVERY), "left")
        .select(
            *DELIVERY,
            *_END,
            *(F.coalesce(F.col(name), F.col(f"end_{name}")).alias(name) for name in PAIR),
            "client",
            "revive_at_ms",
            "popped_ms",
            "alive",
            "parking_id",
        )
        .join(F.broadcast(pairs), ["broker", *PAIR], "left")
        .join(F.broadcast(parkings), ["broker", "parking_id"], "left")
        .where(F.coalesce(F.col("alive"), reads, F.lit(False)))
        .drop("alive", "read", "parks", "parking_id")
    )


def plan_groups(
    revive: DataFrame,
    deliveries: DataFrame,
    places: DataFrame,
    verdicts: DataFrame,
    rules: ReviveRules,
) -> DataFrame:
    """One row for each group in each topic, the most urgent first.

    `verdicts` is what `lag.plan_verdicts` made of the same samples.
    """
    alive = deliveries.where(F.col("alive"))
    counted = _since(alive, rules)
    delivered = (
        counted.where(F.col("kind") == "CHECK_POINT")
        .groupBy(*PAIR)
        .agg(F.sum("messages").alias("delivered"))
    )
    changes = (
        counted.where(F.col("kind") == "CHANGE")
        .groupBy(*PAIR)
        .agg(F.sum("messages").alias("changed"))
    )
    resets = _since(alive.where(F.col("reset") > 0), rules, "reset_ms")
    resets = resets.groupBy(*PAIR).agg(F.sum("reset").alias("reset"))
    in_flight = places.groupBy(*PAIR).agg(F.sum("in_flight").alias("in_flight"))
    ends = _since(plan_ends(revive, deliveries, places), rules)
    late_ms = F.when(
        F.col("kind").isin("RETRY", "RETURNED"), F.col("log_ms") - F.col("revive_at_ms")
    )
    ack_ms = F.when(F.col("kind") == "ACK", F.col("log_ms") - F.col("popped_ms"))
    weights = F.col("messages").cast("bigint")
    by_end = ends.groupBy(*PAIR).agg(
        *(
            F.sum(F.when(F.col("kind") == kind, F.col("messages")).otherwise(0)).alias(name)
            for kind, name in COUNTS.items()
        ),
        _percentiles(ack_ms, weights, "ack_ms"),
        F.max(ack_ms).alias("ack_max_ms"),
        _percentiles(late_ms, weights, "revive_late_ms"),
        F.max(late_ms).alias("revive_late_max_ms"),
    )
    seconds = _span_s(_since(revive, rules))
    return (
        delivered.join(by_end, list(PAIR), "full")
        .join(resets, list(PAIR), "full")
        .join(changes, list(PAIR), "left")
        .join(in_flight, list(PAIR), "left")
        .join(verdicts, list(PAIR), "full")  # pull consumers have no deliveries, but a verdict
        .crossJoin(F.broadcast(seconds))
        .fillna(0, ["delivered", "changed", "reset", "in_flight", *COUNTS.values()])
        .withColumn("delivered", F.col("delivered") - F.col("undone"))
        .withColumn("retry_rate", F.try_divide("retried", "seconds"))
        .withColumn("retry_ratio", F.try_divide("retried", "delivered"))
        .fillna(Verdict.UNKNOWN.name, ["status"])
        .fillna(int(Verdict.UNKNOWN), ["level"])
        .select(
            *PAIR,
            "status",
            "delivered",
            *COUNTS.values(),
            "reset",
            "in_flight",
            "changed",
            "retry_rate",
            "retry_ratio",
            *_percentile_columns("ack_ms"),
            "ack_max_ms",
            *_percentile_columns("revive_late_ms"),
            "revive_late_max_ms",
            "level",
        )
        .orderBy(F.desc("level"), F.desc("retried"), F.desc("dead_lettered"), *PAIR)
    )


def plan_attempts(revive: DataFrame, rules: ReviveRules) -> DataFrame:
    """How many retried or dead-lettered messages each group has, by their highest attempt."""
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
    """The newest `limit` dead letters."""
    return (
        _since(revive, rules)
        .where(F.col("kind") == "DEAD")
        .select(
            "wall_time",
            "group",
            "topic",
            "queue",
            F.col("start_offset").alias("offset"),
            "attempt",
            "reason",
            "broker",
        )
        .orderBy(F.desc("wall_time"), "group", "topic", "queue", "offset")
        .limit(limit)
    )


def plan_consumers(
    revive: DataFrame, deliveries: DataFrame, places: DataFrame, rules: ReviveRules
) -> DataFrame:
    """Deliveries and acks of each client; first those that hold messages and ack none."""
    now = _by_broker(rules.now_log_ms)
    recent = F.col("log_ms") >= _by_broker(rules.since_log_ms)
    popped = F.col("kind") == "CHECK_POINT"
    held = (
        deliveries.where(F.col("alive"))
        .groupBy("broker", "group", "client")
        .agg(
            F.sum(F.when(popped & recent, F.col("messages")).otherwise(0)).alias("delivered"),
            F.max(F.when(popped, F.col("log_ms"))).alias("last_pop"),
            F.sum("open").alias("in_flight"),
            F.min(F.when(F.col("open") > 0, F.col("popped_ms"))).alias("held_since"),
        )
    )
    ends = (
        plan_ends(revive, deliveries, places)
        .where(F.col("client").isNotNull())
        .groupBy("broker", "group", "client")
        .agg(
            *(
                F.sum(
                    F.when((F.col("kind") == kind) & recent, F.col("messages")).otherwise(0)
                ).alias(name)
                for kind, name in (("UNDONE", "undone"), ("ACK", "acked"))
            ),
            F.max(F.when(F.col("kind") == "ACK", F.col("log_ms"))).alias("last_ack"),
        )
    )
    silent_s = F.lit(rules.silent_ms / 1_000)
    return (
        held.join(ends, ["broker", "group", "client"], "left")
        .fillna(0, ["acked", "undone"])
        .withColumn("pop_ago_s", (now - F.col("last_pop")) / 1_000)
        .withColumn("ack_ago_s", (now - F.col("last_ack")) / 1_000)
        .withColumn("held_s", (now - F.col("held_since")) / 1_000)
        .groupBy("group", "client")
        .agg(
            F.sum(F.col("delivered") - F.col("undone")).alias("delivered"),
            F.sum("acked").alias("acked"),
            F.sum("in_flight").alias("in_flight"),
            F.min("pop_ago_s").alias("pop_ago_s"),
            F.min("ack_ago_s").alias("ack_ago_s"),
            F.max("held_s").alias("held_s"),
        )
        .withColumn(
            "stuck",
            (F.col("in_flight") > 0)
            & (F.least("held_s", F.coalesce("ack_ago_s", "held_s")) > silent_s),
        )
        .orderBy(F.desc("stuck"), F.desc("in_flight"), "group", "client")
    )


# -- inside


def _moved(opened: DataFrame) -> DataFrame:
    """A mask for each delivery: its members that changes replaced."""
    changes = opened.where(F.col("kind") == "CHANGE").select(
        F.col("broker"),
        F.col("old_epoch").alias("epoch"),
        F.col("old_sequence").alias("sequence"),
        F.col("start_offset").alias("offset"),
    )
    bit = F.expr("shiftleft(1L, int(offset - start_offset))")
    return (
        changes.join(opened.select(*DELIVERY, "start_offset"), list(DELIVERY))
        .where(F.expr("offset - start_offset BETWEEN 0 AND 63"))
        .groupBy(*DELIVERY)
        .agg(F.bit_or(bit).alias("moved"))
    )


def _taken_back(revive: DataFrame, resets: DataFrame, opened: DataFrame) -> DataFrame:
    """A mask of deliveries from parking topics that a reset ended: the group reads those messages
    again in their first topic. Without parked messages the joins are empty and cheap."""
    parked = revive.where(F.col("kind") == "PARKED").select(
        "broker",
        "group",
        F.col("topic_id").alias("parking_id"),
        F.col("offset").alias("parked_at"),
        F.col("first_topic_id").alias("topic_id"),
        "queue",
        F.col("start_offset").alias("first_offset"),
        F.col("position").alias("parked_position"),
    )
    rewinds = resets.select(
        "broker",
        "group",
        "topic_id",
        "queue",
        "position",
        "log_ms",
        F.col("start_offset").alias("reads_on_at"),
    )
    back = (
        parked.join(rewinds, ["broker", "group", "topic_id", "queue"])
        .where("reads_on_at <= first_offset AND position > parked_position")
        .groupBy("broker", F.col("parking_id").alias("topic_id"), "parked_at")
        .agg(F.max(F.struct("position", "log_ms")).alias("back"))
    )
    return (
        opened.join(F.broadcast(back), ["broker", "topic_id"])
        .where("parked_at - start_offset BETWEEN 0 AND 63 AND back.position > position")
        .groupBy(*DELIVERY)
        .agg(
            F.bit_or(F.expr("shiftleft(1L, int(parked_at - start_offset))")).alias("taken_back"),
            F.max("back.log_ms").alias("taken_back_ms"),
        )
    )


def _or_0(name: str) -> Column:
    return F.coalesce(F.col(name), F.lit(0).cast("bigint"))


def _delivered(opened: DataFrame) -> DataFrame:
    """Adds `popped_ms`: a change has the time of the delivery that it continues."""
    changes = opened.where(F.col("kind") == "CHANGE")
    chain = changes.select(*DELIVERY, "old_epoch", "old_sequence")
    for _ in range(_HOPS):
        before = chain.select(
            F.col("broker"),
            F.col("epoch").alias("old_epoch"),
            F.col("sequence").alias("old_sequence"),
            F.col("old_epoch").alias("next_epoch"),
            F.col("old_sequence").alias("next_sequence"),
        )
        chain = chain.join(before, ["broker", "old_epoch", "old_sequence"], "left").select(
            *DELIVERY,
            F.coalesce("next_epoch", "old_epoch").alias("old_epoch"),
            F.coalesce("next_sequence", "old_sequence").alias("old_sequence"),
        )
    first = opened.select(
        F.col("broker"),
        F.col("epoch").alias("old_epoch"),
        F.col("sequence").alias("old_sequence"),
        F.col("log_ms").alias("popped_ms"),
    )
    popped = chain.join(first, ["broker", "old_epoch", "old_sequence"])
    return (
        opened.drop("old_epoch", "old_sequence")
        .join(popped.select(*DELIVERY, "popped_ms"), list(DELIVERY), "left")
        .withColumn("popped_ms", F.coalesce("popped_ms", "log_ms"))
    )


def _since(table: DataFrame, rules: ReviveRules, time: str = "log_ms") -> DataFrame:
    if not any(rules.since_log_ms.values()):
        return table
    return table.where(F.col(time) >= _by_broker(rules.since_log_ms))


def _by_broker(values: dict[str, int]) -> Column:
    if not values:
        return F.lit(0)
    known = F.create_map(*(F.lit(value) for pair in sorted(values.items()) for value in pair))
    return F.coalesce(F.try_element_at(known, F.col("broker")), F.lit(0))


def _span_s(table: DataFrame) -> DataFrame:
    spans = table.groupBy("broker").agg(
        ((F.max("log_ms") - F.min("log_ms")) / 1_000).alias("seconds")
    )
    return spans.agg(F.max("seconds").alias("seconds"))


def _percentiles(value: Column, weights: Column, name: str) -> Column:
    return F.percentile(value, F.array(*map(F.lit, _PERCENTILES)), weights).alias(name)


def _percentile_columns(name: str) -> list[Column]:
    return [
        F.col(name)[at].alias(name.replace("_ms", f"_p{round(100 * share)}_ms"))
        for at, share in enumerate(_PERCENTILES)
    ]
