"""Revive: what was not acked in time comes back, or goes to the dead letters.

The retry or dead-letter record *is* the revival: it carries the check point and
the member that it ends, so it is written once whatever crashes, and there is no separate
revive log to fall behind.  Messages of FIFO groups come back in place, by a record of their own.
"""

from popmq.broker.deliveries.check_point_buffer import put_revive
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.group_topic_counts import GroupTopicCounts
from popmq.broker.deliveries.pop_check_point import (
    AUTO_RENEW,
    FIFO,
    PUSH,
    PopCheckPoint,
    ReviveKind,
    member_bits,
)
from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.meta.registry import Registry
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.disk import ColdRead
from popmq.common.errors import Code, Refused
from popmq.common.record.message import DeadReason, EndedDelivery, RevivalToken, StoredMessage
from popmq.common.record.message_deadline import without_deadline
from popmq.common.topics import GroupTopic, SubscriptionGroup, TopicConfig

RENEW_MS = 5_000  # how often a renewed delivery is looked at
RENEW_LIMIT_MS = 3 * 3_600_000
_STEP_BYTES = 16 << 20  # copies that may wait for the disk before a step makes more


class ReviveService:
    def __init__(self, store: MessageStore, registry: Registry, deliveries: Deliveries) -> None:
        self._store = store
        self._registry = registry
        self._table = deliveries.table
        self._buffer = deliveries.buffer
        self._bodies = deliveries.bodies
        self._liveness = deliveries.liveness
        self.renewed = 0
        self.retried = 0
        self.returned = 0
        self.dead_lettered = 0
        self.returned_by_pair, self.dead_by_pair = GroupTopicCounts(), GroupTopicCounts()
        self.kept = 0  # dead letters that failed again
        self.lost = 0
        self._warming = False

    def step(self, limit: int = 96) -> int:
        """Revive about `limit` messages that are due; returns how many."""
        now_ms = self._store.log_ms()
        revived = 0
        while (
            revived < limit
            and self._store.pending_bytes < _STEP_BYTES
            and self._store.guard.copies_allowed
            and not self._warming
        ):
            ck = self._table.due_times.take(now_ms)
            if ck is None:
                break
            if self._renews(ck, now_ms):
                self._table.due_times.add(ck, now_ms + RENEW_MS)
                self.renewed += 1
            else:
                revived += self._revive(ck, limit - revived)
        self._table.forget_ended(now_ms)
        self._liveness.forget(now_ms)
        return revived

    def reject(self, ck: PopCheckPoint, member: int) -> None:
        """Make a waiting delivery a dead letter now, because its consumer asks for that.

        Raises ColdRead, with nothing changed, when the body has to come from the disk, and
        MESSAGE_NOT_FOUND when it cannot be read any more.
        """
        topic, group = self._owners(ck)
        unit = self._bodies.unit_of(ck, member, wait=False)
        (message,) = self._store.reader.read([unit], wait=False)
        if isinstance(message, DamagedMessage):
            raise Refused(
                Code.MESSAGE_NOT_FOUND,
                f"the message at position {message.position} cannot be read any more",
            )
        self._buffer.write(ck)
        self._revive_one(ck, member, topic, group, message, DeadReason.REJECTED)

    def release_deliveries(self, client: int) -> int:
        """The client said good-bye: what it holds as a push consumer, and has not given back by
        a change, comes back now; also what another master's end keeps from being renewed."""
        self._liveness.on_client_closed(client)
        mine = (ck for ck in self._table if ck.client == client)
        held = [ck for ck in mine if ck.flags & PUSH and ck.first_check_point is None]
        for ck in held:
            if ck.waiting:
                self._table.due_times.remove(ck)
                self._table.due_times.add(ck, 0)
        return len(held)

    def _renews(self, ck: PopCheckPoint, now_ms: int) -> bool:
        """Whether the delivery goes on, because its push consumer lives: nothing is written."""
        return bool(
            ck.flags & AUTO_RENEW
            and not ck.rolled_back
            and (ck.repeated or not ck.doubted)
            and now_ms - ck.popped_at_ms < RENEW_LIMIT_MS
            and self._liveness.is_alive(ck.client, now_ms)
        )

    def _revive(self, ck: PopCheckPoint, limit: int) -> int:
        topic, group = self._owners(ck)
        self._buffer.write(ck)  # a revival names its check point; acks that wait come first
        revived = 0
        for member in member_bits(ck.waiting):
            if revived == limit or self._store.pending_bytes >= _STEP_BYTES:
                self._table.due_times.add(ck)
                break
            try:
                unit = self._bodies.unit_of(ck, member, wait=False)
                (message,) = self._store.reader.read([unit], wait=False)
            except ColdRead as cold:
                self._table.due_times.add(ck)
                self._warm(cold)
                break
            if isinstance(message, DamagedMessage):
                self._give_up(ck, member)
            else:
                self._revive_one(ck, member, topic, group, message)
            revived += 1
        return revived

    def _owners(self, ck: PopCheckPoint) -> tuple[TopicConfig, SubscriptionGroup]:
        """Deleting a topic or a group drops its check points, so both are there."""
        topic = self._registry.topic_by_id(ck.topic_id)
        group = self._registry.group_by_id(ck.group_id)
        assert topic is not None, f"check point {ck.key} of no topic"
        assert group is not None, f"check point {ck.key} of no group"
        return topic, group

    def _warm(self, cold: ColdRead) -> None:
        """An old body comes from the disk; the next steps do something else meanwhile."""
        self._warming = True

        def done(error: BaseException | None) -> None:
            self._warming = False  # an error shows again, at the read that waits

        self._store.readers.submit(lambda: _read(cold), done)

    def _give_up(self, ck: PopCheckPoint, member: int) -> None:
        """The body cannot be read: say so in the log, so that the queue's offset moves on."""
        self.lost += 1
        lost = ck.end_record(ReviveKind.LOST, 1 << member)
        put_revive(self._store, self._table, lost)

    def _revive_one(
        self,
        ck: PopCheckPoint,
        member: int,
        topic: TopicConfig,
        group: SubscriptionGroup,
        message: StoredMessage,
        reject: DeadReason | None = None,
    ) -> None:
        attempt = topics.first_attempt(topic.name, message.attempt)
        attempt += self._table.attempts_before(ck, member)
        dead = reject is not None or (attempt >= group.max_attempts and not ck.rolled_back)
        if ck.flags & FIFO and not dead:
            self.returned_by_pair.add(_pair(group, topic), not ck.rolled_back)
            self._return(ck, member)
            return
        if dead and topics.has_dead_letters(topic.name):
            self._keep(ck, member)
            return
        target = self._target(topic, group, dead=dead)
        # The first copy's place travels along, however often the message is revived.  Outside of
        # the group's own topics a token is another group's: the message itself is the first copy.
        origin = message.token if topics.is_group_owned(topic.name) else None
        # A change of the invisible duration delivers nothing.
        delivered = ck.first_check_point or ck
        popped_at_ms = 0 if ck.rolled_back else delivered.popped_at_ms
        token = RevivalToken(
            dead,
            EndedDelivery(*ck.key, member),
            origin.topic_id if origin else ck.topic_id,
            origin.queue_id if origin else ck.queue_id,
            origin.queue_offset if origin else ck.offset_of(member),
            # 0: it was redriven, or its receive undone, and not delivered since.
            (origin and origin.first_log_ms) or popped_at_ms,
            popped_at_ms,
            reject or DeadReason.MAX_ATTEMPTS,
        )
        stamp = self._store.stamp()
        self._store.put_message(
            topic_id=target.id,
            queue_id=0,
            head=message.head,
            properties=without_deadline(message.properties) if dead else message.properties,
            tag_hash=message.tag_hash,
            token=token.encode(),
            attempt=attempt if dead or ck.rolled_back else attempt + 1,
            stamp=stamp,
        )
        self._table.apply_revival(token, stamp.log_ms)
        if dead:
            self.dead_lettered += 1
            self.dead_by_pair.add(_pair(group, topic), 1)
        else:
            self.retried += 1
            self.returned_by_pair.add(_pair(group, topic), not ck.rolled_back)

    def _keep(self, ck: PopCheckPoint, member: int) -> None:
        """A dead letter that fails stays where it is: letters of letters would have no end."""
        self.kept += 1
        kept = ck.end_record(ReviveKind.LOST, 1 << member, counted=False)
        put_revive(self._store, self._table, kept)

    def _return(self, ck: PopCheckPoint, member: int) -> None:
        """Order is kept in place: the message waits where it is for its next attempt."""
        self.returned += 1
        record = ck.end_record(ReviveKind.RETURNED, 1 << member, counted=not ck.rolled_back)
        put_revive(self._store, self._table, record)

    def _target(self, topic: TopicConfig, group: SubscriptionGroup, *, dead: bool) -> TopicConfig:
        if dead:
            name = topics.dlq_topic(group.name)
        elif topics.is_retry_topic(topic.name):
            return topic  # a retry of a retry stays in the same topic
        else:
            name = topics.retry_topic(group.name, topic.name)
        return self._registry.internal_topic(name)


def _pair(group: SubscriptionGroup, topic: TopicConfig) -> GroupTopic:
    return group.name, topics.split_group_topic(topic.name)[1] or topic.name


def _read(cold: ColdRead) -> None:
    cold.warm()
