"""What the broker counts, as readings of the table: plain numbers of its parts at each scrape."""

from collections.abc import Container, Iterable, Mapping
from heapq import nlargest
from itertools import accumulate
from typing import TypeVar

from popmq.broker.core.broker import Broker
from popmq.broker.diagnostics.audit import STATES
from popmq.broker.diagnostics.lag import Lag, count_lags, first_lags, top_lags
from popmq.broker.diagnostics.lag_monitor import NAME_BYTES, PAIRS_LIMIT
from popmq.broker.node.timer_metrics import timer_metrics
from popmq.common import topics
from popmq.common.disk import NO_FILE_LIMIT
from popmq.common.metric_table.row import OTHERS
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric, Readings
from popmq.common.record.transaction_token import TransactionEnd
from popmq.common.topics import GroupTopic

GROUPS_LIMIT = 500
TOPICS_LIMIT = 500
AUDITED_GROUPS_LIMIT = 100

Name = TypeVar("Name", str, GroupTopic)


def broker_metrics(broker: Broker) -> Iterable[Metric]:
    return (metric for metric in broker_readings(broker) if metric is not None)


def broker_readings(broker: Broker) -> Readings:
    """The same in pieces, between which the loop may do other things.

    What tables hold of messages is the master's to tell: slaves have the same tables, so sums over
    all brokers would count each message several times.
    """
    yield from _store_metrics(broker)
    yield from _pop_metrics(broker)
    yield from _ack_metrics(broker)
    yield from _pull_metrics(broker)
    yield from _transaction_metrics(broker)
    yield from _limit_metrics(broker)
    yield from timer_metrics(broker)
    yield from _report_metrics(broker)
    if broker.serving:
        yield from _consumer_metrics(broker)
        yield from _dead_letters(broker)
        yield from _audit_metrics(broker)


def _store_metrics(broker: Broker) -> Iterable[Metric]:
    store = broker.store
    counts = store.metrics
    yield reading("store_records", counts.records)
    yield reading("store_appended_bytes", counts.bytes)
    yield reading("store_flushes", counts.flushes)
    yield reading("store_flush_seconds", counts.flush_ms)
    yield reading("store_flush_records", counts.flush_records)
    yield reading("store_flush_bytes", counts.flush_bytes)
    yield reading("store_slow_flushes", counts.slow_flushes)
    yield reading("store_disk_used_ratio", store.guard.used_percent / 100)
    yield reading("store_disk_free_bytes", store.guard.free_bytes)
    if store.guard.free_files != NO_FILE_LIMIT:
        yield reading("store_disk_free_inodes", store.guard.free_files)
    yield reading("store_disk_full", store.guard.full)
    yield reading("store_disk_over_quota", store.guard.over_quota)
    yield reading("store_sends_refused", store.guard.sends_refused)
    yield reading("store_writes_refused", store.guard.writes_refused)
    yield reading("store_disk_failed", counts.disk_failed)
    yield reading("store_last_stop_clean", store.stopped_cleanly)
    yield reading("store_snapshots_abandoned", store.snapshots.abandoned_count)
    yield reading("store_damaged_messages", store.reader.damaged + broker.records.applier.left_out)
    yield reading("store_snapshots", store.snapshots.made)
    yield reading("store_snapshot_bytes", store.snapshots.position)
    yield reading("store_checkpoints", store.checkpoints.made)
    yield reading("store_end_bytes", store.end)
    yield reading("store_confirmed_bytes", store.confirmed)
    yield reading("store_pending_bytes", store.pending_bytes)
    yield reading("store_recovered_records", counts.recovered_records)
    yield reading("store_torn_bytes", counts.torn_bytes)
    yield reading("store_moved_bodies", store.retention.relocated)
    yield reading("store_deleted_segments", store.retention.deleted_segments)


def _pop_metrics(broker: Broker) -> Iterable[Metric]:
    pops = broker.pop.service.metrics
    for topic, count in _most(broker.sends.stored_by_topic, TOPICS_LIMIT, OTHERS):
        yield reading("messages_in", count, topic)
    yield reading("messages_out", pops.delivered)
    yield from _by_pair("group_messages_out", broker, broker.pop.service.delivered.counts)
    yield reading("pops", pops.pops)
    yield reading("empty_pops", pops.empty_pops)
    yield reading("refused_in_flight", pops.refused_in_flight)
    yield reading("cold_pops", pops.cold_pops)
    yield reading("pops_held_back", broker.pop.catch_up.throttled)
    yield reading("pops_undone", broker.pop.pop_rollback.rolled_back)
    yield reading("expired_messages", pops.expired)
    yield reading("filtered_messages", pops.filtered)
    yield reading("sql_filters", len(broker.sql_filters))
    yield reading("sql_filters_compiled", broker.sql_filters.compiled)
    yield reading("duplicate_sends", broker.send_deduplication.duplicates)
    yield reading("message_id_collisions", broker.send_deduplication.collisions)
    yield reading("dedup_ids", len(broker.send_deduplication))
    yield reading("dedup_ids_pushed_out", broker.send_deduplication.evicted)
    lites, requested = broker.registry.lites, broker.lites.subscriptions
    yield reading("lite_topics", len(lites))
    yield reading("lite_topics_made", lites.made)
    yield reading("lite_topics_removed", lites.removed)
    yield reading("lite_subscribers", len(requested))
    yield reading("lite_subscriptions", requested.count)
    yield reading("waiting_receives", broker.polling.count)
    yield reading("receives_woken", broker.polling.woken)
    yield reading("receives_timed_out", broker.polling.timed_out)
    yield reading("is_short_polling_hit", broker.polling.hits)


