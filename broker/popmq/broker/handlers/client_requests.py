"""ClientRequests: sends, receives and news of clients, with their names looked up.

LIST_CLIENTS: the clients that proxies have described.
"""

from collections.abc import Sequence

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.client_liveness import attempt_number, client_number
from popmq.broker.deliveries.described_clients import BYTES_LIMIT, DESCRIPTIONS_LIMIT
from popmq.broker.fifo.fifo_service import FifoService
from popmq.broker.filter.request_filter import compile_filter
from popmq.broker.handlers.request import Request
from popmq.broker.lite.lite_service import LiteService
from popmq.broker.operations.resumable_reads import ResumableRead
from popmq.broker.pop.pop_service import PopParams, PopResult, PopService
from popmq.common import topics
from popmq.common.errors import Code, OtherIncarnation, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import (
    ClientsReport,
    PopRequest,
    PutRequest,
    PutResult,
)
from popmq.common.wire import admin_pb2 as pb

_CLIENTS_A_STEP = 256
LIST_BYTES = 512 << 10  # of a reply, about: proxies join those of all brokers in one turn


class ClientRequests:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def put(self, request: PutRequest) -> list[PutResult]:
        """Append the messages; one result per entry, in order."""
        self._broker.store.check_admission()
        if self._broker.registry.draining:
            raise Unavailable(f"broker group {self._broker.settings.broker.name} is being drained")
        topic = self._broker.metadata_resolver.topic(
            request.topic, auto_create=request.auto_create, least_id=request.topic_id
        )
        if request.topic_id not in (0, topic.id):
            raise OtherIncarnation(f"the message was placed for another topic {topic.name}")
        if topics.is_internal_topic(topic.name):
            topics.check_topic_name(topic.name)  # nobody sends to dead letters
        if not topic.writable:
            raise Refused(Code.FORBIDDEN, f"topic {topic.name} is not writable")
        return self._broker.sends.put(topic, request.entries)

    def resolve_pop(self, request: PopRequest) -> PopParams:
        """The request with its names looked up and its limits applied, or the refusal."""
        topic = self._broker.metadata_resolver.topic(request.topic, least_id=request.topic_id)
        group = self._broker.metadata_resolver.group_of(
            topic, request.group, least_id=request.group_id
        )
        if request.auto_renew:
            self._broker.deliveries.liveness.mark_seen(
                client_number(request.client_id), self._broker.store.log_ms()
            )
        if not topic.readable:
            raise Refused(Code.FORBIDDEN, f"topic {topic.name} is not readable")
        if request.queue_id >= topic.queues:
            raise Refused(
                Code.BAD_REQUEST,
                f"queue {request.queue_id} of topic {topic.name}, which has {topic.queues}",
            )
        return PopParams(
            topic=topic,
            group=group,
            limit=min(request.limit, self._broker.settings.pop.max_batch),
            invisible_ms=request.invisible_ms or self._broker.settings.pop.invisible_default_ms,
            queue_id=request.queue_id,
            filter=compile_filter(
                self._broker.sql_filters, request.filter_type, request.expression
            ),
            client=self._broker.deliveries.clients.number(request.client_id),
            auto_renew=request.auto_renew,
            reply_bytes=request.reply_bytes,
            attempt_id=attempt_number(request.attempt_id) if request.attempt_id else 0,
        )

    def pop(self, params: PopParams) -> PopResult:
        """See `PopService.pop`; a FIFO group's in the order of each message group."""
        return self._pops_of(params).pop(params)

    def has_ready(self, params: PopParams) -> bool:
        """Whether a pop might find something: reads no message, writes no check point."""
        return self._pops_of(params).has_ready(params)

    def _pops_of(self, params: PopParams) -> PopService | FifoService | LiteService:
        if not params.topic.kind.is_ordered(params.group):
            return self._broker.pop.service
        self._broker.buffer.flush_acks()  # a receive that comes again gets what is not acked
        return self._broker.lites if params.topic.kind.has_lite_topics else self._broker.fifo

    def on_clients_report(self, report: ClientsReport) -> Sequence[str]:
        """Reports connected clients; deliveries of those that left are released.

        Returns the ids of those of which there is no description, and room for one.
        """
        now_ms = self._broker.store.log_ms()
        for client_id in report.alive:
            self._broker.deliveries.liveness.mark_seen(client_number(client_id), now_ms)
        for client_id in report.closed:
            self._broker.pop.revive.release_deliveries(client_number(client_id))
            self._broker.lites.on_client_closed(client_number(client_id))
            self._broker.deliveries.described.on_client_closed(client_id)
        return self._take_descriptions(report, now_ms) if report.described else ()

    def _take_descriptions(self, report: ClientsReport, now_ms: int) -> Sequence[str]:
        table = self._broker.deliveries.described
        news = pb.DescribedClients.FromString(report.described)
        for client in news.clients:
            connection = client.connections[0] if client.connections else client.connections.add()
            connection.proxy = news.proxy
            table.put(client.client_id, news.proxy, client.SerializeToString(), now_ms)
        for client_id in news.left:
            table.on_left(client_id, news.proxy)
        alive = report.alive
        unknown = [name for name in alive if not table.mark_seen(name, news.proxy, now_ms)]
        return unknown if table.has_room else ()


def list_clients(broker: Broker, request: Request) -> ResumableRead[bytes]:
    return _list_clients(broker, pb.ListClientsRequest.FromString(request.body))


def _list_clients(broker: Broker, asked: pb.ListClientsRequest) -> ResumableRead[bytes]:
    table = broker.deliveries.described
    reply = pb.ListClientsReply(status=pb.Status(code=Code.OK, message="OK"))
    if not table.has_room:
        reply.incomplete = (
            f"it holds descriptions of {DESCRIPTIONS_LIMIT} clients or {BYTES_LIMIT} bytes, which "
            "is its limit: there may be more clients"
        )
    last, left_bytes = "", LIST_BYTES
    for number, (client_id, description) in enumerate(table.items(asked.after), 1):
        if number % _CLIENTS_A_STEP == 0:
            yield None
        if left_bytes <= 0 and client_id != last:
            reply.until = last
            break
        client = pb.ConnectedClient.FromString(description.content)
        if not _is_asked_for(client, asked):
            continue
        client.connections[0].silent_ms = max(0, broker.store.log_ms() - description.heard_ms)
        left_bytes -= len(description.content)
        last = client_id
        reply.clients.append(client)
    reply.now_ms = broker.clock.wall_ms()
    return reply.SerializeToString()


def _is_asked_for(client: pb.ConnectedClient, asked: pb.ListClientsRequest) -> bool:
    if asked.group and all(group.name != asked.group for group in client.groups):
        return False
    subscriptions = (item.topic for group in client.groups for item in group.subscriptions)
    return not asked.topic or asked.topic in (*client.topics, *subscriptions)
