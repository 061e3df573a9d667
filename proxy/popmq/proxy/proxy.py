"""The proxy as one object: which handler serves which method of the public services.

proxy = Proxy(settings, brokers, clock)
transport = GrpcioTransport(proxy.methods(), host, port)
proxy.listening_on(host, await transport.start())
"""

from collections.abc import Sequence
from functools import partial

from popmq.common.clock import Clock
from popmq.common.config import Settings, format_address
from popmq.common.hop import Port
from popmq.common.turn import Soon, at_once
from popmq.proxy.ack import AckMessage, ChangeInvisibleDuration, refuse_ack, refuse_change
from popmq.proxy.admin import Admin
from popmq.proxy.brokers import Brokers
from popmq.proxy.clients import Clients
from popmq.proxy.cluster_admin import ClusterAdmin
from popmq.proxy.dead_letter import ForwardToDeadLetterQueue
from popmq.proxy.lite import SyncLiteSubscription
from popmq.proxy.metrics import ProxyMetrics
from popmq.proxy.public_admin import PublicAdmin
from popmq.proxy.pull import Offsets, PullMessage
from popmq.proxy.query import EndpointChooser, Query
from popmq.proxy.recall import RecallMessage
from popmq.proxy.receive import ReceiveMessage
from popmq.proxy.reports import Reports
from popmq.proxy.route import Routes
from popmq.proxy.rpc import SERVICE, Rpc
from popmq.proxy.rpc import method as any_method
from popmq.proxy.send import SendMessage, refuse_send
from popmq.proxy.subscribed import Subscribed
from popmq.proxy.telemetry import Telemetry, heartbeat, notify_client_termination
from popmq.proxy.transaction import EndTransaction, OrphanChecks
from popmq.proxy.transport.seam import Method, Shape


class Proxy:
    """Stateless (D6): it may be dropped and made anew at any time."""

    def __init__(
        self,
        settings: Settings,
        brokers: Brokers,
        clock: Clock,
        controllers: Sequence[Port] = (),
        soon: Soon = at_once,
    ) -> None:
        """`soon` calls back when a turn of the loop is over: what came in it goes on together."""
        self._soon = soon
        self.metrics = ProxyMetrics()
        self.routes = Routes(brokers, clock, auto_create=settings.topic.auto_create)
        self.telemetry = Telemetry(self.routes, settings, self.metrics)
        self.clients = Clients(brokers, self.telemetry.hears_lite, self._lite_ended)
        self._endpoints = EndpointChooser(settings.proxy.advertise, settings.proxy.listen)
        publishers = self.telemetry.publishers
        self.checks = OrphanChecks(brokers, publishers, self.metrics)
        self._end_transaction = EndTransaction(brokers)
        self._send = SendMessage(brokers, self.routes, settings, clock, publishers, soon)
        self._receive = ReceiveMessage(brokers, self.routes, settings, clock)
        self._pull = PullMessage(brokers, self.routes, settings)
        self._offsets = Offsets(brokers, self.routes)
        self._ack = AckMessage(brokers, self.routes, soon)
        self._recall = RecallMessage(brokers, self.routes)
        self._reject = ForwardToDeadLetterQueue(brokers)
        self._change = ChangeInvisibleDuration(brokers, self.routes, settings)
        self.lites = SyncLiteSubscription(brokers, settings.lite, clock)
        self._query = Query(brokers, self.routes, self._endpoints)
        self._admin = Admin(brokers, self.metrics)
        self._public_admin = PublicAdmin(
            Admin(brokers, ProxyMetrics()).methods(),  # a refusal is counted once
            Subscribed(self.telemetry.heard),
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
        self.lites.gone(rpc.client_id)
        # Behind the acks that came in this turn: what it acked does not go to others.
        self._soon(partial(self.clients.gone, rpc.client_id))

    def _messaging(self) -> list[Method]:
        count = self.metrics
        stream = Shape.SERVER_STREAM
        method = partial(any_method, heard=self.clients.heard)
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
            Method(SERVICE + "Telemetry", Shape.BIDI_STREAM, open=self.telemetry.open),
            method("PullMessage", self._pull.start, count, shape=stream),
            method("UpdateOffset", self._offsets.update, count),
            method("GetOffset", self._offsets.get, count),
            method("QueryOffset", self._offsets.query, count),
            method("SyncLiteSubscription", self.lites.start, count),
        ]