def _ack_metrics(broker: Broker) -> Iterable[Metric]:
    acks, revive, buffer = broker.pop.acks, broker.pop.revive, broker.buffer
    yield reading("acks", acks.acked)
    yield reading("auto_created_groups", len(broker.registry.auto_created))
    yield reading("auto_created_groups_expired", broker.expiries.groups.expired)
    yield from _by_pair("group_messages_acked", broker, broker.pop.service.acked.counts)
    yield reading("repeated_acks", acks.repeated)
    yield reading("ack_latency_seconds", acks.latency)
    yield reading("refused_handles", acks.refused)
    yield reading("changed_invisible", acks.changed)
    yield reading("rejected_messages", acks.rejected)
    yield reading("pop_revive_retry_messages", revive.retried)
    yield reading("pop_revive_returned_messages", revive.returned)
    yield reading("pop_revive_lost_messages", revive.lost)
    overdue, overdue_ms = broker.table.due_times.overdue(broker.store.log_ms())
    yield reading("pop_revive_lag_check_points", overdue)
    yield reading("pop_revive_latency_seconds", overdue_ms / 1_000)
    yield reading("renewed_deliveries", revive.renewed)
    yield reading("send_to_dlq_messages", revive.dead_lettered)
    yield reading("dead_letters_kept", revive.kept)
    yield reading("redriven_messages", broker.operations.redrives.redriven)
    yield reading("parked_messages", broker.fifo.parking.parked)
    yield reading("offset_resets", broker.operations.offset_reset.resets)
    yield reading("buffered_check_points", buffer.held)
    yield reading("buffered_check_points_opened", buffer.opened)
    yield reading("buffered_check_points_written", buffer.written)
    yield reading("buffered_commits", buffer.commits)
    yield reading("check_points", len(broker.table))
    yield reading("outcomes_dropped", broker.table.outcomes.dropped)


def _pull_metrics(broker: Broker) -> Iterable[Metric]:
    pulls = broker.operations.pulls.metrics
    yield reading("pulls", pulls.pulls)
    yield reading("pulled_messages", pulls.pulled)
    yield reading("illegal_pull_offsets", pulls.illegal_offsets)
    yield reading("pull_offsets_set", pulls.offsets_set)


def _transaction_metrics(broker: Broker) -> Iterable[Metric]:
    table, checks = broker.transactions.table, broker.transactions.checks
    if broker.serving:
        yield reading("half_messages", len(table.pending))
    for name, ending in (
        ("committed", TransactionEnd.COMMITTED),
        ("rolled_back", TransactionEnd.ROLLED_BACK),
        ("checked", TransactionEnd.CHECKED),
        ("given_up", TransactionEnd.GIVEN_UP),
        ("lost", TransactionEnd.LOST),
    ):
        yield reading(f"transactions_{name}", table.counts[ending])
    yield reading("transactions_refused", broker.transactions.halves.refused)
    yield reading("waiting_proxies", checks.waiting)


def _limit_metrics(broker: Broker) -> Iterable[Metric]:
    """By the setting that is the bound; some have two that nobody could tell apart."""
    guard = broker.store.guard
    for limit, count in (
        ("pop.max_in_flight", broker.pop.service.metrics.refused_in_flight),
        ("poll.waiters", broker.polling.refused),
        ("store.max_pending_bytes", broker.store.admission.refused),
        ("store.disk_stop_percent", guard.sends_refused + guard.writes_refused),
        ("timer.slot_limit", broker.timers.admission.refused),
        ("transaction.max_pending", broker.transactions.halves.refused),
    ):
        yield reading("limits_hit", count, limit)


