"""Requests that cost far more than they are long (docs/security.md)."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from proxy.lean.peer import prefixed, zipped
from security.http2 import RawClient
from security.target import CLIENT, SERVICE, Target, attacking

from popmq.common.errors import Code
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service
from popmq.proxy.rpc.wire_scan import chunk

pytestmark = pytest.mark.more
MIB = 1 << 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("requests")) as running:
        yield running


def call(target: Target, method: str, request: bytes, *, compress: bool = True) -> bytes:
    how = grpc.Compression.Gzip if compress else grpc.Compression.NoCompression
    with grpc.insecure_channel(target.ready.endpoint) as channel:
        send: Any = channel.unary_unary(f"{SERVICE}{method}")
        return bytes(send(request, metadata=CLIENT, timeout=60, compression=how))


@pytest.mark.parametrize(
    ("method", "entry"),
    [
        ("SendMessage", chunk(1, b"")),
        ("AckMessage", chunk(3, b"")),
        ("SyncLiteSubscription", chunk(4, b"")),
        ("ReceiveMessage", chunk(3, b"")),
    ],
)
def test_a_mebibyte_of_empty_entries(target: Target, method: str, entry: bytes) -> None:
    with attacking(target):
        for _ in range(20):
            if method == "SendMessage" or method == "AckMessage":
                reply = call(target, method, entry * (MIB // len(entry)))
                status = service.AckMessageResponse.FromString(reply).status
                assert "entries" in status.message
            else:
                with pytest.raises(grpc.RpcError, match="over the limit"):
                    call(target, method, entry * (MIB // len(entry)))


@pytest.mark.parametrize(
    "inside",
    [chunk(2, chunk(1, b"k") + chunk(2, b"")), chunk(3, chunk(2, b"")), chunk(3, b"")],
    ids=["properties", "keys", "system properties"],
)
def test_twelve_mebibytes_of_parts_of_one_message(target: Target, inside: bytes) -> None:
    with attacking(target):
        for _ in range(3):
            reply = call(target, "SendMessage", chunk(1, inside * (12 * MIB // len(inside))))
            status = service.SendMessageResponse.FromString(reply).status
            assert "fields" in status.message


def test_as_many_parts_as_a_request_may_have(target: Target) -> None:
    """What the limits let pass must not be too much either."""
    keys = chunk(1, chunk(1, chunk(2, b"others")) + chunk(3, chunk(2, b"k") * 20_000))
    empty = chunk(1, b"") * 1_024
    topics = chunk(1, chunk(1, chunk(2, b"others")) + chunk(4, b"x")) * 1_024
    acks = (
        chunk(1, chunk(2, b"others")) + chunk(2, chunk(2, b"g")) + chunk(3, chunk(2, b"h")) * 1_020
    )
    with attacking(target):
        for _ in range(3):
            for data in (keys, empty, topics):
                call(target, "SendMessage", data)
            call(target, "AckMessage", acks)


def test_compressed_calls_whose_streams_do_not_end(target: Target) -> None:
    content = zipped(b"\0" * (33 * MIB))
    with attacking(target), RawClient(target.address) as client:
        for _ in range(60):
            client.open(f"{SERVICE}SendMessage", [("grpc-encoding", "gzip")])
            client.data(content)
        client.until_answered(50)
    assert client.statuses.count("8") >= 50


def test_settings_of_many_topics_on_many_streams(target: Target) -> None:
    settings = pb.Settings(client_type=pb.ClientType.PRODUCER)
    settings.publishing.topics.extend([pb.Resource()] * 21_000)
    command = service.TelemetryCommand(settings=settings).SerializeToString()
    names = pb.Settings(client_type=pb.ClientType.PUSH_CONSUMER)
    for number in range(1_300):
        names.subscription.subscriptions.add().topic.name = f"{number:030}"
    within = service.TelemetryCommand(settings=names).SerializeToString()
    with attacking(target), RawClient(target.address) as client:
        for content in (command, within):
            for _ in range(20):
                client.open(f"{SERVICE}Telemetry")
                client.data(prefixed(content))
        client.until_answered(20)


def test_four_connections_with_as_much_as_the_server_holds(target: Target) -> None:
    """Others go on with messages of more than one frame, too."""
    body = b"x" * (2 * MIB)
    message = pb.Message(topic=pb.Resource(name="others"), body=body)
    message.system_properties.message_id = "large"
    large = service.SendMessageRequest(messages=[message]).SerializeToString()
    begun = b"\0" + (100 * MIB).to_bytes(4, "big") + b"x" * (90 * MIB)
    with attacking(target), ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(RawClient(target.address))
            client.open(f"{SERVICE}SendMessage")
            client.data(begun)
        reply = call(target, "SendMessage", large, compress=False)
        assert service.SendMessageResponse.FromString(reply).status.code == Code.OK.value
