"""The proxy as one object: which handler serves which method of the public services.

A transport serves what `Proxy.methods` returns; `Proxy.listening_on` then hears its address.
"""

import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from popmq.common.clock import Clock
from popmq.common.loop_iteration import CallSoon, at_once
from popmq.common.protocol.messaging_payloads import Port
from popmq.common.settings.settings import Settings, format_address
from popmq.proxy.admin.admin_service import Admin
from popmq.proxy.admin.audit_log import AuditLog
from popmq.proxy.admin.cluster_admin import ClusterAdmin
from popmq.proxy.admin.public_admin import PublicAdmin
from popmq.proxy.admin.reports import Reports
from popmq.proxy.admin.settings_admin import SettingsAdmin
from popmq.proxy.admin.user_admin import UserAdmin
from popmq.proxy.auth.gate import AuthGate
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.lanes.ack_lane import AckLane
from popmq.proxy.lanes.send_lane import SendLane
from popmq.proxy.messaging.ack import (
    AckMessage,
    ChangeInvisibleDuration,
    ForwardToDeadLetterQueue,
    refuse_ack,
    refuse_change,
)
from popmq.proxy.messaging.client_directory import ClientDirectory
from popmq.proxy.messaging.client_reporter import ClientReporter
from popmq.proxy.messaging.connected_subscriptions import ConnectedSubscriptions
from popmq.proxy.messaging.connection_limits import ConnectionLimits
from popmq.proxy.messaging.lite import SyncLiteSubscription
from popmq.proxy.messaging.pull import ConsumerOffsets, PullMessage
from popmq.proxy.messaging.query import EndpointChooser, RouteQueries
from popmq.proxy.messaging.recall import RecallMessage
from popmq.proxy.messaging.receive import ReceiveMessage
from popmq.proxy.messaging.send import SendMessage, refuse_send
from popmq.proxy.messaging.telemetry import Telemetry, heartbeat, notify_client_termination
from popmq.proxy.messaging.transaction import EndTransaction, OrphanChecks
from popmq.proxy.remoting.service import RemotingService
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.request_limits import bounded, request_limits
from popmq.proxy.rpc.rpc import SERVICE, Rpc
from popmq.proxy.rpc.rpc import method as any_method
from popmq.proxy.transport.interface import Call, Method, MethodType


