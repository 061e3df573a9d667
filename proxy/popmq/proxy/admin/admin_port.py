"""AdminPort: the listener of a proxy's administration services, apart from the public port.

Its methods are those of `Proxy.admin_methods`.  The public port refuses them and names this port to
callers on the same machine (docs/concepts/proxy.md).
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from popmq.common.address import format_address, host_of, is_loopback, parse_address
from popmq.common.admin_endpoint import ID_HEADER, OTHER_PROXY, AdminEndpoint, refusal
from popmq.common.admin_socket import AdminSocket
from popmq.common.settings.settings import OVER_TLS, UNIX
from popmq.proxy.transport.interface import Call, GrpcStatus, Method
from popmq.proxy.transport.lean.server import LeanTransport

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1_000
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and where the machine itself reaches them


class AdminPort:
    """`listen`, then `stop`, once each. `transport` serves the methods; over TLS where it can."""

    def __init__(self, proxy_id: str, transport: LeanTransport) -> None:
        self._proxy_id = proxy_id
        self._transport = transport
        self.endpoint: AdminEndpoint | None = None  # for callers on this machine

    async def listen(self, listener: AdminSocket) -> None:
        await self._transport.start(listener.sock)
        address = _from_here(listener.address, tls_only=self._transport.tls_only)
        self.endpoint = AdminEndpoint(self._proxy_id, address)
        logger.info("admin port", extra={"address": listener.address})

    async def stop(self, grace_s: float) -> None:
        self.endpoint = None
        await self._transport.stop(grace_s)


def _from_here(address: str, *, tls_only: bool) -> str:
    """How a caller on this machine writes it."""
    if address.startswith(UNIX):
        return address
    host, port = parse_address(address)
    reached = format_address(_WILDCARDS.get(host, host), port)
    return f"{OVER_TLS}{reached}" if tls_only else reached


def only_for(proxy_id: str, methods: Iterable[Method]) -> list[Method]:
    """The methods, refusing calls that are meant for another proxy (`common/admin_endpoint.py`)."""

    def checked(method: Method) -> Method:
        handler = method.start
        assert handler is not None, "administration has unary calls alone"

        def start(call: Call, data: bytes) -> None:
            if call.metadata.get(ID_HEADER, proxy_id) == proxy_id:
                handler(call, data)
            else:
                call.finish(GrpcStatus.UNAVAILABLE, OTHER_PROXY)

        return replace(method, start=start)

    return [checked(method) for method in methods]


def refused(
    methods: Iterable[Method], endpoint: Callable[[], AdminEndpoint | None]
) -> list[Method]:
    """The same methods as the public port has them: each answers where it is served instead."""

    def refusing(method: Method) -> Method:
        service = method.path.split("/")[1]

        def start(call: Call, data: bytes) -> None:
            is_here = is_loopback(host_of(call.peer).strip("[]"))
            call.finish(GrpcStatus.UNIMPLEMENTED, refusal(service, endpoint() if is_here else None))

        return replace(method, start=start)

    return [refusing(method) for method in methods]
