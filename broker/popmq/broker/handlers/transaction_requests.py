"""END_TRANSACTION and the answers to CHECKS (docs/concepts/transactions.md)."""

from collections.abc import Sequence

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.request_runner import Job
from popmq.broker.operations.resumable_reads import Unconfirmed
from popmq.broker.transaction.check_service import Check
from popmq.common.errors import Code, Refused
from popmq.common.record.transaction_token import TransactionEnd
from popmq.common.wire import transaction_pb2 as pb


class EndTransactionJob:
    def __init__(self, broker: Broker, request: pb.EndTransactionRequest) -> None:
        self._halves = broker.transactions.halves
        self._ending = TransactionEnd.COMMITTED if request.commit else TransactionEnd.ROLLED_BACK
        self._transaction = self._halves.find(
            request.topic, request.message_id, request.transaction_id
        )
        self._waited = False

    def step(self) -> bytes | None:
        """It is final that the transaction came to another end: that record is waited for."""
        if not self._halves.is_readable(self._transaction):
            raise Unconfirmed
        try:
            self._halves.end(self._transaction, self._ending)
        except Refused as refusal:
            if self._waited or refusal.code is not Code.INVALID_TRANSACTION_ID:
                raise
            self._waited = True
            raise Unconfirmed from None
        return b""


def end_transaction_job(broker: Broker, body: bytes) -> Job:
    return EndTransactionJob(broker, pb.EndTransactionRequest.FromString(body))


def encode_checks(found: Sequence[Check]) -> bytes:
    reply = pb.ChecksReply()
    for check in found:
        message = check.message
        reply.checks.add(
            topic=check.topic,
            transaction_id=check.transaction_id,
            queue_id=check.queue_id,
            half_offset=check.half_offset,
            stored_ms=message.header.wall_ms,
            head=message.head,
            properties=message.properties,
        )
    return reply.SerializeToString()
