"""LAG: the counts at one moment, then the ages, which take a look into the log.

TIME_SPANS: from when to when queues hold messages, and how far a group has come in them.
"""

from dataclasses import dataclass
from functools import partial
from itertools import islice

from popmq.broker.core.broker import Broker
from popmq.broker.diagnostics.lag import Lag, first_lags, lags
from popmq.broker.handlers.request import Request
from popmq.broker.operations.resumable_reads import ResumableRead, read_now
from popmq.common import topics
from popmq.common.errors import Code
from popmq.common.topics import SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb

_READS_A_STEP = 64
_QUEUES_A_STEP = 16
_CHECK_POINTS_A_STEP = 2_000
_HELD_LIMIT = 100_000  # check points


def lag(broker: Broker, request: Request) -> ResumableRead[bytes]:
    asked = pb.LagRequest.FromString(request.body)
    registry = broker.registry
    group = registry.group(asked.group) if asked.group else None
    topic = None
    if asked.topic:
        topics.check_readable_topic_name(asked.topic)
        topic = registry.topic(asked.topic)
    if asked.pairs:
        counted = [lag for pair in asked.pairs for lag in _of_pair(broker, pair)]
        return _with_ages(broker, counted, pb.LagReply())
    groups = [group] if group else list(registry.groups())
    dead_letters = [_dead_letters(broker, group.name) for group in groups]
    reply = pb.LagReply(
        dead_letters=[count for count in dead_letters if count is not None],
        brokers=[broker.settings.broker.name],
        stored=_stored(broker, topic),
    )
    counted = _lags(broker, group=group, topic=topic)
    if group is not None and asked.never_read and not counted:
        first = first_lags(broker.store, registry, broker.table, [group])
        counted = [lag for lag in first if lag is not None]
    return _with_ages(broker, counted, reply)


@dataclass(slots=True)
class _Ages:
    """Of lags, by identity."""

    oldest_ms: dict[int, int]  # wall time
    unknown: dict[int, int]  # queues


def _with_ages(broker: Broker, counted: list[Lag], reply: pb.LagReply) -> ResumableRead[bytes]:
    ages = _Ages({}, {})
    heads = [(lag, head) for lag in counted for head in lag.heads]
    for number, (lag, head) in enumerate(reversed(heads), 1):
        stored_ms = yield from read_now(partial(broker.diagnostics.head_times.stored_ms, head))
        if stored_ms is None:
            ages.unknown[id(lag)] = ages.unknown.get(id(lag), 0) + 1
        else:
            known = ages.oldest_ms.get(id(lag), stored_ms)
            ages.oldest_ms[id(lag)] = min(known, stored_ms)
        if number % _READS_A_STEP == 0:
            yield None
    reply.status.CopyFrom(pb.Status(code=Code.OK, message="OK"))
    reply.lags.extend(_to_wire(broker, lag, ages) for lag in counted)
    reply.now_ms = broker.clock.wall_ms()
    return reply.SerializeToString()


def _stored(broker: Broker, topic: TopicConfig | None) -> list[pb.StoredCount]:
    name, counts = broker.settings.broker.name, broker.sends.stored_by_topic
    names = list(counts) if topic is None else [topic.name]
    return [
        pb.StoredCount(broker=name, topic=each, stored=counts[each])
        for each in names
        if each in counts
    ]


def _dead_letters(broker: Broker, group: str) -> pb.DeadLetterCount | None:
    topic = broker.registry.find_topic(topics.dlq_topic(group))
    if topic is None:
        return None
    queue = broker.store.queue(topic.id, 0)
    return pb.DeadLetterCount(
        broker=broker.settings.broker.name,
        group=group,
        stored=queue.count - queue.min_offset,
        redriven=broker.deliveries.redriven.count(topic.id, queue.min_offset),
    )


def _to_wire(broker: Broker, lag: Lag, ages: _Ages) -> pb.Lag:
    return pb.Lag(
        broker=broker.settings.broker.name,
        group=lag.group.name,
        topic=lag.topic.name,
        ready=lag.ready,
        in_flight=lag.in_flight,
        delayed=lag.delayed,
        blocked=lag.blocked,
        retries=lag.retries,
        expired=lag.expired,
        oldest_ready_ms=ages.oldest_ms.get(id(lag), 0),
        unknown_ages=ages.unknown.get(id(lag), 0),
        never_read=lag.never_read,
        verdict=broker.diagnostics.lag_monitor.verdict(lag.group.name, lag.topic.name),
        delivered=broker.pop.service.delivered.counts.get((lag.group.name, lag.topic.name), 0),
    )


