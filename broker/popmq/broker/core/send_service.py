"""SendService: messages of producers into the log, each to where its type belongs."""

import logging
from collections.abc import Sequence

from popmq.broker.deliveries.message_group import born_host, lite_topic
from popmq.broker.meta.lite_topics import LiteTopicTable
from popmq.broker.meta.send_deduplication import FirstSend, SendDeduplication, key_of
from popmq.broker.persistence.bulk_copy import MessageCopy
from popmq.broker.store.message_store import MessageStore
from popmq.broker.timer.timer_admission import TimerAdmission
from popmq.broker.transaction.half_service import HalfService
from popmq.common.errors import Code, PopmqError, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import PutEntry, PutResult
from popmq.common.record.message import Stamp
from popmq.common.record.message_deadline import expiry_token
from popmq.common.record.send_fingerprint import fingerprint_of
from popmq.common.topics import MessageType, TopicConfig

logger = logging.getLogger(__name__)
_WARNED_HOSTS = 1_000
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
        self._send_deduplication = receipts
        self._timers = timers
        self._halves = halves
        self._lites = lites
        self._max_lite_topics = max_lite_topics
        self._next_queue = 0
        self._warned_hosts: set[str] = set()
        self.stored_by_topic: dict[str, int] = {}

    def put(self, topic: TopicConfig, entries: Sequence[PutEntry]) -> list[PutResult]:
        """Append the messages; one result per entry, in order. One refusal spoils no other.

        Ordinary ones that follow each other are appended as one.
        """
        results: list[PutResult] = []
        put_one = self._put_lite if topic.kind.has_lite_topics else self._put_one
        stamp = self._store.stamp()  # of this step: they came in one frame
        kinds = tuple(int(kind) for kind in _ORDINARY if topic.type.accepts(kind))
        topic_id, queues, receipts = topic.id, topic.queues, self._send_deduplication
        known, prefix = receipts.known, key_of(topic_id, b"")
        largest = self._store.admission.largest_content
        crowded = receipts.is_crowded
        copies: list[MessageCopy] = []
        keys: dict[bytes, int] = {}  # and fingerprints
        for entry in entries:
            kind, head, properties, tag_hash, queue_id, due_ms, message_id, _ = entry
            key = prefix + message_id.encode()
            if (
                kind in kinds
                and 0 <= queue_id < queues
                and message_id
                and not due_ms
                and len(head) + len(properties) <= largest
                and key not in keys
                and key not in known
                and not crowded
            ):
                copy = (topic_id, queue_id, tag_hash, b"", len(head), head + properties)
                copies.append(_new(MessageCopy, copy))
                keys[key] = fingerprint_of(properties)
                continue
            if copies:
                results += self._put_all(topic, copies, keys, stamp)
                copies, keys = [], {}
            try:
                results.append(put_one(topic, entry, stamp))
            except PopmqError as error:
                results.append(PutResult(error.code, str(error)))
            crowded = receipts.is_crowded
        if copies:
            results += self._put_all(topic, copies, keys, stamp)
        return results

    def _put_all(
        self, topic: TopicConfig, copies: list[MessageCopy], keys: dict[bytes, int], stamp: Stamp
    ) -> list[PutResult]:
        """Append ordinary messages, whose ids are not known yet."""
        name = topic.name
        self.stored_by_topic[name] = self.stored_by_topic.get(name, 0) + len(copies)
        units = self._store.put_copies(copies, stamp)
        self._send_deduplication.record_sends(keys, units, stamp.log_ms)
        ok = Code.OK
        return [_new(PutResult, (ok, "", unit[3], unit[4], 0)) for unit in units]

    def on_topic_deleted(self, name: str) -> None:
        self.stored_by_topic.pop(name, None)

    def _put_one(self, topic: TopicConfig, entry: PutEntry, stamp: Stamp) -> PutResult:
        if entry.type != MessageType.NORMAL or topic.type is not MessageType.NORMAL:
            _check_type(topic, entry)
        known = self._first_send(topic, entry)
        if known is not None:
            return self._halves.repeat_result(topic.id, entry.message_id, known)
        queue_id = entry.queue_id
        if queue_id < 0:
            self._next_queue += 1
            queue_id = self._next_queue % topic.queues
        elif queue_id >= topic.queues:
            queue_id = _queue_that_is_here(topic, entry)
        return self._append(topic, queue_id, entry, stamp)

    def _first_send(self, topic: TopicConfig, entry: PutEntry) -> FirstSend | None:
        """What became of the message if it was sent before."""
        message_id, receipts = entry.message_id, self._send_deduplication
        if not message_id:
            return None
        collisions = receipts.collisions
        known = receipts.find(topic.id, message_id, fingerprint_of(entry.properties))
        if receipts.collisions > collisions:
            self._warn(topic, entry)
        return known

    def _warn(self, topic: TopicConfig, entry: PutEntry) -> None:
        """Once for each host, of so many hosts."""
        host = born_host(entry.properties)
        if host not in self._warned_hosts and len(self._warned_hosts) < _WARNED_HOSTS:
            self._warned_hosts.add(host)
            logger.warning(
                "two messages of different clients or bodies have one message id: both are stored. "
                "Clients make equal ids when they are forked after they were started, or are "
                "process 1 of containers with one MAC address: start each client in its own "
                "process, behind the fork, and give each container its own network",
                extra={"topic": topic.name, "message_id": entry.message_id, "born_host": host},
            )

    def _put_lite(self, topic: TopicConfig, entry: PutEntry, _: Stamp) -> PutResult:
        """Into the queue of the lite topic that the message names, made if need be."""
        _check_type(topic, entry)
        known = self._first_send(topic, entry)
        if known is not None:
            return self._halves.repeat_result(topic.id, entry.message_id, known)
        self._store.admission.check_size(entry.head, entry.properties)
        name = lite_topic(entry.properties)
        queue_id = self._lites.queue_of(topic, name, self._max_lite_topics)
        stamp = self._store.stamp()  # log time never goes back: a lite topic may be a new record
        result = self._append(topic, queue_id, entry, stamp)
        self._lites.stored(topic.id, queue_id, stamp.log_ms)
        return result

    def _append(
        self, topic: TopicConfig, queue_id: int, entry: PutEntry, stamp: Stamp
    ) -> PutResult:
        self._store.admission.check_size(entry.head, entry.properties)
        self.stored_by_topic[topic.name] = self.stored_by_topic.get(topic.name, 0) + 1
        if entry.type == MessageType.TRANSACTION:
            result = self._halves.put(topic, queue_id, entry, stamp)
            self._remember(topic, entry, result, stamp, half=True)
            return result
        token = b""
        if entry.due_ms:  # of a timer, or of a message with a deadline
            due_ms = self._timers.due_ms(entry) if entry.type == MessageType.DELAY else 0
            if due_ms:
                timer = self._timers.put(topic.id, queue_id, entry, due_ms, stamp)
                result = PutResult(
                    queue_id=queue_id, queue_offset=timer.offset, due_ms=timer.due_ms
                )
                self._remember(topic, entry, result, stamp, timer=timer.identity)
                return result
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
        result = PutResult(queue_id=queue_id, queue_offset=offset)
        self._remember(topic, entry, result, stamp)
        return result

    def _remember(
        self,
        topic: TopicConfig,
        entry: PutEntry,
        result: PutResult,
        stamp: Stamp,
        *,
        timer: int = 0,
        half: bool = False,
    ) -> None:
        if message_id := entry.message_id:
            self._send_deduplication.record_send(
                topic.id,
                message_id,
                result,
                stamp.log_ms,
                fingerprint=fingerprint_of(entry.properties),
                timer=timer,
                half=half,
            )


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
