"""The commands' own client: the calls that `popmq` makes, one at a time, on the public port.

Every reply's status is checked here, so a caller gets an answer or an error whose text can be
shown to a person as it is (docs/operating.md).
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Protocol, Self, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from popmq.common.errors import Code, ConfigError, PopmqError
from popmq.common.settings.settings import CLIENT_TLS_CA, OVER_TLS, environment
from popmq.common.wire import admin_pb2 as admin
from popmq.proxy.api import definition_pb2 as api
from popmq.proxy.api import service_pb2 as service

MESSAGING = "/apache.rocketmq.v2.MessagingService/"
ADMIN = "/popmq.admin.v1.Admin/"
CALL_TIMEOUT_MS = 10_000
MAX_REPLY_BYTES = 64 << 20
RECEIVE_BATCH = 32
# Message ids count their seconds from here (RocketMQ: MessageIdCodec).

T = TypeVar("T")
TopicRequest = (
    admin.CreateTopicRequest
    | admin.AlterTopicRequest
    | admin.DeleteTopicRequest
    | admin.DescribeTopicRequest
)
GroupRequest = admin.CreateGroupRequest | admin.AlterGroupRequest | admin.DeleteGroupRequest
Metadata = tuple[tuple[str, str | bytes], ...]


class StatusLike(Protocol):
    """What the public and the admin protocol's Status have in common."""

    @property
    def code(self) -> int: ...
    @property
    def message(self) -> str: ...


class Reply(Protocol):
    """What every reply has."""

    @property
    def status(self) -> StatusLike: ...
    @classmethod
    def FromString(cls, s: bytes, /) -> Self: ...


R = TypeVar("R", bound=Reply)


class CallRefused(PopmqError):
    """The server answered with another code than OK."""

    def __init__(self, number: int, message: str) -> None:
        name = next((name for name, value in api.Code.items() if value == number), "unknown code")
        super().__init__(f"{name} ({number}): {message or 'no reason given'}")
        self.number = number


class CallFailed(PopmqError):
    """No reply: nobody listens there, the time ran out, or it is not a popmq that answers."""

    code = Code.HA_NOT_AVAILABLE


def trusted_certificates() -> bytes | None:
    """The certificates to trust, as PEM; None: those that gRPC comes with."""
    path = environment().get(CLIENT_TLS_CA)
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{CLIENT_TLS_CA} = {path}: {error.strerror}") from error


def check_status(status: StatusLike) -> None:
    if status.code != Code.OK:
        raise CallRefused(status.code, status.message)


def new_client_id() -> str:
    """host@pid@index@time, the form of the official clients; ASCII, as metadata must be."""
    host = socket.gethostname().encode("ascii", "replace").decode()
    return f"{host}@{os.getpid()}@0@{time.time_ns():x}"


def duration(milliseconds: int) -> Duration:
    seconds, rest = divmod(milliseconds, 1000)
    return Duration(seconds=seconds, nanos=rest * 1_000_000)


