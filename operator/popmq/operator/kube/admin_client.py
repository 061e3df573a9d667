"""The administration service of a cluster's proxies, for one look: opened, asked, closed.

It blocks, and therefore runs on a thread: grpcio's own loop and ours do not share a process well.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from popmq.common.address import host_of, is_loopback
from popmq.common.admin_endpoint import ID_HEADER, AdminRoute
from popmq.common.errors import Code
from popmq.common.signing import Signer
from popmq.operator.kube.look_slots import outside_slot
from popmq.operator.model.spec import ClusterSpec

ADMIN = "/popmq.admin.v1.Admin/"
CALL_S = 10.0
CONNECT_S = 3.0  # before the next address is tried
MAX_REPLY_BYTES = 64 << 20

THREADS = 64  # calls at once: one of a cluster that hangs holds its thread for CALL_S

R = TypeVar("R", bound=Message)
T = TypeVar("T")


class DataPlaneUnavailable(Exception):
    """Nobody who could have done it answered, or it was refused; the text says which."""


async def on_thread(threads: Executor | None, asked: Callable[[], T]) -> T:
    """The result of `asked`, which waits for a cluster."""
    async with outside_slot():
        return await asyncio.get_running_loop().run_in_executor(threads, asked)


class AdminClient:
    """`address` replaces that of the cluster's Service; `trusted` is the PEM of who signed its
    certificate; `signer` has the user that calls, where the cluster has users."""

    def __init__(
        self, spec: ClusterSpec, address: str, trusted: bytes | None, signer: Signer | None = None
    ) -> None:
        names, address = spec.names, spec.address_of(address)
        self._route = AdminRoute(
            [address] if address else [names.admin_endpoint, names.proxy_endpoint]
        )
        self._admin_host = names.admin_endpoint.rpartition(":")[0]
        self._tls_name = names.proxy_endpoint.rpartition(":")[0]
        self._trusted = trusted
        self._signer = signer or Signer()
        # Credentials in plain text are refused off loopback, where proxies take it at all.
        signs = bool(self._signer.access_key) and not is_loopback(host_of(address))
        self._encrypted = spec.tls.mode != "Disabled" and (signs or not spec.tls.plain_text)
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def ask(self, method: str, request: Message, reply: type[R], *, fine: Sequence[int] = ()) -> R:
        """Raises DataPlaneUnavailable for no answer, and for one that is neither OK nor in
        `fine`."""
        while True:
            try:
                answer = self._ask_used(method, request, reply)
                break
            except grpc.FutureTimeoutError as error:
                implemented, why = True, f"no connection within {CONNECT_S:g} s"
                failure: Exception = error
            except grpc.RpcError as error:
                implemented = error.code() is not grpc.StatusCode.UNIMPLEMENTED
                why = f"{error.code().name}: {error.details()}"
                failure = error
            target = self._route.used.address
            self._close()
            if not self._goes_on(failure) or not self._route.go_on(
                implemented=implemented, details=why
            ):
                raise DataPlaneUnavailable(f"{target}: {why}") from failure
        status = getattr(answer, "status", None)
        if status is not None and status.code not in (Code.OK, *fine):
            raise DataPlaneUnavailable(f"{method}: {status.code} {status.message}")
        return answer

    def _goes_on(self, failure: Exception) -> bool:
        """Proxies from before have no admin port; theirs is the public one."""
        return not isinstance(failure, grpc.RpcError) or failure.code() in (
            grpc.StatusCode.UNIMPLEMENTED,
            grpc.StatusCode.UNAVAILABLE,
        )

    def _ask_used(self, method: str, request: Message, reply: type[R]) -> R:
        used = self._route.used
        if self._channel is None:
            self._channel = self._open(used.address)
            if not self._route.is_last:
                grpc.channel_ready_future(self._channel).result(timeout=CONNECT_S)
        stub: Callable[..., R] = self._channel.unary_unary(
            ADMIN + method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        metadata = self._signer.headers()
        if used.proxy_id:
            metadata.append((ID_HEADER, used.proxy_id))
        return stub(request, timeout=CALL_S, metadata=metadata)

    def _open(self, target: str) -> grpc.Channel:
        # Otherwise a proxy for the web, set in the environment, gets the calls.
        options: list[tuple[str, object]] = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ]
        if not self._encrypted or target.startswith("unix:"):
            return grpc.insecure_channel(target, options=options)
        # A certificate that a user gives names the clients' Service, not that of the admin ports.
        if target.startswith(self._admin_host):
            options.append(("grpc.ssl_target_name_override", self._tls_name))
        # Without a CA in the Secret, the certificate is one that the system's authorities sign.
        secure = grpc.ssl_channel_credentials(self._trusted)
        return grpc.secure_channel(target.removeprefix("tls://"), secure, options=options)

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
