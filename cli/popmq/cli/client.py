"""The commands' own client: the calls that `popmq` makes, one at a time.

Messages go to the public port, administration to the admin port: the one that is given, else the
one that the public port names to callers on its machine, else the public port itself.

Every reply's status is checked here, so a caller gets an answer or an error whose text can be
shown to a person as it is (docs/reference/cli.md).
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from google.protobuf.message import Message

from popmq.cli.terminal.channel import ChannelError, GrpcChannel, StatusError
from popmq.cli.terminal.contexts import OVER_TLS, TLS_CA_VARIABLE
from popmq.common.admin_endpoint import (
    ADMIN_LISTEN,
    ID_HEADER,
    OTHER_PROXY,
    AdminEndpoint,
    named_endpoint,
)
from popmq.common.errors import Code, PopmqError
from popmq.common.signing import Signer, signer_of
from popmq.common.version import VERSION
from popmq.common.wire import admin_pb2 as admin

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from popmq.proxy.api import definition_pb2 as api
    from popmq.proxy.api import service_pb2 as service

MESSAGING = "/apache.rocketmq.v2.MessagingService/"
ADMIN = "/popmq.admin.v1.Admin/"
CALL_TIMEOUT_MS = 10_000
MAX_REPLY_BYTES = 64 << 20
RECEIVE_BATCH = 32

TopicRequest = (
    admin.CreateTopicRequest
    | admin.AlterTopicRequest
    | admin.DeleteTopicRequest
    | admin.DescribeTopicRequest
)
GroupRequest = admin.CreateGroupRequest | admin.AlterGroupRequest | admin.DeleteGroupRequest


_LOOKS = (
    admin.DescribeTopicRequest,
    admin.ListTopicsRequest,
    admin.DescribeGroupRequest,
    admin.ListGroupsRequest,
    admin.LagRequest,
    admin.ListClientsRequest,
    admin.TimeSpansRequest,
    admin.ListTimersRequest,
    admin.ForecastTimersRequest,
    admin.ListBrokersRequest,
    admin.DescribeUserRequest,
    admin.ListUsersRequest,
    admin.CheckAccessRequest,
    admin.DescribeSettingsRequest,
    admin.ExplainRequest,
    admin.FindMessagesRequest,
    admin.ListDeadLettersRequest,
)
# Changes that a broker makes at once.  Others wait: for copies of a deletion, or for an election.
_QUICK_CHANGES = (
    admin.AlterTopicRequest,
    admin.AlterGroupRequest,
    admin.DrainRequest,
    admin.RotateKeysRequest,
    admin.ResetOffsetRequest,
    admin.UnparkRequest,
    admin.RecallRequest,
    admin.RescheduleRequest,
)
# Those of the public service, whose module is imported when used.
_QUICK_CHANGE_NAMES = (
    "SendMessageRequest",
    "EndTransactionRequest",
    "AckMessageRequest",
    "ChangeInvisibleDurationRequest",
)
# A broker that is silent for so long costs the next requests of the same command little.
SILENT_S, LEAST_LOOK_S, LEAST_CHANGE_S = 1.0, 0.2, 0.5


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
        name = Code(number).name if number in set(Code) else "unknown code"
        super().__init__(f"{name} ({number}): {message or 'no reason given'}")
        self.number = number
        self.reason = message


class CallFailed(PopmqError):
    """No reply: the connection was refused, the time ran out, or the server is no popmq."""

    code = Code.HA_NOT_AVAILABLE


def looks(request: Message) -> bool:
    """Whether it changes nothing."""
    if isinstance(request, _LOOKS) or any(getattr(request, n, False) for n in ("dry_run", "look")):
        return True
    return type(request).__name__ == "QueryOffsetRequest"  # of a module that is imported when used


def changes_at_once(request: Message) -> bool:
    quick = isinstance(request, _QUICK_CHANGES) or type(request).__name__ in _QUICK_CHANGE_NAMES
    return quick and not looks(request)


def check_status(status: StatusLike) -> None:
    if status.code != Code.OK:
        raise CallRefused(status.code, status.message)


def new_client_id() -> str:
    """host@pid@index@time, the form of the official clients; ASCII, as metadata must be."""
    host = socket.gethostname().encode("ascii", "replace").decode()
    return f"{host}@{os.getpid()}@0@{time.time_ns():x}"


def duration(milliseconds: int) -> "Duration":
    from google.protobuf.duration_pb2 import Duration

    seconds, rest = divmod(milliseconds, 1000)
    return Duration(seconds=seconds, nanos=rest * 1_000_000)


class Client:
    """Connections to one proxy; a context manager. Opening it connects to nothing yet.

    Threads may share it: a call takes a connection that no other call uses, or makes one.
    """

    def __init__(
        self,
        endpoint: str,
        client_id: str = "",
        *,
        tls_ca: str = "",
        signer: Signer | None = None,
        admin_endpoint: str = "",
        timeout_ms: int = CALL_TIMEOUT_MS,
        quick_timeout_ms: int = 0,
    ) -> None:
        """`admin_endpoint` may be unix:PATH; empty: what the endpoint names, or itself.
        `signer` is the user that calls; None: the one that the environment names."""
        self.endpoint = endpoint
        self._public = AdminEndpoint("", endpoint)
        self._admin = AdminEndpoint("", admin_endpoint) if admin_endpoint else None
        self._client_id = client_id or new_client_id()
        self._tls_ca = tls_ca or os.environ.get(TLS_CA_VARIABLE, "")
        self._signer = signer_of(os.environ) if signer is None else signer
        self._timeout_ms = timeout_ms
        # Of the requests of a command that only look or change at once, together; 0: as others.
        self._quick_timeout_ms = quick_timeout_ms
        self._silent_s = self._looked_s = 0.0
        self._idle: dict[str, list[GrpcChannel]] = {}  # by endpoint
        self._closed = False

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; one that a call uses is closed when the call ends."""
        self._closed = True
        for channels in self._idle.values():
            while channels:
                channels.pop().close()

    def query_route(self, topic: str) -> "list[api.MessageQueue]":
        from popmq.proxy.api import definition_pb2 as api
        from popmq.proxy.api import service_pb2 as service

        request = service.QueryRouteRequest(topic=api.Resource(name=topic))
        reply = self._call(MESSAGING + "QueryRoute", request, service.QueryRouteResponse)
        check_status(reply.status)
        return list(reply.message_queues)

    def check_signature(self) -> None:
        """Raises CallRefused with UNAUTHORIZED when the proxy does not know the caller.

        The call that it makes ends a client that does not exist, which any user may.
        """
        from popmq.proxy.api import service_pb2 as service

        request = service.NotifyClientTerminationRequest()
        path = MESSAGING + "NotifyClientTermination"
        status = self._call(path, request, service.NotifyClientTerminationResponse).status
        if int(status.code) == Code.UNAUTHORIZED:
            check_status(status)

    def heartbeat(self, group: str) -> None:
        """Say that this client is a consumer of the group, for `popmq clients`."""
        from popmq.proxy.api import definition_pb2 as api
        from popmq.proxy.api import service_pb2 as service

        request = service.HeartbeatRequest(
            group=api.Resource(name=group), client_type=api.ClientType.SIMPLE_CONSUMER
        )
        reply = self._call(MESSAGING + "Heartbeat", request, service.HeartbeatResponse)
        check_status(reply.status)

    def send(self, message: "api.Message") -> "service.SendResultEntry":
        return self.send_batch([message])[0]

    def send_batch(self, messages: "Sequence[api.Message]") -> "list[service.SendResultEntry]":
        """Raises CallRefused for the first that was refused; the others are stored."""
        from popmq.proxy.api import service_pb2 as service

        request = service.SendMessageRequest(messages=messages)
        reply = self._call(MESSAGING + "SendMessage", request, service.SendMessageResponse)
        for entry in reply.entries:
            check_status(entry.status)
        check_status(reply.status)
        if len(reply.entries) != len(messages):
            raise CallRefused(Code.INTERNAL_SERVER_ERROR, "the reply to a send lacks results")
        return list(reply.entries)

    def end_transaction(
        self, topic: str, entry: "service.SendResultEntry", *, commit: bool
    ) -> None:
        from popmq.proxy.api import definition_pb2 as api
        from popmq.proxy.api import service_pb2 as service

        request = service.EndTransactionRequest(
            topic=api.Resource(name=topic),
            message_id=entry.message_id,
            transaction_id=entry.transaction_id,
            resolution=api.COMMIT if commit else api.ROLLBACK,
            source=api.SOURCE_CLIENT,
        )
        path = MESSAGING + "EndTransaction"
        check_status(self._call(path, request, service.EndTransactionResponse).status)

    def receive(
        self,
        group: str,
        queue: "api.MessageQueue",
        *,
        limit: int,
        wait_ms: int,
        invisible_ms: int,
        tag: str = "*",
        sql: str = "",
    ) -> "list[api.Message]":
        """Up to `limit` messages; empty when none came within `wait_ms`."""
        from popmq.proxy.api import definition_pb2 as api
        from popmq.proxy.api import service_pb2 as service

        kind, expression = (api.SQL, sql) if sql else (api.TAG, tag)
        request = service.ReceiveMessageRequest(
            group=api.Resource(name=group),
            message_queue=queue,
            filter_expression=api.FilterExpression(type=kind, expression=expression),
            batch_size=min(limit, RECEIVE_BATCH),
            invisible_duration=duration(invisible_ms),
            long_polling_timeout=duration(wait_ms),
        )
        parts: list[service.ReceiveMessageResponse] = []

        def on_message(data: bytes) -> None:
            parts.append(service.ReceiveMessageResponse.FromString(data))

        timeout_s = (wait_ms + CALL_TIMEOUT_MS) / 1000
        self._ask(MESSAGING + "ReceiveMessage", request, on_message, timeout_s)
        return messages_of(parts)

    def subscribe_lite(self, group: str, topic: str, names: Sequence[str]) -> None:
        """This client receives from these lite topics of `topic`, and from no others."""
        from popmq.proxy.api import definition_pb2 as api
        from popmq.proxy.api import service_pb2 as service

        request = service.SyncLiteSubscriptionRequest(
            action=api.LiteSubscriptionAction.COMPLETE_ADD,
            topic=api.Resource(name=topic),
            group=api.Resource(name=group),
            lite_topic_set=names,
        )
        path = MESSAGING + "SyncLiteSubscription"
        check_status(self._call(path, request, service.SyncLiteSubscriptionResponse).status)

    def ack(self, group: str, topic: str, messages: "Sequence[api.Message]") -> None:
        """Raises CallRefused for the first message whose ack was refused; the others are acked."""
        properties = [message.system_properties for message in messages]
        self.ack_handles(
            group, topic, [(message.message_id, message.receipt_handle) for message in properties]
        )

    def ack_handles(self, group: str, topic: str, handles: Sequence[tuple[str, str]]) -> None:
        """The same by message ids, which may be empty, and receipt handles."""
        from popmq.proxy.api import definition_pb2 as api
        from popmq.proxy.api import service_pb2 as service

        request = service.AckMessageRequest(
            group=api.Resource(name=group),
            topic=api.Resource(name=topic),
            entries=[
                service.AckMessageEntry(message_id=message_id, receipt_handle=handle)
                for message_id, handle in handles
            ],
        )
        reply = self._call(MESSAGING + "AckMessage", request, service.AckMessageResponse)
        for entry in reply.entries:
            check_status(entry.status)
        check_status(reply.status)

    def change_invisible_time(self, group: str, topic: str, handle: str, invisible_ms: int) -> str:
        """Count it anew from now on; returns the handle that is good from then on."""
        from popmq.proxy.api import definition_pb2 as api
        from popmq.proxy.api import service_pb2 as service

        request = service.ChangeInvisibleDurationRequest(
            group=api.Resource(name=group),
            topic=api.Resource(name=topic),
            receipt_handle=handle,
            invisible_duration=duration(invisible_ms),
        )
        path = MESSAGING + "ChangeInvisibleDuration"
        reply = self._call(path, request, service.ChangeInvisibleDurationResponse)
        check_status(reply.status)
        return reply.receipt_handle or handle

    def start_offset(self, queue: "api.MessageQueue") -> int:
        """Of the first message that the queue still has."""
        from popmq.proxy.api import definition_pb2 as api

        return self._query_offset(queue, api.BEGINNING)

    def end_offset(self, queue: "api.MessageQueue") -> int:
        """Of the message that the queue gets next."""
        from popmq.proxy.api import definition_pb2 as api

        return self._query_offset(queue, api.END)

    def offset_at(self, queue: "api.MessageQueue", stored_ms: int) -> int:
        """Of the first message that was stored then or later."""
        from popmq.proxy.api import definition_pb2 as api

        return self._query_offset(queue, api.TIMESTAMP, stored_ms)

    def _query_offset(
        self,
        queue: "api.MessageQueue",
        policy: "api.QueryOffsetPolicy.ValueType",
        stored_ms: int = 0,
    ) -> int:
        from popmq.proxy.api import service_pb2 as service

        request = service.QueryOffsetRequest(message_queue=queue, query_offset_policy=policy)
        if stored_ms:
            request.timestamp.FromMilliseconds(stored_ms)
        path = MESSAGING + "QueryOffset"
        reply = self._call(path, request, service.QueryOffsetResponse)
        check_status(reply.status)
        return reply.offset

    def topic(self, request: TopicRequest) -> admin.Topic:
        return self.call_admin(request, admin.TopicReply).topic

    def group(self, request: GroupRequest) -> admin.Group:
        return self.call_admin(request, admin.GroupReply).group

    def topics(self, *, system: bool) -> list[admin.Topic]:
        reply = self.call_admin(admin.ListTopicsRequest(system=system), admin.ListTopicsReply)
        return list(reply.topics)

    def groups(self) -> list[admin.Group]:
        return list(self.call_admin(admin.ListGroupsRequest(), admin.ListGroupsReply).groups)

    def call_admin(self, request: Message, reply_type: type[R], timeout_s: float = 0) -> R:
        """The method of the admin service that takes this kind of request.

        `timeout_s` is 0 for that of the kind of request.
        """
        method = type(request).__name__.removesuffix("Request")
        reply = self._call(ADMIN + method, request, reply_type, timeout_s)
        check_status(reply.status)
        return reply

    def _call(self, path: str, request: Message, reply_type: type[R], timeout_s: float = 0) -> R:
        replies: list[R] = []

        def on_message(data: bytes) -> None:
            replies.append(reply_type.FromString(data))

        began_s = time.monotonic()
        try:
            self._ask(path, request, on_message, timeout_s or self._timeout_s(request, began_s))
        finally:
            self._note_silence(request, began_s)
        if len(replies) != 1:
            raise CallFailed(f"{self.endpoint} answered {len(replies)} messages instead of one")
        return replies[0]

    def _timeout_s(self, request: Message, now_s: float) -> float:
        is_look = looks(request)
        if not (self._quick_timeout_ms and (is_look or changes_at_once(request))):
            return self._timeout_ms / 1000
        if now_s - self._looked_s > SILENT_S:  # a view that is drawn again after a pause
            self._silent_s = 0.0
        least_s = LEAST_LOOK_S if is_look else LEAST_CHANGE_S
        return max(least_s, self._quick_timeout_ms / 1000 - self._silent_s)

    def _note_silence(self, request: Message, began_s: float) -> None:
        self._looked_s = time.monotonic()
        took_s = self._looked_s - began_s
        if took_s > SILENT_S and (looks(request) or changes_at_once(request)):
            self._silent_s += took_s

    def _ask(
        self, path: str, request: Message, on_message: Callable[[bytes], None], timeout_s: float
    ) -> None:
        body = request.SerializeToString()
        changes = changes_at_once(request) or (path.startswith(ADMIN) and not looks(request))
        unclear = "; whether it was done is unknown" if changes else ""
        try:
            if path.startswith(ADMIN):
                self._ask_admin(path, body, on_message, timeout_s)
            else:
                self._ask_at(self._public, path, body, on_message, timeout_s)
        except StatusError as error:
            raise self._explained(error, path, timeout_s, unclear) from error
        except ChannelError as error:
            raise CallFailed(f"{error}{unclear if error.sent else ''}") from error

    def _ask_admin(
        self, path: str, body: bytes, on_message: Callable[[bytes], None], timeout_s: float
    ) -> None:
        """At the admin port that is known; else at the public port, which may name one."""
        missing: ChannelError | None = None
        if (known := self._admin) is not None:
            try:
                self._ask_at(known, path, body, on_message, timeout_s)
                return
            except ChannelError as error:
                # Before this release there were no admin ports; or the proxy was started anew.
                if error.connected:
                    raise
                missing = error
            except StatusError as error:
                if str(error) != OTHER_PROXY:
                    raise
        try:
            self._ask_at(self._public, path, body, on_message, timeout_s)
        except StatusError as error:
            named = named_endpoint(str(error))
            if named is None:
                raise missing or error from error
            self._admin = named
            self._ask_named(named, path, body, on_message, timeout_s)

    def _ask_named(
        self,
        named: AdminEndpoint,
        path: str,
        body: bytes,
        on_message: Callable[[bytes], None],
        timeout_s: float,
    ) -> None:
        """At the port that the public one has just named; it may be a forwarded one's."""
        why = f"{self.endpoint} names it as its admin port; elsewhere --admin-endpoint does"
        try:
            self._ask_at(named, path, body, on_message, timeout_s)
        except ChannelError as error:
            if error.connected:
                raise
            raise ChannelError(f"{error} ({why})", connected=False) from error
        except StatusError as error:
            if str(error) != OTHER_PROXY:
                raise
            raise ChannelError(f"{named.address} belongs to another popmq ({why})") from error

    def _ask_at(
        self,
        at: AdminEndpoint,
        path: str,
        body: bytes,
        on_message: Callable[[bytes], None],
        timeout_s: float,
    ) -> None:
        channel = self._connection(at.address)
        fields = self._metadata()
        if at.proxy_id:
            fields.append((ID_HEADER, at.proxy_id))
        try:
            channel.call(path, body, fields, timeout_s, on_message)
        except StatusError:
            self._keep(channel)  # the call ended as calls do
            raise
        self._keep(channel)

    def _metadata(self) -> list[tuple[str, str]]:
        return [*_metadata(self._client_id), *self._signer.headers()]

    def _keep(self, channel: GrpcChannel) -> None:
        self._idle.setdefault(channel.endpoint, []).append(channel)
        if self._closed:
            self.close()

    def _connection(self, endpoint: str) -> GrpcChannel:
        idle = self._idle.setdefault(endpoint, [])
        while idle:
            channel = idle.pop()
            if channel.is_usable():
                return channel
            channel.close()
        return GrpcChannel(endpoint, self._tls_ca)

    def _explained(
        self, error: StatusError, path: str, timeout_s: float, unclear: str
    ) -> PopmqError:
        if error.name == "DEADLINE_EXCEEDED":
            return CallFailed(f"{self.endpoint} did not answer within {timeout_s:g} s{unclear}")
        if ADMIN_LISTEN in str(error):
            return CallFailed(f"{self.endpoint}: {error}")
        if error.name == "UNIMPLEMENTED":
            method = path.rpartition("/")[2]
            return CallFailed(f"{self.endpoint} does not serve {method}: its popmq is too old")
        if "TLS only" in str(error):
            return CallFailed(f"{self.endpoint} takes TLS only: write {OVER_TLS}{self.endpoint}")
        return CallFailed(f"{self.endpoint} answered {error.name}: {error}")


def messages_of(parts: "Iterable[service.ReceiveMessageResponse]") -> "list[api.Message]":
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


def _metadata(client_id: str) -> list[tuple[str, str]]:
    return [
        ("x-mq-client-id", client_id),
        ("x-mq-client-version", VERSION),
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", "v2"),
        ("x-mq-namespace", ""),
        ("x-mq-request-id", os.urandom(16).hex()),
    ]
