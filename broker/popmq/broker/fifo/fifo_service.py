"""FifoService: pop for groups of type FIFO, in the order of each message group.

A receive takes messages of keys (message groups) that have nothing in flight, in the order of
their offsets; a key that is busy holds up nobody else.  What comes back waits in its place, so
there is no retry topic (docs/concepts/pop.md, FIFO groups).
"""

from popmq.broker.deliveries.check_point_buffer import put_revive
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.order_info import OrderInfo
from popmq.broker.deliveries.parked_keys import ParkedKey
from popmq.broker.deliveries.pop_check_point import (
    AUTO_RENEW,
    FIFO,
    MEMBER_LIMIT,
    PUSH,
    CheckPointRecord,
    PopCheckPoint,
    UnparkAction,
    member_bits,
)
from popmq.broker.deliveries.queue_progress import FifoProgress
from popmq.broker.fifo.fifo_queue_scan import FifoQueueScan, units_to_look_at
from popmq.broker.fifo.parking_service import ParkingService
from popmq.broker.filter.message_filter import EVERYTHING
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.pop_batch import PopBatch
from popmq.broker.pop.pop_service import PopParams, PopResult, PopService
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.disk import ColdRead
from popmq.common.protocol.pop_reply import content_of
from popmq.common.record.message import StoredMessage
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import TopicConfig

LINE_OPEN = 64  # messages of a lite topic that are remembered for a group


