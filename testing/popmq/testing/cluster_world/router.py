"""Router: finds the masters for a proxy of a simulated cluster, as `proxy/brokers/broker_ports.py`.

It follows the controllers' routes by long polls.  A request that a broker refused because it
leads no more, or that found no connection, is tried again on the route of that moment, until
the client's deadline; so is one whose connection broke, and then nobody knows whether the
first try was done.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

from popmq.common.errors import Code, DeadlineExceeded, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire.controller_pb2 import RoutesReply, RoutesRequest
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.cluster_world.sim_network import SimNet

_WAIT_MS = 10_000
_AGAIN_MS = 500
_RETRY_MS = (20, 100, 300)

Answered = Callable[[bytes | PopmqError, int], None]


class Router:
    """`request` answers with how many tries there were of which nobody knows the end."""

    def __init__(
        self, net: SimNet, host: Host, controllers: Sequence[str], rng: random.Random
    ) -> None:
        self._net = net
        self._host = host
        self._rng = rng
        self._controllers = [SimPort(net, host, address) for address in controllers]
        self._ports: dict[str, SimPort] = {}
        self._routes: dict[str, tuple[int, str]] = {}  # group -> epoch and address
        self._open: dict[int, _RoutedRequest] = {}
        self._numbers = 0
        self.retried = 0
        for port in self._controllers:
            self._follow(port, 0)

    def address(self, group: str) -> str:
        return self._routes.get(group, (0, ""))[1]

    def request(
        self,
        group: str,
        kind: Kind,
        body: bytes,
        timeout_ms: int,
        on_answer: Answered,
        on_unknown: Callable[[], None] = lambda: None,
    ) -> int:
        """`on_unknown` hears at once of each try whose end nobody knows."""
        self._numbers += 1
        due_ms = self._host.clock.boot_ms() + timeout_ms
        request = _RoutedRequest(group, kind, body, due_ms, on_answer, on_unknown)
        self._open[self._numbers] = request
        self._try(self._numbers, request)
        return self._numbers

    def cancel(self, number: int) -> None:
        """The client is gone."""
        request = self._open.pop(number, None)
        if request is not None and request.port is not None:
            request.port.cancel(request.request_id)

    # -- tries

    def _try(self, number: int, request: "_RoutedRequest") -> None:
        if self._open.get(number) is not request:
            return
        left_ms = request.due_ms - self._host.clock.boot_ms()
        port = self._port(request.group)
        if left_ms <= 0:
            self._end(number, request, DeadlineExceeded("no master in time"))
        elif port is None or not port.usable:
            self._again(number, request)
        else:
            request.port = port
            request.request_id = port.request(
                request.kind, request.body, left_ms, partial(self._heard, number, request)
            )

    def _heard(self, number: int, request: "_RoutedRequest", answer: bytes | PopmqError) -> None:
        request.port = None
        if self._open.get(number) is not request:
            return
        code = answer.code if isinstance(answer, PopmqError) else Code.OK
        if code is Code.PROXY_TIMEOUT or isinstance(answer, Unavailable):
            request.unknown += 1
            request.on_unknown()
        if code in (Code.NOT_MASTER, Code.HA_NOT_AVAILABLE):
            request.refusal = answer
            self.retried += 1
            self._again(number, request)
        else:
            self._end(number, request, answer)

    def _again(self, number: int, request: "_RoutedRequest") -> None:
        self._host.after(self._rng.choice(_RETRY_MS), partial(self._try, number, request))

    def _end(self, number: int, request: "_RoutedRequest", answer: bytes | PopmqError) -> None:
        del self._open[number]
        request.on_answer(answer, request.unknown)

    # -- routes

    def _port(self, group: str) -> SimPort | None:
        address = self.address(group)
        if not address:
            return None
        if address not in self._ports:
            self._ports[address] = SimPort(self._net, self._host, address)
        return self._ports[address]

    def _follow(self, controller: SimPort, version: int) -> None:
        body = RoutesRequest(known_version=version, wait_ms=_WAIT_MS).SerializeToString()
        reply = partial(self._told, controller, version)
        controller.request(Kind.ROUTES, body, _WAIT_MS + 5_000, reply)

    def _told(self, controller: SimPort, version: int, answer: bytes | PopmqError) -> None:
        wait_ms = _AGAIN_MS
        if not isinstance(answer, PopmqError):
            reply = RoutesReply.FromString(answer)
            wait_ms = 50 if reply.version == version else 0
            version = reply.version
            for broker in reply.brokers:
                # Of two controllers, one may be behind.
                if broker.epoch >= self._routes.get(broker.broker, (0, ""))[0]:
                    self._routes[broker.broker] = (broker.epoch, broker.address)
        self._host.after(wait_ms, partial(self._follow, controller, version))


class _RoutedRequest:
    __slots__ = (
        "body",
        "due_ms",
        "group",
        "kind",
        "on_answer",
        "on_unknown",
        "port",
        "refusal",
        "request_id",
        "unknown",
    )

    def __init__(
        self,
        group: str,
        kind: Kind,
        body: bytes,
        due_ms: int,
        on_answer: Answered,
        on_unknown: Callable[[], None],
    ) -> None:
        self.group, self.kind, self.body = group, kind, body
        self.due_ms, self.on_answer, self.on_unknown = due_ms, on_answer, on_unknown
        self.port: SimPort | None = None
        self.request_id = 0
        self.unknown = 0  # tries that may have been done, or may be yet
        self.refusal: bytes | PopmqError = b""
