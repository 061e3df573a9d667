"""EndTransaction, and the checks of half messages that nobody ended.

A transaction id names its broker, so any proxy can pass it on.  For checks the proxy waits at
every broker while producers are connected here, and hands what comes to one of those that publish
to the topic, each in turn (docs/concepts/transactions.md).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.protocol.messaging_payloads import Delivery, Kind
from popmq.common.record.transaction_id import broker_of_transaction
from popmq.common.topics import check_topic_name, is_broker_name
from popmq.common.wire import transaction_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.messaging.publishers import Publishers
from popmq.proxy.rpc.convert import OK_ONLY, delivered_message, name_of, parse
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Answer, Rpc

logger = logging.getLogger(__name__)

WAIT_MS = 10_000
TIMEOUT_MS = WAIT_MS + 5_000
LOOK_S = 1.0  # how often it looks which brokers and topics there are
TOPICS_LIMIT = 10_000


class EndTransaction:
    def __init__(self, brokers: BrokerPorts) -> None:
        self._brokers = brokers

    def start(self, rpc: Rpc) -> None:
        request = parse(service.EndTransactionRequest, rpc.data)
        topic = name_of(request.topic)
        check_topic_name(topic)
        broker = broker_of_transaction(request.transaction_id)
        if request.resolution not in (pb.COMMIT, pb.ROLLBACK):
            rpc.reply(OK_ONLY)  # its producer does not know yet: it is asked again
            return
        if not is_broker_name(broker):
            raise Refused(
                Code.INVALID_TRANSACTION_ID,
                f"the transaction id names broker group {broker[:100]!r}, and no group can have "
                "that name",
            )
        body = transaction_pb2.EndTransactionRequest(
            topic=topic,
            message_id=request.message_id,
            transaction_id=request.transaction_id,
            commit=request.resolution == pb.COMMIT,
        ).SerializeToString()

        def answered(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            rpc.reply(OK_ONLY)

        port = self._brokers.port(broker)
        rpc.send_request(port, Kind.END_TRANSACTION, body, rpc.timeout_ms(), answered)


class OrphanChecks:
    """Waits for checks at every broker, for the topics of the producers that are here now."""

    def __init__(self, brokers: BrokerPorts, publishers: Publishers, metrics: ProxyMetrics) -> None:
        self._brokers = brokers
        self._publishers = publishers
        self._metrics = metrics
        self._asked: dict[str, tuple[frozenset[str], Callable[[], None]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look once a second from now on; must be called on the loop."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for broker in list(self._asked):
            self._cancel(broker)

    def look(self) -> None:
        """Ask each broker that is not asked yet; ask again where the topics have changed."""
        topics = self._publishers.topics()
        names = self._brokers.names()
        for broker, (asked, _) in list(self._asked.items()):
            if asked != topics or broker not in names:
                self._cancel(broker)
        for broker in names if topics else ():
            if broker not in self._asked:
                self._ask(broker, topics)

    def _tick(self) -> None:
        try:
            self.look()
        except Exception:
            logger.exception("cannot ask for transaction checks")
        self.start()

    def _ask(self, broker: str, topics: frozenset[str]) -> None:
        some = sorted(topics)[:TOPICS_LIMIT]
        body = transaction_pb2.ChecksRequest(topics=some, wait_ms=WAIT_MS).SerializeToString()
        over = False

        def answered(answer: bytes | PopmqError) -> None:
            nonlocal over
            over = True
            self._asked.pop(broker, None)
            if isinstance(answer, bytes):
                self._checks(broker, answer)

        try:
            port = self._brokers.port(broker)
        except PopmqError:
            return  # it is asked when it is back
        number = port.request(Kind.CHECKS, body, TIMEOUT_MS, answered)
        if not over:
            self._asked[broker] = (topics, lambda: port.cancel(number))

    def _cancel(self, broker: str) -> None:
        _, cancel = self._asked.pop(broker)
        cancel()

    def _checks(self, broker: str, answer: bytes) -> None:
        """They are with the producers when this returns; the next look asks for more."""
        try:
            checks = transaction_pb2.ChecksReply.FromString(answer).checks
        except DecodeError:
            logger.error("a broker's checks cannot be read", extra={"broker": broker})
            return
        self._hand_out(broker, checks)
        if checks and self._timer is not None:
            asyncio.get_running_loop().call_soon(self.look)

    def _hand_out(self, broker: str, checks: Sequence[transaction_pb2.Check]) -> None:
        for check in checks:
            half = Delivery(
                check.queue_id,
                check.half_offset,
                1,
                check.stored_ms,
                b"",
                check.head,
                check.properties,
            )
            message = pb.Message.FromString(delivered_message(half, broker.encode()))
            message.system_properties.ClearField("receipt_handle")
            command = service.TelemetryCommand(
                recover_orphaned_transaction_command=service.RecoverOrphanedTransactionCommand(
                    message=message, transaction_id=check.transaction_id
                )
            )
            if self._publishers.send_command(check.topic, command.SerializeToString()):
                self._metrics.transaction_checks += 1
