"""The metric names of timers, with RocketMQ's words where it has one."""

from collections.abc import Iterable
from heapq import nlargest

from popmq.broker.broker import Broker
from popmq.broker.timer.timer_forecast import BUCKETS_MS
from popmq.common.disk import ColdRead
from popmq.common.observe import Metric, MetricKind

TOPICS_LIMIT = 1_000  # as labels
OTHERS = "_others"


def timer_metrics(broker: Broker) -> Iterable[Metric]:
    """Names without the prefix `popmq_`."""
    timers = broker.timers
    service, enqueue, state = timers.service, timers.service.enqueue, timers.state
    for name, help_text, value in (
        ("enqueue_lag_messages", "Stored, not in the wheel yet.", max(0, enqueue.behind)),
        ("enqueue_lag_ms", "Age of the oldest of them.", enqueue_lag_ms(broker)),
        ("dequeue_lag_ms", "How long the next one is overdue.", service.dequeue_lag_ms),
        ("late_messages", "That wait beside the wheel.", len(state.late)),
        ("cancelled_held", "Recalled timers that are remembered.", state.cancelled_count),
        ("files_blocked", "1 while its files cannot be written.", float(timers.files.blocked)),
    ):
        yield _gauge(f"timer_{name}", help_text, value)
    windows = [*map(str, BUCKETS_MS), "+Inf"]
    for window, count in zip(windows, timers.forecast.counts() or (), strict=False):
        help_text = "Due within so long, and not within the window before."
        yield _gauge("timer_forecast_messages", help_text, count, {"within_ms": window})
    for topic, count in _by_topic(broker):
        yield _gauge("timer_timing_messages", "That wait.", count, {"topic": topic})
    for name, help_text, value in (
        ("enqueue", "Records of the timer queue put into the wheel.", enqueue.enqueued),
        ("dequeue", "Timers that fired.", service.fired),
        ("delay_latency_ms", "How late they fired, summed up.", service.lateness.total),
        ("recalled", "Recalled before their time.", timers.recall.recalled),
        ("rescheduled", "Given another time.", timers.recall.rescheduled),
        ("lost", "Whose body could not be read.", service.lost + enqueue.lost),
        ("dead_lettered", "Whose topic was deleted.", service.dead_lettered),
        ("refused", "Sends refused by a bound of the timer.", timers.admission.refused),
        ("spread", "Put into a later slot that had room.", timers.admission.spread),
        ("rolled", "Units put on into a later slot.", enqueue.rolled),
        ("moved_bodies", "Appended again by retention.", timers.bodies.moved),
        ("rebuilds", "Times that the wheel was made anew.", service.rebuilds),
        ("turned_back", "Times that a clock was far ahead before.", service.turned_back),
        ("checks", "Counts of the pending timers.", timers.check.done),
        ("check_mismatches", "Topics with another count.", timers.check.mismatches),
    ):
        yield Metric(f"timer_{name}", help_text, value)

    yield Metric(
        "timer_lateness_ms",
        "How late they fired.",
        service.lateness.total,
        MetricKind.HISTOGRAM,
        buckets=service.lateness.buckets,
    )


def enqueue_lag_ms(broker: Broker) -> int:
    """By what waits, and not by what was done last: so enqueueing that is stuck shows."""
    enqueue = broker.timers.service.enqueue
    if enqueue.behind <= 0:
        return 0
    try:
        since_ms = broker.timers.service.queue.stored_ms(enqueue.curr_queue_offset)
    except ColdRead:  # nobody waits for the disk here: at most since nothing was behind
        since_ms = enqueue.caught_up_ms
    return max(0, broker.wall_ms() - since_ms)


def _by_topic(broker: Broker) -> list[tuple[str, int]]:
    """Those with the most, and the sum of the others; deleted topics are among the others."""
    named, others = {}, 0
    for topic_id, count in broker.timers.state.pending.items():
        topic = broker.registry.topic_by_id(topic_id)
        if topic is None:
            others += count
        else:
            named[topic.name] = count
    found = nlargest(TOPICS_LIMIT, named.items(), key=lambda item: item[1])
    others += sum(named.values()) - sum(count for _, count in found)
    return [*found, (OTHERS, others)] if others else found


def _gauge(name: str, help_text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    return Metric(name, help_text, value, MetricKind.GAUGE, labels or {})
