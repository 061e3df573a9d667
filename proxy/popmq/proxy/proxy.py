"""The proxy as one object: which handler serves which method of the public services.

proxy = Proxy(settings, brokers, clock)
transport = GrpcioTransport(proxy.methods(), host, port)
proxy.listening_on(host, await transport.start())
"""

from collections.abc import Sequence
from functools import partial

from popmq.common.clock import Clock
from popmq.common.loop_iteration import CallSoon, at_once
from popmq.common.protocol.messaging_payloads import Port
from popmq.common.settings.settings import Settings, format_address
from popmq.proxy.admin.admin_service import Admin
from popmq.proxy.admin.cluster_admin import ClusterAdmin
from popmq.proxy.admin.public_admin import PublicAdmin
from popmq.proxy.admin.reports import Reports
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.messaging.ack import (
    AckMessage,
    ChangeInvisibleDuration,
    ForwardToDeadLetterQueue,
    refuse_ack,
    refuse_change,
)
from popmq.proxy.messaging.client_reporter import ClientReporter
from popmq.proxy.messaging.connected_subscriptions import ConnectedSubscriptions
from popmq.proxy.messaging.lite import SyncLiteSubscription
from popmq.proxy.messaging.pull import ConsumerOffsets, PullMessage
from popmq.proxy.messaging.query import EndpointChooser, RouteQueries
from popmq.proxy.messaging.recall import RecallMessage
from popmq.proxy.messaging.receive import ReceiveMessage
from popmq.proxy.messaging.send import SendMessage, refuse_send
from popmq.proxy.messaging.telemetry import Telemetry, heartbeat, notify_client_termination
from popmq.proxy.messaging.transaction import EndTransaction, OrphanChecks
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import SERVICE, Rpc
from popmq.proxy.rpc.rpc import method as any_method
from popmq.proxy.transport.interface import Method, MethodType


class Proxy:
    """Stateless (D6): it may be dropped and made anew at any time."""

    def __init__(
        self,
        settings: Settings,
        brokers: BrokerPorts,
        clock: Clock,
        controllers: Sequence[Port] = (),
        soon: CallSoon = at_once,
    ) -> None:
        """`soon` calls back when a turn of the loop is over: what came in it goes on together."""
        self._soon = soon
        self.metrics = ProxyMetrics()
        self.routes = MetadataCache(brokers, clock, auto_create=settings.topic.auto_create)
        self.telemetry = Telemetry(self.routes, settings, self.metrics)
        self.clients = ClientReporter(brokers, self.telemetry.has_lite_stream, self._lite_ended)
        self._endpoints = EndpointChooser(settings.proxy.advertise, settings.proxy.listen)
        publishers = self.telemetry.publishers
        self.checks = OrphanChecks(brokers, publishers, self.metrics)
        self._end_transaction = EndTransaction(brokers)
        self._send = SendMessage(brokers, self.routes, settings, clock, publishers, soon)
        self._receive = ReceiveMessage(brokers, self.routes, settings, clock)
        self._pull = PullMessage(brokers, self.routes, settings)
        self._offsets = ConsumerOffsets(brokers, self.routes)
        self._ack = AckMessage(brokers, self.routes, soon)
        self._recall = RecallMessage(brokers, self.routes)
        self._reject = ForwardToDeadLetterQueue(brokers)
        self._change = ChangeInvisibleDuration(brokers, self.routes, settings)
        self.lites = SyncLiteSubscription(brokers, settings.lite, clock)
        self._query = RouteQueries(brokers, self.routes, self._endpoints)
        self._admin = Admin(brokers, self.metrics)
        self._public_admin = PublicAdmin(
            Admin(brokers, ProxyMetrics()).methods(),  # a refusal is counted once
            ConnectedSubscriptions(self.telemetry.mark_seen),
            self.lites,
            self.metrics,
            lambda: self.endpoint,
        )
        self._reports = Reports(brokers, self.metrics)
        self._cluster = ClusterAdmin(controllers, settings.cluster.name, self.metrics)

    def listening_on(self, host: str, port: int) -> None:
        """Tell it the address of its transport, for routes when nothing better is known."""
        self._endpoints.listening = (host, port)

    def drain(self) -> None:
        """Let go of what waits: the step before the transport's `stop`."""
        self._receive.drain()
        self._pull.drain()
        self.clients.stop()
        self.checks.stop()
        self.telemetry.drain()

    @property
    def endpoint(self) -> str:
        return format_address(*self._endpoints.listening)

    def methods(self) -> list[Method]:
        """All services, for any transport."""
        rest = (self._public_admin, self._admin, self._reports, self._cluster)
        return [*self._messaging(), *(method for one in rest for method in one.methods())]

    def _lite_ended(self, client_id: str, names: Sequence[str]) -> None:
        self.telemetry.unsubscribe_lite(client_id, names)
        self.lites.ended(client_id, names)

    def _terminated(self, rpc: Rpc) -> None:
        notify_client_termination(rpc)
        self.lites.on_client_closed(rpc.client_id)
        # Behind the acks that came in this turn: what it acked does not go to others.
        self._soon(partial(self.clients.on_client_closed, rpc.client_id))

    def _messaging(self) -> list[Method]:
        count = self.metrics
        stream = MethodType.SERVER_STREAM
        method = partial(any_method, heard=self.clients.mark_seen)
        return [
            method("QueryRoute", self._query.route, count),
            method("QueryAssignment", self._query.assignment, count),
            method("SendMessage", self._send.start, count, refusal=refuse_send),
            method(
                "ReceiveMessage",
                self._receive.start,
                count,
                refusal=self._receive.refuse,
                shape=stream,
            ),
            method("AckMessage", self._ack.start, count, refusal=refuse_ack),
            method("ChangeInvisibleDuration", self._change.start, count, refusal=refuse_change),
            method("ForwardMessageToDeadLetterQueue", self._reject.start, count),
            method("EndTransaction", self._end_transaction.start, count),
            method("RecallMessage", self._recall.start, count),
            method("Heartbeat", heartbeat, count),
            method("NotifyClientTermination", self._terminated, count),
            Method(SERVICE + "Telemetry", MethodType.BIDI_STREAM, open=self.telemetry.open),
            method("PullMessage", self._pull.start, count, shape=stream),
            method("UpdateOffset", self._offsets.update, count),
            method("GetOffset", self._offsets.get, count),
            method("QueryOffset", self._offsets.query, count),
            method("SyncLiteSubscription", self.lites.start, count),
        ]
