"""A proxy of a simulated cluster: the product's `Proxy` over simulated ports.

What the process shell does is done here: routes are followed, and calls of clients arrive as
bytes. Ordinary calls that arrive together go to their lanes, as those of one connection do. A proxy
that dies answers nothing any more; what was under way ends for its clients.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial

from popmq.common.loop_iteration import LoopIteration
from popmq.common.settings.settings import Settings
from popmq.proxy.brokers.broker_ports import RoutedBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.transport.interface import GrpcStatus, Method, OneByOne
from popmq.testing.cluster_world.port import SimPort
from popmq.testing.cluster_world.sim_network import SimNet
from popmq.testing.groups_world.sim_loop import LoopHost

READ_MS = 5  # a busy process finds what arrived meanwhile in one look at its sockets


class CallFailed(Exception):
    """A call ended without a whole answer."""


class PeerPort(SimPort):
    """A `ClosablePort`: the way of a proxy to a broker."""

    async def close(self) -> None:  # type: ignore[override]
        SimPort.close(self)


class ProxyNode:
    """One proxy."""

    def __init__(
        self,
        net: SimNet,
        host: LoopHost,
        settings: Settings,
        controllers: Sequence[str],
    ) -> None:
        self.host = host
        self._net = net
        self._settings = settings
        self._controllers = controllers
        self._calls: dict[int, SimCall] = {}
        self._number = 0
        self._methods: dict[str, Method] = {}
        self._arrivals: list[Arrival] = []
        self.calls_by_path: Counter[tuple[str, str]] = Counter()  # of all its processes

    def start(self) -> None:
        self.host.boot()
        self.host.post(self._boot)

    def stop(self) -> None:
        """The process ends: its clients see their connections break."""
        self.host.die()
        self._net.process_ended(self.host, quietly=False)
        calls, self._calls = self._calls, {}
        self._methods = {}
        for call in calls.values():
            call.lost("the proxy died")

    def call(
        self, client: LoopHost, client_id: str, method: str, request: bytes, timeout_ms: int
    ) -> "SimCall":
        """A call of a client on that host; it ends when the time is over."""
        self._number += 1
        number = self._number
        metadata = {"x-mq-client-id": client_id, "x-mq-protocol": "v2"}
        call = SimCall(self._net, client, self.host, metadata, timeout_ms)
        if not self.host.up:
            call.lost("connection refused")
            return call
        self._calls[number] = call
        call.on_over = partial(self._over, number)
        client.after(timeout_ms, partial(call.broke, "deadline exceeded"))
        arrive = partial(self.host.post, partial(self._arrived, number, method, call, request))
        self._net.carry(client.name, self.host.name, arrive)
        return call

    def _over(self, number: int) -> None:
        self._calls.pop(number, None)

    def _arrived(self, number: int, method: str, call: "SimCall", request: bytes) -> None:
        if number not in self._calls:  # of an earlier process, or given up
            return
        if not self._arrivals:
            self.host.after(READ_MS, self._serve)
        self._arrivals.append((self._methods[method], call, request))

    def _serve(self) -> None:
        """All that arrived meanwhile, in its order: as `lean/lanes.py` does."""
        arrivals, self._arrivals = self._arrivals, []
        run = SimRun()
        for method, call, request in arrivals:
            if not (self._settings.lean.lanes and run.takes(method, call, request)):
                assert method.start is not None
                method.start(call, request)

    def _boot(self) -> None:
        host, net = self.host, self._net
        controllers = [PeerPort(net, host, address) for address in self._controllers]

        def open_port(name: str, address: str) -> PeerPort:
            return PeerPort(net, host, address)

        clock = host.process_clock

        def resend(broker_group: str) -> None:
            proxy.lites.resend_to(broker_group)

        routed = RoutedBrokers(controllers, open_port, clock, resend)
        self._arrivals = []
        turn = LoopIteration()
        proxy: Proxy = Proxy(self._settings, routed, clock, controllers, turn.call_at_end)
        proxy.metrics.calls_by_path = self.calls_by_path
        proxy.listening_on(host.name, 8081)
        self._methods = {method.path.rpartition("/")[2]: method for method in proxy.methods()}
        routed.start()
        proxy.access.start()
        proxy.clients.start()
        proxy.checks.start()


Arrival = tuple[Method, "SimCall", bytes]


class SimRun:
    """What arrived together, for lanes; implements LaneRun."""

    peer = ""

    def __init__(self) -> None:
        self.data = b""
        self.client_id = ""

    def takes(self, method: Method, call: "SimCall", request: bytes) -> bool:
        lane = method.lane
        if lane is None or not lane.is_open:
            return False
        self.client_id = lane.client_of(call.metadata)
        if not self.client_id:
            return False
        lane.on_client(self.client_id, call)
        self.data, self.peer = request, call.peer
        calls = lane.take(self, 0, len(request), call.remaining_ms())
        if calls is None:
            return False
        assert isinstance(calls, SimCalls)
        calls.add(call, request)
        lane.end_run()
        return True

    def new_calls(self) -> "SimCalls":
        return SimCalls()


class SimCalls:
    """Calls that a lane took together; implements LaneCalls."""

    def __init__(self) -> None:
        self._calls: list[SimCall] = []
        self._requests: list[bytes] = []
        self._answered: set[int] = set()
        self._gone = 0

    def add(self, call: "SimCall", request: bytes) -> None:
        self._calls.append(call)
        self._requests.append(request)

    def request(self, index: int) -> bytes:
        return self._requests[index]

    def call(self, index: int) -> "SimCall | None":
        return self._calls[index] if index not in self._answered else None

    def answer(self, answers: Sequence[bytes]) -> None:
        for index, message in enumerate(answers):
            if message:
                self._answered.add(index)
                self._calls[index].send(message)
                self._calls[index].finish()

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        def one_gone() -> None:
            self._gone += 1
            if self._gone == len(self._calls):
                callback()

        for call in self._calls:
            call.on_cancelled(one_gone)


class SimCall(OneByOne):
    """Both ends of one call: the server's is `popmq.proxy.transport.interface.Call`."""

    encrypted = False

    def __init__(
        self,
        net: SimNet,
        client: LoopHost,
        server: LoopHost,
        metadata: Mapping[str, str],
        timeout_ms: int,
    ) -> None:
        self.metadata = metadata
        self.peer = f"{client.name}:1"
        self.on_over: Callable[[], None] = lambda: None
        self._net, self._client, self._server = net, client, server
        self._due_ms = server.clock.boot_ms() + timeout_ms
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._why = ""  # it broke off
        self._over = False  # for the client
        self._finished = False  # for the server
        self._gone = False  # the server knows it
        self._cancelled: list[Callable[[], None]] = []
        self._unread: list[Callable[[], None]] = []
        self._frames: list[bytes | None] = []

    # -- the server's end

    def remaining_ms(self) -> int:
        return max(0, self._due_ms - self._server.clock.boot_ms())

    def send(self, message: bytes) -> None:
        self._carry(message)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, detail: str = "") -> None:
        self._finished = True
        if status is not GrpcStatus.OK:
            broke = partial(self.lost, f"{status.name} {detail}")
            self._net.carry(self._server.name, self._client.name, broke)
            return
        self._carry(None)

    def on_cancelled(self, callback: Callable[[], None]) -> None:
        if self._gone:
            callback()
        else:
            self._cancelled.append(callback)

    def on_unread(self, callback: Callable[[], None]) -> None:
        self._unread.append(callback)

    def _carry(self, part: bytes | None) -> None:
        """Parts arrive in order, whatever the latency of each."""
        self._frames.append(part)
        came = partial(self._client.post, self._came)
        self._net.carry(self._server.name, self._client.name, came)

    def _came(self) -> None:
        part = self._frames.pop(0)
        if self._over:
            return
        if part is None:
            self._end()
        self._parts.put_nowait(part)

    # -- the client's end

    async def parts(self) -> AsyncIterator[bytes]:
        """The messages of the answer. Raises CallFailed if it breaks off."""
        while (part := await self._parts.get()) is not None:
            yield part
        if self._why:
            raise CallFailed(self._why)

    async def unary(self) -> bytes:
        (part,) = [item async for item in self.parts()]
        return part

    def lost(self, why: str) -> None:
        """As `broke`, from outside of the client's loop."""
        self._client.post(partial(self.broke, why))

    def broke(self, why: str) -> None:
        """The client hears that it is over; so does the server, if it lives."""
        if self._over:
            return
        self._why = why
        self._end()
        self._parts.put_nowait(None)
        left = partial(self._server.post, self._left)
        self._net.carry(self._client.name, self._server.name, left)

    def _left(self) -> None:
        """The server hears that its client is gone."""
        if self._gone:
            return
        self._gone = not self._finished
        for callback in self._unread if self._finished else self._cancelled:
            callback()

    def _end(self) -> None:
        self._over = True
        self.on_over()
