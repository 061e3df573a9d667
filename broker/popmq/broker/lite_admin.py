"""SYNC_LITE: what a client says of its subscriptions to lite topics (`wire/lite.proto`)."""

from popmq.broker.broker import Broker
from popmq.broker.pop.lite_service import Action, Begin
from popmq.common.errors import Code, Refused
from popmq.common.wire.lite_pb2 import SyncLite


def sync_lite(broker: Broker, body: bytes) -> None:
    request = SyncLite.FromString(body)
    if request.action not in Action._value2member_map_:
        raise Refused(
            Code.BAD_REQUEST, f"action {request.action} on lite subscriptions: it takes 0 to 4"
        )
    broker.lites.sync(
        broker.directory.topic(request.topic),
        broker.directory.group(request.group),
        broker.clients.number(request.client_id),
        Action(request.action),
        request.names,
        _begin(request),
        broker.waits_ms(),
    )


def _begin(request: SyncLite) -> Begin:
    match request.WhichOneof("begin"):
        case "newest":
            return Begin(newest=True) if request.newest else Begin(offset=0)
        case "offset":
            return Begin(offset=request.offset)
        case "tail":
            return Begin(tail=request.tail)
        case _:
            return Begin()
