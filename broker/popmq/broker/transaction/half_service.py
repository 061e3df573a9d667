"""HalfService: stores half messages, and commits, rolls back or gives up each of them once.

Nobody reads the half queue but this; what is committed is a message of its topic by one record,
which is also the end of the transaction, so that it happens once whatever crashes.
"""

from popmq.broker.log.message_reader import DamagedMessage
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.meta.registry import Registry
from popmq.broker.meta.send_deduplication import FirstSend
from popmq.broker.store.message_store import MessageStore
from popmq.broker.transaction.transaction_table import HalfMessage, TransactionTable
from popmq.common import topics
from popmq.common.errors import Code, Refused, TooManyRequests, TopicNotFound
from popmq.common.protocol.messaging_payloads import PutEntry, PutResult
from popmq.common.record.message import RecordKind, Stamp, StoredMessage, message_size
from popmq.common.record.message_deadline import without_deadline
from popmq.common.record.transaction_id import TransactionId
from popmq.common.record.transaction_token import HalfToken, TransactionEnd, TransactionEndToken
from popmq.common.settings.send_settings import TransactionSettings
from popmq.common.topics import TopicConfig

_TEXTS = {
    TransactionEnd.COMMITTED: "was committed",
    TransactionEnd.ROLLED_BACK: "was rolled back",
    TransactionEnd.GIVEN_UP: "was given up because no producer knew about it",
    TransactionEnd.LOST: "was lost: its message could not be read",
}


