"""SendService: messages of producers into the log, each to where its type belongs."""

from collections.abc import Sequence

from popmq.broker.deliveries.message_group import lite_topic
from popmq.broker.meta.lite_topics import LiteTopicTable
from popmq.broker.meta.send_deduplication import SendDeduplication, key_of
from popmq.broker.persistence.bulk_copy import MessageCopy
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_admission import TimerAdmission
from popmq.broker.transaction.half_service import HalfService
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import PutEntry, PutResult
from popmq.common.record.message import Stamp
from popmq.common.record.message_deadline import expiry_token
from popmq.common.topics import MessageType, TopicConfig

_ORDINARY = (MessageType.NORMAL, MessageType.FIFO)
_new = tuple.__new__


class SendService:
    def __init__(
        self,
        store: MessageStore,
        lites: LiteTopicTable,
        receipts: SendDeduplication,
        timers: TimerAdmission,
        halves: HalfService,
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
        """Append the messages; one result per entry, in order. One refusal spoils no other.

        Ordinary ones that follow each other are appended as one.
        """
        results: list[PutResult] = []
        put_one = self._put_lite if topic.kind.has_lite_topics else self._put_one
        stamp = self._store.stamp()  # of this step: they came in one frame
        kinds = tuple(int(kind) for kind in _ORDINARY if topic.type.accepts(kind))
        topic_id, queues, knows = topic.id, topic.queues, self._receipts.knows
        largest = self._store.admission.largest_content
        copies: list[MessageCopy] = []
        keys: dict[bytes, None] = {}
        for entry in entries:
            kind, head, properties, tag_hash, queue_id, due_ms, message_id, _ = entry
            key = key_of(topic_id, message_id.encode())
            if (
                kind in kinds
                and 0 <= queue_id < queues
                and message_id
                and not due_ms
                and len(head) + len(properties) <= largest
                and key not in keys
                and not knows(key)
            ):
                copy = (topic_id, queue_id, tag_hash, b"", len(head), head + properties)
                copies.append(_new(MessageCopy, copy))
                keys[key] = None
                continue
            if copies:
                results += self._put_all(topic, copies, keys, stamp)
                copies, keys = [], {}
            try:
                results.append(put_one(topic, entry, stamp))
            except PopmqError as error:
                results.append(PutResult(error.code, str(error)))
        if copies:
            results += self._put_all(topic, copies, keys, stamp)
        return results

    def _put_all(
        self, topic: TopicConfig, copies: list[MessageCopy], keys: dict[bytes, None], stamp: Stamp
    ) -> list[PutResult]:
        """Append ordinary messages, whose ids are not known yet."""
        name = topic.name
        self.stored_by_topic[name] = self.stored_by_topic.get(name, 0) + len(copies)
        units = self._store.put_copies(copies, stamp)
        self._receipts.record_sends(keys, units, stamp.log_ms)
        ok = Code.OK
        return [_new(PutResult, (ok, "", unit[3], unit[4], 0)) for unit in units]

    def topic_gone(self, name: str) -> None:
        self.stored_by_topic.pop(name, None)

    def _put_one(self, topic: TopicConfig, entry: PutEntry, stamp: Stamp) -> PutResult:
        if entry.type != MessageType.NORMAL or topic.type is not MessageType.NORMAL:
            _check_type(topic, entry)
        known = self._receipts.find(topic.id, entry.message_id) if entry.message_id else None
        if known is not None:
            return self._halves.repeat_result(topic.id, entry.message_id, known)
        queue_id = entry.queue_id
        if queue_id < 0:
            self._next_queue += 1
            queue_id = self._next_queue % topic.queues
        elif queue_id >= topic.queues:
            queue_id = _queue_that_is_here(topic, entry)
        result = self._append(topic, queue_id, entry, stamp)
        if not entry.message_id:
            return result
        half = entry.type == MessageType.TRANSACTION
        self._receipts.record_send(topic.id, entry.message_id, result, stamp.log_ms, half=half)
        return result

    def _put_lite(self, topic: TopicConfig, entry: PutEntry, _: Stamp) -> PutResult:
        """Into the queue of the lite topic that the message names, made if need be."""
        _check_type(topic, entry)
        known = self._receipts.find(topic.id, entry.message_id) if entry.message_id else None
        if known is not None:
            return self._halves.repeat_result(topic.id, entry.message_id, known)
        self._store.admission.check_size(entry.head, entry.properties)
        name = lite_topic(entry.properties)
        queue_id = self._lites.queue_of(topic, name, self._max_lite_topics)
        stamp = self._store.stamp()  # log time never goes back: a lite topic may be a new record
        result = self._append(topic, queue_id, entry, stamp)
        self._lites.stored(topic.id, queue_id, stamp.log_ms)
        if entry.message_id:
            self._receipts.record_send(topic.id, entry.message_id, result, stamp.log_ms)
        return result

    def _append(
        self, topic: TopicConfig, queue_id: int, entry: PutEntry, stamp: Stamp
    ) -> PutResult:
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
