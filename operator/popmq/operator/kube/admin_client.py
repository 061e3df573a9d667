"""The administration service of a cluster's proxies, for one look: opened, asked, closed.

It blocks, and therefore runs on a thread: grpcio's own loop and ours do not share a process well.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from popmq.common.errors import Code
from popmq.operator.model.spec import ClusterSpec

ADMIN = "/popmq.admin.v1.Admin/"
CALL_S = 10.0
MAX_REPLY_BYTES = 64 << 20

R = TypeVar("R", bound=Message)


class DataPlaneUnavailable(Exception):
    """Nobody who could have done it answered, or it was refused; the text says which."""


class AdminClient:
    """`address` replaces that of the cluster's Service; `trusted` is the PEM of who signed its
    certificate."""

    def __init__(self, spec: ClusterSpec, address: str, trusted: bytes | None) -> None:
        self._target = address or spec.names.proxy_endpoint
        # Otherwise a proxy for the web, set in the environment, gets the calls.
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ]
        if trusted and spec.tls.mode != "Disabled" and not spec.tls.plain_text:
            secure = grpc.ssl_channel_credentials(trusted)
            self._channel = grpc.secure_channel(self._target, secure, options=options)
        else:
            self._channel = grpc.insecure_channel(self._target, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def ask(self, method: str, request: Message, reply: type[R], *, fine: Sequence[int] = ()) -> R:
        """Raises DataPlaneUnavailable for no answer, and for one that is neither OK nor in
        `fine`."""
        stub: Callable[..., R] = self._channel.unary_unary(
            ADMIN + method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        try:
            answer = stub(request, timeout=CALL_S)
        except grpc.RpcError as error:
            why = f"{self._target}: {error.code().name}: {error.details()}"
            raise DataPlaneUnavailable(why) from error
        status = getattr(answer, "status", None)
        if status is not None and status.code not in (Code.OK, *fine):
            raise DataPlaneUnavailable(f"{method}: {status.code} {status.message}")
        return answer
