"""SendBack: messages that a pull consumer could not process, as retries and dead letters.

A retry waits in the timer wheel and then comes to the one queue of `%RETRY%<group>`, which only
this group pulls; the retries of pop are elsewhere.  A dead letter looks like one of pop, so that
`popmq dlq` shows it and sends it to its group again (docs/concepts/remoting-consumers.md).

The record of either names the copy that was sent back.  Whoever applies it, at append, at recovery
or on a slave, remembers that copy, so that a repeat changes nothing.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.log.snapshot_table import SnapshotTable
from popmq.broker.meta.registry import Registry
from popmq.broker.operations.pull_ends import PullEnds
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_admission import TimerAdmission
from popmq.common import topics
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import PutEntry
from popmq.common.record.message import (
    MESSAGE_HEADER_SIZE,
    WITH_MESSAGE,
    BadRecord,
    EndedDelivery,
    Header,
    RevivalToken,
    StoredMessage,
    decode_header,
)
from popmq.common.record.message_deadline import without_deadline
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig

MAX_ATTEMPT = 0xFFFF  # what a record can say
REMEMBERED = 10_000  # copies that were sent back
DEAD_REMEMBERED_MS = 60_000
_ROW = struct.Struct(">IQQ")  # group, position of the copy, until when in log time


@dataclass(frozen=True, slots=True)
class ReturnedMessage:
    """`topic`, `queue_id` and `queue_offset` are those of the first copy."""

    topic: TopicConfig
    queue_id: int
    queue_offset: int
    head: bytes
    properties: bytes
    tag_hash: int
    attempt: int  # that failed, from 1
    position: int  # of the copy's record, or 0


class SendBack(SnapshotTable):
    """What it remembers fades with time, so it is no part of the state hash.  An older popmq
    passes over the table."""

    table_number = 13

    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        timers: TimerAdmission,
        ends: PullEnds,
        largest_bytes: int,
    ) -> None:
        """`largest_bytes` is what a record of a message has at most."""
        self._store = store
        self._largest_bytes = largest_bytes
        self._registry = registry
        self._timers = timers
        self._ends = ends
        # By group and position of a copy, until when a repeat changes nothing, in log time.
        self._until_ms: dict[tuple[int, int], int] = {}

    def read(self, position: int) -> tuple[TopicConfig, StoredMessage]:
        """The message of a user's topic whose confirmed record is at that position.  Raises
        MESSAGE_NOT_FOUND for anything else, and ColdRead."""
        data = b""
        if position + MESSAGE_HEADER_SIZE <= self._store.confirmed:
            data = self._store.record_bytes(position, MESSAGE_HEADER_SIZE)
        try:
            header = decode_header(data)
        except BadRecord:
            header = None
        is_message = (
            header is not None
            and header.position == position
            and header.kind in WITH_MESSAGE
            and MESSAGE_HEADER_SIZE <= header.size <= self._largest_bytes
            and header.end <= self._store.confirmed
        )
        topic = self._registry.topic_by_id(header.topic_id) if header and is_message else None
        if header is None or topic is None:
            raise Refused(Code.MESSAGE_NOT_FOUND, f"no message of a topic is at {position}")
        unit = QueueUnit(position, header.size, 0)
        (message,) = self._store.reader.read([unit], wait=False)
        if isinstance(message, DamagedMessage):
            raise Refused(Code.MESSAGE_NOT_FOUND, f"the message at {position} is damaged")
        return topic, message

    def retry(self, group: SubscriptionGroup, returned: ReturnedMessage, delay_ms: int) -> None:
        """Append the timer of the next attempt."""
        self._store.guard.check_write()
        target = self._registry.internal_topic(topics.pull_retry_topic(group.name))
        if self._is_repeat(group, returned):
            return
        entry = PutEntry(
            MessageType.DELAY,
            returned.head,
            returned.properties,
            returned.tag_hash,
            0,
            -max(1, delay_ms),
        )
        stamp = self._store.stamp()
        due_ms = self._timers.due_ms(entry)
        position = returned.position or None
        self._timers.put(target.id, 0, entry, due_ms, stamp, sent_back=position)
        self._remember(group.id, returned.position, stamp.log_ms + delay_ms)
        self._count(group, returned, dead=False)

    def dead_letter(self, group: SubscriptionGroup, returned: ReturnedMessage) -> None:
        """One of a topic of dead letters stays where it is."""
        self._store.guard.check_write()
        if topics.has_dead_letters(returned.topic.name):
            return
        if self._is_repeat(group, returned):
            return
        target = self._registry.internal_topic(topics.dlq_topic(group.name))
        stamp = self._store.stamp()
        # No check point: what has the epoch 0 ends no delivery.
        token = RevivalToken(
            dead=True,
            ends=EndedDelivery(epoch=0, sequence=returned.position, member=0),
            topic_id=returned.topic.id,
            queue_id=returned.queue_id,
            queue_offset=returned.queue_offset,
            first_log_ms=stamp.log_ms,
        )
        self._store.put_message(
            topic_id=target.id,
            queue_id=0,
            head=returned.head,
            properties=without_deadline(returned.properties),
            tag_hash=returned.tag_hash,
            token=token.encode(),
            attempt=min(returned.attempt, MAX_ATTEMPT),
            stamp=stamp,
        )
        self._remember(group.id, returned.position, stamp.log_ms + DEAD_REMEMBERED_MS)
        self._count(group, returned, dead=True)

    def apply_retry(self, topic_id: int, position: int, due_ms: int, header: Header) -> None:
        """The record of a retry, from the log."""
        until_ms = header.log_ms + due_ms - header.wall_ms
        self._remember(self._group_of(topic_id), position, until_ms)

    def apply_dead_letter(self, position: int, header: Header) -> None:
        """The record of a dead letter, from the log."""
        until_ms = header.log_ms + DEAD_REMEMBERED_MS
        self._remember(self._group_of(header.topic_id), position, until_ms)

    def begin_snapshot(self) -> Iterator[tuple[bytes, int]]:
        rows = (_ROW.pack(*copy, until_ms) for copy, until_ms in self._until_ms.items())
        return iter([(b"".join(rows), 0)])

    def restore(self, content: bytes) -> None:
        for group_id, position, until_ms in _ROW.iter_unpack(content):
            self._remember(group_id, position, until_ms)

    def _is_repeat(self, group: SubscriptionGroup, returned: ReturnedMessage) -> bool:
        """Whether that copy was sent back before and waits: its client got no answer, or two
        clients have it."""
        until_ms = self._until_ms.get((group.id, returned.position), 0)
        return self._store.stamp().log_ms < until_ms

    def _remember(self, group_id: int, position: int, until_ms: int) -> None:
        if not (group_id and position):  # a group that is gone, a client's own send
            return
        self._until_ms.pop((group_id, position), None)
        self._until_ms[group_id, position] = until_ms
        if len(self._until_ms) > REMEMBERED:
            del self._until_ms[next(iter(self._until_ms))]

    def _group_of(self, topic_id: int) -> int:
        """The group whose retries or dead letters a topic has; 0 when it is gone."""
        topic = self._registry.topic_by_id(topic_id)
        name = topics.split_group_topic(topic.name)[0] if topic else ""
        group = self._registry.find_group(name)
        return group.id if group else 0

    def _count(self, group: SubscriptionGroup, returned: ReturnedMessage, *, dead: bool) -> None:
        pair = (group.name, returned.topic.name)
        self._ends.returned(pair, attempt=returned.attempt, dead=dead)
