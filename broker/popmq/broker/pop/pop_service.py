"""Pop: delivers messages of any queue to any consumer, and accepts acks (docs/concepts/pop.md).

A pop writes a check point before its messages leave; the caller sends the reply once that is
confirmed.  Nothing here waits: what is not there now is an empty reply, and long polling is
the layer above.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from popmq.broker.deliveries.check_point_buffer import put_revive
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.group_topic_counts import GroupTopicCounts
from popmq.broker.deliveries.pop_check_point import (
    AUTO_RENEW,
    MEMBER_LIMIT,
    PUSH,
    CheckPointRecord,
    PopCheckPoint,
)
from popmq.broker.deliveries.queue_progress import QueueProgress
from popmq.broker.filter.message_filter import MessageFilter
from popmq.broker.filter.recent_filters import RecentFilters
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.meta.offset_record import OffsetReason, OffsetRecord
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.catch_up_throttle import CatchUpThrottle
from popmq.broker.pop.pop_batch import PopBatch
from popmq.broker.pop.pop_metrics import PopMetrics
from popmq.broker.pop.priority_order import PriorityOrder
from popmq.broker.pop.read_ahead import ReadAhead
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.disk import ColdRead
from popmq.common.errors import TooManyRequests
from popmq.common.protocol.pop_reply import DeliveryContent, PopReplyBuilder, content_of
from popmq.common.record.message import RecordKind
from popmq.common.record.receipt import encode_members, sign_check_point
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import MessageType, StartAt, SubscriptionGroup, TopicConfig


class PopParams(NamedTuple):
    """What one receive asks for, resolved: `queue_id` -1 means all queues."""

    topic: TopicConfig
    group: SubscriptionGroup
    limit: int
    invisible_ms: int
    queue_id: int
    filter: MessageFilter
    client: int
    auto_renew: bool
    reply_bytes: int
    attempt_id: int = 0  # 32 bits of the receive's attempt id; 0 when it has none


class PopResult(NamedTuple):
    deliveries: PopReplyBuilder
    remaining: int  # messages that the visited queues hold beyond those
    appended: bool  # records, so that the reply waits until they are confirmed


class PopService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        catch_up: CatchUpThrottle,
        settings: PopSettings,
        *,
        broker: str,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._buffer = deliveries.buffer
        self._catch_up = catch_up
        self._registry = registry
        self._table = deliveries.table
        self._settings = settings
        self._broker = broker
        self._rng = rng
        self.sequence = 0  # of the last check point that was made in this epoch
        self._cold_fetch = ReadAhead(store)
        self._priorities = PriorityOrder(settings.priority_turn)
        self.filters = RecentFilters()
        self.metrics = PopMetrics()
        self.delivered, self.acked = GroupTopicCounts(), GroupTopicCounts()

    def next_sequence(self) -> int:
        """Check points of one epoch are numbered from 1."""
        self.sequence += 1
        return self.sequence

    def pop(self, params: PopParams) -> PopResult:
        """Deliver what is ready in the queues that the receive visits.

        Every delivery's check point is appended when this returns; it may be told to the
        client when it is confirmed.  Raises TooManyRequests when messages are there but too
        many are in flight, and ColdRead when all that is there has to be read from the disk
        first: warm it elsewhere, and pop again.
        """
        begin = self.start_pop(params)
        batch = PopBatch(params.limit, min(params.reply_bytes, self._settings.reply_bytes))
        retry = self._registry.find_topic(topics.retry_topic(params.group.name, params.topic.name))
        retry_first = self._rng.randrange(100) < self._settings.retry_first_percent
        sources = [(params.topic, self.queue_order(params))]
        if retry is not None:
            sources.insert(0 if retry_first else 1, (retry, [0]))
        places = [(topic, queue_id) for topic, queue_ids in sources for queue_id in queue_ids]
        for number, (topic, queue_id) in enumerate(places):
            try:
                self._take(params, topic, queue_id, batch, len(places) - number)
            except OSError as error:
                batch.pass_over(topic, queue_id, error)
        return self.finish(params, batch, begin)

    def start_pop(self, params: PopParams) -> int:
        """The end of the log before the pop. TooManyRequests while nothing can be written."""
        self._store.guard.check_write()
        self.metrics.pops += 1
        self.filters.used((params.group.name, params.topic.name), params.filter)
        return self._store.end

    def finish(self, params: PopParams, batch: PopBatch, begin: int) -> PopResult:
        """What the batch came to since the log ended at `begin`; raises what `pop` raises."""
        place = (params.group.name, params.topic.name)
        if not batch.deliveries.count:
            if batch.cold:
                self.metrics.cold_pops += 1
                raise batch.cold[0]
            self._catch_up.on_queue_end(place)
            self.metrics.empty_pops += 1
            if batch.shortage:
                raise TooManyRequests(batch.shortage)
            if batch.refusal:
                self.metrics.refused_in_flight += 1
                raise TooManyRequests(batch.refusal)
        else:
            self._catch_up.delivered(place, batch.position, self._store.end)
            self.delivered.add(place, len(batch.deliveries))
            if batch.cold:
                self._cold_fetch.fetch(batch.cold[0])
        self.metrics.delivered += batch.deliveries.count
        return PopResult(batch.deliveries, batch.remaining, appended=self._store.end != begin)

    def has_ready(self, params: PopParams) -> bool:
        """Whether a pop might find something: reads no message, writes nothing."""
        retry = self._registry.find_topic(topics.retry_topic(params.group.name, params.topic.name))
        places = [(params.topic, q) for q in self.queue_order(params, begins=False)]
        if retry is not None:
            places.append((retry, 0))
        return any(
            self._store.queue(topic.id, queue_id).count
            > self.progress(params.group, topic, queue_id).cursor
            for topic, queue_id in places
        )

    def queue_order(self, params: PopParams, *, begins: bool = True) -> list[int]:
        """The queues that a receive visits; `begins`: it does so now."""
        topic = params.topic
        if params.queue_id >= 0:
            return [params.queue_id]
        if topic.type is MessageType.PRIORITY:
            waiting = partial(self._is_waiting, params.group, topic)
            place = (params.group.id, topic.id)
            return (
                self._priorities.order(place, topic.queues, waiting)
                if begins
                else [*range(topic.queues)]
            )
        first = self._rng.randrange(topic.queues)
        return [(first + i) % topic.queues for i in range(topic.queues)]

    def _is_waiting(self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int) -> bool:
        progress = self.progress(group, topic, queue_id)
        return progress.waiting(self._store.queue(topic.id, queue_id).count) > 0

    def progress(
        self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int
    ) -> QueueProgress:
        """Made at the group's first look at the queue."""
        known = self._table.progress(group.id, topic.id, queue_id)
        if known is not None:
            return known
        newest = topic.kind.start_at(group) is StartAt.NEWEST
        if newest and not topics.is_group_owned(topic.name):
            self._start_at_newest(group, topic)
            known = self._table.progress(group.id, topic.id, queue_id)
        queue = self._store.queue(topic.id, queue_id)
        fifo = topic.kind.is_ordered(group)
        return known or self._table.start(group.id, topic.id, queue_id, queue.min_offset, fifo=fifo)

    def open_progress_at(
        self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int, offset: int
    ) -> None:
        """The group's first look at the queue: it begins at `offset`, and a record says so."""
        place = (group.id, topic.id, queue_id)
        record = OffsetRecord(*place, offset, OffsetReason.START_AT_NEWEST)
        self._store.put_record(
            RecordKind.OFFSET, topic_id=topics.OFFSETS_TOPIC_ID, queue_id=0, body=record.encode()
        )
        self._table.start(*place, offset, fifo=topic.kind.is_ordered(group), logged=True)

    def _start_at_newest(self, group: SubscriptionGroup, topic: TopicConfig) -> None:
        """At the group's first look at the topic, for all queues; one added later is new to all."""
        places = [(group.id, topic.id, queue_id) for queue_id in range(topic.queues)]
        if any(self._table.progress(*place) for place in places):
            return
        for _, _, queue_id in places:
            self.open_progress_at(
                group, topic, queue_id, self._store.queue(topic.id, queue_id).count
            )

    def _take(
        self, params: PopParams, topic: TopicConfig, queue_id: int, batch: PopBatch, queues: int
    ) -> None:
        """Fill the batch from one queue and write the check points of what was taken; it is the
        first of so many queues that are left."""
        progress = self.progress(params.group, topic, queue_id)
        queue = self._store.queue(topic.id, queue_id)
        if batch.full:
            batch.remaining += queue.count - min(
                max(progress.cursor, queue.min_offset), queue.count
            )
            return
        if progress.cursor < queue.min_offset:
            self.metrics.expired += queue.min_offset - progress.cursor
            progress.expired += queue.min_offset - progress.cursor
            progress.skip_to(queue.min_offset)
        if progress.cursor < queue.count and (room := self.in_flight_room(progress, batch)) > 0:
            try:
                self._read_on(params, topic, queue_id, batch, progress, room, queues)
            except ColdRead as cold:
                batch.cold.append(cold)
        batch.remaining += queue.count - min(progress.cursor, queue.count)

    def _read_on(
        self,
        params: PopParams,
        topic: TopicConfig,
        queue_id: int,
        batch: PopBatch,
        progress: QueueProgress,
        room: int,
        queues: int,
    ) -> None:
        """Deliver from the queue's cursor; ColdRead, with nothing changed, when not in memory."""
        queue = self._store.queue(topic.id, queue_id)
        offset, left = progress.cursor, batch.bytes_left
        requested, reader = params.filter, self._store.reader
        expired = reader.expired
        try:
            if requested.matches_all:
                units = batch.take_all(queue.units(offset, room, wait=False), room)
                contents = enumerate(reader.contents(units), offset)
                numbers = [(number, content) for number, content in contents if content is not None]
                passed = len(units)
            elif requested.uses_tag_hash:
                units = queue.units(offset, batch.share(queues), wait=False)
                batch.scan_units -= len(units)
                numbers, passed = self._chosen(units, offset, requested, batch, room)
            else:
                limit = batch.can_read(requested.cost)
                units = queue.units(offset, limit, wait=False) if limit else []
                numbers, passed = self._looked_through(units, offset, requested, batch, room)
        except ColdRead:
            batch.bytes_left, reader.expired = left, expired
            raise
        if len(numbers) < passed:
            expired = reader.expired - expired
            unwanted = passed - len(numbers) - expired
            progress.filtered += unwanted
            progress.expired += expired
            self.metrics.passed_over(0 if requested.matches_all else unwanted, expired)
        if numbers:
            batch.position = units[numbers[-1][0] - offset].position
            self._deliver(params, topic, queue_id, numbers, offset + passed, batch)
        else:
            progress.skip_to(offset + passed)

    def _chosen(
        self,
        units: list[QueueUnit],
        offset: int,
        requested: MessageFilter,
        batch: PopBatch,
        room: int,
    ) -> tuple[list[tuple[int, DeliveryContent]], int]:
        """Messages chosen by their units and then read, and how many units were passed in all."""
        taken, passed = batch.choose(units, offset, requested, room)
        reader = self._store.reader
        read = reader.read([unit for _, unit in taken], wait=False) if taken else []
        offsets = [
            (offset, content_of(message))
            for (offset, _), message in zip(taken, read, strict=True)
            if not isinstance(message, DamagedMessage)
            and requested.accepts(message)
            and not reader.is_expired(message)
        ]
        return offsets, passed

    def _looked_through(
        self,
        units: list[QueueUnit],
        offset: int,
        requested: MessageFilter,
        batch: PopBatch,
        room: int,
    ) -> tuple[list[tuple[int, DeliveryContent]], int]:
        """Messages read and then chosen by their content, and how many were passed in all."""
        units = batch.units_to_read(units, requested.cost)
        offsets: list[tuple[int, DeliveryContent]] = []
        read = self._store.reader.read(units, wait=False)
        for passed, message in enumerate(read):
            if isinstance(message, DamagedMessage) or not requested.accepts(message):
                continue
            if self._store.reader.is_expired(message):
                continue
            first = not (offsets or batch.deliveries.count)
            if len(offsets) == room or (message.header.size > batch.bytes_left and not first):
                return offsets, passed
            batch.bytes_left -= message.header.size
            offsets.append((offset + passed, content_of(message)))
        return offsets, len(units)

    def in_flight_room(self, progress: QueueProgress, batch: PopBatch) -> int:
        """How many messages may be handed out, of a queue that has some: without room for any the
        receive is refused, unless it finds something elsewhere."""
        per_queue = self._settings.max_in_flight_per_queue - progress.in_flight
        per_broker = self._settings.max_in_flight_per_broker - self._table.in_flight
        if per_queue <= 0:
            batch.refusal = (
                f"{progress.in_flight} messages of this queue are in flight to the group, the "
                f"limit is {self._settings.max_in_flight_per_queue} "
                "(pop.max_in_flight_per_queue): ack some first"
            )
        elif per_broker <= 0:
            batch.refusal = (
                f"{self._table.in_flight} messages are in flight from broker {self._broker}, "
                f"the limit is {self._settings.max_in_flight_per_broker} "
                "(pop.max_in_flight_per_broker): ack some first"
            )
        return min(batch.limit - batch.deliveries.count, per_queue, per_broker)

    def _deliver(
        self,
        params: PopParams,
        topic: TopicConfig,
        queue_id: int,
        contents: list[tuple[int, DeliveryContent]],
        end: int,
        batch: PopBatch,
    ) -> None:
        """Check points of at most 64 offsets each, and their deliveries; read up to `end`."""
        while contents:
            beyond = contents[0][0] + MEMBER_LIMIT
            count = bisect_left(contents, beyond, key=itemgetter(0))
            group, contents = contents[:count], contents[count:]
            following = contents[0][0] if contents else end
            self._hand_out(params, topic, queue_id, group, following, batch)

    def _hand_out(
        self,
        params: PopParams,
        topic: TopicConfig,
        queue_id: int,
        group: list[tuple[int, DeliveryContent]],
        next_offset: int,
        batch: PopBatch,
    ) -> None:
        """One check point and its deliveries."""
        start = group[0][0]
        members = (1 << len(group)) - 1
        if group[-1][0] - start >= len(group):  # with gaps
            members = sum(1 << (offset - start) for offset, _ in group)
        record = CheckPointRecord(
            self._store.epoch,
            self.next_sequence(),
            members,
            start_offset=start,
            topic_id=topic.id,
            group_id=params.group.id,
            queue_id=queue_id,
            attempt_id=0,
            next_offset=next_offset,
            revive_at_ms=self._store.log_ms() + params.invisible_ms,
            client=params.client,
            flags=AUTO_RENEW | PUSH if params.auto_renew else 0,
        )
        if params.group.buffered and self._buffer.accepts(params.invisible_ms):
            self._buffer.open(record)
        else:
            self._buffer.write_queue((params.group.id, topic.id, queue_id))
            put_revive(self._store, self._table, record)
        self.deliver(batch.deliveries, record, group, {})

    def deliver(
        self,
        deliveries: PopReplyBuilder,
        check_point: CheckPointRecord | PopCheckPoint,
        messages: list[tuple[int, DeliveryContent]],
        attempts: Mapping[int, int],
    ) -> None:
        """Members as their consumer sees them, with their handles; `attempts` counts those that
        ended where the message stands."""
        key = self._registry.signing_keys.newest
        topic = self._registry.topic_by_id(check_point.topic_id)
        counts = topic is not None and topics.is_group_owned(topic.name)
        for attempt, some in _by_attempt(messages, attempts, counts=counts):
            signed = sign_check_point(
                key.secret,
                self._broker,
                check_point.topic_id,
                check_point.group_id,
                check_point.queue_id,
                attempt,
                check_point.epoch,
                check_point.sequence,
                key.id,
            )
            start = check_point.start_offset
            handle, tails = encode_members(signed, [(at, at - start) for at, _ in some])
            deliveries.add(check_point.queue_id, attempt, handle, tails, some)


def _by_attempt(
    messages: list[tuple[int, DeliveryContent]], attempts: Mapping[int, int], *, counts: bool
) -> Iterator[tuple[int, list[tuple[int, DeliveryContent]]]]:
    """Runs of messages that are delivered as the same attempt; nearly always one.

    `counts`: the attempts of their records count (`topics.first_attempt`).
    """
    first = messages[0][1].attempt if counts else 1
    if not attempts and (not counts or all([item.attempt == first for _, item in messages])):
        yield first, messages
        return

    def attempt_of(message: tuple[int, DeliveryContent]) -> int:
        offset, content = message
        return (content.attempt if counts else 1) + attempts.get(offset, 0)

    for attempt, run in groupby(messages, attempt_of):
        yield attempt, list(run)
