"""RecordApplier: at recovery, and on a slave all the time, each record of the log goes to the part
that it belongs to."""

import logging

from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.message_group import message_group
from popmq.broker.deliveries.pop_check_point import decode_revive
from popmq.broker.index.message_keys import ID, names_in
from popmq.broker.log.commit_log import ScannedRecord
from popmq.broker.log.queue_unit import QueueUnit
from popmq.broker.meta.offset_record import OffsetRecord
from popmq.broker.meta.registry import Registry
from popmq.broker.meta.send_deduplication import SendDeduplication
from popmq.broker.operations.offset_reset import apply_offset
from popmq.broker.operations.send_back import SendBack
from popmq.broker.persistence.epoch_start import EpochStart
from popmq.broker.persistence.retention import LiveBody
from popmq.broker.store.replica_records import LogStart, SnapshotMark
from popmq.broker.timer.timers import Timers
from popmq.broker.transaction.transactions import Transactions
from popmq.common import topics
from popmq.common.record.message import (
    HEADER_SIZE,
    BadRecord,
    EndedDelivery,
    RecordKind,
    RedrivenLetter,
    RevivalToken,
    decode_message,
    peek_message,
)
from popmq.common.record.send_fingerprint import fingerprint_of
from popmq.common.record.timer_migration import (
    TimerMigrationBatch,
    TimerMigrationDone,
    decode_timer_record,
)
from popmq.common.record.timer_token import (
    MOVED_BIT,
    FiringToken,
    TimerRecount,
    TimerToken,
)
from popmq.common.record.transaction_token import HalfToken, TransactionEndToken
from popmq.common.topics import GroupType, MessageType, TopicConfig

logger = logging.getLogger(__name__)


