"""The broker's metric names: plain numbers of the parts, read at each scrape."""

from collections.abc import Iterable

from popmq.broker.broker import Broker
from popmq.broker.pop.lag import bounded, lags
from popmq.broker.timer_metrics import timer_metrics
from popmq.common.observe import Metric, MetricKind

CONSUMER_PAIRS_LIMIT = 1_000  # of group and topic, as labels
OTHERS = "_others"


def broker_metrics(broker: Broker) -> Iterable[Metric]:
    """Names without the prefix `popmq_`."""
    store = broker.store
    yield Metric("store_records", "Records appended to the log.", store.metrics.records)
    yield Metric("store_appended_bytes", "Bytes appended to the log.", store.metrics.bytes)
    yield Metric("store_flushes", "Group commits (fdatasync).", store.metrics.flushes)
    yield Metric("store_flush_seconds", "Time of group commits.", store.metrics.flush_ms / 1000)
    yield Metric("store_slow_flushes", "Group commits of 1 s and more.", store.metrics.slow_flushes)
    yield _gauge("store_disk_used_ratio", "Of the data disk.", store.guard.used_percent / 100)
    yield _gauge("store_disk_free_bytes", "Of the data disk.", store.guard.free_bytes)
    yield _gauge("store_disk_full", "1 while sends are refused.", float(store.guard.full))
    yield Metric("store_sends_refused", "For lack of disk.", store.guard.sends_refused)
    yield Metric("store_writes_refused", "For lack of reserve.", store.guard.writes_refused)
    yield Metric("store_snapshots_abandoned", "Not written.", store.snapshots.abandoned)
    yield Metric("store_damaged_messages", "Reads of damaged records.", store.reader.damaged)
    yield Metric("store_snapshots", "Snapshots written.", store.snapshots.made)
    yield _gauge("store_snapshot_bytes", "Position of the newest.", store.snapshots.position)
    yield Metric("pop_revive_lost_messages", "Given up: body unreadable.", broker.revive.lost)
    yield Metric("store_checkpoints", "Checkpoints written.", store.checkpoints.made)
    yield _gauge("store_end_bytes", "Position of the log's end.", store.end)
    yield _gauge("store_confirmed_bytes", "Confirmed position.", store.confirmed)
    yield _gauge("store_pending_bytes", "Bytes not yet given to the disk.", store.pending_bytes)
    yield _gauge("store_recovered_records", "Read at start.", store.metrics.recovered_records)
    yield _gauge("store_torn_bytes", "Bytes of a torn tail cut at start.", store.metrics.torn_bytes)
    for topic, count in broker.sends.stored_by_topic.items():
        yield Metric("messages_in", "Messages stored.", count, labels={"topic": topic})
    yield Metric("messages_out", "Messages delivered.", broker.pops.metrics.delivered)
    yield Metric("pops", "Pops, those of waiting receives included.", broker.pops.metrics.pops)
    yield Metric("empty_pops", "Pops that found nothing.", broker.pops.metrics.empty_pops)
    yield Metric(
        "refused_in_flight",
        "Pops refused because too much was in flight.",
        broker.pops.metrics.refused_in_flight,
    )
    yield Metric("cold_pops", "Pops that waited for the disk.", broker.pops.metrics.cold_pops)
    yield Metric("pops_held_back", "Of groups far behind.", broker.catch_up.held_back)
    yield Metric("expired_messages", "Unread, gone by retention.", broker.pops.metrics.expired)
    yield from _transaction_metrics(broker)
    yield Metric("duplicate_sends", "Resends that stored nothing.", broker.receipts.duplicates)
    yield _gauge("dedup_ids", "Message ids that are remembered.", len(broker.receipts))
    yield Metric("dedup_ids_pushed_out", "Before their time.", broker.receipts.pushed_out)
    yield Metric("filtered_messages", "Passed over by filters.", broker.pops.metrics.filtered)
    yield Metric("sql_filters_compiled", "SQL filters.", broker.sql_filters.compiled)
    yield _gauge("sql_filters", "SQL filters kept compiled.", len(broker.sql_filters))
    yield Metric("store_moved_bodies", "Appended again.", store.retention.moved)
    yield Metric("store_deleted_segments", "By retention.", store.retention.deleted_segments)
    yield Metric("receives_woken", "Waiting receives that got messages.", broker.polling.woken)
    yield Metric("receives_timed_out", "Waiting receives that did not.", broker.polling.timed_out)
    yield Metric("acks", "Messages acked.", broker.acks.acked)
    yield Metric("repeated_acks", "Acks of an acked message.", broker.acks.repeated)
    yield Metric("refused_handles", "Receipt handles refused.", broker.acks.refused)
    yield Metric("changed_invisible", "Invisible durations changed.", broker.acks.changed)
    yield Metric("pop_revive_retry_messages", "Messages revived.", broker.revive.retried)
    yield Metric("pop_revive_returned_messages", "Back in a FIFO group.", broker.revive.returned)
    yield Metric("pops_undone", "Check points whose reply nobody took.", broker.undo.undone)
    yield Metric("renewed_deliveries", "Auto-renewals.", broker.revive.renewed)
    yield Metric("send_to_dlq_messages", "Dead letters.", broker.revive.dead_lettered)
    yield Metric("parked_messages", "Moved to parking topics.", broker.parking.parked)
    yield Metric("offset_resets", "Queues set by an operator.", broker.offset_reset.resets)
    yield Metric("redriven_messages", "Dead letters sent back.", broker.redrives.redriven)
    yield Metric("rejected_messages", "Dead letters by request.", broker.acks.rejected)
    yield _gauge("buffered_check_points", "That are no records yet.", broker.buffer.held)
    yield Metric("buffered_check_points_opened", "Held in memory.", broker.buffer.opened)
    yield Metric("buffered_check_points_written", "Held, then written.", broker.buffer.written)
    yield Metric("buffered_commits", "Offsets written for acks.", broker.buffer.commits)
    yield _gauge("check_points", "Check points in memory.", len(broker.table))
    yield Metric(
        "outcomes_dropped",
        "Outcomes of deliveries forgotten before their 10 minutes.",
        broker.table.outcomes.dropped,
    )
    yield _gauge("waiting_receives", "Receives that wait for a message.", broker.polling.count)
    yield from timer_metrics(broker)
    yield from _consumer_metrics(broker)