class Client:
    """One channel to one proxy; a context manager. Opening it connects to nothing yet."""

    def __init__(self, endpoint: str, client_id: str = "") -> None:
        self.endpoint = endpoint
        self._client_id = client_id or new_client_id()
        self._answered = False
        options = [
            ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
            ("grpc.max_send_message_length", MAX_REPLY_BYTES),
            # Otherwise a proxy for the web, set in the environment, gets the calls.
            ("grpc.enable_http_proxy", 0),
        ]
        if endpoint.startswith(OVER_TLS):
            trusted = grpc.ssl_channel_credentials(trusted_certificates())
            address = endpoint.removeprefix(OVER_TLS)
            self._channel = grpc.secure_channel(address, trusted, options=options)
        else:
            self._channel = grpc.insecure_channel(endpoint, options=options)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def query_route(self, topic: str) -> list[api.MessageQueue]:
        request = service.QueryRouteRequest(topic=api.Resource(name=topic))
        reply = self._call(MESSAGING + "QueryRoute", request, service.QueryRouteResponse)
        check_status(reply.status)
        return list(reply.message_queues)

    def send(self, message: api.Message) -> service.SendResultEntry:
        request = service.SendMessageRequest(messages=[message])
        reply = self._call(MESSAGING + "SendMessage", request, service.SendMessageResponse)
        for entry in reply.entries:
            check_status(entry.status)
        check_status(reply.status)
        if not reply.entries:
            raise CallRefused(Code.INTERNAL_SERVER_ERROR, "the reply to a send holds no result")
        return reply.entries[0]

    def receive(
        self,
        group: str,
        queue: api.MessageQueue,
        *,
        limit: int,
        wait_ms: int,
        invisible_ms: int,
    ) -> list[api.Message]:
        """Up to `limit` messages; empty when none came within `wait_ms`."""
        request = service.ReceiveMessageRequest(
            group=api.Resource(name=group),
            message_queue=queue,
            filter_expression=api.FilterExpression(type=api.TAG, expression="*"),
            batch_size=min(limit, RECEIVE_BATCH),
            invisible_duration=duration(invisible_ms),
            long_polling_timeout=duration(wait_ms),
        )
        call: grpc.UnaryStreamMultiCallable[
            service.ReceiveMessageRequest, service.ReceiveMessageResponse
        ] = self._channel.unary_stream(
            MESSAGING + "ReceiveMessage",
            request_serializer=service.ReceiveMessageRequest.SerializeToString,
            response_deserializer=service.ReceiveMessageResponse.FromString,
        )
        timeout_s = (wait_ms + CALL_TIMEOUT_MS) / 1000
        parts = self._ask(
            lambda metadata: list(call(request, timeout=timeout_s, metadata=metadata)), timeout_s
        )
        return messages_of(parts)

    def subscribe_lite(self, group: str, topic: str, names: Sequence[str]) -> None:
        """This client receives from these lite topics of `topic`, and from no others."""
        request = service.SyncLiteSubscriptionRequest(
            action=api.LiteSubscriptionAction.COMPLETE_ADD,
            topic=api.Resource(name=topic),
            group=api.Resource(name=group),
            lite_topic_set=names,
        )
        path = MESSAGING + "SyncLiteSubscription"
        check_status(self._call(path, request, service.SyncLiteSubscriptionResponse).status)

    def ack(self, group: str, topic: str, messages: Sequence[api.Message]) -> None:
        """Raises CallRefused for the first message whose ack was refused; the others are acked."""
        request = service.AckMessageRequest(
            group=api.Resource(name=group),
            topic=api.Resource(name=topic),
            entries=[
                service.AckMessageEntry(
                    message_id=message.system_properties.message_id,
                    receipt_handle=message.system_properties.receipt_handle,
                )
                for message in messages
            ],
        )
        reply = self._call(MESSAGING + "AckMessage", request, service.AckMessageResponse)
        for entry in reply.entries:
            check_status(entry.status)
        check_status(reply.status)

    def topic(self, request: TopicRequest) -> admin.Topic:
        return self.call_admin(request, admin.TopicReply).topic

    def group(self, request: GroupRequest) -> admin.Group:
        return self.call_admin(request, admin.GroupReply).group

    def topics(self, *, system: bool) -> list[admin.Topic]:
        reply = self.call_admin(admin.ListTopicsRequest(system=system), admin.ListTopicsReply)
        return list(reply.topics)

    def groups(self) -> list[admin.Group]:
        return list(self.call_admin(admin.ListGroupsRequest(), admin.ListGroupsReply).groups)

    def call_admin(self, request: Message, reply_type: type[R]) -> R:
        """The method of the admin service that takes this kind of request."""
        method = type(request).__name__.removesuffix("Request")
        reply = self._call(ADMIN + method, request, reply_type)
        check_status(reply.status)
        return reply

    def _call(self, path: str, request: Message, reply_type: type[R]) -> R:
        call: grpc.UnaryUnaryMultiCallable[Message, R] = self._channel.unary_unary(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        timeout_s = CALL_TIMEOUT_MS / 1000
        return self._ask(
            lambda metadata: call(request, timeout=timeout_s, metadata=metadata), timeout_s
        )

    def _ask(self, call: Callable[[Metadata], T], timeout_s: float) -> T:
        try:
            answer = call(_metadata(self._client_id))
        except grpc.RpcError as error:
            raise self._explained(error, timeout_s) from error
        self._answered = True
        return answer

    def _explained(self, error: grpc.RpcError, timeout_s: float) -> PopmqError:
        details = error.details() or "no details given"
        match error.code():
            case grpc.StatusCode.UNAVAILABLE if "TLS only" in details:
                return CallFailed(
                    f"{self.endpoint} takes TLS only: write {OVER_TLS}{self.endpoint}"
                )
            case grpc.StatusCode.UNAVAILABLE if "CERTIFICATE_VERIFY_FAILED" in details:
                return CallFailed(
                    f"the certificate of {self.endpoint} is not trusted: {CLIENT_TLS_CA} names a "
                    "file of those that are"
                )
            case grpc.StatusCode.UNAVAILABLE if not self._answered:
                return CallFailed(f"no popmq at {self.endpoint}: start one with `popmq up`")
            case grpc.StatusCode.UNAVAILABLE:
                return CallFailed(f"lost the connection to {self.endpoint}: {details}")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return CallFailed(f"{self.endpoint} did not answer within {timeout_s:g} s")
            case code:
                return CallFailed(f"{self.endpoint} answered {code.name}: {details}")


def messages_of(parts: Iterable[service.ReceiveMessageResponse]) -> list[api.Message]:
    """The messages of one receive; CallRefused when there are none for another reason than that.

    What came before a refusal is kept: it is in flight for us already.
    """
    messages: list[api.Message] = []
    refusal: CallRefused | None = None
    for part in parts:
        match part.WhichOneof("content"):
            case "message":
                messages.append(part.message)
            case "status" if int(part.status.code) not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                refusal = CallRefused(part.status.code, part.status.message)
    if refusal and not messages:
        raise refusal
    return messages


def _metadata(client_id: str) -> Metadata:
    return (
        ("x-mq-client-id", client_id),
        ("x-mq-client-version", version("popmq")),
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", "v2"),
        ("x-mq-namespace", ""),
        ("x-mq-request-id", str(uuid.uuid4())),
        ("x-mq-date-time", time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())),
    )