def _consumer_metrics(broker: Broker) -> Readings:
    """By group and topic; of very many pairs those with the most to do, and the others' sum."""
    broker.diagnostics.lag_monitor.on_scrape()
    timers = broker.timers.state.pending
    counted = []
    for counted_lag in count_lags(broker.store, broker.registry, broker.table, timers=timers):
        yield None
        if counted_lag is not None:
            counted.append(counted_lag)
    found_lags, rest = top_lags(counted, PAIRS_LIMIT, NAME_BYTES)
    for lag in found_lags:
        yield from _lag_metrics(broker, lag.group.name, lag.topic.name, [lag])
    yield reading("consumer_pairs_summed", len(rest))
    if rest:
        yield from _lag_metrics(broker, OTHERS, OTHERS, rest)
    groups = broker.registry.groups()
    for first in first_lags(broker.store, broker.registry, broker.table, groups):
        yield None
        if first is not None:  # nothing is ready for a group that nobody started
            labels = first.group.name, first.topic.name
            yield reading("consumer_lag_messages", first.total, *labels)


def _lag_metrics(broker: Broker, group: str, topic: str, some: list[Lag]) -> Iterable[Metric]:
    for name, value in (
        ("lag", sum(lag.total for lag in some)),
        ("ready", sum(lag.ready for lag in some)),
        ("inflight", sum(lag.in_flight for lag in some)),
        ("delayed", sum(lag.delayed for lag in some)),
        ("blocked", sum(lag.blocked for lag in some)),
        ("retry", sum(lag.retries for lag in some)),
    ):
        yield reading(f"consumer_{name}_messages", value, group, topic)
    watched = broker.diagnostics.lag_monitor.pairs.get((group, topic))
    if watched is None:
        return
    unknown = watched.unknown_ages if some[0].ready else 0
    since_ms = watched.oldest_wall_ms if some[0].ready else 0
    waits_ms = max(0, broker.clock.wall_ms() - since_ms) if since_ms else 0
    yield reading("consumer_unknown_age_queues", unknown, group, topic)
    if since_ms or not unknown:  # an age that nobody knows is not 0
        yield reading("consumer_queueing_latency_seconds", waits_ms / 1_000, group, topic)
    yield reading("consumer_eta_seconds", watched.eta_s(), group, topic)
    yield reading("consumer_verdict", watched.verdict, group, topic)


def _dead_letters(broker: Broker) -> Iterable[Metric]:
    kept: dict[str, int] = {}
    for group in broker.registry.groups():
        topic = broker.registry.find_topic(topics.dlq_topic(group.name))
        if topic is not None:
            queue = broker.store.queue(topic.id, 0)
            kept[group.name] = queue.count - queue.min_offset
    for name, count in _most(kept, GROUPS_LIMIT, OTHERS):
        yield reading("dlq_messages", count, name)


def _audit_metrics(broker: Broker) -> Iterable[Metric]:
    audit = broker.diagnostics.audit
    audit.on_scrape()
    yield reading("audit_passes", audit.passes)
    yield reading("audit_restarts", audit.restarts)
    if not audit.passes:
        return
    yield reading("audit_unaccounted_messages", audit.unaccounted)
    yield reading("audit_age_seconds", audit.age_ms() / 1_000)
    for name, balance in audit.top_balances(AUDITED_GROUPS_LIMIT):
        for state in STATES:
            yield reading("audit_messages", getattr(balance, state), name, state)


def _by_pair(name: str, broker: Broker, counts: Mapping[GroupTopic, int]) -> Iterable[Metric]:
    """Alerts join them with lags by their labels, so those whose lag has a name come first."""
    named = broker.diagnostics.lag_monitor.pairs
    for (group, topic), count in _most(counts, PAIRS_LIMIT, (OTHERS, OTHERS), named):
        yield reading(name, count, group, topic)


def _most(
    counts: Mapping[Name, int], limit: int, others: Name, first: Container[Name] = ()
) -> list[tuple[Name, int]]:
    """Those of `first`, then those with the highest counts, and the sum of the rest."""
    some = nlargest(limit, counts.items(), key=lambda item: (item[0] in first, item[1]))
    sizes = accumulate(_name_bytes(name) for name, _ in some)
    largest = {
        name: count for (name, count), size in zip(some, sizes, strict=True) if size <= NAME_BYTES
    }
    if len(largest) == len(counts):
        return list(largest.items())
    largest[others] = largest.get(others, 0) + sum(counts.values()) - sum(largest.values())
    return list(largest.items())


def _name_bytes(name: str | GroupTopic) -> int:
    return len(name) if isinstance(name, str) else sum(map(len, name))


def _report_metrics(broker: Broker) -> Iterable[Metric]:
    yield reading("sampler_samples", broker.diagnostics.sampler.taken)
    yield reading("sampler_bytes", broker.diagnostics.sampler.held_bytes)
    yield reading("sampler_read_bytes", broker.diagnostics.sampler.budget.read_bytes)
    yield reading("sampler_reads_held_back", broker.diagnostics.sampler.budget.refused)
