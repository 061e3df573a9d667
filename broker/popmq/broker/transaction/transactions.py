"""Transactions: wires the parts, applies records to them, and decides nothing."""

import struct

from popmq.broker.log.commit_log import ScannedRecord
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.meta.registry import Registry
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.broker.store.message_store import MessageStore
from popmq.broker.transaction.check_service import CheckService
from popmq.broker.transaction.half_bodies import HalfBodies
from popmq.broker.transaction.half_service import HalfService
from popmq.broker.transaction.transaction_table import TransactionTable
from popmq.common import topics
from popmq.common.record.message import HEADER_SIZE, BadRecord
from popmq.common.record.transaction_token import HalfToken, TransactionEndToken
from popmq.common.settings.send_settings import TransactionSettings


class Transactions:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        sends: SendDeduplication,
        settings: TransactionSettings,
        broker: str,
    ) -> None:
        self._store = store
        self.table = TransactionTable(settings.check_interval_ms, sends)
        self.halves = HalfService(store, registry, self.table, settings, broker)
        self.bodies = HalfBodies(store, self.table)
        self.checks = CheckService(store, registry, self.table, self.halves, settings)

    def add_topics(self) -> None:
        """Before the log is replayed."""
        self._store.add_topic(topics.HALF_TOPIC_ID, topics.HALF_TOPIC)
        self._store.add_topic(topics.OP_TOPIC_ID, topics.OP_TOPIC)

    def apply_half(self, record: ScannedRecord, token: HalfToken, tag_hash: int) -> None:
        header = record.header
        unit = QueueUnit(header.position, header.size, tag_hash)
        self.table.stored(token, header.queue_offset, unit, header.log_ms)

    def apply_op(self, record: ScannedRecord) -> None:
        """BadRecord for what this build does not know."""
        try:
            token = TransactionEndToken.decode(record.data[HEADER_SIZE:])
        except (struct.error, ValueError) as error:
            raise BadRecord(f"op record at {record.header.position}: {error}") from error
        self.table.apply(token, record.header.log_ms)
