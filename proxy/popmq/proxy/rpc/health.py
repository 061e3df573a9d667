"""grpc.health.v1.Health, for probes of Kubernetes, Envoy and grpcurl.

It answers as /readyz does: SERVING while this proxy can serve clients.
"""

import asyncio
from collections.abc import Callable, Collection

from popmq.proxy.rpc.wire_scan import LEN, BadWire, fields, scalar
from popmq.proxy.transport.interface import Call, GrpcStatus, Method, MethodType

HEALTH = "/grpc.health.v1.Health/"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3
WATCHERS_LIMIT = 1_000
LOOK_S = 1.0
REQUEST_BYTES = 1_024


class Health:
    """`services` are the names that a client may ask for; the empty one is the whole server."""

    def __init__(self, is_ready: Callable[[], bool], services: Collection[str]) -> None:
        self._is_ready = is_ready
        self._services = frozenset(services) | {""}
        self._watchers = 0

    def methods(self) -> list[Method]:
        return [
            Method(HEALTH + "Check", MethodType.UNARY, self._check, max_bytes=REQUEST_BYTES),
            Method(
                HEALTH + "Watch", MethodType.SERVER_STREAM, self._watch, max_bytes=REQUEST_BYTES
            ),
        ]

    def _check(self, call: Call, data: bytes) -> None:
        name = _service_of(data)
        if name is None:
            call.finish(GrpcStatus.INVALID_ARGUMENT, "the request is no HealthCheckRequest")
        elif name not in self._services:
            call.finish(GrpcStatus.NOT_FOUND, f"there is no service {name[:100]}")
        else:
            call.send(scalar(1, self._status(name)))
            call.finish()

    def _watch(self, call: Call, data: bytes) -> None:
        """The status now, and again when it has changed, until the client ends the call."""
        name = _service_of(data)
        if name is None:
            call.finish(GrpcStatus.INVALID_ARGUMENT, "the request is no HealthCheckRequest")
        elif self._watchers >= WATCHERS_LIMIT:
            call.finish(
                GrpcStatus.RESOURCE_EXHAUSTED, f"{WATCHERS_LIMIT} clients watch the health already"
            )
        else:
            self._watchers += 1
            _Watch(call, lambda: self._status(name), self._ended)

    def _ended(self) -> None:
        self._watchers -= 1

    def _status(self, name: str) -> int:
        if name not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self._is_ready() else NOT_SERVING


class _Watch:
    def __init__(self, call: Call, status: Callable[[], int], ended: Callable[[], None]) -> None:
        self._call = call
        self._status = status
        self._ended = ended
        self._told = 0
        self._timer: asyncio.TimerHandle | None = None
        call.on_cancelled(self._end)
        self._look()

    def _look(self) -> None:
        status = self._status()
        if status != self._told:
            self._told = status
            self._call.send(scalar(1, status))
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended()


def _service_of(data: bytes) -> str | None:
    """The name in a HealthCheckRequest; None if it is none."""
    try:
        names = [
            data[field.content : field.end]
            for field in fields(data)
            if field.number == 1 and field.wire_type == LEN
        ]
        return names[-1].decode() if names else ""
    except (BadWire, UnicodeDecodeError):
        return None
