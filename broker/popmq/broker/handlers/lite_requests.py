"""SYNC_LITE: what a client says of its subscriptions to lite topics (`wire/lite.proto`); and what
it is told of them."""

from popmq.broker.core.broker import Broker
from popmq.broker.deliveries.client_liveness import client_number
from popmq.broker.lite.lite_service import Action, LiteStart
from popmq.common.errors import Code, Refused
from popmq.common.protocol.messaging_payloads import ClientsReport
from popmq.common.wire.lite_pb2 import LiteNotices, SyncLite


class SyncLiteJob:
    """A beginning at a time is looked up by reading messages: ColdRead until they are in memory."""

    def __init__(self, broker: Broker, body: bytes) -> None:
        self._broker = broker
        self._request = SyncLite.FromString(body)
        if self._request.action not in Action._value2member_map_:
            raise Refused(
                Code.BAD_REQUEST,
                f"action {self._request.action} on lite subscriptions: it takes 0 to 4",
            )

    @property
    def reads(self) -> bool:
        """Whether it may have to wait for the disk."""
        return self._request.WhichOneof("begin") == "stored_ms"

    def step(self) -> bytes | None:
        broker, request = self._broker, self._request
        broker.lites.sync(
            broker.directory.topic(request.topic),
            broker.directory.group(request.group),
            broker.clients.number(request.client_id),
            Action(request.action),
            request.names,
            _begin(request),
            broker.waits_ms(),
        )
        return b""


def take_notices(broker: Broker, report: ClientsReport) -> bytes:
    """What those who listen to the proxy are to forget, which they hear now; or nothing."""
    notices = LiteNotices()
    for client_id in report.listening_clients:
        if names := broker.lites.notices.take(client_number(client_id)):
            notices.ended.add(client_id=client_id, names=names)
    return notices.SerializeToString()


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
