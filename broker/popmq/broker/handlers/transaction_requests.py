"""END_TRANSACTION and the answers to CHECKS (docs/concepts/transactions.md)."""

from collections.abc import Sequence
from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.request import Request
from popmq.broker.operations.resumable_reads import ResumableRead, Unconfirmed, read_now
from popmq.broker.transaction.check_service import Check
from popmq.common.errors import Code, Refused
from popmq.common.record.transaction_token import TransactionEnd
from popmq.common.wire import transaction_pb2 as pb


def end_transaction(broker: Broker, request: Request) -> ResumableRead[bytes]:
    requested = pb.EndTransactionRequest.FromString(request.body)
    halves = broker.transactions.halves
    ending = TransactionEnd.COMMITTED if requested.commit else TransactionEnd.ROLLED_BACK
    transaction = halves.find(requested.topic, requested.message_id, requested.transaction_id)
    waited = False

    def step() -> bytes:
        """It is final that the transaction came to another end: that record is waited for."""
        nonlocal waited
        if not halves.is_readable(transaction):
            raise Unconfirmed
        try:
            halves.end(transaction, ending)
        except Refused as refusal:
            if waited or refusal.code is not Code.INVALID_TRANSACTION_ID:
                raise
            waited = True
            raise Unconfirmed from None
        return b""

    return read_now(step)


def wait_for_checks(broker: Broker, request: Request) -> None:
    requested = pb.ChecksRequest.FromString(request.body)
    checks = broker.transactions.checks
    checks.add_waiting_proxy(
        request.number,
        requested.topics,
        requested.producer_groups,
        broker.waits.boot_ms() + requested.wait_ms,
        lambda due: request.answer(_encode_checks(due)),
    )
    request.wait(partial(checks.cancel, request.number))


def _encode_checks(due: Sequence[Check]) -> bytes:
    reply = pb.ChecksReply()
    for check in due:
        message = check.message
        reply.checks.add(
            topic=check.topic,
            transaction_id=check.transaction_id,
            queue_id=check.queue_id,
            half_offset=check.half_offset,
            stored_ms=message.header.wall_ms,
            head=message.head,
            properties=message.properties,
            producer_group=check.producer_group,
        )
    return reply.SerializeToString()
