"""ParkingService: message groups that are stuck are moved out of the way (RULES of FIFO groups).

At the bound of open messages, keys whose oldest message has been stuck for long are parked, the
longest first: what waits of them moves, in order, to the group's parking topic, and what
comes later follows.  An operator resumes them, skips their messages, or makes these dead letters.
Each move is one record, which is the end of the message in its first place.
"""

from popmq.broker.deliveries.check_point_buffer import put_revive
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.parked_keys import ParkedKey
from popmq.broker.deliveries.pop_check_point import UnparkAction, UnparkRecord
from popmq.broker.deliveries.queue_progress import FifoProgress, GroupQueue
from popmq.broker.fifo.fifo_queue_scan import FifoQueueScan
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.pop_metrics import PopMetrics
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, Refused
from popmq.common.record.message import ParkedMessage, RevivalToken, Stamp, StoredMessage
from popmq.common.record.message_deadline import without_deadline
from popmq.common.settings.settings import PopSettings
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig

_LOOK_MS = 1_000  # between looks for stuck keys in one queue
_STEP_BYTES = 16 << 20  # copies that may wait for the disk before a step makes more


class ParkingService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        metrics: PopMetrics,
        settings: PopSettings,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = deliveries.table
        self._bodies = deliveries.bodies
        self._metrics = metrics
        self._settings = settings
        self._moving: dict[GroupQueue, None] = {}  # queues with something to move
        self._warming = False
        self.parked = 0
        self.dead_lettered = 0

    # -- what receives tell

    def choose_keys_to_park(
        self, group: SubscriptionGroup, topic: TopicConfig, queue_id: int, visit: FifoQueueScan
    ) -> None:
        """After a receive's visit: choose keys to park when the queue is at its bound."""
        place = (group.id, topic.id, queue_id)
        if visit.full:
            self._choose(place, visit.progress, self._store.log_ms())
        if visit.order.followers:
            self._moving[place] = None

    def _choose(self, place: GroupQueue, progress: FifoProgress, now_ms: int) -> None:
        """Mark stuck keys until a quarter of the room is free again."""
        if now_ms < progress.park_check_ms or not self._has_room(place):
            return
        progress.park_check_ms = now_ms + _LOOK_MS
        order = progress.order
        assert order is not None, "a visited queue without order info"
        requested = self._settings.fifo_open_offsets // 4 + 1
        for _, key, waiting in order.stuck_keys(now_ms - self._settings.fifo_park_after_ms):
            if requested <= 0:
                break
            order.park(key)
            requested -= waiting

    # -- steps

    @property
    def moving(self) -> bool:
        """Whether a step has something to move."""
        return bool(self._moving) or bool(self._table.parked.dead_lettering())

    def step(self, limit: int = 256) -> int:
        """Move at most `limit` messages; returns how many."""
        moved = 0
        try:
            for place in list(self._moving):
                if moved < limit:
                    moved += self._move_from(place, limit - moved)
            for key in self._table.parked.dead_lettering():
                if moved < limit:
                    moved += self._dead_letter(key, limit - moved)
        except ColdRead as cold:
            self._warm(cold)
        return moved

    def _may_copy(self) -> bool:
        fits = self._store.pending_bytes < _STEP_BYTES
        return fits and self._store.guard.copies_allowed and not self._warming

    def _has_room(self, place: GroupQueue) -> bool:
        parked = self._table.parked.counts.get(place[:2], 0)
        return parked < self._settings.fifo_parked_messages

    def _move_from(self, place: GroupQueue, limit: int) -> int:
        progress = self._table.progress(*place)
        group = self._registry.group_by_id(place[0])
        topic = self._registry.topic_by_id(place[1])
        order = progress.order if isinstance(progress, FifoProgress) else None
        if order is None or not order.followers or group is None or topic is None:
            del self._moving[place]
            return 0
        assert isinstance(progress, FifoProgress)
        moved = 0
        for key in list(order.followers):
            while moved < limit and self._may_copy():
                if not self._has_room(place):
                    if self._table.parked.find(*place, key) is None:
                        order.unpark(key)  # it was only chosen
                    break
                follower = order.next_follower(key)
                if follower is None:
                    break
                self._park(place, progress, group, topic, key, follower)
                moved += 1
        return moved

    def _park(
        self,
        place: GroupQueue,
        progress: FifoProgress,
        group: SubscriptionGroup,
        topic: TopicConfig,
        key: bytes,
        follower: tuple[int, QueueUnit],
    ) -> None:
        offset, unit = follower
        order = progress.order
        assert order is not None
        where = self._bodies.moved_to((topic.id, place[2], offset)) or unit
        try:
            (message,) = self._store.reader.read([where], wait=False)
        except ColdRead:
            order.returned(offset)
            raise
        expired = not isinstance(message, DamagedMessage) and self._store.reader.is_expired(message)
        if isinstance(message, DamagedMessage) or expired:
            self._metrics.passed_over(0, expired)
            progress.expired += expired
            order.skip(offset)
            progress.skip_filtered(offset, offset + 1)
            return
        target = self._topic(topics.parked_topic(group.name, topic.name))
        stamp = self._store.stamp()
        log_ms = stamp.log_ms
        token = RevivalToken(
            False,
            None,
            topic_id=topic.id,
            queue_id=place[2],
            queue_offset=offset,
            first_log_ms=log_ms,
        )
        attempt = topics.first_attempt(topic.name, message.attempt)
        attempt += progress.attempts.get(offset, 0)
        at = self._copy(target, message, token, attempt, stamp)
        self._table.parking.park(place, target.id, key, origin=offset, offset=at, log_ms=log_ms)
        self.parked += 1

    def _dead_letter(self, key: ParkedKey, limit: int) -> int:
        group = self._registry.group_by_id(key.group_id)
        assert group is not None, "a key parked for no group"
        progress = self._table.progress(key.group_id, key.parking_id, 0)
        assert isinstance(progress, FifoProgress), "a parking queue without progress"
        queue = self._store.queue(key.parking_id, 0)
        requested = [
            offset
            for _, offset in key.messages[: limit + len(progress.in_flight_offsets)]
            if offset < min(key.action_end_offset, queue.count)
            and offset not in progress.in_flight_offsets
        ]
        moved = 0
        for offset in requested[:limit]:
            if not self._may_copy():
                break
            unit = self._bodies.unit_at((key.parking_id, 0, offset), wait=False)
            (message,) = self._store.reader.read([unit], wait=False)
            if isinstance(message, DamagedMessage):
                self.set_action(key.group_id, key.parking_id, offset, UnparkAction.SKIP, alone=True)
                continue
            first = message.token
            assert first is not None, "a parked message without its token"
            token = RevivalToken(
                True,
                ParkedMessage(key.parking_id, offset),
                topic_id=first.topic_id,
                queue_id=first.queue_id,
                queue_offset=first.queue_offset,
                first_log_ms=first.first_log_ms,
            )
            # The last delivery that ended is the attempt it stands for, if there was one.
            attempt = message.attempt + progress.attempts.get(offset, 0)
            target = self._topic(topics.dlq_topic(group.name))
            stamp = self._store.stamp()
            self._copy(target, message, token, attempt, stamp)
            self._table.apply_revival(token, stamp.log_ms)
            self.dead_lettered += 1
            moved += 1
        return moved

    def _copy(
        self,
        target: TopicConfig,
        message: StoredMessage,
        token: RevivalToken,
        attempt: int,
        stamp: Stamp,
    ) -> int:
        return self._store.put_message(
            topic_id=target.id,
            queue_id=0,
            head=message.head,
            # Parked, or dead: it waits for a person.
            properties=without_deadline(message.properties),
            tag_hash=message.tag_hash,
            token=token.encode(),
            attempt=attempt,
            stamp=stamp,
        )

    def _topic(self, name: str) -> TopicConfig:
        requested = TopicConfig(0, name, queues=1, type=MessageType.MIXED)
        return self._registry.find_topic(name) or self._registry.create_topic(
            requested, internal=True
        )

    def _warm(self, cold: ColdRead) -> None:
        """An old body comes from the disk; the next steps do something else meanwhile."""
        self._warming = True

        def done(error: BaseException | None) -> None:
            self._warming = False  # an error shows again, at the read that waits

        self._store.readers.submit(lambda: _read(cold), done)

    # -- what operators say

    def apply_action(
        self, group: SubscriptionGroup, topic: TopicConfig, name: str, what: UnparkAction
    ) -> int:
        """Resume, skip or dead-letter the parked message group, in every queue that it is in.

        Returns how many messages that is about; NOT_FOUND when the message group is not parked.
        """
        self._store.guard.check_write()
        keys = [
            key
            for key in self._table.parked.of_group(group.id)
            if key.topic_id == topic.id and key.name == name.encode()
        ]
        if not keys:
            raise Refused(
                Code.NOT_FOUND,
                f"message group {name!r} of topic {topic.name} is not parked for consumer group "
                f"{group.name}: `popmq group show {group.name}` lists those that are",
            )
        messages = sum(len(key.messages) for key in keys)
        for key in keys:
            self.set_action(group.id, key.parking_id, key.messages[0][1], what)
        return messages

    def set_action(
        self,
        group_id: int,
        parking_id: int,
        offset: int,
        what: UnparkAction,
        *,
        alone: bool = False,
    ) -> None:
        """Write and apply an operator's word about the key that owns the message at `offset`.

        A skip may be about the message there `alone`.
        """
        key = self._table.parked.owner(parking_id, offset)
        assert key is not None, "a word about no parked key"
        end = 1 + (offset if alone else max(message for _, message in key.messages))
        record = UnparkRecord(
            what,
            self._store.epoch,
            0,
            offset if alone else 0,
            key_offset=offset,
            parking_id=parking_id,
            group_id=group_id,
            end=end,
        )
        put_revive(self._store, self._table, record)


def _read(cold: ColdRead) -> None:
    cold.warm()