class FifoService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        pops: PopService,
        settings: PopSettings,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = deliveries.table
        self._bodies = deliveries.bodies
        self._pops = pops
        self._settings = settings
        self.parking = ParkingService(store, registry, deliveries, pops.metrics, settings)

    def pop(self, params: PopParams) -> PopResult:
        """Like `PopService.pop`, in order; the same attempt id gets the same again."""
        begin = self._pops.start_pop(params)
        batch = PopBatch(params.limit, min(params.reply_bytes, self._settings.reply_bytes))
        for ck in self.received(params):
            self.repeat_deliveries(ck, batch)
        if not batch.deliveries:
            self._take_resumed(params, batch)
            queues = self._pops.queue_order(params)
            batch.scan_units = units_to_look_at(params.filter)
            for number, queue_id in enumerate(queues):
                share = batch.share(len(queues) - number)
                try:
                    self._take(params, params.topic, queue_id, batch, share)
                except OSError as error:
                    batch.pass_over(params.topic, queue_id, error)
            if not batch.deliveries:  # the queues may have been looked at far enough by now
                self._take_resumed(params, batch)
        return self._pops.finish(params, batch, begin)

    def pop_queue_in_order(self, params: PopParams, queue_id: int, batch: PopBatch) -> bool:
        """Fill the batch from a lite topic: a queue in one line, in which nothing leaves while
        something is in flight. Returns whether more could leave at once."""
        look_at = units_to_look_at(params.filter)
        visit = self._visit(params, params.topic, queue_id, look_at, LINE_OPEN)
        if not self._fill(params, params.topic, visit, batch):
            return True
        return not visit.progress.in_flight_offsets and (visit.order.has_ready() or visit.rest > 0)

    def has_ready(self, params: PopParams) -> bool:
        """Whether a pop might find something: reads no message, writes nothing."""
        if self.received(params):
            return True
        return any(
            visit.rest or visit.order.has_ready()
            for visit in (
                self._visit(params, params.topic, queue_id)
                for queue_id in self._pops.queue_order(params, begins=False)
            )
        )

    def _take(
        self, params: PopParams, topic: TopicConfig, queue_id: int, batch: PopBatch, share: int
    ) -> None:
        """Fill the batch from one queue and write the check points of what was taken; at most
        about `share` units are looked at."""
        visit = self._visit(params, topic, queue_id, share)
        self._fill(params, topic, visit, batch)
        batch.scan_units -= share - visit.left
        self.parking.choose_keys_to_park(params.group, topic, queue_id, visit)
        batch.remaining += visit.rest

    def _visit(
        self,
        params: PopParams,
        topic: TopicConfig,
        queue_id: int,
        look_at: int = 0,
        open_limit: int = 0,
    ) -> FifoQueueScan:
        progress = self._progress(params, topic, queue_id)
        if progress.order is None:
            progress.order = OrderInfo(progress.committed)
            for key in self._table.parked.of_group(params.group.id):
                if (key.topic_id, key.queue_id) == (topic.id, queue_id):
                    progress.order.park(key.name)
        return FifoQueueScan(
            self._store,
            self._bodies,
            self._pops.metrics,
            topic.id,
            queue_id,
            progress,
            requested=params.filter,
            open_limit=open_limit or self._settings.fifo_open_offsets,
            look_at=look_at,
        )

    def _progress(self, params: PopParams, topic: TopicConfig, queue_id: int) -> FifoProgress:
        progress = self._pops.progress(params.group, topic, queue_id)
        assert isinstance(progress, FifoProgress), f"group {params.group.name} keeps no order"
        return progress

    def _fill(
        self, params: PopParams, topic: TopicConfig, visit: FifoQueueScan, batch: PopBatch
    ) -> bool:
        """Take what fits from the visit; False when a body has to come from the disk first."""
        left = batch.bytes_left
        try:
            visit.expire()
            there = visit.rest or visit.order.has_ready()
            room = self._pops.in_flight_room(visit.progress, batch) if there else 0
            messages = visit.read(visit.choose(batch, room)) if room > 0 else []
        except ColdRead as cold:
            batch.bytes_left = left
            batch.cold.append(cold)
            return False
        self._deliver(params, topic, visit, messages, batch)
        return True

    def _deliver(
        self,
        params: PopParams,
        topic: TopicConfig,
        visit: FifoQueueScan,
        messages: list[tuple[int, StoredMessage]],
        batch: PopBatch,
    ) -> None:
        """Check points of at most 64 offsets each, and their deliveries."""
        if messages:
            batch.position = messages[-1][1].header.position
        first = 0
        while first < len(messages):
            start = messages[first][0]
            behind = first
            members = 0
            while behind < len(messages) and messages[behind][0] - start < MEMBER_LIMIT:
                members |= 1 << (messages[behind][0] - start)
                behind += 1
            record = CheckPointRecord(
                self._store.epoch,
                self._pops.next_sequence(),
                members,
                start_offset=start,
                topic_id=topic.id,
                group_id=params.group.id,
                queue_id=visit.queue_id,
                attempt_id=params.attempt_id,
                next_offset=visit.progress.committed,
                revive_at_ms=self._store.log_ms() + params.invisible_ms,
                client=params.client,
                flags=FIFO | AUTO_RENEW | PUSH if params.auto_renew else FIFO,
            )
            put_revive(self._store, self._table, record)
            some = [(offset, content_of(message)) for offset, message in messages[first:behind]]
            self._pops.deliver(batch.deliveries, record, some, visit.progress.attempts)
            first = behind

    # -- parked keys that were resumed

    def _take_resumed(self, params: PopParams, batch: PopBatch) -> None:
        """Their messages come out of the parking queue, in the order that they had before."""
        keys = self._table.parked.resumed(params.group.id, params.topic.id)
        if not keys:
            return
        parking = self._registry.topic_by_id(keys[0].parking_id)
        assert parking is not None, "keys parked in no topic"
        progress = self._progress(params, parking, 0)
        if progress.order is None:
            progress.order = OrderInfo(0)
        # What is parked had passed the filter already.
        visit = FifoQueueScan(
            self._store,
            self._bodies,
            self._pops.metrics,
            parking.id,
            0,
            progress,
            requested=EVERYTHING,
            open_limit=1 << 60,
            look_at=0,
        )
        left = batch.bytes_left
        try:
            for key in keys:
                if params.queue_id in (-1, key.queue_id):
                    self._feed(key, visit)
            room = self._pops.in_flight_room(progress, batch) if visit.order.has_ready() else 0
            taken = visit.choose(batch, room) if room > 0 else []
            messages = visit.read(taken)
        except ColdRead as cold:
            batch.bytes_left = left
            batch.cold.append(cold)
            return
        self._deliver(params, parking, visit, messages, batch)
        for offset in {offset for offset, _ in taken} - {offset for offset, _ in messages}:
            self.parking.set_action(
                keys[0].group_id, parking.id, offset, UnparkAction.SKIP, alone=True
            )

    def _feed(self, key: ParkedKey, visit: FifoQueueScan) -> None:
        """Let the key's next messages be chosen: as many as stand in their order there.

        A message that was in flight when its key was parked stands behind later ones, and the
        ones behind it wait until it is over.  One that is still in flight holds up all.
        """
        base = self._table.progress(key.group_id, key.topic_id, key.queue_id)
        if not isinstance(base, FifoProgress) or base.order is None:
            return
        before = -1
        for origin, offset in key.messages[:MEMBER_LIMIT]:
            confirmed = offset < visit.queue.count
            if offset < before or not confirmed or base.order.has_open_below(key.name, origin):
                return
            before = offset
            if offset not in visit.order.open:
                unit = self._bodies.unit_at((key.parking_id, 0, offset), wait=False)
                held = offset in visit.progress.in_flight_offsets
                visit.order.add_message(offset, key.line, unit, held=held)

    # -- the same receive once more

    def received(self, params: PopParams) -> list[PopCheckPoint]:
        """What a receive of this attempt id was given and still has."""
        if not params.attempt_id:
            return []
        now_ms = self._store.log_ms()
        name = topics.parked_topic(params.group.name, params.topic.name)
        places = (self._registry.find_topic(name), params.topic)
        return [
            ck
            for topic in places
            if topic is not None
            for ck in self._table.receives.of(
                (params.group.id, topic.id, params.client, params.attempt_id)
            )
            if params.queue_id in (-1, ck.queue_id) and ck.waiting and ck.due_ms > now_ms
        ]

    def repeat_deliveries(self, ck: PopCheckPoint, batch: PopBatch) -> None:
        """The client may not have seen the reply: nothing is written, the handles are the same."""
        ck.repeated = True
        members = member_bits(ck.waiting)[: batch.limit - len(batch.deliveries)]
        units = [self._bodies.unit_of(ck, member, wait=False) for member in members]
        messages = self._store.reader.read(units, wait=False)
        offsets = [
            (ck.offset_of(member), content_of(message))
            for member, message in zip(members, messages, strict=True)
            if not isinstance(message, DamagedMessage)
        ]
        progress = self._table.progress(*ck.place)
        assert isinstance(progress, FifoProgress), "a FIFO check point without progress"
        if offsets:
            self._pops.deliver(batch.deliveries, ck, offsets, progress.attempts)
            batch.position = units[-1].position
