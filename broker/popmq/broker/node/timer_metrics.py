"""The metric names of timers, with RocketMQ's words where it has one."""

from collections.abc import Iterable
from heapq import nlargest

from popmq.broker.core.broker import Broker
from popmq.broker.timer.timer_forecast import BUCKETS_MS
from popmq.common.disk import ColdRead
from popmq.common.metric_table.row import OTHERS
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric

TOPICS_LIMIT = 250  # as labels


def timer_metrics(broker: Broker) -> Iterable[Metric]:
    timers = broker.timers
    service, enqueue, state = timers.service, timers.service.enqueue, timers.state
    for name, value in (
        ("enqueue_lag_messages", max(0, enqueue.behind)),
        ("enqueue_lag_seconds", enqueue_lag_ms(broker) / 1_000),
        ("dequeue_lag_seconds", service.dequeue_lag_ms / 1_000),
        ("late_messages", len(state.late)),
        ("cancelled_held", len(state.cancelled)),
        ("far_held", enqueue.far.held),
        ("files_blocked", timers.files.blocked),
        ("leaving", len(timers.outgoing_timers.leaving)),
    ):
        yield reading(f"timer_{name}", value)
    if broker.serving:
        yield from _pending(broker)
    for name, value in (
        ("enqueue", enqueue.enqueued),
        ("dequeue", service.fired),
        ("recalled", timers.recall.recalled),
        ("rescheduled", timers.recall.rescheduled),
        ("lost", service.lost + enqueue.lost),
        ("dead_lettered", service.dead_lettered),
        ("refused", timers.admission.refused),
        ("spread", timers.admission.spread),
        ("far_forgotten", enqueue.far.forgotten),
        ("rolled", enqueue.rolled),
        ("moved_bodies", timers.bodies.relocated),
        ("moved_out", timers.outgoing_timers.moved),
        ("moved_in", timers.incoming_timers.taken),
        ("cold_reads", service.cold.trips),
        ("rebuilds", service.rebuilds),
        ("turned_back", service.turned_back),
        ("checks", timers.check.done),
        ("check_mismatches", timers.check.mismatches),
    ):
        yield reading(f"timer_{name}", value)
    yield reading("timer_lateness_seconds", service.lateness)


def _pending(broker: Broker) -> Iterable[Metric]:
    windows = [*(f"{window // 1_000}" for window in BUCKETS_MS), "+Inf"]
    for window, count in zip(windows, broker.timers.forecast.counts() or (), strict=False):
        yield reading("timer_forecast_messages", count, window)
    for topic, count in _by_topic(broker):
        yield reading("timer_timing_messages", count, topic)


def enqueue_lag_ms(broker: Broker) -> int:
    """By what waits, and not by what was done last: so enqueueing that is stuck shows."""
    enqueue = broker.timers.service.enqueue
    if enqueue.behind <= 0:
        return 0
    try:
        since_ms = broker.timers.service.queue.stored_ms(enqueue.curr_queue_offset)
    except ColdRead:  # nobody waits for the disk here: at most since nothing was behind
        since_ms = enqueue.caught_up_ms
    return max(0, broker.clock.wall_ms() - since_ms)


def _by_topic(broker: Broker) -> list[tuple[str, int]]:
    """Those with the most, and the sum of the others; deleted topics are among the others."""
    named, others = {}, 0
    for topic_id, count in broker.timers.state.pending.items():
        topic = broker.registry.topic_by_id(topic_id)
        if topic is None:
            others += count
        else:
            named[topic.name] = count
    largest = nlargest(TOPICS_LIMIT, named.items(), key=lambda item: item[1])
    others += sum(named.values()) - sum(count for _, count in largest)
    return [*largest, (OTHERS, others)] if others else largest