def _transaction_metrics(broker: Broker) -> Iterable[Metric]:
    table, checks = broker.transactions.table, broker.transactions.checks
    yield _gauge("half_messages", "Neither committed nor rolled back.", len(table.pending))
    for ending, count in table.counts.items():
        name = f"transactions_{ending.name.lower()}"
        yield Metric(name, "Since the start, replayed ones included.", count)
    yield Metric("transactions_refused", "At the bound.", broker.transactions.halves.refused)
    yield _gauge("waiting_proxies", "That wait for transaction checks.", checks.waiting)


def _consumer_metrics(broker: Broker) -> Iterable[Metric]:
    """By group and topic; of very many pairs those with the most to do, and the others' sum."""
    found, rest = bounded(lags(broker.store, broker.registry, broker.table), CONSUMER_PAIRS_LIMIT)
    labelled = [({"group": one.group.name, "topic": one.topic.name}, [one]) for one in found]
    if rest:
        labelled.append(({"group": OTHERS, "topic": OTHERS}, rest))
    for labels, some in labelled:
        for name, help_text, value in (
            ("lag", "Ready and in flight.", sum(one.total for one in some)),
            ("ready", "That a receive would find.", sum(one.ready for one in some)),
            ("inflight", "Delivered, neither acked nor back.", sum(one.in_flight for one in some)),
        ):
            yield _gauge(f"consumer_{name}_messages", help_text, value, labels)


def _gauge(name: str, help_text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    return Metric(name, help_text, value, MetricKind.GAUGE, labels or {})
