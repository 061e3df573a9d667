"""ClientRequests: sends, receives and news of clients, with their names looked up."""

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.client_liveness import attempt_number, client_number
from popmq.broker.fifo.fifo_service import FifoService
from popmq.broker.filter.request_filter import compile_filter
from popmq.broker.lite.lite_service import LiteService
from popmq.broker.pop.pop_service import PopParams, PopService
from popmq.common import topics
from popmq.common.errors import Code, OtherIncarnation, Refused, Unavailable
from popmq.common.protocol.messaging_payloads import (
    ClientsReport,
    PopRequest,
    PutRequest,
    PutResult,
)
from popmq.common.protocol.pop_reply import PopReplyBuilder
from popmq.common.topics import MessageType, is_ordered


class ClientRequests:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def put(self, request: PutRequest) -> list[PutResult]:
        """Append the messages; one result per entry, in order."""
        self._broker.store.check_admission()
        if self._broker.registry.draining:
            raise Unavailable(f"broker group {self._broker.settings.broker.name} is being drained")
        topic = self._broker.directory.topic(
            request.topic, auto_create=request.auto_create, least_id=request.topic_id
        )
        if request.topic_id not in (0, topic.id):
            raise OtherIncarnation(f"the message was placed for another topic {topic.name}")
        if topic.name[0] == "%":
            topics.check_topic_name(topic.name)  # nobody sends to dead letters
        if not topic.writable:
            raise Refused(Code.FORBIDDEN, f"topic {topic.name} is not writable")
        return self._broker.sends.put(topic, request.entries)

    def resolve_pop(self, request: PopRequest) -> PopParams:
        """The request with its names looked up and its limits applied, or the refusal."""
        topic = self._broker.directory.topic(request.topic, least_id=request.topic_id)
        group = self._broker.directory.group(request.group, least_id=request.group_id)
        if request.auto_renew:
            self._broker.liveness.mark_seen(
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
            client=self._broker.clients.number(request.client_id),
            auto_renew=request.auto_renew,
            reply_bytes=request.reply_bytes,
            attempt_id=attempt_number(request.attempt_id) if request.attempt_id else 0,
        )

    def pop(self, want: PopParams) -> tuple[PopReplyBuilder, int]:
        """See `PopService.pop`; a FIFO group's in the order of each message group."""
        return self._pops_of(want).pop(want)

    def has_ready(self, want: PopParams) -> bool:
        """Whether a pop might find something: reads no message, writes no check point."""
        return self._pops_of(want).has_ready(want)

    def _pops_of(self, want: PopParams) -> PopService | FifoService | LiteService:
        if not is_ordered(want.group, want.topic):
            return self._broker.pops
        self._broker.buffer.flush_acks()  # a receive that comes again gets what is not acked
        return self._broker.lites if want.topic.type is MessageType.LITE else self._broker.fifo

    def on_clients_report(self, report: ClientsReport) -> None:
        """A proxy heard these clients; those that left get nothing back any more."""
        now_ms = self._broker.store.log_ms()
        for client_id in report.alive:
            self._broker.liveness.mark_seen(client_number(client_id), now_ms)
        for client_id in report.closed:
            self._broker.revive.release_deliveries(client_number(client_id))
            self._broker.lites.on_client_closed(client_number(client_id))
