"""SYNC_LITE: a client changes its subscriptions to lite topics (`wire/lite.proto`). And CLIENTS, a
proxy's report of its clients. It is answered with the lite subscriptions that have ended and the
clients that the proxy is to describe."""

from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.client_liveness import client_number
from popmq.broker.handlers.client_requests import ClientRequests
from popmq.broker.handlers.request import Request
from popmq.broker.lite.lite_service import Action, LiteStart
from popmq.broker.operations.resumable_reads import ResumableRead, read_now
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import ClientsReport, decode_clients
from popmq.common.wire.lite_pb2 import LiteNotices, SyncLite


def sync_lite(broker: Broker, request: Request) -> bytes | ResumableRead[bytes]:
    requested = SyncLite.FromString(request.body)
    if requested.action not in Action._value2member_map_:
        raise Refused(
            Code.BAD_REQUEST, f"action {requested.action} on lite subscriptions: it takes 0 to 4"
        )
    # A start at a time is looked up by reading messages: ColdRead until they are in memory.
    if requested.WhichOneof("begin") == "stored_ms":
        return read_now(partial(_sync, broker, requested))
    return _sync(broker, requested)


def _sync(broker: Broker, requested: SyncLite) -> bytes:
    broker.lites.sync(
        broker.metadata_resolver.topic(requested.topic),
        broker.metadata_resolver.group(requested.group),
        broker.deliveries.clients.number(requested.client_id),
        Action(requested.action),
        requested.names,
        _begin(requested),
        broker.waits.boot_ms(),
    )
    return b""


def clients(broker: Broker, request: Request) -> bytes | None:
    report = decode_clients(request.body)
    notices = LiteNotices(undescribed=ClientRequests(broker).on_clients_report(report))
    _take_notices(broker, report, notices)
    reply = notices.SerializeToString()
    if notices.ended:
        return reply
    request.on_reply(reply)  # rests on no record
    return None


def _take_notices(broker: Broker, report: ClientsReport, notices: LiteNotices) -> None:
    """Add what those who listen to the proxy are to forget, which they hear now."""
    for client_id in report.listening_clients:
        if names := broker.lites.notices.take(client_number(client_id)):
            notices.ended.add(client_id=client_id, names=names)


def _begin(request: SyncLite) -> LiteStart:
    match request.WhichOneof("begin"):
        case "newest":
            return LiteStart(newest=True) if request.newest else LiteStart(offset=0)
        case "offset":
            return LiteStart(offset=request.offset)
        case "tail":
            return LiteStart(tail=request.tail)
        case "stored_ms":
            return LiteStart(stored_ms=request.stored_ms)
        case _:
            return LiteStart()
