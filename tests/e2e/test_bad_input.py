"""Bad input through the front door of a real process: code, message, and life goes on."""

import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import grpc
import pytest
from e2e.processes import Role, RoleFailed, free_port
from google.protobuf.message import Message as Protobuf

from popmq.cli.__main__ import main
from popmq.common.errors import Code
from popmq.common.record.receipt import ReceiptHandle
from popmq.proxy.api import definition_pb2 as definition
from popmq.proxy.api import service_pb2 as service

SERVICE = "/apache.rocketmq.v2.MessagingService"
Reply = TypeVar("Reply", bound=Protobuf)


def code_of(status: definition.Status) -> Code:
    return Code(status.code)


class Client:
    """Sync calls with whatever a test wants to get wrong."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(
            endpoint, options=[("grpc.max_receive_message_length", -1)]
        )
        self._number = 0
        self._ids = uuid4().hex  # what comes twice is stored once

    def close(self) -> None:
        self._channel.close()

    def unary(self, method: str, request: Protobuf, reply: type[Reply]) -> Reply:
        call: grpc.UnaryUnaryMultiCallable[Protobuf, Reply] = self._channel.unary_unary(
            f"{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply.FromString,
        )
        return call(request, metadata=(("x-mq-client-id", "test"),), timeout=10)

    def message(self, topic: str = "orders", body: bytes = b"x") -> definition.Message:
        self._number += 1
        message = definition.Message(topic=definition.Resource(name=topic), body=body)
        message.system_properties.message_id = f"{self._ids}-{self._number}"
        message.system_properties.message_type = definition.NORMAL
        return message

    def send(self, *messages: definition.Message) -> service.SendMessageResponse:
        request = service.SendMessageRequest(messages=messages)
        return self.unary("SendMessage", request, service.SendMessageResponse)

    def receive(
        self,
        *,
        topic: str = "orders",
        group: str = "g",
        batch: int = 32,
        invisible_s: float | None = 60,
    ) -> tuple[definition.Status, list[definition.Message]]:
        request = service.ReceiveMessageRequest(
            group=definition.Resource(name=group),
            message_queue=definition.MessageQueue(topic=definition.Resource(name=topic)),
            batch_size=batch,
        )
        request.long_polling_timeout.FromMilliseconds(0)
        if invisible_s is not None:
            request.invisible_duration.FromMilliseconds(int(invisible_s * 1000))
        call = self._channel.unary_stream(
            f"{SERVICE}/ReceiveMessage",
            request_serializer=service.ReceiveMessageRequest.SerializeToString,
            response_deserializer=service.ReceiveMessageResponse.FromString,
        )
        parts = list(call(request, metadata=(("x-mq-client-id", "test"),), timeout=10))
        statuses = [part.status for part in parts if part.HasField("status")]
        assert len(statuses) == 1
        assert parts[-1].HasField("delivery_timestamp")
        return statuses[0], [part.message for part in parts if part.HasField("message")]

    def ack(self, handle: str, *, group: str = "g") -> service.AckMessageResponse:
        request = service.AckMessageRequest(
            group=definition.Resource(name=group), topic=definition.Resource(name="orders")
        )
        request.entries.add(message_id="any", receipt_handle=handle)
        return self.unary("AckMessage", request, service.AckMessageResponse)

    def route(self, topic: str) -> service.QueryRouteResponse:
        request = service.QueryRouteRequest(topic=definition.Resource(name=topic))
        return self.unary("QueryRoute", request, service.QueryRouteResponse)


@pytest.fixture(scope="module")
def up(served_by: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Role]:
    folder = tmp_path_factory.mktemp("up")
    role = Role(
        "up",
        ["up", "--data", "data", "--port", str(free_port()), "--http-port", str(free_port())],
        folder=folder,
        settings={"POPMQ_TOPIC_AUTO_CREATE": "false"},
    )
    with role:
        yield role


@pytest.fixture(scope="module")
def made(up: Role) -> None:
    """A topic of each kind that a test needs."""
    for name, kind in (("orders", "normal"), ("ordered", "fifo"), ("later", "delay")):
        arguments = ["topic", "create", name, "--type", kind, "--endpoint", up.ready.endpoint]
        assert main(arguments) == 0


@pytest.fixture
def client(up: Role, made: None) -> Iterator[Client]:
    opened = Client(up.ready.endpoint)
    yield opened
    # Whatever was asked of it, the server goes on.
    assert code_of(opened.send(opened.message()).status) == Code.OK
    status, messages = opened.receive(group="goes-on")
    assert code_of(status) == Code.OK
    assert messages
    opened.close()


def tagged(message: definition.Message, tag: str) -> definition.Message:
    message.system_properties.tag = tag
    return message


def keyed(message: definition.Message, key: str) -> definition.Message:
    message.system_properties.keys.append(key)
    return message


def with_properties(message: definition.Message, count: int, size: int) -> definition.Message:
    for number in range(count):
        message.user_properties[f"property-{number}"] = "v" * size
    return message


def without_id(message: definition.Message) -> definition.Message:
    message.system_properties.message_id = ""
    return message


def fifo(message: definition.Message, group: str) -> definition.Message:
    message.system_properties.message_group = group
    message.system_properties.message_type = definition.FIFO
    return message


SENDS: list[tuple[str, Callable[[Client], definition.Message], Code, str]] = [
    (
        "body too large",
        lambda c: c.message(body=bytes((4 << 20) + 1)),
        Code.MESSAGE_BODY_TOO_LARGE,
        "4194304",
    ),
    ("empty body", lambda c: c.message(body=b""), Code.MESSAGE_BODY_EMPTY, "empty"),
    ("unknown topic", lambda c: c.message("nowhere"), Code.TOPIC_NOT_FOUND, "nowhere"),
    ("illegal topic", lambda c: c.message("no such!"), Code.ILLEGAL_TOPIC, "no such!"),
    ("long topic", lambda c: c.message("t" * 128), Code.ILLEGAL_TOPIC, "127"),
    ("blank topic", lambda c: c.message(""), Code.ILLEGAL_TOPIC, "blank"),
    ("system topic", lambda c: c.message("rmq_sys_meta"), Code.ILLEGAL_TOPIC, "system topic"),
    ("retry topic", lambda c: c.message("%RETRY%g+orders"), Code.ILLEGAL_TOPIC, "RETRY"),
    ("dead letters", lambda c: c.message("%DLQ%g"), Code.ILLEGAL_TOPIC, "DLQ"),
    (
        "wrong type",
        lambda c: fifo(c.message(), "k"),
        Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        "NORMAL",
    ),
    (
        "no message group",
        lambda c: c.message("ordered"),
        Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        "FIFO",
    ),
    ("no id", lambda c: without_id(c.message()), Code.ILLEGAL_MESSAGE_ID, "id"),
    ("tag with a bar", lambda c: tagged(c.message(), "a|b"), Code.ILLEGAL_MESSAGE_TAG, "|"),
    ("blank key", lambda c: keyed(c.message(), " "), Code.ILLEGAL_MESSAGE_KEY, "key"),
    (
        "129 properties",
        lambda c: with_properties(c.message(), 129, 1),
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
        "128",
    ),
    (
        "17 KiB of properties",
        lambda c: with_properties(c.message(), 17, 1024),
        Code.MESSAGE_PROPERTIES_TOO_LARGE,
        "16384",
    ),
    (
        "long message group",
        lambda c: fifo(c.message("ordered"), "g" * 64),
        Code.ILLEGAL_MESSAGE_GROUP,
        "64",
    ),
]


@pytest.mark.parametrize(
    ("build", "code", "words"), [case[1:] for case in SENDS], ids=[case[0] for case in SENDS]
)
def test_a_bad_send_is_refused_with_its_code_and_what_was_wrong(
    client: Client, build: Callable[[Client], definition.Message], code: Code, words: str
) -> None:
    reply = client.send(build(client))
    assert code_of(reply.status) == code, reply.status
    assert words in reply.status.message
    print(f"{Code(code).name}: {reply.status.message}")


def test_the_largest_body_is_accepted_and_comes_back(client: Client) -> None:
    body = bytes(range(256)) * (1 << 14)
    reply = client.send(client.message(body=body))
    assert code_of(reply.status) == Code.OK
    result = False
    while not result:
        status, messages = client.receive(group="largest")
        assert code_of(status) == Code.OK, "the message did not come"
        result = any(message.body == body for message in messages)


def test_an_empty_request_is_refused(client: Client) -> None:
    reply = client.send()
    assert code_of(reply.status) == Code.MESSAGE_CORRUPTED
    assert reply.status.message


def test_one_bad_message_of_several_refuses_only_itself(client: Client) -> None:
    reply = client.send(client.message(), client.message(body=b""), client.message())
    assert code_of(reply.status) == Code.MULTIPLE_RESULTS
    codes = [code_of(entry.status) for entry in reply.entries]
    assert codes == [Code.OK, Code.MESSAGE_BODY_EMPTY, Code.OK]


def test_a_batch_of_33_is_served_as_32_and_a_negative_one_refused(client: Client) -> None:
    for _ in range(40):
        client.send(client.message())
    _, messages = client.receive(group="batch", batch=33)
    assert len(messages) == 32
    status, messages = client.receive(group="batch", batch=-1)
    assert (code_of(status), messages) == (Code.BAD_REQUEST, [])
    assert "-1" in status.message


@pytest.mark.parametrize("invisible_s", [0, 100 * 86_400, None], ids=["zero", "100 days", "unset"])
def test_an_impossible_invisible_time_is_refused(client: Client, invisible_s: float | None) -> None:
    status, _ = client.receive(invisible_s=invisible_s)
    assert code_of(status) == Code.ILLEGAL_INVISIBLE_TIME
    assert ("missing" if invisible_s is None else "pop.invisible") in status.message


@pytest.mark.parametrize("group", ["", "bad group", "x" * 121, "CID_RMQ_SYS_x"])
def test_an_illegal_group_is_refused(client: Client, group: str) -> None:
    status, _ = client.receive(group=group)
    assert code_of(status) == Code.ILLEGAL_CONSUMER_GROUP
    assert status.message


def test_receiving_from_an_unknown_or_system_topic_is_refused(client: Client) -> None:
    assert code_of(client.receive(topic="nowhere")[0]) == Code.TOPIC_NOT_FOUND
    assert code_of(client.receive(topic="rmq_sys_meta")[0]) == Code.ILLEGAL_TOPIC
    assert code_of(client.route("nowhere").status) == Code.TOPIC_NOT_FOUND


def test_forged_truncated_and_foreign_handles_are_refused_each_with_a_reason(
    client: Client,
) -> None:
    client.send(client.message())
    _, (message, *_) = client.receive(group="handles")
    good = message.system_properties.receipt_handle
    forged = good[:40] + ("A" if good[40] != "A" else "B") + good[41:]
    other_key = ReceiptHandle("broker-a", 64, 1, 0, 0, 1, 1, 1, 0).encode(b"another key").decode()
    no_broker = ReceiptHandle("broker/z", 64, 1, 0, 0, 1, 1, 1, 0).encode(b"k").decode()
    reasons = set()
    for bad in ("", "nonsense", good[:-3], good + "AAAA", forged, other_key, no_broker):
        reply = client.ack(bad, group="handles")
        assert code_of(reply.status) == Code.INVALID_RECEIPT_HANDLE, bad
        assert code_of(reply.entries[0].status) == Code.INVALID_RECEIPT_HANDLE
        reasons.add(reply.entries[0].status.message)
    absent = ReceiptHandle("broker-z", 64, 1, 0, 0, 1, 1, 1, 0).encode(b"k").decode()
    assert code_of(client.ack(absent, group="handles").status) == Code.HA_NOT_AVAILABLE
    foreign = client.ack(good, group="another-group")
    assert code_of(foreign.status) == Code.INVALID_RECEIPT_HANDLE
    assert "handles" in foreign.entries[0].status.message
    assert len(reasons) >= 4
    assert code_of(client.ack(good, group="handles").status) == Code.OK


def test_a_refused_change_gives_the_handle_of_the_request_back(client: Client) -> None:
    request = service.ChangeInvisibleDurationRequest(
        group=definition.Resource(name="g"),
        topic=definition.Resource(name="orders"),
        receipt_handle="nonsense",
    )
    request.invisible_duration.FromSeconds(10)
    reply = client.unary(
        "ChangeInvisibleDuration", request, service.ChangeInvisibleDurationResponse
    )
    assert code_of(reply.status) == Code.INVALID_RECEIPT_HANDLE
    assert reply.receipt_handle == "nonsense"


def test_a_call_without_a_client_id_is_refused(up: Role, made: None) -> None:
    with grpc.insecure_channel(up.ready.endpoint) as channel:
        call = channel.unary_unary(
            f"{SERVICE}/QueryRoute",
            request_serializer=service.QueryRouteRequest.SerializeToString,
            response_deserializer=service.QueryRouteResponse.FromString,
        )
        reply = call(
            service.QueryRouteRequest(topic=definition.Resource(name="orders")), timeout=10
        )
    assert code_of(reply.status) == Code.CLIENT_ID_REQUIRED


def test_bytes_that_are_no_protobuf_are_refused(up: Role, client: Client) -> None:
    with grpc.insecure_channel(up.ready.endpoint) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            f"{SERVICE}/SendMessage"
        )
        raw = call(b"\xff\xff\xff", metadata=(("x-mq-client-id", "test"),), timeout=10)
    reply = service.SendMessageResponse.FromString(raw)
    assert code_of(reply.status) == Code.BAD_REQUEST


def test_an_unknown_frame_is_refused_and_the_broker_goes_on(up: Role, client: Client) -> None:
    """Straight at the broker's unix socket, before any HELLO."""
    path = Path(up.folder) / "data" / "frames.sock"
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        peer.settimeout(10)
        peer.sendall(struct.pack(">IBBQI", 14, 1, 99, 7, 1_000))
        answer = b""
        while piece := peer.recv(4096):
            answer += piece
    length, version, kind, request_id = struct.unpack_from(">IBBQ", answer)
    assert (version, kind, request_id) == (1, 3, 0)
    assert length == len(answer) - 4
    assert b"HELLO" in answer


def test_a_second_process_on_the_data_directory_is_refused(up: Role, tmp_path: Path) -> None:
    second = Role(
        "second",
        ["up", "--data", str(Path(up.folder) / "data"), "--port", "0", "--http-port", "0"],
        folder=tmp_path,
        settings={},
    )
    with pytest.raises(RoleFailed, match="is used by process") as refused, second:
        pass
    assert f"{up.pid}" in str(refused.value)
