"""Ack and change of the invisible duration: what a consumer says of a delivery.

A handle is good until its message was revived, not until the clock passes (D6).  Each way in
which it can be no good any more has its own sentence.
"""

import struct
from collections.abc import Sequence

from popmq.broker.deliveries.check_point_buffer import put_revive
from popmq.broker.deliveries.check_point_table import DeliveryStatus
from popmq.broker.deliveries.deliveries import Deliveries
from popmq.broker.deliveries.pop_check_point import (
    AUTO_RENEW,
    PUSH,
    ChangeRecord,
    PopCheckPoint,
)
from popmq.broker.meta.registry import Registry
from popmq.broker.pop.pop_service import PopService
from popmq.broker.pop.revive_service import ReviveService
from popmq.broker.store.message_store import MessageStore
from popmq.common import topics
from popmq.common.errors import InvalidReceiptHandle, PopmqError
from popmq.common.observability import Histogram
from popmq.common.protocol.messaging_payloads import ACKED, AckResult
from popmq.common.record.receipt import ReceiptHandle, ReceiptPrefix, ReceiptReader, receipt_of

LATENCY_MS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000),
)


class AckService:
    def __init__(
        self,
        store: MessageStore,
        registry: Registry,
        deliveries: Deliveries,
        pop: PopService,
        revive: ReviveService,
        *,
        broker: str,
    ) -> None:
        self._store = store
        self._registry = registry
        self._table = deliveries.table  # acks know themselves what waits (`unwritten_bits`)
        self._pop = pop
        self._revive = revive
        self._buffer = deliveries.buffer
        self._receipt_reader = ReceiptReader()
        self._broker = broker
        self.acked = 0
        self.repeated = 0
        self.rejected = 0
        self.refused = 0
        self.changed = 0
        self.latency = Histogram(LATENCY_MS, divisor=1_000)

    def ack(self, *, topic: str, group: str, handles: Sequence[bytes]) -> list[AckResult]:
        """Take the acks; one record for each check point leaves with the next group commit.  Tell
        the client when they are confirmed.  One result per handle, in order: repeating an ack is
        fine, and what is refused says why.
        """
        results = []
        taken: dict[PopCheckPoint, int] = {}
        before = self.acked
        for handle in handles:
            try:
                self._take(*self._opened(topic, group, handle), taken)
                results.append(ACKED)
            except PopmqError as error:
                results.append(AckResult(error.code, str(error)))
        if taken:
            self._pop.acked.add((group, topic), self.acked - before)
            now_ms = self._store.log_ms()
            for ck, bits in taken.items():
                self._buffer.ack(ck, bits)
                # A change of the invisible duration delivers nothing.
                delivered = ck.first_check_point or ck
                self.latency.observe_each(now_ms - delivered.popped_at_ms, bits.bit_count())
        return results

    def reject(self, *, topic: str, group: str, handle: bytes) -> None:
        """Make the message a dead letter now; tell the client when it is confirmed.

        Repeating that is fine.  Raises InvalidReceiptHandle with the reason, and ColdRead, with
        nothing changed, when the message has to come from the disk first.
        """
        table = self._buffer.table
        receipt = self._receipt(topic, group, handle)
        fate = self._fate(receipt)
        ck = table.find(receipt.epoch, receipt.sequence)
        if fate is DeliveryStatus.WAITING and ck is not None:
            self._check_offset(ck, receipt.queue_offset, receipt.member)
            self._revive.reject(ck, receipt.member)
            self.rejected += 1
        elif fate is not DeliveryStatus.DEAD_LETTERED:
            self.refused += 1
            raise _no_good(receipt, fate)

    def change(self, *, topic: str, group: str, handle: bytes, invisible_ms: int) -> bytes:
        """Make the message visible `invisible_ms` from now; returns the handle that replaces
        this one.  A push consumer's duration is raised to the group's back-off for the
        attempt, because the Node client sends 0 for every failure.

        A repeated request gets the same handle, until that handle is used.
        """
        table = self._buffer.table
        receipt = self._receipt(topic, group, handle)
        fate = self._fate(receipt)
        ck = table.find(receipt.epoch, receipt.sequence)
        if fate is DeliveryStatus.MOVED:
            # The reply to the first request may have been lost: say it again.
            place = receipt.group_id, receipt.topic_id, receipt.queue_id
            offset = receipt.queue_offset
            after = table.successor(place, receipt.epoch, receipt.sequence, offset)
            if after is not None:
                return self._handle_of(receipt, after.key)
        if fate is not DeliveryStatus.WAITING or ck is None:
            self.refused += 1
            raise _no_good(receipt, fate)
        self._check_offset(ck, receipt.queue_offset, receipt.member)
        self._buffer.write(ck)
        if ck.flags & PUSH:
            config = self._registry.group(group)
            # Retries have places of their own, so each attempt has another name for its jitter.
            name = struct.pack(">IIQ", receipt.topic_id, receipt.queue_id, receipt.queue_offset)
            back_off_ms = config.back_off_after_ms(receipt.attempt, name)
            invisible_ms = max(invisible_ms, back_off_ms)
        record = ChangeRecord(
            self._store.epoch,
            self._pop.next_sequence(),
            receipt.queue_offset,
            topic_id=ck.topic_id,
            group_id=ck.group_id,
            queue_id=ck.queue_id,
            old_epoch=receipt.epoch,
            old_sequence=receipt.sequence,
            revive_at_ms=self._store.log_ms() + invisible_ms,
            client=ck.client,
            flags=ck.flags & ~AUTO_RENEW,
        )
        put_revive(self._store, table, record)
        self.changed += 1
        return self._handle_of(receipt, (record.epoch, record.sequence))

    def _handle_of(self, receipt: ReceiptHandle, key: tuple[int, int]) -> bytes:
        """The handle of the delivery that stands for the one of `receipt`."""
        new = ReceiptHandle(
            receipt.broker,
            receipt.topic_id,
            receipt.group_id,
            receipt.queue_id,
            receipt.queue_offset,
            receipt.attempt,
            *key,
            0,
        )
        signing_key = self._registry.signing_keys.newest
        return new.encode(signing_key.secret, signing_key.id)

    def _fate(self, receipt: ReceiptHandle) -> DeliveryStatus:
        fate = self._table.fate(receipt.epoch, receipt.sequence, receipt.member)
        if fate is DeliveryStatus.UNKNOWN:
            return self._buffer.fate(receipt.epoch, receipt.sequence, receipt.member)
        return fate

    def _take(
        self, signed: ReceiptPrefix, offset: int, member: int, taken: dict[PopCheckPoint, int]
    ) -> None:
        """Enter one ack into `taken`, the bits of each check point. InvalidReceiptHandle when the
        delivery is over."""
        ck = self._table.find(signed.epoch, signed.sequence)
        bit = 1 << member
        if ck is None or not ck.waiting & bit:
            receipt = receipt_of(signed, offset, member)
            fate = self._fate(receipt)
            if fate is not DeliveryStatus.ACKED:
                self.refused += 1
                raise _no_good(receipt, fate)
            self.repeated += 1
            return
        if ck.start_offset + member != offset:
            self._check_offset(ck, offset, member)
        bits = taken.get(ck, 0)
        if (bits | self._buffer.unwritten_bits(ck.key)) & bit:
            self.repeated += 1
        else:
            taken[ck] = bits | bit
            self.acked += 1

    def _check_offset(self, ck: PopCheckPoint, offset: int, member: int) -> None:
        """Neither of the two is signed: the check point knows whether they belong together."""
        if ck.offset_of(member) != offset:
            self.refused += 1
            raise InvalidReceiptHandle(
                f"the receipt handle names message {offset} of its queue, but its delivery was of "
                f"message {ck.offset_of(member)}: it was changed"
            )

    def _receipt(self, topic: str, group: str, handle: bytes) -> ReceiptHandle:
        return receipt_of(*self._opened(topic, group, handle))

    def _opened(self, topic: str, group: str, handle: bytes) -> tuple[ReceiptPrefix, int, int]:
        """What the handle says, if this group got it from this topic and broker."""
        self._store.guard.check_write()
        registry = self._registry
        try:
            opened = self._receipt_reader.open(handle, registry.signing_keys)
            broker, topic_id, group_id, _, _, _, _ = opened[0]
            config, read = registry.group_by_id(group_id), registry.topic_by_id(topic_id)
            if broker != self._broker:
                raise InvalidReceiptHandle(
                    f"the receipt handle belongs to broker {broker}, this is {self._broker}"
                )
            if config is None or config.name != group:
                owner = config.name if config else "a group that was deleted"
                raise InvalidReceiptHandle(
                    f"the receipt handle was given to consumer group {owner}, not to {group}"
                )
            name = read.name if read else ""
            if name != topic and name not in (
                topics.retry_topic(group, topic),
                topics.parked_topic(group, topic),
            ):
                owner = read.name if read else "a topic that was deleted"
                raise InvalidReceiptHandle(
                    f"the receipt handle is of a message of {owner}, not of topic {topic}"
                )
        except InvalidReceiptHandle:
            self.refused += 1
            raise
        return opened


def _no_good(receipt: ReceiptHandle, fate: DeliveryStatus) -> InvalidReceiptHandle:
    match fate:
        case DeliveryStatus.REVIVED:
            return InvalidReceiptHandle(
                f"attempt {receipt.attempt} ran out of its invisible time and the message was "
                f"revived as attempt {receipt.attempt + 1}: this receipt handle is over"
            )
        case DeliveryStatus.DEAD_LETTERED:
            return InvalidReceiptHandle(
                f"the message became a dead letter after attempt {receipt.attempt}: this receipt "
                "handle is over"
            )
        case DeliveryStatus.RESET:
            return InvalidReceiptHandle(
                "the group's offset was reset after this delivery: this receipt handle is over"
            )
        case DeliveryStatus.MOVED:
            return InvalidReceiptHandle(
                "the receipt handle was superseded: the message was returned, or its invisible "
                "duration was changed and the reply to that has the handle to use"
            )
        case DeliveryStatus.ACKED:
            return InvalidReceiptHandle("the message was acked with this receipt handle")
        case _:
            return InvalidReceiptHandle(
                "the receipt handle is expired: its delivery ended more than 10 minutes ago, or "
                "its check point was in memory only (a buffered group) when the broker stopped"
            )
