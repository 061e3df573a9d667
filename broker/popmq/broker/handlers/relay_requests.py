"""ASK_CLIENT and CLIENT_REQUESTS: requests to clients that are connected to another proxy."""

from functools import partial

from popmq.broker.core.broker import Broker
from popmq.broker.handlers.request import Request
from popmq.broker.operations.client_relay import ClientRequest, Outcome
from popmq.common.errors import PopmqError
from popmq.common.wire import relay_pb2 as pb


def ask_client(broker: Broker, request: Request) -> None:
    asked = pb.AskClientRequest.FromString(request.body)

    def decided(answer: bytes | None) -> None:
        reply = pb.AskClientReply(absent=answer is None, answer=answer or b"")
        request.answer(reply.SerializeToString())

    request.wait(partial(broker.remoting.relay.cancel_ask, request.number))
    try:
        broker.remoting.relay.ask(
            request.number,
            asked.client_id,
            asked.request,
            deadline_ms=broker.waits.boot_ms() + asked.wait_ms,
            on_outcome=decided,
        )
    except PopmqError:
        request.stop_waiting()
        raise


def client_requests(broker: Broker, request: Request) -> None:
    asked = pb.ClientRequestsRequest.FromString(request.body)
    outcomes = [
        Outcome(outcome.number, None if outcome.absent else outcome.answer)
        for outcome in asked.outcomes
    ]

    def came(requests: list[ClientRequest]) -> None:
        items = [pb.ClientRequest(**item._asdict()) for item in requests]
        request.answer(pb.ClientRequestsReply(requests=items).SerializeToString())

    request.wait(partial(broker.remoting.relay.cancel_wait, request.number))
    try:
        broker.remoting.relay.wait(
            request.number,
            asked.proxy,
            outcomes,
            wait_ms=asked.wait_ms,
            now_ms=broker.waits.boot_ms(),
            answer=came,
        )
    except PopmqError:
        request.stop_waiting()
        raise
