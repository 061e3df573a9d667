"""SendBack: messages that a pull consumer could not process, as retries and dead letters.

A retry waits in the timer wheel and then comes to the one queue of `%RETRY%<group>`, which only
this group pulls; the retries of pop are elsewhere.  A dead letter looks like one of pop, so that
`popmq dlq` shows it and sends it to its group again (docs/concepts/remoting.md).
"""

from dataclasses import dataclass

from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
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
    RevivalToken,
    StoredMessage,
    decode_header,
)
from popmq.common.record.message_deadline import without_deadline
from popmq.common.topics import MessageType, SubscriptionGroup, TopicConfig

MAX_ATTEMPT = 0xFFFF  # what a record can say
REMEMBERED = 10_000  # copies that were sent back
DEAD_REMEMBERED_MS = 60_000


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


class SendBack:
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
        self._until_ms: dict[tuple[int, int], int] = {}  # a repeat of that copy changes nothing

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
        if self._is_repeat(group, returned, delay_ms):
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
        self._timers.put(target.id, 0, entry, due_ms, stamp)
        self._count(group, returned, dead=False)

    def dead_letter(self, group: SubscriptionGroup, returned: ReturnedMessage) -> None:
        """One of a topic of dead letters stays where it is."""
        self._store.guard.check_write()
        if topics.has_dead_letters(returned.topic.name):
            return
        if self._is_repeat(group, returned, DEAD_REMEMBERED_MS):
            return
        target = self._registry.internal_topic(topics.dlq_topic(group.name))
        stamp = self._store.stamp()
        # No check point: what has the epoch and the sequence 0 ends no delivery.
        token = RevivalToken(
            dead=True,
            ends=EndedDelivery(epoch=0, sequence=0, member=0),
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
        self._count(group, returned, dead=True)

    def _is_repeat(self, group: SubscriptionGroup, returned: ReturnedMessage, ms: int) -> bool:
        """Whether that copy was sent back before and waits: its client got no answer, or two
        clients have it.  If not, it is remembered for so long."""
        place = (group.id, returned.position)
        now_ms = self._store.stamp().log_ms
        if returned.position and now_ms < self._until_ms.get(place, 0):
            return True
        if returned.position:
            self._until_ms.pop(place, None)
            self._until_ms[place] = now_ms + ms
            if len(self._until_ms) > REMEMBERED:
                del self._until_ms[next(iter(self._until_ms))]
        return False

    def _count(self, group: SubscriptionGroup, returned: ReturnedMessage, *, dead: bool) -> None:
        pair = (group.name, returned.topic.name)
        self._ends.returned(pair, attempt=returned.attempt, dead=dead)
