"""Pop: hand out messages of any queue to any consumer, and take back acks (docs/concepts/pop.md).

A pop writes a check point before its messages leave; the caller sends the reply once that is
confirmed.  Nothing here waits: what is not there now is an empty reply, and long polling is
the layer above.
"""

import random
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from popmq.broker.filter.last_filters import LastFilters
from popmq.broker.filter.message_filter import MessageFilter
from popmq.broker.meta.offsets import OffsetRecord, Reason
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.batch import SCAN_UNITS, Batch
from popmq.broker.pop.catch_up import CatchUp
from popmq.broker.pop.check_point_buffer import CheckPointBuffer
from popmq.broker.pop.check_point_table import CheckPointTable
from popmq.broker.pop.cold_fetch import ColdFetch
from popmq.broker.pop.pop_check_point import (
    AUTO_RENEW,
    MEMBER_LIMIT,
    PUSH,
    PopCheckPoint,
    ReviveKind,
    ReviveRecord,
)
from popmq.broker.pop.queue_progress import QueueProgress
from popmq.broker.store.message_reader import DamagedMessage
from popmq.broker.store.message_store import MessageStore
from popmq.broker.store.unit_check import Unit
from popmq.common import topics
from popmq.common.config import PopSettings
from popmq.common.disk import ColdRead
from popmq.common.errors import TooManyRequests
from popmq.common.hop import Delivery
from popmq.common.message import RecordKind, StoredMessage
from popmq.common.receipt import ReceiptHandle, encode_member, sign_check_point
from popmq.common.topics import GroupType, StartAt, SubscriptionGroup, TopicConfig


class Want(NamedTuple):
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


@dataclass(slots=True)
class PopMetrics:
    pops: int = 0
    empty_pops: int = 0
    delivered: int = 0
    refused_in_flight: int = 0
    cold_pops: int = 0  # had to wait for the disk
    expired: int = 0  # went by retention before this group read them
    filtered: int = 0  # passed over because no receive wanted them