class Proxy:
    """Stateless (D6): it may be dropped and made anew at any time."""

    def __init__(
        self,
        settings: Settings,
        brokers: BrokerPorts,
        clock: Clock,
        controllers: Sequence[Port] = (),
        soon: CallSoon = at_once,
        worker: int = 0,
    ) -> None:
        """`soon` calls back when a turn of the loop is over: what came in it goes on together.

        `worker` counts those that share a port, from 1.
        """
        self._soon = soon
        self._worker = worker
        self._brokers = brokers
        self._limits = request_limits(settings)
        self.metrics = ProxyMetrics()
        self.routes = MetadataCache(brokers, clock, settings.topic)
        self.access = AuthGate(settings, brokers, clock, self.metrics, self.routes)
        self._directory = ClientDirectory(clock)
        self.telemetry = Telemetry(
            self.routes, settings, self.metrics, self._directory, self.access
        )
        self.clients = ClientReporter(
            brokers,
            self._directory,
            clock,
            lambda: self.name,
            self.telemetry.has_lite_stream,
            self._lite_ended,
        )
        self._endpoints = EndpointChooser(settings.proxy.advertise, settings.proxy.listen)
        publishers = self.telemetry.publishers
        self._end_transaction = EndTransaction(brokers)
        self._send = SendMessage(brokers, self.routes, settings, clock, publishers, soon)
        limits = ConnectionLimits(settings, clock)
        self._receive = ReceiveMessage(brokers, self.routes, settings, clock, limits)
        self._pull = PullMessage(brokers, self.routes, settings, limits)
        self._offsets = ConsumerOffsets(brokers, self.routes)
        self._ack = AckMessage(brokers, self.routes, soon)
        lane_needs = self.metrics, self.access, self.clients.on_call, settings.lean.lanes
        message_limits = settings.message
        self._send_lane = SendLane(
            self._send, brokers, self.routes, message_limits, clock, *lane_needs
        )
        self._ack_lane = AckLane(self._ack, brokers, self.routes, *lane_needs)
        self._recall = RecallMessage(brokers, self.routes)
        self.remoting = RemotingService(
            settings,
            brokers,
            self.routes,
            self._send,
            self._recall,
            self._end_transaction,
            self.metrics,
            clock,
            self.clients.mark_seen,
            self._directory,
            self.access,
        )
        self.checks = OrphanChecks(brokers, publishers, self.remoting.producers, self.metrics)
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
        self._user_admin = UserAdmin(self.access, settings.cluster.name, clock, self.metrics)
        self._reports = Reports(brokers, self.metrics)
        self._cluster = ClusterAdmin(controllers, settings.cluster.name, self.metrics)
        self._described = SettingsAdmin(
            settings, brokers, controllers, self.metrics, lambda: self.endpoint
        )

    def listening_on(self, host: str, port: int) -> None:
        """Tell it the address of its transport, for routes when nothing better is known."""
        self._endpoints.listening = (host, port)

    def drain(self) -> None:
        """Let go of what waits: the step before the transport's `stop`."""
        self._receive.drain()
        self._pull.drain()
        self.remoting.drain()
        self.clients.stop()
        self.checks.stop()
        self.access.stop()
        self.telemetry.drain()

    @property
    def endpoint(self) -> str:
        return format_address(*self._endpoints.listening)

    @property
    def name(self) -> str:
        """Of this one among all proxies: where it listens, and the number of a worker."""
        host, port = self._endpoints.listening
        name = format_address(socket.gethostname() if host in ("0.0.0.0", "::") else host, port)
        return f"{name}/{self._worker}" if self._worker else name

    def methods(self) -> list[Method]:
        """All services, for any transport."""
        return [*self.messaging_methods(), *self.admin_methods()]

    def messaging_methods(self) -> list[Method]:
        return bounded(self._messaging(), self._limits, self.metrics, self.access)

    def admin_methods(self) -> list[Method]:
        """popmq's own admin service, that of reports and the public one."""
        rest = (
            *(self._public_admin, self._admin, self._reports, self._cluster),
            *(self._described, self._user_admin),
        )
        audit = AuditLog(self._brokers, self.metrics)
        methods = audit.audited([method for item in rest for method in item.methods()])
        return bounded(methods, self._limits, self.metrics, self.access)

    def _lite_ended(self, client_id: str, names: Sequence[str]) -> None:
        self.telemetry.unsubscribe_lite(client_id, names)
        self.lites.ended(client_id, names)

    def _terminated(self, rpc: Rpc) -> None:
        notify_client_termination(rpc)
        if not self.clients.may_close(rpc.client_id, rpc.call.peer):
            self.metrics.foreign_good_byes += 1
            return
        self.lites.on_client_closed(rpc.client_id)
        # Behind the acks that came in this turn: what it acked does not go to others.
        self._soon(partial(self.clients.on_client_closed, rpc.client_id))

    def _messaging(self) -> list[Method]:
        count = self.metrics
        stream = MethodType.SERVER_STREAM
        method = partial(any_method, on_client=self.clients.on_call)
        return [
            method("QueryRoute", self._query.route, count),
            method("QueryAssignment", self._query.assignment, count),
            replace(
                method("SendMessage", self._send_lane.start, count, refusal=refuse_send),
                lane=self._send_lane,
            ),
            method(
                "ReceiveMessage",
                self._receive.start,
                count,
                refusal=self._receive.refuse,
                shape=stream,
            ),
            replace(
                method("AckMessage", self._ack_lane.start, count, refusal=refuse_ack),
                lane=self._ack_lane,
            ),
            method("ChangeInvisibleDuration", self._change.start, count, refusal=refuse_change),
            method("ForwardMessageToDeadLetterQueue", self._reject.start, count),
            method("EndTransaction", self._end_transaction.start, count),
            method("RecallMessage", self._recall.start, count),
            method("Heartbeat", partial(heartbeat, self._directory), count),
            any_method("NotifyClientTermination", self._terminated, count, on_client=_is_silent),
            Method(SERVICE + "Telemetry", MethodType.BIDI_STREAM, open=self.telemetry.open),
            method("PullMessage", self._pull.start, count, shape=stream),
            method("UpdateOffset", self._offsets.update, count),
            method("GetOffset", self._offsets.get, count),
            method("QueryOffset", self._offsets.query, count),
            method("SyncLiteSubscription", self.lites.start, count),
        ]


def _is_silent(client_id: str, call: Call) -> None:
    """A good-bye needs a client id, and is no sign of life: anybody may send one."""
