"""Ways to the brokers, by the name of their broker group (docs/concepts/proxy.md).

The routes come from the controller; while it is away the last ones stay.  A broker that the
controller does not list any more keeps its way for a minute: receipt handles name it, and it
may be the controller that is wrong.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from popmq.common.clock import Clock
from popmq.common.errors import InvalidReceiptHandle, PopmqError, Unavailable
from popmq.common.hop import Kind, Port
from popmq.common.receipt import broker_of
from popmq.common.wire import controller_pb2

logger = logging.getLogger(__name__)

ROUTES_WAIT_MS = 10_000
ROUTES_TIMEOUT_MS = ROUTES_WAIT_MS + 5_000
RETRY_MS = 500
SAME_VERSION_MS = 50  # a controller that answers early with nothing new is not asked in a loop
KEEP_ABSENT_MS = 60_000


class Brokers(Protocol):
    def names(self) -> Sequence[str]:
        """Every broker group of the cluster, sorted, whether or not it answers now."""
        ...

    def port(self, name: str) -> Port:
        """The way to that broker group; raises Unavailable when there is none."""
        ...


def port_of_handle(brokers: Brokers, handle: bytes) -> tuple[str, Port]:
    """The broker group that a receipt handle names, and the way to it.

    Raises InvalidReceiptHandle when no such broker exists, which makes a client give up; before
    the first routes arrived nobody can say that, so then it is Unavailable.
    """
    name = broker_of(handle)
    known = brokers.names()
    if known and name not in known:
        raise InvalidReceiptHandle(f"the receipt handle names broker {name!r}, which is unknown")
    return name, brokers.port(name)


class StaticBrokers:
    """Brokers that never change: the one-process cluster, and tests."""

    def __init__(self, ports: Mapping[str, Port]) -> None:
        self._ports = dict(sorted(ports.items()))

    def names(self) -> Sequence[str]:
        return tuple(self._ports)

    def port(self, name: str) -> Port:
        try:
            return self._ports[name]
        except KeyError:
            raise Unavailable(f"broker {name!r} is unknown") from None


class ClosablePort(Port, Protocol):
    async def close(self) -> None: ...


class _Way:
    """An open port and, once the controller stopped listing its broker, since when."""

    __slots__ = ("absent_since_ms", "address", "port")

    def __init__(self, address: str, port: ClosablePort) -> None:
        self.address = address
        self.port = port
        self.absent_since_ms: int | None = None


class RoutedBrokers:
    """Follows the controller's routes by long polls; `open_port(name, address)` opens the way."""

    def __init__(
        self,
        controller: Port,
        open_port: Callable[[str, str], ClosablePort],
        clock: Clock,
    ) -> None:
        self._controller = controller
        self._open_port = open_port
        self._clock = clock
        self._ways: dict[str, _Way] = {}
        self._names: tuple[str, ...] = ()
        self._version = 0
        self._asking: int | None = None
        self._again: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.changed = asyncio.Event()  # set when routes arrived; a waiter clears it

    def names(self) -> Sequence[str]:
        return self._names

    def port(self, name: str) -> Port:
        try:
            return self._ways[name].port
        except KeyError:
            raise Unavailable(f"broker {name!r} is not among the controller's routes") from None

    def start(self) -> None:
        """Ask for routes until `stop`; must be called on the loop."""
        self._again = None
        request = controller_pb2.RoutesRequest(known_version=self._version, wait_ms=ROUTES_WAIT_MS)
        body = request.SerializeToString()
        self._asking = self._controller.request(
            Kind.ROUTES, body, ROUTES_TIMEOUT_MS, self._on_routes
        )

    async def stop(self) -> None:
        self._stopped = True
        if self._again is not None:
            self._again.cancel()
        if self._asking is not None:
            self._controller.cancel(self._asking)
        for name in list(self._ways):
            self._close(name)
        if self._closing:
            await asyncio.wait(self._closing)

    def _on_routes(self, answer: bytes | PopmqError) -> None:
        if self._stopped:
            return
        try:
            if isinstance(answer, PopmqError):
                raise answer
            wait_ms = self._take(controller_pb2.RoutesReply.FromString(answer))
        except (PopmqError, DecodeError) as error:
            logger.info("no routes from the controller", extra={"reason": str(error)})
            wait_ms = RETRY_MS
        except Exception:
            logger.exception("routes could not be followed")
            wait_ms = RETRY_MS
        loop = asyncio.get_running_loop()
        self._again = loop.call_later(wait_ms / 1000, self.start)

    def _take(self, routes: controller_pb2.RoutesReply) -> int:
        """Follow the routes; return how long to wait before asking again."""
        now_ms = self._clock.boot_ms()
        listed = {one.broker: one.address for one in routes.brokers}
        for name, address in listed.items():
            self._open(name, address)
        for name, way in list(self._ways.items()):
            if name in listed:
                way.absent_since_ms = None
            elif way.absent_since_ms is None:
                way.absent_since_ms = now_ms
            elif now_ms - way.absent_since_ms > KEEP_ABSENT_MS:
                self._close(name)
        self._names = tuple(sorted(self._ways))
        same = routes.version == self._version
        self._version = routes.version
        self.changed.set()
        return SAME_VERSION_MS if same else 0

    def _open(self, name: str, address: str) -> None:
        way = self._ways.get(name)
        if way is not None and way.address == address:
            return
        try:
            port = self._open_port(name, address)
        except PopmqError as error:  # one impossible address; the other routes are good
            logger.warning("broker cannot be used", extra={"broker": name, "reason": str(error)})
            return
        logger.info("broker in the routes", extra={"broker": name, "address": address})
        if way is not None:
            self._close(name)
        self._ways[name] = _Way(address, port)

    def _close(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._ways.pop(name).port.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
