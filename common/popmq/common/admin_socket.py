"""AdminSocket: what a proxy's admin port listens on, bound before there is a transport for it.

Workers that share a public port inherit one from their parent, so commands are served while any of
them lives.
"""

import logging
import socket
from dataclasses import dataclass
from typing import Self

from popmq.common.address import format_address, is_loopback, parse_address
from popmq.common.errors import ConfigError
from popmq.common.unix_socket import BoundSocket, bind_own

logger = logging.getLogger(__name__)

UNIX = "unix:"


class AdminSocket:
    """`address` is HOST:PORT or unix:PATH; `close` by the process that bound it."""

    def __init__(self, sock: socket.socket, address: str, bound: BoundSocket | None = None) -> None:
        self.sock = sock
        self.address = address
        self._bound = bound

    @classmethod
    def bind(cls, address: str, *, public: str, runtime_folder: str) -> Self:
        """An empty `address` is a unix socket that is called like the public address.

        Raises ConfigError when it cannot be taken, and OSError when an empty one has no folder.
        """
        if not address:
            bound = bind_own(runtime_folder, f"proxy-{public}")
            return cls(bound.sock, f"{UNIX}{bound.path}", bound)
        try:
            if address.startswith(UNIX):
                bound = BoundSocket(address.removeprefix(UNIX))
                return cls(bound.sock, address, bound)
            return cls(*_bind_network(address))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: another process does, or it is no address of this "
                f"machine (proxy.admin_listen, --admin-port): {error.strerror}"
            ) from error

    @classmethod
    def inherited(cls, descriptor: int, address: str) -> Self:
        return cls(socket.socket(fileno=descriptor), address)

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine reach it."""
        return self.address.startswith(UNIX) or is_loopback(parse_address(self.address)[0])

    def close(self) -> None:
        self.sock.close()
        if self._bound is not None:
            self._bound.remove()


@dataclass(frozen=True, slots=True)
class SharedAdmin:
    """What workers of one port share: the id that they answer to, and the socket."""

    proxy_id: str
    socket: AdminSocket


def bind_admin(address: str, *, public: str, runtime_folder: str) -> AdminSocket | None:
    """AdminSocket.bind; None where an empty address has no folder, as on a read-only file system:
    messages need no admin port."""
    try:
        return AdminSocket.bind(address, public=public, runtime_folder=runtime_folder)
    except OSError as error:
        logger.warning("no admin port (proxy.admin_listen)", extra={"why": str(error)})
        return None


def _bind_network(address: str) -> tuple[socket.socket, str]:
    host, port = parse_address(address)
    family, kind, protocol, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
    except OSError:
        sock.close()
        raise
    return sock, format_address(host, sock.getsockname()[1])
