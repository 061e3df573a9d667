"""Lag: what each group has still to do in each topic that it reads.

lag = ready + in flight + blocked.  Retry topics are folded under their base topic.  What waits for
its delivery time is counted beside it.  Nothing is read from the log here; `heads` says whose store
times tell the age of the oldest ready message.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from popmq.broker.deliveries.check_point_table import CheckPointTable
from popmq.broker.deliveries.queue_progress import FifoProgress, QueueProgress
from popmq.broker.diagnostics.head_times import Head
from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.namespaces import namespace_of_name
from popmq.common.topics import (
    FIRST_USER_TOPIC_ID,
    MessageType,
    StartAt,
    SubscriptionGroup,
    TopicConfig,
)


@dataclass(slots=True)
class Lag:
    """One group in one topic, in messages. A filter may yet pass over some that are ready."""

    group: SubscriptionGroup
    topic: TopicConfig
    ready: int = 0
    in_flight: int = 0
    delayed: int = 0  # timers of the topic: work of later, no lag
    blocked: int = 0
    retries: int = 0  # of `ready`: what waits in the retry topic
    expired: int = 0  # went by retention before the group read it, since the broker started
    heads: list[Head] = field(default_factory=list)
    fronts: dict[tuple[int, int], int] = field(default_factory=dict)  # committed, of busy queues
    committed: int = 0  # of all queues together
    never_read: bool = False  # the group has read no topic at all

    @property
    def total(self) -> int:
        return self.ready + self.in_flight + self.blocked

    @property
    def is_idle(self) -> bool:
        """There is something to do, and no consumer has any of it."""
        return self.ready > 0 and not self.in_flight


def lags(
    store: MessageStore,
    registry: Registry,
    table: CheckPointTable,
    *,
    group: SubscriptionGroup | None = None,
    topic: TopicConfig | None = None,
    timers: Mapping[int, int] = MappingProxyType({}),
) -> list[Lag]:
    """Every group with every topic that it ever read, sorted by their names.

    With both `group` and `topic` given that pair is told also when it never met. `timers` says how
    many wait for their delivery time, by id of their topic.
    """
    counted = count_lags(store, registry, table, group=group, topic=topic, timers=timers)
    return [lag for lag in counted if lag is not None]


def count_lags(
    store: MessageStore,
    registry: Registry,
    table: CheckPointTable,
    *,
    group: SubscriptionGroup | None = None,
    topic: TopicConfig | None = None,
    timers: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[Lag | None]:
    """The same in pieces: anything may happen between two of them. After a piece that leads to no
    lag comes a None."""
    pairs: dict[tuple[int, int], Lag] = {}
    for lag in met_pairs(registry, table):
        if lag is None:
            yield None
        elif group in (None, lag.group) and topic in (None, lag.topic):
            pairs[lag.group.id, lag.topic.id] = lag
    if group is not None and topic is not None:
        pairs.setdefault((group.id, topic.id), Lag(group, topic))
    for lag in sorted(pairs.values(), key=lambda lag: (lag.group.name, lag.topic.name)):
        if registry.topic_by_id(lag.topic.id) and registry.group_by_id(lag.group.id):
            lag.delayed = timers.get(lag.topic.id, 0)
            _count(store, registry, table, lag)
            yield lag


def met_pairs(registry: Registry, table: CheckPointTable) -> Iterator[Lag | None]:
    """Every group with every topic that it ever read, once and not counted, in pieces."""
    seen: set[tuple[int, int]] = set()
    met: set[tuple[int, int]] = set()
    for looked, (group_id, topic_id, _) in enumerate(table.places()):
        if looked % _PLACES_A_PIECE == 0:
            yield None
        if (group_id, topic_id) in seen:
            continue
        seen.add((group_id, topic_id))
        group, topic = registry.group_by_id(group_id), registry.topic_by_id(topic_id)
        if topic is not None and topics.is_group_owned(topic.name):
            # A retry or parking topic counts with its base topic, also when the group has not read
            # that one: redriven dead letters of an earlier group of the same name come to it.
            topic = registry.find_topic(topic.name.partition("+")[2])
        if group is not None and topic is not None and (group_id, topic.id) not in met:
            met.add((group_id, topic.id))
            yield Lag(group, topic)


def first_lags(
    store: MessageStore,
    registry: Registry,
    table: CheckPointTable,
    groups: Iterable[SubscriptionGroup],
) -> Iterator[Lag | None]:
    """Of groups that somebody made and that never read anything: what each topic of their namespace
    holds for them, so that an autoscaler can start the first consumer. In pieces, as `count_lags`;
    FIRST_LAGS_LIMIT at most."""
    met = set()
    for looked, (group_id, _, _) in enumerate(table.places()):
        if looked % _PLACES_A_PIECE == 0:
            yield None
        met.add(group_id)
    left = FIRST_LAGS_LIMIT
    for group in groups:
        if group.auto_created or group.id in met:
            continue
        namespace = namespace_of_name(group.name)
        for topic in registry.topics():
            is_users = not topics.is_internal_topic(topic.name) and topic.id >= FIRST_USER_TOPIC_ID
            if not is_users or namespace_of_name(topic.name) != namespace:
                continue
            if topic.kind.has_lite_topics or not left:
                continue
            left -= 1
            lag = Lag(group, topic, never_read=True)
            _count(store, registry, table, lag)
            yield lag


class QueueLag(NamedTuple):
    """One queue that a group reads for a topic: of the topic, its retry or its parking topic."""

    topic: TopicConfig  # the one that is read
    queue_id: int
    progress: QueueProgress | None
    min_offset: int
    max_offset: int
    ready: int = 0
    in_flight: int = 0
    blocked: int = 0
    expired: int = 0
    head: int = -1  # offset of the oldest ready message; in order, of the oldest that is not over
    retry: bool = False
    parked: bool = False


_PLACES_A_PIECE = 1_000
FIRST_LAGS_LIMIT = 500
_Place = tuple[int, QueueProgress | None]  # a queue, and the group's place in it


def _count(store: MessageStore, registry: Registry, table: CheckPointTable, lag: Lag) -> None:
    for queue in queue_lags(store, registry, table, lag):
        lag.ready += queue.ready
        lag.in_flight += queue.in_flight
        lag.blocked += queue.blocked
        lag.expired += queue.expired
        lag.retries += queue.ready if queue.retry else 0
        lag.committed += queue.progress.committed if queue.progress is not None else 0
        if queue.progress is not None and (queue.in_flight or queue.blocked):
            lag.fronts[queue.topic.id, queue.queue_id] = queue.progress.committed
        if queue.head >= 0:
            lag.heads.append(Head(queue.topic.id, queue.queue_id, queue.head))


def queue_lags(
    store: MessageStore, registry: Registry, table: CheckPointTable, lag: Lag
) -> Iterator[QueueLag]:
    """What the sums of one group in one topic are made of."""
    places = [
        (queue_id, table.progress(lag.group.id, lag.topic.id, queue_id))
        for queue_id in registry.queue_ids(lag.topic)
    ]
    if lag.topic.type is MessageType.LITE:
        places = _busy(store, lag.topic, places)
    met = any(progress is not None for _, progress in places)
    if met or lag.group.start_at is not StartAt.NEWEST:
        for queue_id, progress in places:
            yield _queue_lag(store, lag.topic, queue_id, progress)
    retry = registry.find_topic(topics.retry_topic(lag.group.name, lag.topic.name))
    if retry is not None:
        queue_lag = _queue_lag(store, retry, 0, table.progress(lag.group.id, retry.id, 0))
        yield queue_lag._replace(retry=True)
    parked = registry.find_topic(topics.parked_topic(lag.group.name, lag.topic.name))
    progress = table.progress(lag.group.id, parked.id, 0) if parked is not None else None
    if parked is not None and progress is not None:
        queue = store.queue(parked.id, 0)
        yield QueueLag(
            parked,
            0,
            progress,
            queue.min_offset,
            queue.count,
            in_flight=progress.in_flight,
            blocked=progress.waiting(queue.count),
            parked=True,
        )


def _busy(store: MessageStore, topic: TopicConfig, places: list[_Place]) -> list[_Place]:
    """Of the lite topics that a group began, which are all that it subscribed to, those in which it
    has something to do; one of them at least, for what is told of the pair."""
    begun = [(queue_id, progress) for queue_id, progress in places if progress is not None]
    busy: list[_Place] = [
        (queue_id, progress)
        for queue_id, progress in begun
        if progress.in_flight
        or progress.expired
        or progress.committed < store.queue(topic.id, queue_id).count
    ]
    return busy or [*begun[:1]]


def _queue_lag(
    store: MessageStore, topic: TopicConfig, queue_id: int, progress: QueueProgress | None
) -> QueueLag:
    queue = store.queue(topic.id, queue_id)
    start, count = queue.min_offset, queue.count
    if isinstance(progress, FifoProgress):
        gone, no_longer_blocked = progress.expired_below(start)
        blocked = progress.blocked - no_longer_blocked
        ready = max(0, progress.waiting(count) - gone - blocked)
        head = max(start, progress.committed) if ready else -1
        return QueueLag(
            topic,
            queue_id,
            progress,
            start,
            count,
            ready,
            progress.in_flight,
            blocked,
            progress.expired + gone,
            head,
        )
    first, in_flight, expired = start, 0, 0
    if progress is not None:
        in_flight = progress.in_flight
        expired = progress.expired + max(0, start - progress.cursor)
        first = max(start, progress.cursor)
    ready = max(0, count - first)
    head = first if ready else -1
    return QueueLag(topic, queue_id, progress, start, count, ready, in_flight, 0, expired, head)


def unread_lites(
    store: MessageStore, registry: Registry, table: CheckPointTable, subscribed: Collection[int]
) -> list[tuple[TopicConfig, int]]:
    """Messages of lite topics that no group has begun, by the parent topic; where somebody reads
    that, or subscribes to it (`subscribed` are numbers of such topics).

    A lag counts them for nobody: a group has begun what it was subscribed to when it received.
    """
    lites = [topic for topic in registry.topics() if topic.type is MessageType.LITE]
    begun: dict[int, set[int]] = {topic.id: set() for topic in lites}
    if not lites:
        return []
    for (_, topic_id, queue_id), _progress in table.progress_items():
        if topic_id in begun:
            begun[topic_id].add(queue_id)
    found_topics = []
    for topic in lites:
        if begun[topic.id] or topic.id in subscribed:
            others = set(registry.queue_ids(topic)) - begun[topic.id]
            queues = [store.queue(topic.id, queue_id) for queue_id in others]
            found_topics.append((topic, sum(queue.count - queue.min_offset for queue in queues)))
    return [(topic, messages) for topic, messages in found_topics if messages]


def top_lags(found_lags: Iterable[Lag], limit: int, name_bytes: int) -> tuple[list[Lag], list[Lag]]:
    """At most `limit`, fewer if their names are longer than `name_bytes` together, in the order
    given; and the rest: for metrics' labels.

    Alerts and autoscalers read by name, and a client can make groups.  So first come the groups
    that somebody declared, those that nobody serves before the others, and of equals those with
    the most to do.
    """
    every = list(found_lags)
    order = sorted(range(len(every)), key=lambda at: _rank(every[at]))[:limit]
    sizes = accumulate(len(every[at].group.name) + len(every[at].topic.name) for at in order)
    kept = sorted(at for at, size in zip(order, sizes, strict=True) if size <= name_bytes)
    chosen = set(kept)
    return [every[at] for at in kept], [lag for at, lag in enumerate(every) if at not in chosen]


def _rank(lag: Lag) -> tuple[bool, bool, int]:
    return lag.group.auto_created, not lag.is_idle, -lag.total