class RecordApplier:
    def __init__(
        self,
        registry: Registry,
        deliveries: Deliveries,
        timers: Timers,
        receipts: SendDeduplication,
        transactions: Transactions,
        send_back: SendBack,
    ) -> None:
        self._registry = registry
        self._table = deliveries.table
        self._redriven = deliveries.redriven
        self._timers = timers.service
        self._departures = timers.outgoing_timers
        self._incoming_timers = timers.incoming_timers
        self._send_deduplication = receipts
        self._transactions = transactions
        self._send_back = send_back
        self.left_out = 0  # intact records that say nothing known

    def apply(self, record: ScannedRecord) -> None:
        """One record of the log, in its order: each part takes what is its own."""
        match record.header.kind:
            case RecordKind.META:
                self._registry.apply(record.data[HEADER_SIZE:])
            case RecordKind.LITE_TOPIC:
                self.lite_topic(record.data[HEADER_SIZE:])
            case RecordKind.REVIVE:
                self._apply_revive(record)
            case RecordKind.OFFSET:
                offset = OffsetRecord.decode(record.data[HEADER_SIZE:])
                group = self._registry.group_by_id(offset.group_id)
                topic = self._registry.topic_by_id(offset.topic_id)
                lite = topic is not None and topic.type is MessageType.LITE
                fifo = lite or (group is not None and group.type is GroupType.FIFO)
                apply_offset(self._table, offset, record.header.log_ms, fifo=fifo)
            case RecordKind.MOVED:
                header = record.header
                unit = QueueUnit(header.position, header.size, peek_message(record.data)[0])
                self.moved(LiveBody(header.topic_id, header.queue_id, header.queue_offset, unit))
            case RecordKind.TRANSACTION:
                self._transactions.apply_op(record)
            case RecordKind.TIMER:
                self._apply_timer(record)
            case RecordKind.EPOCH_START:
                start = EpochStart.decode(record.data[HEADER_SIZE:])
                self._table.start_epoch(record.header.epoch, start.unanswered_from_ms)
            case RecordKind.SNAPSHOT_MARK:
                self._timers.apply_classified(
                    SnapshotMark.decode(record.data[HEADER_SIZE:]).classified
                )
            case RecordKind.LOG_START:
                self._timers.apply_classified(LogStart.decode(record.data[HEADER_SIZE:]).classified)
            case RecordKind.MESSAGE:
                self._apply_message(record)

    def lite_topic(self, body: bytes) -> None:
        """One was made, or removed with what groups had of it."""
        gone = self._registry.lites.apply(body)
        if gone is not None:
            groups = [group.id for group in self._registry.groups()]
            self._table.drop_queue(gone.topic_id, gone.queue_id, groups)

    def forget_old(self, log_ms: int) -> int:
        """On a slave: some of what only counts for a while; returns how much."""
        self._table.forget_ended(log_ms)
        return self._send_deduplication.step(log_ms)

    def moved(self, body: LiveBody) -> None:
        """Retention appended a live body again."""
        if body.topic_id == topics.HALF_TOPIC_ID:
            self._transactions.table.moved(body)
        else:
            self._table.moved.apply(body)

    def _apply_revive(self, record: ScannedRecord) -> None:
        """If a record is damaged, its messages are delivered again. It stays in the log at its
        position; all others count."""
        try:
            revive = decode_revive(record.data[HEADER_SIZE:])
            self._table.apply(revive, record.header.log_ms)
        except BadRecord as error:
            self.left_out += 1
            logger.error(
                "record left out",
                extra={"position": record.header.position, "reason": str(error)},
            )

    def _apply_timer(self, record: ScannedRecord) -> None:
        match decode_timer_record(record.data[HEADER_SIZE:]):
            case TimerRecount() as recount:
                self._timers.state.apply_recount(recount)
            case TimerMigrationBatch() as departure:
                self._timers.apply_classified(departure.classified)
                self._departures.apply_departure(departure, record.header.end)
            case TimerMigrationDone() as settled:
                self._departures.apply_settled(settled)
            case ending:
                self._timers.apply_ended(ending)

    def _apply_message(self, record: ScannedRecord) -> None:
        tag_hash, any_token = peek_message(record.data)
        header = record.header
        self._registry.lites.stored(header.topic_id, header.queue_id, header.log_ms)
        match any_token:
            case None:
                self._apply_sent(record, record.header.topic_id, record.header.queue_id)
            case TimerToken() as token:
                self._timers.apply_stored(token, record.header, tag_hash)
                if token.moved_from is not None:
                    place = record.header.position, record.header.size
                    self._departures.apply_moved_body(token.moved_from, *place)
                elif token.taken is not None:
                    self._incoming_timers.apply(*token.taken)
                elif token.sent_back is not None:
                    self._send_back.apply_retry(token.topic_id, token.sent_back, tag_hash, header)
                elif token.replaces is None:
                    due_ms = tag_hash & ~MOVED_BIT
                    self._apply_sent(record, token.topic_id, token.queue_id, due_ms)
            case HalfToken() as token:
                self._transactions.apply_half(record, token, tag_hash)
                self._apply_sent(record, token.topic_id, token.queue_id, half=True)
            case TransactionEndToken() as token:
                self._transactions.table.apply(token, record.header.log_ms)
            case FiringToken() as token:
                self._timers.apply_ended(token)
            case RevivalToken(ends=None) as token:
                self._apply_parked(record, token)
            case RevivalToken(ends=RedrivenLetter() as letter):
                self._redriven.apply(letter)
            case RevivalToken(ends=EndedDelivery(epoch=0, sequence=position)):
                self._send_back.apply_dead_letter(position, header)
            case RevivalToken() as token:
                self._table.apply_revival(token, record.header.log_ms)

    def _apply_sent(
        self,
        record: ScannedRecord,
        topic_id: int,
        queue_id: int,
        due_ms: int = 0,
        *,
        half: bool = False,
    ) -> None:
        """A client's message, whose id is known from now on."""
        properties, header = decode_message(record.data).properties, record.header
        for kind, name in names_in(properties):
            if kind == ID:
                offset, log_ms = header.queue_offset, header.log_ms
                self._send_deduplication.restore_entry(
                    topic_id,
                    name,
                    queue_id,
                    offset,
                    due_ms,
                    log_ms,
                    fingerprint=fingerprint_of(properties),
                    timer=header.position if due_ms else 0,
                    half=half,
                )

    def _apply_parked(self, record: ScannedRecord, token: RevivalToken) -> None:
        header = record.header
        parking = self._registry.topic_by_id(header.topic_id)
        place = self.base_of(parking) if parking is not None else None
        if place is not None:
            self._table.parking.park(
                (place[1], token.topic_id, token.queue_id),
                header.topic_id,
                message_group(decode_message(record.data).properties),
                origin=token.queue_offset,
                offset=header.queue_offset,
                log_ms=header.log_ms,
            )

    def base_of(self, topic: TopicConfig) -> tuple[int, int] | None:
        """Topic and group that a retry or parking topic belongs to."""
        group_name, base_name = topics.split_group_topic(topic.name)
        base, group = self._registry.find_topic(base_name), self._registry.find_group(group_name)
        return (base.id, group.id) if base is not None and group is not None else None