class PopService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        table: CheckPointTable,
        settings: PopSettings,
        *,
        buffer: CheckPointBuffer,
        catch_up: CatchUp,
        broker: str,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._buffer = buffer
        self._catch_up = catch_up
        self._registry = registry
        self._table = table
        self._settings = settings
        self._broker = broker
        self._rng = rng
        self._sequence = 0
        self.wrote = False  # whether the last pop appended anything
        self._cold_fetch = ColdFetch(store)
        self.filters = LastFilters()
        self.metrics = PopMetrics()

    @property
    def sequence(self) -> int:
        """Of the last check point that was made in this epoch."""
        return self._sequence

    def next_sequence(self) -> int:
        """Check points of one epoch are numbered from 1."""
        self._sequence += 1
        return self._sequence

    def pop(self, want: Want) -> tuple[list[Delivery], int]:
        """Deliveries, and how many more messages the visited queues hold.

        Every delivery's check point is appended when this returns; it may be told to the
        client when it is confirmed.  Raises TooManyRequests when messages are there but too
        many are in flight, and ColdRead when all that is there has to be read from the disk
        first: warm it elsewhere, and pop again.
        """
        self.begin_pop(want)
        end = self._store.end
        batch = Batch(want.limit, min(want.reply_bytes, self._settings.reply_bytes))
        retry = self._registry.find_topic(topics.retry_topic(want.group.name, want.topic.name))
        retry_first = self._rng.randrange(100) < self._settings.retry_first_percent
        sources = [(want.topic, self.queue_order(want.topic, want.queue_id))]
        if retry is not None:
            sources.insert(0 if retry_first else 1, (retry, [0]))
        for topic, queue_ids in sources:
            for queue_id in queue_ids:
                self._take(want, topic, queue_id, batch)
        self.wrote = self._store.end != end
        return self.finish(want, batch)

    def begin_pop(self, want: Want) -> None:
        """TooManyRequests while nothing can be written."""
        self._store.guard.check_write()
        self.metrics.pops += 1
        self.filters.used((want.group.name, want.topic.name), want.filter)

    def finish(self, want: Want, batch: Batch) -> tuple[list[Delivery], int]:
        """What the batch came to; raises what `pop` raises."""
        place = (want.topic.name, want.group.name)
        if not batch.deliveries:
            if batch.cold:
                self.metrics.cold_pops += 1
                raise batch.cold[0]
            self._catch_up.found_nothing(place)
            self.metrics.empty_pops += 1
            if batch.refusal:
                self.metrics.refused_in_flight += 1
                raise TooManyRequests(batch.refusal)
        else:
            self._catch_up.delivered(place, batch.position, self._store.end)
            if batch.cold:
                self._cold_fetch.fetch(batch.cold[0])
        self.metrics.delivered += len(batch.deliveries)
        return batch.deliveries, batch.rest

    def has_ready(self, want: Want) -> bool:
        """Whether a pop might find something: reads no message, writes nothing."""
        retry = self._registry.find_topic(topics.retry_topic(want.group.name, want.topic.name))
        places = [(want.topic, q) for q in self.queue_order(want.topic, want.queue_id)]
        if retry is not None:
            places.append((retry, 0))
        return any(
            self._store.queue(topic.id, queue_id).count
            > self.progress(want.group, topic, queue_id).cursor
            for topic, queue_id in places
        )

    def begin(self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int) -> None:
        """The group's first look at the queue, if it had none yet."""
        self.progress(group, topic, queue_id)

    def queue_order(self, topic: TopicConfig, queue_id: int) -> list[int]:
        if queue_id >= 0:
            return [queue_id]
        first = self._rng.randrange(topic.queues)
        return [(first + i) % topic.queues for i in range(topic.queues)]

    def progress(
        self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int
    ) -> QueueProgress:
        """Made at the group's first look at the queue."""
        known = self._table.progress(group.id, topic.id, queue_id)
        if known is not None:
            return known
        if group.start_at is StartAt.NEWEST and not topics.is_group_owned(topic.name):
            self._start_at_newest(group, topic)
            known = self._table.progress(group.id, topic.id, queue_id)
        queue = self._store.queue(topic.id, queue_id)
        fifo = group.type is GroupType.FIFO
        return known or self._table.start(group.id, topic.id, queue_id, queue.min_offset, fifo=fifo)

    def _start_at_newest(self, group: SubscriptionGroup, topic: TopicConfig) -> None:
        """At the group's first look at the topic, for all queues; one added later is new to all."""
        places = [(group.id, topic.id, queue_id) for queue_id in range(topic.queues)]
        if any(self._table.progress(*place) for place in places):
            return
        for place in places:
            start = self._store.queue(topic.id, place[2]).count
            record = OffsetRecord(*place, start, Reason.START_AT_NEWEST)
            self._store.put_record(
                RecordKind.OFFSET,
                topic_id=topics.OFFSETS_TOPIC_ID,
                queue_id=0,
                body=record.encode(),
            )
            fifo = group.type is GroupType.FIFO
            self._table.start(*place, start, fifo=fifo, logged=True)

    def _take(self, want: Want, topic: TopicConfig, queue_id: int, batch: Batch) -> None:
        """Fill the batch from one queue and write the check points of what was taken."""
        progress = self.progress(want.group, topic, queue_id)
        queue = self._store.queue(topic.id, queue_id)
        if progress.cursor < queue.min_offset:
            self.metrics.expired += queue.min_offset - progress.cursor
            progress.expired += queue.min_offset - progress.cursor
            progress.skip_to(queue.min_offset)
        room = self.room(progress, batch) if not batch.full else 0
        if room > 0 and progress.cursor < queue.count:
            try:
                self._read_on(want, topic, queue_id, batch, progress, room)
            except ColdRead as cold:
                batch.cold.append(cold)
        batch.rest += queue.count - min(progress.cursor, queue.count)

    def _read_on(
        self,
        want: Want,
        topic: TopicConfig,
        queue_id: int,
        batch: Batch,
        progress: QueueProgress,
        room: int,
    ) -> None:
        """Deliver from the queue's cursor; ColdRead, with nothing changed, when not in memory."""
        queue = self._store.queue(topic.id, queue_id)
        offset, left = progress.cursor, batch.bytes_left
        wanted = want.filter
        try:
            if wanted.everything:
                units = queue.units(offset, room, wait=False)
                found, passed = self._chosen(units, offset, wanted, batch, room)
            elif wanted.by_hash:
                units = queue.units(offset, SCAN_UNITS, wait=False)
                found, passed = self._chosen(units, offset, wanted, batch, room)
            else:
                limit = batch.may_look_at(wanted.work)
                units = queue.units(offset, limit, wait=False) if limit else []
                found, passed = self._looked_through(units, offset, wanted, batch, room)
        except ColdRead:
            batch.bytes_left = left
            raise
        if not wanted.everything:
            self.metrics.filtered += passed - len(found)
        if found:
            self._deliver(want, topic, queue_id, found, offset + passed, batch)
        else:
            progress.skip_to(offset + passed)

    def _chosen(
        self, units: list[Unit], offset: int, wanted: MessageFilter, batch: Batch, room: int
    ) -> tuple[list[tuple[int, StoredMessage]], int]:
        """Messages chosen by their units and then read, and how many units were passed in all."""
        taken, passed = batch.choose(units, offset, wanted, room)
        read = self._store.reader.read([unit for _, unit in taken], wait=False) if taken else []
        everything = wanted.everything
        found = [
            (offset, message)
            for (offset, _), message in zip(taken, read, strict=True)
            if not isinstance(message, DamagedMessage) and (everything or wanted.accepts(message))
        ]
        return found, passed

    def _looked_through(
        self, units: list[Unit], offset: int, wanted: MessageFilter, batch: Batch, room: int
    ) -> tuple[list[tuple[int, StoredMessage]], int]:
        """Messages read and then chosen by their content, and how many were passed in all."""
        units = batch.to_look_at(units, wanted.work)
        found: list[tuple[int, StoredMessage]] = []
        read = self._store.reader.read(units, wait=False)
        for passed, message in enumerate(read):
            if isinstance(message, DamagedMessage) or not wanted.accepts(message):
                continue
            first = not (found or batch.deliveries)
            if len(found) == room or (message.header.size > batch.bytes_left and not first):
                return found, passed
            batch.bytes_left -= message.header.size
            found.append((offset + passed, message))
        return found, len(units)

    def room(self, progress: QueueProgress, batch: Batch) -> int:
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
        return min(batch.limit - len(batch.deliveries), per_queue, per_broker)

    def _deliver(
        self,
        want: Want,
        topic: TopicConfig,
        queue_id: int,
        found: list[tuple[int, StoredMessage]],
        end: int,
        batch: Batch,
    ) -> None:
        """Check points of at most 64 offsets each, and their deliveries; read up to `end`."""
        batch.position = found[-1][1].header.position
        while found:
            beyond = found[0][0] + MEMBER_LIMIT
            count = bisect_left(found, beyond, key=itemgetter(0))
            group, found = found[:count], found[count:]
            following = found[0][0] if found else end
            self._hand_out(want, topic, queue_id, group, following, batch)

    def _hand_out(
        self,
        want: Want,
        topic: TopicConfig,
        queue_id: int,
        group: list[tuple[int, StoredMessage]],
        next_offset: int,
        batch: Batch,
    ) -> None:
        """One check point and its deliveries."""
        start = group[0][0]
        members = 0
        for offset, _ in group:
            members |= 1 << (offset - start)
        record = ReviveRecord(
            ReviveKind.CHECK_POINT,
            self._store.epoch,
            self.next_sequence(),
            members,
            start_offset=start,
            topic_id=topic.id,
            group_id=want.group.id,
            queue_id=queue_id,
            link=next_offset,
            revive_at_ms=self._store.log_ms() + want.invisible_ms,
            client=want.client,
            flags=AUTO_RENEW | PUSH if want.auto_renew else 0,
        )
        if want.group.buffered and self._buffer.takes(want.invisible_ms):
            self._buffer.open(record)
        else:
            self._buffer.write_queue((want.group.id, topic.id, queue_id))
            put_revive(self._store, self._table, record)
        batch.deliveries += self.deliveries(record, group, {})

    def deliveries(
        self,
        check_point: ReviveRecord,
        messages: list[tuple[int, StoredMessage]],
        attempts: Mapping[int, int],
    ) -> list[Delivery]:
        """Members as their consumer sees them, with their handles; `attempts` counts those that
        ended where the message stands."""
        key, broker = self._registry.receipt_key, self._broker
        topic_id, group_id = check_point.topic_id, check_point.group_id
        queue_id, start = check_point.queue_id, check_point.start_offset
        epoch, sequence = check_point.epoch, check_point.sequence
        made = []
        signed: dict[int, bytes] = {}  # by attempt
        for offset, (header, _, attempt, _, head, properties) in messages:
            if attempts:
                attempt += attempts.get(offset, 0)
            common = signed.get(attempt)
            if common is None:
                common = signed[attempt] = sign_check_point(
                    key, broker, topic_id, group_id, queue_id, attempt, epoch, sequence
                )
            handle = encode_member(common, offset, offset - start)
            fields = (queue_id, offset, attempt, header.wall_ms, handle, head, properties)
            made.append(tuple.__new__(Delivery, fields))  # half of what calling the class costs
        return made


def put_revive(store: MessageStore, table: CheckPointTable, record: ReviveRecord) -> None:
    """Append the record to the revive topic and apply it (D1: at append)."""
    log_ms = store.put_record(
        RecordKind.REVIVE,
        topic_id=topics.REVIVE_TOPIC_ID,
        queue_id=record.sequence % topics.REVIVE_QUEUES,
        body=record.encode(),
    )
    table.apply(record, log_ms)


def live_check_point(table: CheckPointTable, handle: ReceiptHandle) -> PopCheckPoint | None:
    return table.find(handle.epoch, handle.sequence)
