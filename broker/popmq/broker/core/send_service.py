"""SendService: messages of producers into the log, each to where its type belongs."""

from collections.abc import Sequence

from popmq.broker.deliveries.message_group import lite_topic
from popmq.broker.meta.lite_topics import LiteTopicTable
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_admission import TimerAdmission
from popmq.broker.transaction.half_service import HalfService
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import PutEntry, PutResult
from popmq.common.record.message import Stamp
from popmq.common.record.message_deadline import expiry_token
from popmq.common.topics import MessageType, TopicConfig


class SendService:
    def __init__(
        self,
        store: MessageStore,
        receipts: SendDeduplication,
        timers: TimerAdmission,
        halves: HalfService,
        lites: LiteTopicTable,
        max_lite_topics: int,
    ) -> None:
        self._store = store
        self._receipts = receipts
        self._timers = timers
        self._halves = halves
        self._lites = lites
        self._max_lite_topics = max_lite_topics
        self._next_queue = 0
        self.stored_by_topic: dict[str, int] = {}

    def put(self, topic: TopicConfig, entries: Sequence[PutEntry]) -> list[PutResult]:
        """Append the messages; one result per entry, in order. One refusal spoils no other."""
        results = []
        stamp = self._store.stamp()  # of this step: they came in one frame
        for entry in entries:
            try:
                results.append(self._put_one(topic, entry, stamp))
            except PopmqError as error:
                results.append(PutResult(error.code, str(error)))
            if entry.type == MessageType.LITE:  # making a lite topic is a record of its own
                stamp = self._store.stamp()  # log time never goes back
        return results

    def topic_gone(self, name: str) -> None:
        self.stored_by_topic.pop(name, None)

    def _put_one(self, topic: TopicConfig, entry: PutEntry, stamp: Stamp) -> PutResult:
        if entry.type != MessageType.NORMAL or topic.type is not MessageType.NORMAL:
            _check_type(topic, entry)
        known = self._receipts.find(topic.id, entry.message_id) if entry.message_id else None
        if known is not None:
            return self._halves.repeat_result(topic.id, entry.message_id, known)
        if topic.type is MessageType.LITE:
            entry = self._into_lite_topic(topic, entry)
            stamp = self._store.stamp()
        if not entry.message_id:
            return self._append(topic, entry, stamp)
        result = self._append(topic, entry, stamp)
        half = entry.type == MessageType.TRANSACTION
        self._receipts.record_send(topic.id, entry.message_id, result, stamp.log_ms, half=half)
        return result

    def _into_lite_topic(self, topic: TopicConfig, entry: PutEntry) -> PutEntry:
        """Into the queue of the lite topic that the message names, made if need be."""
        self._store.admission.check_size(entry.head, entry.properties)
        name = lite_topic(entry.properties)
        queue_id = self._lites.queue_of(topic, name, self._max_lite_topics)
        return entry._replace(queue_id=queue_id)

    def _append(self, topic: TopicConfig, entry: PutEntry, stamp: Stamp) -> PutResult:
        queue_id = entry.queue_id
        if queue_id < 0:
            self._next_queue += 1
            queue_id = self._next_queue % topic.queues
        elif queue_id >= topic.queues and topic.type is not MessageType.LITE:
            queue_id = _queue_that_is_here(topic, entry)
        self._store.admission.check_size(entry.head, entry.properties)
        self.stored_by_topic[topic.name] = self.stored_by_topic.get(topic.name, 0) + 1
        if entry.type == MessageType.TRANSACTION:
            return self._halves.put(topic, queue_id, entry, stamp)
        token = b""
        if entry.due_ms:  # of a timer, or of a message with a deadline
            due_ms = self._timers.due_ms(entry) if entry.type == MessageType.DELAY else 0
            if due_ms:
                timer = self._timers.put(topic.id, queue_id, entry, due_ms, stamp)
                return PutResult(queue_id=queue_id, queue_offset=timer.offset, due_ms=timer.due_ms)
            token = expiry_token(entry.properties)
        offset = self._store.put_message(
            topic_id=topic.id,
            queue_id=queue_id,
            head=entry.head,
            properties=entry.properties,
            tag_hash=entry.tag_hash,
            token=token,
            stamp=stamp,
        )
        if topic.type is MessageType.LITE:
            self._lites.stored(topic.id, queue_id, stamp.log_ms)
        return PutResult(queue_id=queue_id, queue_offset=offset)


def _queue_that_is_here(topic: TopicConfig, entry: PutEntry) -> int:
    """The sender named no queue, its proxy did, and knew of more: those of a topic that was altered
    and not copied here yet, or of one that was deleted and made again."""
    if entry.type == MessageType.FIFO:
        raise Unavailable(
            f"topic {topic.name} has {topic.queues} queues here, and no queue {entry.queue_id}: "
            "try again"
        )
    last = topic.queues - 1
    return last if entry.type == MessageType.PRIORITY else entry.queue_id % topic.queues


def _check_type(topic: TopicConfig, entry: PutEntry) -> None:
    try:
        kind = MessageType(entry.type)
    except ValueError:
        kind = MessageType.MIXED
    if kind is MessageType.MIXED:
        raise Refused(Code.BAD_REQUEST, f"message type {entry.type} is not known")
    if not topic.type.accepts(kind):
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"topic {topic.name} takes {topic.type.name} messages, this one is {kind.name}",
        )
