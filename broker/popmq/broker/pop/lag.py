"""Lag: what each group has still to do in each topic that it reads.

lag = ready + in flight.  Retry topics are folded under their base topic.  Nothing is read from
the log here; `heads` says whose store times tell the age of the oldest ready message.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from popmq.broker.meta.registry import Registry
from popmq.broker.pop.check_point_table import CheckPointTable
from popmq.broker.pop.queue_progress import FifoProgress, QueueProgress
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.topics import StartAt, SubscriptionGroup, TopicConfig


@dataclass(slots=True)
class Lag:
    """One group in one topic, in messages. A filter may yet pass over some that are ready."""

    group: SubscriptionGroup
    topic: TopicConfig
    ready: int = 0
    in_flight: int = 0
    delayed: int = 0
    blocked: int = 0
    retries: int = 0  # of `ready`: what waits in the retry topic
    expired: int = 0  # went by retention before the group read it, since the broker started
    heads: list[tuple[int, int, int]] = field(default_factory=list)  # topic, queue, offset

    @property
    def total(self) -> int:
        return self.ready + self.in_flight + self.delayed + self.blocked


def lags(
    store: MessageStore,
    registry: Registry,
    table: CheckPointTable,
    *,
    group: SubscriptionGroup | None = None,
    topic: TopicConfig | None = None,
) -> list[Lag]:
    """Every group with every topic that it ever read, sorted by their names.

    With both `group` and `topic` given that pair is told also when it never met.
    """
    pairs: dict[tuple[int, int], Lag] = {}
    for read_by, read in _pairs(registry, table):
        if group not in (None, read_by) or topic not in (None, read):
            continue
        pairs.setdefault((read_by.id, read.id), Lag(read_by, read))
    if group is not None and topic is not None:
        pairs.setdefault((group.id, topic.id), Lag(group, topic))
    for lag in pairs.values():
        _count(store, registry, table, lag)
    return sorted(pairs.values(), key=lambda lag: (lag.group.name, lag.topic.name))


def _pairs(
    registry: Registry, table: CheckPointTable
) -> Iterator[tuple[SubscriptionGroup, TopicConfig]]:
    seen: set[tuple[int, int]] = set()
    for (group_id, topic_id, _), _progress in table.progress_items():
        if (group_id, topic_id) in seen:
            continue
        seen.add((group_id, topic_id))
        group, topic = registry.group_by_id(group_id), registry.topic_by_id(topic_id)
        # A group reads a retry or parking topic only with its base topic.
        if group is not None and topic is not None and not topics.is_group_owned(topic.name):
            yield group, topic


def _count(store: MessageStore, registry: Registry, table: CheckPointTable, lag: Lag) -> None:
    places = [
        (queue_id, table.progress(lag.group.id, lag.topic.id, queue_id))
        for queue_id in range(lag.topic.queues)
    ]
    met = any(progress is not None for _, progress in places)
    if not met and lag.group.start_at is StartAt.NEWEST:
        return
    for queue_id, progress in places:
        lag.ready += _add_queue(store, lag, lag.topic, queue_id, progress)
    retry = registry.find_topic(topics.retry_topic(lag.group.name, lag.topic.name))
    if retry is not None:
        lag.retries = _add_queue(store, lag, retry, 0, table.progress(lag.group.id, retry.id, 0))
        lag.ready += lag.retries
    parked = registry.find_topic(topics.parked_topic(lag.group.name, lag.topic.name))
    progress = table.progress(lag.group.id, parked.id, 0) if parked is not None else None
    if parked is not None and progress is not None:
        lag.in_flight += progress.in_flight
        lag.blocked += progress.waiting(store.queue(parked.id, 0).count)


def _add_queue(
    store: MessageStore,
    lag: Lag,
    topic: TopicConfig,
    queue_id: int,
    progress: QueueProgress | None,
) -> int:
    """Add all but the ready messages of one queue; returns how many those are."""
    queue = store.queue(topic.id, queue_id)
    start = queue.min_offset
    if isinstance(progress, FifoProgress):
        lag.in_flight += progress.in_flight
        lag.expired += progress.expired
        lag.blocked += progress.blocked
        ready = max(0, progress.waiting(queue.count) - progress.blocked)
        if ready:
            lag.heads.append((topic.id, queue_id, max(start, progress.committed)))
        return ready
    if progress is not None:
        lag.in_flight += progress.in_flight
        lag.expired += progress.expired + max(0, start - progress.cursor)
        start = max(start, progress.cursor)
    if queue.count > start:
        lag.heads.append((topic.id, queue_id, start))
    return max(0, queue.count - start)


def bounded(found: Iterable[Lag], limit: int) -> tuple[list[Lag], list[Lag]]:
    """The `limit` with the most to do, in the order given, and the rest: for metrics' labels."""
    every = list(found)
    if len(every) <= limit:
        return every, []
    order = sorted(range(len(every)), key=lambda at: -every[at].total)
    kept = sorted(order[:limit])
    chosen = set(kept)
    return [every[at] for at in kept], [one for at, one in enumerate(every) if at not in chosen]