class HalfService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        table: TransactionTable,
        settings: TransactionSettings,
        broker: str,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = table
        self._settings = settings
        self._broker = broker
        self.refused = 0

    def put(self, topic: TopicConfig, queue_id: int, entry: PutEntry, stamp: Stamp) -> PutResult:
        """Store a half message; the result's `message` is its transaction id.

        Raises TooManyRequests at the bound.
        """
        limit = self._settings.max_pending
        if len(self._table.pending) >= limit:
            self.refused += 1
            raise TooManyRequests(
                f"{limit} transactions are neither committed nor rolled back, and no more are "
                "taken (transaction.max_pending)"
            )
        check_after_ms = entry.due_ms or self._settings.first_check_ms
        if not 0 <= check_after_ms < 1 << 32:
            raise Refused(
                Code.BAD_REQUEST,
                f"a first check {check_after_ms} ms after the send: it takes 0 to {(1 << 32) - 1}",
            )
        token = HalfToken(topic.id, queue_id, check_after_ms)
        encoded = token.encode()
        offset = self._store.put_message(
            topic_id=topics.HALF_TOPIC_ID,
            queue_id=0,
            head=entry.head,
            properties=entry.properties,
            tag_hash=entry.tag_hash,
            token=encoded,
            stamp=stamp,
        )
        # Not up to the store's end: that may lie in the next segment.
        size = message_size(entry.head, entry.properties, encoded)
        unit = QueueUnit(self._store.last_position, size, entry.tag_hash)
        self._table.stored(token, offset, unit, stamp.log_ms)
        transaction = self.id_of(topic.id, offset, entry.message_id)
        return PutResult(message=transaction, queue_id=queue_id, queue_offset=offset)

    def repeat_result(self, topic_id: int, message_id: str, known: FirstSend) -> PutResult:
        """The first receipt for a resend, with its transaction id if it was a half message."""
        if not known.half:
            return known.result
        transaction = self.id_of(topic_id, known.result.queue_offset, message_id)
        return known.result._replace(message=transaction)

    def id_of(self, topic_id: int, half_offset: int, message_id: str) -> str:
        transaction_id = TransactionId(self._broker, topic_id, half_offset)
        key = self._registry.signing_keys.newest
        return transaction_id.encode(key.secret, message_id, key.id)

    def find(self, topic_name: str, message_id: str, transaction_id: str) -> TransactionId:
        """The transaction that the id names; its topic may be left out. Raises
        INVALID_TRANSACTION_ID."""
        keys = self._registry.signing_keys
        found_transaction_id = TransactionId.decode(transaction_id, keys, message_id)
        topic_id = found_transaction_id.topic_id
        expected_id = self._registry.topic(topic_name).id if topic_name else topic_id
        if topic_id != expected_id or found_transaction_id.broker != self._broker:
            raise Refused(
                Code.INVALID_TRANSACTION_ID,
                f"the transaction id is not one of topic {topic_name} at broker {self._broker}",
            )
        return found_transaction_id

    def end(self, transaction: TransactionId, ending: TransactionEnd) -> None:
        """Commit or roll back; again is OK. ColdRead: nothing was changed.

        Raises INVALID_TRANSACTION_ID when it came to another end, or nobody knows any more.
        """
        half = self._table.pending.get(transaction.half_offset)
        if half is None:
            self._check_ended(transaction, ending)
        elif ending is TransactionEnd.COMMITTED:
            self._store.check_admission()
            self._commit(half)
        else:
            self._store.guard.check_write()
            self.write_op(half, TransactionEnd.ROLLED_BACK)

    def is_readable(self, transaction: TransactionId) -> bool:
        """False while retention's copy of its body is not confirmed yet."""
        half = self._table.pending.get(transaction.half_offset)
        return half is None or half.unit.position < self._store.confirmed

    def read(self, half: HalfMessage) -> StoredMessage | None:
        """Its message; None when it cannot be read any more. ColdRead instead of waiting."""
        (message,) = self._store.reader.read([half.unit], wait=False)
        return None if isinstance(message, DamagedMessage) else message

    def give_up(self, half: HalfMessage) -> None:
        """Nobody knew what became of it: a dead letter. ColdRead: nothing was changed."""
        message = self.read(half)
        if message is None:
            self.write_op(half, TransactionEnd.LOST)
            return
        topic = self._registry.internal_topic(topics.TRANSACTION_DLQ_TOPIC)
        self._put(half, topic, 0, message, TransactionEnd.GIVEN_UP)

    def write_op(self, half: HalfMessage, ending: TransactionEnd, checks: int = 0) -> None:
        """A record that is no message: the end, or a check."""
        if ending is TransactionEnd.CHECKED:
            # The record names the interval: replicas may be set to another one.
            interval_ms = self._settings.check_interval_ms
            token = TransactionEndToken(ending, 0, half.offset, checks, next_check_ms=interval_ms)
        else:
            token = TransactionEndToken(ending, half.topic_id, half.offset)
        log_ms = self._store.put_record(
            RecordKind.TRANSACTION, topic_id=topics.OP_TOPIC_ID, queue_id=0, body=token.encode()
        )
        self._table.apply(token, log_ms)

    def _commit(self, half: HalfMessage) -> None:
        topic = self._registry.topic_by_id(half.topic_id)
        if topic is None:
            raise TopicNotFound("the topic of the transaction was deleted")
        message = self.read(half)
        if message is None:
            self.write_op(half, TransactionEnd.LOST)
            raise Refused(
                Code.INTERNAL_ERROR, "the transaction's message is damaged on the broker's disk"
            )
        self._put(half, topic, half.queue_id, message, TransactionEnd.COMMITTED)

    def _put(
        self,
        half: HalfMessage,
        topic: TopicConfig,
        queue_id: int,
        message: StoredMessage,
        ending: TransactionEnd,
    ) -> None:
        stamp = self._store.stamp()
        token = TransactionEndToken(ending, half.topic_id, half.offset)
        properties = message.properties
        if ending is TransactionEnd.GIVEN_UP:
            properties = without_deadline(properties)
        self._store.put_message(
            topic_id=topic.id,
            queue_id=queue_id,
            head=message.head,
            properties=properties,
            tag_hash=message.tag_hash,
            token=token.encode(),
            stamp=stamp,
        )
        self._table.apply(token, stamp.log_ms)

    def _check_ended(self, transaction: TransactionId, requested: TransactionEnd) -> None:
        ended = self._table.ending(transaction.half_offset)
        if ended is requested:
            return
        if ended is None:
            raise Refused(
                Code.INVALID_TRANSACTION_ID,
                "the transaction is not pending: it ended more than 10 minutes ago",
            )
        raise Refused(Code.INVALID_TRANSACTION_ID, f"the transaction {_TEXTS[ended]}")
