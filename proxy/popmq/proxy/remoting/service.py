"""Which handler serves which request code; the one place where a request meets its `Rpc`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from popmq.common.clock import Clock
from popmq.common.errors import ConfigError
from popmq.common.observability import Histogram
from popmq.common.settings.settings import Settings
from popmq.proxy.auth.gate import AuthGate
from popmq.proxy.auth.remoting_rights import REMOTING_RIGHTS, RemotingRequest
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.brokers.metadata_cache import MetadataCache
from popmq.proxy.messaging.client_directory import ClientDirectory
from popmq.proxy.messaging.recall import RecallMessage
from popmq.proxy.messaging.send import SendMessage
from popmq.proxy.messaging.transaction import EndTransaction
from popmq.proxy.remoting.assignments import Assignments
from popmq.proxy.remoting.clients import Clients
from popmq.proxy.remoting.connection import RemotingCall, RemotingConnection
from popmq.proxy.remoting.leases import Leases
from popmq.proxy.remoting.popping import Pops
from popmq.proxy.remoting.producers import Producers, end
from popmq.proxy.remoting.pulling import Offsets, Pulls
from popmq.proxy.remoting.queries import Queries
from popmq.proxy.remoting.replies import Replies
from popmq.proxy.remoting.request import Request, refuse
from popmq.proxy.remoting.request_codes import RequestCode, why_refused
from popmq.proxy.remoting.result_codes import ResultCode
from popmq.proxy.remoting.returns import Returns
from popmq.proxy.remoting.routes import Addresses, TopicRoutes
from popmq.proxy.remoting.sending import Sends
from popmq.proxy.remoting.sessions import Sessions
from popmq.proxy.rpc.metrics import ProxyMetrics
from popmq.proxy.rpc.rpc import Rpc
from popmq.proxy.transport.interface import Call, Opening

CLIENT_TIMEOUT_MS = 3_000  # what clients wait for most answers; then they close the connection
LOCK_TIMEOUT_MS = 1_000

Handler = Callable[[Request], None]


class _Served(NamedTuple):
    handler: Handler
    took: Histogram
    timeout_ms: int | None


# A frame begins with its length, which is below 16 MiB or exactly that.
_FIRST_BYTES = frozenset({0, 1})


class GroupPort:
    """Implements `OtherProtocol` on a port that stands for one broker group: a request that names
    none means that one."""

    first_bytes = _FIRST_BYTES

    def __init__(self, service: "RemotingService", broker_group: str) -> None:
        self._service = service
        self._broker_group = broker_group

    def open(self, opening: Opening) -> RemotingConnection:
        return self._service.open(opening, self._broker_group)


class RemotingService:
    """Implements `OtherProtocol`: the connections of Remoting clients, and their handlers."""

    first_bytes = _FIRST_BYTES

    def __init__(
        self,
        settings: Settings,
        brokers: BrokerPorts,
        routes: MetadataCache,
        send: SendMessage,
        recall: RecallMessage,
        end_transaction: EndTransaction,
        metrics: ProxyMetrics,
        clock: Clock,
        mark_seen: Callable[[str], None],
        directory: ClientDirectory,
        access: AuthGate,
    ) -> None:
        """Raises ConfigError when a code that is served has no row in the table of rights."""
        self._access = access
        self._limits = settings.lean
        self._clock = clock
        self._metrics = metrics
        self._mark_seen = mark_seen
        addresses = Addresses(settings)
        topics = TopicRoutes(brokers, routes, settings, addresses)
        returns = Returns(brokers, routes, settings, addresses)
        sends = Sends(brokers, routes, send, settings, clock, addresses, returns)
        self.producers = Producers(settings, addresses, access)
        self._clients = clients = Clients(brokers)
        self._sessions = sessions = Sessions(brokers, clock, self.producers, clients, directory)
        replies = Replies(clients, addresses, settings.message, clock)
        self._pulls = Pulls(brokers, routes, sessions, settings, addresses)
        offsets, leases = Offsets(brokers, routes), Leases(brokers)
        self._served: dict[int, _Served] = {}
        self._serve(RequestCode.GET_ROUTEINFO_BY_TOPIC, topics.route)
        self._serve(RequestCode.SEND_MESSAGE, sends.send_v1)
        self._serve(RequestCode.SEND_MESSAGE_V2, sends.send_v2)
        self._serve(RequestCode.SEND_BATCH_MESSAGE, sends.send_v2)
        self._serve(RequestCode.SEND_REPLY_MESSAGE, replies.reply_v1)
        self._serve(RequestCode.SEND_REPLY_MESSAGE_V2, replies.reply_v2)
        queries = Queries(brokers, clients, settings, addresses, clock)
        self._serve(RequestCode.QUERY_MESSAGE, queries.messages)
        self._serve(RequestCode.GET_EARLIEST_MSG_STORETIME, queries.earliest_time)
        self._serve(RequestCode.GET_CONSUMER_RUNNING_INFO, queries.running_info)
        held = None  # it waits as long as it says
        self._serve(RequestCode.PULL_MESSAGE, self._pulls.pull, held)
        self._serve(RequestCode.LITE_PULL_MESSAGE, self._pulls.pull, held)
        self._pops = pops = Pops(brokers, routes, settings, addresses, clock)
        self._serve(RequestCode.POP_MESSAGE, pops.pop, held)
        self._serve(RequestCode.ACK_MESSAGE, pops.ack)
        self._serve(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, pops.change)
        assignments = Assignments(brokers, routes, sessions.membership)
        self._serve(RequestCode.QUERY_ASSIGNMENT, assignments.query)
        self._serve(RequestCode.SET_MESSAGE_REQUEST_MODE, assignments.set_mode)
        self._serve(RequestCode.QUERY_CONSUMER_OFFSET, offsets.query)
        self._serve(RequestCode.UPDATE_CONSUMER_OFFSET, offsets.update)
        self._serve(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, offsets.by_time)
        self._serve(RequestCode.GET_MAX_OFFSET, offsets.latest)
        self._serve(RequestCode.GET_MIN_OFFSET, offsets.earliest)
        self._serve(RequestCode.CHECK_CLIENT_CONFIG, self._pulls.check_client)
        self._serve(RequestCode.LOCK_BATCH_MQ, leases.lock, LOCK_TIMEOUT_MS)
        self._serve(RequestCode.UNLOCK_BATCH_MQ, leases.unlock, LOCK_TIMEOUT_MS)
        self._serve(RequestCode.CONSUMER_SEND_MSG_BACK, returns.send_back)
        self._serve(RequestCode.VIEW_MESSAGE_BY_ID, returns.view)
        self._serve(RequestCode.GET_CONSUMER_LIST_BY_GROUP, sessions.consumer_ids)
        self._serve(RequestCode.RECALL_MESSAGE, partial(_recall, recall))
        self._serve(RequestCode.END_TRANSACTION, partial(end, end_transaction))
        self._serve(RequestCode.HEART_BEAT, sessions.heartbeat)
        self._serve(RequestCode.UNREGISTER_CLIENT, sessions.unregister)

    def start(self) -> None:
        """Follow the members of groups; must be called on the loop."""
        self._sessions.membership.start()
        self._clients.start()

    def drain(self) -> None:
        """Let go of what waits: the step before the transport's `stop`."""
        self._sessions.membership.stop()
        self._clients.stop()
        self._pulls.drain()
        self._pops.drain()

    def open(self, opening: Opening, broker_group: str = "") -> RemotingConnection:
        now_ms = self._clock.boot_ms()
        return RemotingConnection(opening, self._limits, self._dispatch, now_ms, broker_group)

    @property
    def handlers(self) -> Mapping[RequestCode, Handler]:
        """What serves which request code (docs/reference/remoting.md)."""
        return {RequestCode(code): served.handler for code, served in self._served.items()}

    def _serve(
        self, code: RequestCode, handler: Handler, timeout_ms: int | None = CLIENT_TIMEOUT_MS
    ) -> None:
        if code not in REMOTING_RIGHTS:
            raise ConfigError(f"request code {code} has no row in the table of rights")
        took = self._metrics.taken(f"Remoting {code.name}")
        self._served[code] = _Served(handler, took, timeout_ms)

    def _dispatch(self, connection: RemotingConnection, call: RemotingCall) -> None:
        command = call.command
        served = self._served.get(command.code)
        if served is None:
            call.answer(ResultCode.NOT_SUPPORTED, why_refused(command.code))
            return
        call.timeout_ms = served.timeout_ms
        if connection.client_id:
            self._mark_seen(connection.client_id)
        refusal = partial(refuse, command)
        rpc = Rpc(call, b"", self._metrics, refusal, served.took)
        if not self._access.active:
            rpc.run(served.handler, Request(rpc, command, connection))
            return

        def admitted() -> None:
            asked = RemotingRequest(command.code, command.fields, command.body)
            self._access.admit_remoting(asked, call, partial(refusal, b""), go_on)

        def go_on(allowed: Call) -> None:
            inner = Rpc(allowed, b"", self._metrics, refusal, served.took)
            inner.run(served.handler, Request(inner, command, connection))

        rpc.run(admitted)


def _recall(recall: RecallMessage, request: Request) -> None:
    """RECALL_MESSAGE: the handle has the form that these clients decode."""
    topic, handle = request.text("topic"), request.text("recallHandle")
    recall.recall(request.rpc, topic, handle, lambda message_id: request.ok({"msgId": message_id}))