def _of_pair(broker: Broker, pair: pb.LagPair) -> list[Lag]:
    """Nothing when this broker does not know one of them any more."""
    registry = broker.registry
    group, topic = registry.find_group(pair.group), registry.find_topic(pair.topic)
    if group is None or topic is None:
        return []
    return _lags(broker, group=group, topic=topic)


def _lags(
    broker: Broker, *, group: SubscriptionGroup | None, topic: TopicConfig | None
) -> list[Lag]:
    store, registry, timers = broker.store, broker.registry, broker.timers.state.pending
    return lags(store, registry, broker.table, group=group, topic=topic, timers=timers)


def time_spans(broker: Broker, request: Request) -> ResumableRead[bytes]:
    """What a group has been given counts as read, also while it is in flight."""
    asked = pb.TimeSpansRequest.FromString(request.body)
    group = broker.registry.group(asked.group)
    for name in asked.topics:
        topics.check_readable_topic_name(name)
    named = [broker.registry.topic(name) for name in asked.topics]
    queues = [
        (topic, queue_id)
        for topic in named or _topics_read(broker, group)
        for queue_id in broker.registry.queue_ids(topic)
    ]
    return _time_spans(broker, group, queues, holders=asked.holders)


def _time_spans(
    broker: Broker,
    group: SubscriptionGroup,
    queues: list[tuple[TopicConfig, int]],
    *,
    holders: bool,
) -> ResumableRead[bytes]:
    spans: list[pb.TimeSpan] = []
    held = (yield from _held(broker, group)) if holders else {}
    for topic, queue_id in queues:
        if spans and len(spans) % _QUEUES_A_STEP == 0:
            yield None
        span = yield from read_now(partial(_time_span, broker, group, topic, queue_id))
        span.holders.extend(
            pb.QueueHolder(client=broker.deliveries.clients.name(client), messages=count)
            for client, count in sorted(held.get((topic.id, queue_id), {}).items())
        )
        spans.append(span)
    return pb.TimeSpansReply(
        status=pb.Status(code=Code.OK, message="OK"), spans=spans, now_ms=broker.clock.wall_ms()
    ).SerializeToString()


def _held(
    broker: Broker, group: SubscriptionGroup
) -> ResumableRead[dict[tuple[int, int], dict[int, int]]]:
    """By topic and queue: how many messages each client has. Of more check points than can be
    looked at only the first."""
    held: dict[tuple[int, int], dict[int, int]] = {}
    for number, ck in enumerate(list(islice(broker.table, _HELD_LIMIT))):
        if number % _CHECK_POINTS_A_STEP == _CHECK_POINTS_A_STEP - 1:
            yield None
        group_id, topic_id, queue_id = ck.place
        if group_id == group.id and ck.waiting:
            clients = held.setdefault((topic_id, queue_id), {})
            clients[ck.client] = clients.get(ck.client, 0) + ck.waiting.bit_count()
    return held


def _topics_read(broker: Broker, group: SubscriptionGroup) -> list[TopicConfig]:
    """Topics of people's own that the group has come to."""
    places = (place for place, _ in broker.table.progress_items())
    ids = sorted({topic_id for group_id, topic_id, _ in places if group_id == group.id})
    known = map(broker.registry.topic_by_id, ids)
    return [topic for topic in known if topic is not None and not topics.is_group_owned(topic.name)]


def _time_span(
    broker: Broker, group: SubscriptionGroup, topic: TopicConfig, queue_id: int
) -> pb.TimeSpan:
    store = broker.store
    queue = store.queue(topic.id, queue_id)
    progress = broker.table.progress(group.id, topic.id, queue_id)
    next_offset = max(progress.cursor if progress else 0, queue.min_offset)

    def stored_ms(offset: int) -> int:
        if not queue.min_offset <= offset < queue.count:
            return 0
        (unit,) = queue.units(offset, 1, wait=False)
        return store.reader.stored_ms(unit, wait=False)

    return pb.TimeSpan(
        broker=broker.settings.broker.name,
        topic=topic.name,
        queue_id=queue_id,
        oldest_ms=stored_ms(queue.min_offset),
        newest_ms=stored_ms(queue.count - 1),
        read_ms=stored_ms(next_offset - 1),
        next_ms=stored_ms(next_offset),
        unread=max(0, queue.count - next_offset),
    )
