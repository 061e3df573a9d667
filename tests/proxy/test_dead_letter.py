"""ForwardMessageToDeadLetterQueue, as push consumers of FIFO groups need it."""

from typing import Any

import pytest

from popmq.common.errors import Code
from popmq.common.protocol.messaging_payloads import AckResult, Kind, decode_ack, encode_ack_reply
from popmq.common.record.receipt import ReceiptHandle
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

HANDLE = ReceiptHandle("broker-a", 64, 9, 1, 0, 1, 1, 1, 0).encode(b"key").decode()


def forward(bench: Any, handle: str = HANDLE, group: str = "workers", **call: Any) -> Any:
    request = service.ForwardMessageToDeadLetterQueueRequest(
        group=pb.Resource(name=group),
        topic=pb.Resource(name="orders"),
        receipt_handle=handle,
        message_id="01AB",
        delivery_attempt=99,
    )
    return bench.unary(
        "ForwardMessageToDeadLetterQueue",
        request,
        service.ForwardMessageToDeadLetterQueueResponse,
        **call,
    ).status


def test_the_handles_broker_is_asked_and_its_answer_is_the_answer(two_brokers: Any) -> None:
    broker = two_brokers.brokers["broker-a"]
    broker.tells[Kind.REJECT] = lambda _: encode_ack_reply([AckResult()])
    assert forward(two_brokers).code == Code.OK
    (asked,) = broker.bodies(Kind.REJECT)
    request = decode_ack(asked)
    assert (request.topic, request.group) == ("orders", "workers")
    assert request.handles == [HANDLE.encode()]
    assert two_brokers.brokers["broker-b"].asked == []


def test_a_refusal_of_the_broker_is_told_with_its_sentence(bench: Any) -> None:
    result = AckResult(Code.INVALID_RECEIPT_HANDLE, "was acked")
    bench.brokers["broker-a"].tells[Kind.REJECT] = lambda _: encode_ack_reply([result])
    status = forward(bench)
    assert (status.code, status.message) == (Code.INVALID_RECEIPT_HANDLE, "was acked")


@pytest.mark.parametrize("handle", ["nonsense", "härte", "A" * 70_000])
def test_a_bad_handle_makes_the_client_give_up(bench: Any, handle: str) -> None:
    assert forward(bench, handle).code == Code.INVALID_RECEIPT_HANDLE


def test_a_bad_group_and_a_nameless_client_are_refused(bench: Any) -> None:
    assert forward(bench, group="bad.name").code == Code.ILLEGAL_CONSUMER_GROUP
    assert forward(bench, metadata={}).code == Code.CLIENT_ID_REQUIRED
