"""EndTransaction, and the checks of half messages without a commit or rollback.

A transaction id names its broker, so any proxy can pass it on.  For checks the proxy waits at
every broker while producers are connected here, and hands what comes to one of those that publish
to the topic, each in turn (docs/concepts/transactions.md).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

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
from popmq.proxy.rpc.convert import OK_ONLY, name_of, parse, stored_message
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Answer, Rpc

logger = logging.getLogger(__name__)

WAIT_MS = 10_000
TIMEOUT_MS = WAIT_MS + 5_000
LOOK_S = 1.0  # how often it looks which brokers and topics there are
NAMES_LIMIT = 10_000  # of topics, and of groups, in one request


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
        body = transaction_pb2.EndTransactionRequest(
            topic=topic,
            message_id=request.message_id,
            transaction_id=request.transaction_id,
            commit=request.resolution == pb.COMMIT,
        )
        self.end(rpc, broker, body, lambda: rpc.reply(OK_ONLY))

    def end(
        self,
        rpc: Rpc,
        broker: str,
        asked: transaction_pb2.EndTransactionRequest,
        then: Callable[[], None],
    ) -> None:
        """Commit or roll back at the broker group that the id names; `then` when it is durable."""
        if not is_broker_name(broker):
            raise Refused(
                Code.INVALID_TRANSACTION_ID,
                f"the transaction id names broker group {broker[:100]!r}, and no group can have "
                "that name",
            )

        def answered(answer: Answer) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            then()

        port, body = self._brokers.port(broker), asked.SerializeToString()
        rpc.send_request(port, Kind.END_TRANSACTION, body, rpc.timeout_ms(), answered)


class ProducerGroups(Protocol):
    """Producers of Remoting clients, which are asked by their group."""

    def groups(self) -> frozenset[str]:
        """Those that have a producer here now."""
        ...

    def send_check(self, broker: str, check: transaction_pb2.Check) -> bool:
        """Send it to a producer of the check's group, each in turn; False when none is here."""
        ...


class _Producers(NamedTuple):
    """Whom a broker may name checks for."""

    topics: frozenset[str]
    groups: frozenset[str]


class OrphanChecks:
    """Waits for checks at every broker, for the producers that are here now."""

    def __init__(
        self,
        brokers: BrokerPorts,
        publishers: Publishers,
        producer_groups: ProducerGroups,
        metrics: ProxyMetrics,
    ) -> None:
        self._brokers = brokers
        self._publishers = publishers
        self._producer_groups = producer_groups
        self._metrics = metrics
        self._asked: dict[str, tuple[_Producers, Callable[[], None]]] = {}
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
        """Ask each broker that is not asked yet; ask again where the producers have changed."""
        producers = _Producers(self._publishers.topics(), self._producer_groups.groups())
        names = self._brokers.names()
        for broker, (asked, _) in list(self._asked.items()):
            if asked != producers or broker not in names:
                self._cancel(broker)
        for broker in names if any(producers) else ():
            if broker not in self._asked:
                self._ask(broker, producers)

    def _tick(self) -> None:
        try:
            self.look()
        except Exception:
            logger.exception("cannot ask for transaction checks")
        self.start()

    def _ask(self, broker: str, producers: _Producers) -> None:
        body = transaction_pb2.ChecksRequest(
            topics=sorted(producers.topics)[:NAMES_LIMIT],
            producer_groups=sorted(producers.groups)[:NAMES_LIMIT],
            wait_ms=WAIT_MS,
        ).SerializeToString()
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
            self._asked[broker] = (producers, lambda: port.cancel(number))

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
            if check.producer_group:
                sent = self._producer_groups.send_check(broker, check)
            else:
                sent = self._publishers.send_command(check.topic, _command(broker, check))
            self._metrics.transaction_checks += sent


def _command(broker: str, check: transaction_pb2.Check) -> bytes:
    half = Delivery(
        check.queue_id,
        check.half_offset,
        1,
        check.stored_ms,
        b"",
        check.head,
        check.properties,
    )
    message = stored_message(half, broker.encode())
    return service.TelemetryCommand(
        recover_orphaned_transaction_command=service.RecoverOrphanedTransactionCommand(
            message=message, transaction_id=check.transaction_id
        )
    ).SerializeToString()
