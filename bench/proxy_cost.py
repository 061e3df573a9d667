"""CPU per call of the proxy's handlers: a request's bytes in, the reply's bytes out.

    python -m bench.proxy_cost [--calls 20000] [--body 1024] [--rounds 5]

No socket, no HTTP/2 and no broker: a port that answers at once stands for one, and its own cost
is in the figures.  Every reply is decoded and checked, outside of what is measured.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

from popmq.common.clock import SystemClock
from popmq.common.protocol.messaging_payloads import (
    AckResult,
    Kind,
    OnReply,
    PutResult,
    decode_ack,
    decode_put,
    encode_ack_reply,
    encode_put_reply,
)
from popmq.common.record.receipt import ReceiptHandle
from popmq.common.settings.settings import Settings
from popmq.common.wire import admin_pb2
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.transport.interface import GrpcStatus, OneByOne

METADATA = {"x-mq-client-id": "bench@1@0@aaaaaaaa", "x-mq-language": "JAVA"}


class EagerBroker:
    """A port whose answers are all OK, before `request` returns."""

    def __init__(self) -> None:
        self._offset = 0
        topic = admin_pb2.Topic(id=1, name="orders", queues=8, type="normal", permission="rw")
        self._topic = admin_pb2.TopicReply(topic=topic).SerializeToString()

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        if kind is Kind.PUT:
            entries = decode_put(body).entries
            self._offset += len(entries)
            on_reply(encode_put_reply([PutResult(queue_offset=self._offset) for _ in entries]))
        elif kind is Kind.ACK:
            on_reply(encode_ack_reply([AckResult() for _ in decode_ack(body).handles]))
        else:
            on_reply(self._topic)
        return 0

    def cancel(self, request_id: int) -> None: ...


class KeptCall(OneByOne):
    """A call that keeps its reply."""

    peer = "127.0.0.1:9"

    def __init__(self) -> None:
        self.metadata: Mapping[str, str] = METADATA
        self.sent = b""

    encrypted = False

    def remaining_ms(self) -> int | None:
        return 3_000

    def send(self, message: bytes) -> None:
        self.sent = message

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None: ...

    def on_cancelled(self, callback: Callable[[], None]) -> None: ...

    def on_unread(self, callback: Callable[[], None]) -> None: ...


def sends(calls: int, body: bytes) -> list[bytes]:
    serializes = []
    for number in range(calls):
        message = pb.Message(topic=pb.Resource(name="orders"), body=body)
        message.user_properties["color"] = "red"
        system = message.system_properties
        system.message_id = f"01{number:032X}"
        system.tag = "a"
        system.keys.append("k")
        system.message_type = pb.MessageType.NORMAL
        system.body_encoding = pb.Encoding.IDENTITY
        system.born_host = "bench"
        system.born_timestamp.GetCurrentTime()
        serializes.append(service.SendMessageRequest(messages=[message]).SerializeToString())
    return serializes


def acks(calls: int) -> list[bytes]:
    serializes = []
    for number in range(calls):
        handle = (
            ReceiptHandle("broker-a", 64, 9, 1, number, 1, 1, number, 0).encode(b"k" * 32).decode()
        )
        entry = service.AckMessageEntry(message_id=f"01{number:032X}", receipt_handle=handle)
        request = service.AckMessageRequest(
            group=pb.Resource(name="workers"), topic=pb.Resource(name="orders"), entries=[entry]
        )
        serializes.append(request.SerializeToString())
    return serializes


def cost(requests: list[bytes], name: str, check: Callable[[bytes], None]) -> float:
    """Microseconds of CPU for a call."""
    proxy = Proxy(Settings(), StaticBrokers({"broker-a": EagerBroker()}), SystemClock())
    start = next(method.start for method in proxy.methods() if method.path.endswith("/" + name))
    assert start is not None
    calls = [KeptCall() for _ in requests]
    start(KeptCall(), requests[0])  # the topic is known from then on
    began = time.process_time_ns()
    for call, request in zip(calls, requests, strict=True):
        start(call, request)
    spent = time.process_time_ns() - began
    for call in calls:
        check(call.sent)
    return spent / len(calls) / 1000


def check_send(reply: bytes) -> None:
    decoded = service.SendMessageResponse.FromString(reply)
    assert decoded.status.code == decoded.entries[0].status.code == pb.Code.OK


def check_ack(reply: bytes) -> None:
    decoded = service.AckMessageResponse.FromString(reply)
    assert decoded.status.code == decoded.entries[0].status.code == pb.Code.OK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--body", type=int, default=1_024)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    ways = (
        ("SendMessage", sends(given.calls, b"x" * given.body), check_send),
        ("AckMessage", acks(given.calls), check_ack),
    )
    figures: dict[str, list[float]] = {name: [] for name, _, _ in ways}
    for _ in range(given.rounds):
        for name, requests, check in ways:
            figures[name].append(cost(requests, name, check))
    for name, found_figures in figures.items():
        middle = statistics.median(found_figures)
        print(f"| {name} | {middle:.1f} ({min(found_figures):.1f}-{max(found_figures):.1f}) us |")


if __name__ == "__main__":
    main()
