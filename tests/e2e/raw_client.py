"""A thin client of the public API on grpc.aio, for tests that must see every outcome.

The official clients retry and hide; here each call ends in an answer or in `NoAnswer`, and
nothing is done twice.  It opens no Telemetry stream, which a server must put up with.
"""

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message as Protobuf

from popmq.proxy.api import definition_pb2 as definition
from popmq.proxy.api import service_pb2 as service

SERVICE = "/apache.rocketmq.v2.MessagingService"
CALL_S = 3.0

Reply = TypeVar("Reply")


class NoAnswer(Exception):
    """The call's outcome is not known: no reply, or one that tells of trouble inside."""


class Refused(Exception):
    """The server said no, and that nothing was changed."""


@dataclass(frozen=True, slots=True)
class Received:
    message_id: str
    handle: str
    attempt: int
    body: bytes
    whole: bool = True  # else the reply broke off behind it, and the receive may be undone


class ApiClient:
    """The calls of one client id; a subclass says how their bytes travel."""

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """The answer to a unary call of the messaging service. Raises NoAnswer."""
        raise NotImplementedError

    def stream(self, method: str, request: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        """The parts of an answer; NoAnswer where it breaks off."""
        raise NotImplementedError

    def attempt_id(self) -> str:
        return str(uuid.uuid4())

    def born_ms(self) -> int:
        """The wall clock of the client."""
        return time.time_ns() // 1_000_000

    async def send(
        self,
        topic: str,
        message_id: str,
        body: bytes,
        *,
        key: str = "",
        due_ms: int = 0,
        half: bool = False,
    ) -> str:
        """The recall handle or, of a `half` message, the transaction id, if there is one, when the
        server said OK. Raise NoAnswer for anything else. `key` is a message group, `due_ms` a
        delivery time since 1970."""
        message = definition.Message(
            topic=definition.Resource(name=topic),
            body=body,
            system_properties=definition.SystemProperties(
                message_id=message_id,
                message_type=definition.NORMAL,
                body_encoding=definition.IDENTITY,
                born_host="raw-client",
            ),
        )
        system = message.system_properties
        system.born_timestamp.FromMilliseconds(self.born_ms())
        if key:
            system.message_type, system.message_group = definition.FIFO, key
        if due_ms:
            system.message_type = definition.DELAY
            system.delivery_timestamp.FromMilliseconds(due_ms)
        if half:
            system.message_type = definition.TRANSACTION
        reply = await self._unary(
            "SendMessage",
            service.SendMessageRequest(messages=[message]),
            service.SendMessageResponse.FromString,
            CALL_S,
        )
        if reply.status.code != definition.OK:
            raise NoAnswer(f"send: {reply.status.code} {reply.status.message}")
        assert [entry.message_id for entry in reply.entries] == [message_id]
        return reply.entries[0].transaction_id if half else reply.entries[0].recall_handle

    async def end(self, topic: str, message_id: str, transaction_id: str, *, commit: bool) -> None:
        """End a transaction. Return when the server said OK. Raise NoAnswer for anything else."""
        request = service.EndTransactionRequest(
            topic=definition.Resource(name=topic),
            message_id=message_id,
            transaction_id=transaction_id,
            resolution=definition.COMMIT if commit else definition.ROLLBACK,
        )
        parse = service.EndTransactionResponse.FromString
        reply = await self._unary("EndTransaction", request, parse, CALL_S)
        if reply.status.code != definition.OK:
            raise NoAnswer(f"end: {reply.status.code} {reply.status.message}")

    async def recall(self, topic: str, handle: str) -> None:
        """Return when the server said OK. Raise NoAnswer for anything else."""
        request = service.RecallMessageRequest(
            topic=definition.Resource(name=topic), recall_handle=handle
        )
        parse = service.RecallMessageResponse.FromString
        reply = await self._unary("RecallMessage", request, parse, CALL_S)
        if reply.status.code != definition.OK:
            raise NoAnswer(f"recall: {reply.status.code} {reply.status.message}")

    async def receive(
        self, group: str, topic: str, *, limit: int, invisible_ms: int, poll_ms: int
    ) -> list[Received]:
        """At most `limit` messages; none when `poll_ms` passed without one."""
        request = service.ReceiveMessageRequest(
            group=definition.Resource(name=group),
            message_queue=definition.MessageQueue(topic=definition.Resource(name=topic), id=-1),
            filter_expression=definition.FilterExpression(type=definition.TAG, expression="*"),
            batch_size=limit,
            attempt_id=self.attempt_id(),
        )
        request.invisible_duration.FromMilliseconds(invisible_ms)
        request.long_polling_timeout.FromMilliseconds(poll_ms)
        received: list[Received] = []
        code = None
        try:
            timeout_s = CALL_S + poll_ms / 1000
            async for data in self.stream("ReceiveMessage", request.SerializeToString(), timeout_s):
                part = service.ReceiveMessageResponse.FromString(data)
                if part.HasField("status"):
                    code = part.status.code
                if part.HasField("message"):
                    received.append(_received(part.message))
        except NoAnswer:
            # What came before the break was delivered all the same.
            if not received:
                raise
            received = [replace(item, whole=False) for item in received]
        if code not in (definition.OK, definition.MESSAGE_NOT_FOUND) and not received:
            raise NoAnswer(f"receive: {code}")
        return received

    async def ack(self, group: str, topic: str, *messages: Received) -> None:
        """Return when the server said OK to each. Raise Refused when a handle is no good."""
        request = service.AckMessageRequest(
            group=definition.Resource(name=group),
            topic=definition.Resource(name=topic),
            entries=[
                service.AckMessageEntry(
                    message_id=message.message_id, receipt_handle=message.handle
                )
                for message in messages
            ],
        )
        reply = await self._unary(
            "AckMessage", request, service.AckMessageResponse.FromString, CALL_S
        )
        codes = {reply.status.code, *(entry.status.code for entry in reply.entries)}
        if definition.INVALID_RECEIPT_HANDLE in codes:
            raise Refused(reply.status.message)
        if codes != {definition.OK}:
            raise NoAnswer(f"ack: {sorted(codes)} {reply.status.message}")
        assert len(reply.entries) == len(messages)

    async def change(
        self, group: str, topic: str, message: Received, *, invisible_ms: int
    ) -> Received:
        """The same message with its new handle. Raise Refused when the old one is no good."""
        request = service.ChangeInvisibleDurationRequest(
            group=definition.Resource(name=group),
            topic=definition.Resource(name=topic),
            message_id=message.message_id,
            receipt_handle=message.handle,
        )
        request.invisible_duration.FromMilliseconds(invisible_ms)
        reply = await self._unary(
            "ChangeInvisibleDuration",
            request,
            service.ChangeInvisibleDurationResponse.FromString,
            CALL_S,
        )
        if reply.status.code == definition.INVALID_RECEIPT_HANDLE:
            raise Refused(reply.status.message)
        if reply.status.code != definition.OK:
            raise NoAnswer(f"change: {reply.status.code} {reply.status.message}")
        return replace(message, handle=reply.receipt_handle)

    async def _unary(
        self, method: str, request: Protobuf, parse: Callable[[bytes], Reply], timeout_s: float
    ) -> Reply:
        return parse(await self.call(method, request.SerializeToString(), timeout_s))


class RawClient(ApiClient):
    """One client id on one channel. Enter it; leaving closes the channel."""

    def __init__(self, endpoint: str, name: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            endpoint,
            # One test, several clients: channels to the same place would share a connection.
            # The back-off after a lost connection is otherwise up to two minutes.
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 500),
            ],
        )
        self._name = name

    async def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        call: Callable[..., Any] = self._channel.unary_unary(f"{SERVICE}/{method}")
        try:
            reply: bytes = await call(request, metadata=self._metadata(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise NoAnswer(f"{method}: {error.code()} {error.details()}") from error
        return reply

    async def stream(self, method: str, request: bytes, timeout_s: float) -> AsyncIterator[bytes]:
        call: Callable[..., Any] = self._channel.unary_stream(f"{SERVICE}/{method}")
        try:
            async for part in call(request, metadata=self._metadata(), timeout=timeout_s):
                yield part
        except grpc.aio.AioRpcError as error:
            raise NoAnswer(f"{method}: {error.code()} {error.details()}") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (
            ("x-mq-client-id", self._name),
            ("x-mq-protocol", "v2"),
            ("x-mq-language", "PYTHON"),
            ("x-mq-client-version", "5.1.2"),
            ("x-mq-request-id", str(uuid.uuid4())),
        )


def _received(message: definition.Message) -> Received:
    system = message.system_properties
    return Received(
        message_id=system.message_id,
        handle=system.receipt_handle,
        attempt=system.delivery_attempt,
        body=message.body,
    )
