"""LAG: the counts at one moment, then the ages, which take a look into the log."""

from popmq.broker.core.broker import Broker
from popmq.broker.diagnostics.lag import Lag, lags
from popmq.common import topics
from popmq.common.errors import Code
from popmq.common.topics import SubscriptionGroup, TopicConfig
from popmq.common.wire import admin_pb2 as pb

_READS_A_STEP = 64


class LagJob:
    def __init__(self, broker: Broker, request: pb.LagRequest) -> None:
        self._broker = broker
        registry = broker.registry
        group = registry.group(request.group) if request.group else None
        topic = None
        if request.topic:
            topics.check_readable_topic_name(request.topic)
            topic = registry.topic(request.topic)
        if request.pairs:
            self._lags = [lag for pair in request.pairs for lag in _of_pair(broker, pair)]
        else:
            self._lags = _lags(broker, group=group, topic=topic)
        groups = [group] if group else list(registry.groups())
        if request.pairs:
            groups = []
        self._again = bool(request.pairs)
        self._dead = [
            count for one in groups if (count := self._dead_letters(one.name)) is not None
        ]
        self._heads = [(lag, head) for lag in self._lags for head in lag.heads]
        self._oldest: dict[int, int] = {}  # lag by identity -> wall milliseconds
        self._unknown: dict[int, int] = {}  # lag by identity -> queues

    def step(self) -> bytes | None:
        for _ in range(_READS_A_STEP):
            if not self._heads:
                return self._reply()
            lag, head = self._heads[-1]
            stored_ms = self._broker.head_times.stored_ms(head)
            self._heads.pop()
            if stored_ms is None:
                self._unknown[id(lag)] = self._unknown.get(id(lag), 0) + 1
            else:
                known = self._oldest.get(id(lag), stored_ms)
                self._oldest[id(lag)] = min(known, stored_ms)
        return None

    def _dead_letters(self, group: str) -> pb.DeadLetterCount | None:
        topic = self._broker.registry.find_topic(topics.dlq_topic(group))
        if topic is None:
            return None
        queue = self._broker.store.queue(topic.id, 0)
        return pb.DeadLetterCount(
            broker=self._broker.settings.broker.name,
            group=group,
            stored=queue.count - queue.min_offset,
            redriven=self._broker.redriven.count(topic.id, queue.min_offset),
        )

    def _reply(self) -> bytes:
        return pb.LagReply(
            status=pb.Status(code=Code.OK, message="OK"),
            lags=map(self._to_wire, self._lags),
            dead_letters=self._dead,
            now_ms=self._broker.wall_ms(),
            brokers=[] if self._again else [self._broker.settings.broker.name],
        ).SerializeToString()

    def _to_wire(self, lag: Lag) -> pb.Lag:
        return pb.Lag(
            broker=self._broker.settings.broker.name,
            group=lag.group.name,
            topic=lag.topic.name,
            ready=lag.ready,
            in_flight=lag.in_flight,
            delayed=lag.delayed,
            blocked=lag.blocked,
            retries=lag.retries,
            expired=lag.expired,
            oldest_ready_ms=self._oldest.get(id(lag), 0),
            unknown_ages=self._unknown.get(id(lag), 0),
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
