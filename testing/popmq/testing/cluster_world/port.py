"""Ports of a simulated cluster: `common/protocol/frame_port.py` and `frame_server.py` over a
`SimNet`.

Kept of the real ones: one connection that is opened again; requests made without one are
refused at once; every request ends once; who serves is told when its asker is gone.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from popmq.common.errors import DeadlineExceeded, PopmqError, Unavailable
from popmq.common.protocol.messaging_payloads import Kind, OnReply, Port
from popmq.testing.cluster_world.host import Host
from popmq.testing.cluster_world.sim_network import NetworkConnection, SimNet
from popmq.testing.cluster_world.sometimes_states import NetSometimes
from popmq.testing.cluster_world.timeline import Action

_FIRST_BACK_OFF_MS = 50
_MAX_BACK_OFF_MS = 1_000
_CONNECT_MS = 5_000
_REPEATED_KINDS = 64  # from here on: what brokers and controllers say to each other
_POP = Kind.POP

Answer = bytes | PopmqError


class SimPort:
    """One host's way to an address; it is over when the process that opened it is."""

    def __init__(
        self,
        net: SimNet,
        host: Host,
        address: str,
        *,
        on_state: Callable[[bool], None] | None = None,
    ) -> None:
        self.address = address
        self._net = net
        self._host = host
        self._life = host.life
        self._on_state = on_state
        self._connection: SimConnection | None = None
        self._first = True  # during the first attempt requests wait
        self._waiting: dict[int, tuple[Kind, bytes, int]] = {}
        self._pending: dict[int, OnReply] = {}
        self._number = 0
        self._attempt = 0
        self._back_off_ms = _FIRST_BACK_OFF_MS
        self._closed = False
        self._connect()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def usable(self) -> bool:
        """Whether a request would leave, now or when the first attempt has come to its end."""
        return not self._closed and (self._connection is not None or self._first)

    # -- messaging_payloads.Port

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self._number += 1
        number = self._number
        if self._closed or (self._connection is None and not self._first):
            on_reply(Unavailable(f"{self.address} is not connected"))
            return number
        self._pending[number] = on_reply
        late = DeadlineExceeded(f"{self.address} did not answer {kind.name} in {timeout_ms} ms")
        self._host.after(timeout_ms, partial(self._late, number, late))
        if self._connection is not None:
            self._connection.ask(number, kind, body, timeout_ms)
        else:
            self._waiting[number] = (kind, body, timeout_ms)
        return number

    def cancel(self, request_id: int) -> None:
        if self._pending.pop(request_id, None) is None:
            return
        if self._waiting.pop(request_id, None) is None and self._connection is not None:
            self._connection.tell_cancelled(request_id)

    def close(self) -> None:
        """Refuse what is pending and let the connection go, for good."""
        self._closed = True
        connection = self._connection
        self._down("the port was closed")
        if connection is not None:
            connection.close_client()

    # -- for the connection

    @property
    def over(self) -> bool:
        return self._closed or self._host.life != self._life

    def answered(self, number: int, answer: Answer) -> None:
        on_reply = self._pending.pop(number, None)
        if on_reply is not None:
            on_reply(answer)

    def lost(self, connection: "SimConnection", why: str) -> None:
        if self._connection is not connection:
            return
        self._down(why)
        self._try_again()

    # -- inside

    def _late(self, number: int, refusal: PopmqError) -> None:
        if number in self._pending:
            if self._waiting.pop(number, None) is None and self._connection is not None:
                self._connection.tell_cancelled(number)
            self.answered(number, refusal)

    def _down(self, why: str) -> None:
        was_connected, self._connection, self._first = self.connected, None, False
        self._waiting.clear()
        text = f"{self.address}: {why}; unknown whether it was done"
        for number in list(self._pending):
            self.answered(number, Unavailable(text))
        if was_connected and self._on_state is not None and not self.over:
            self._on_state(False)

    def _connect(self) -> None:
        """Say hello; what comes back, or does not, decides."""
        if self.over:
            return
        self._attempt += 1
        attempt, host, net = self._attempt, self._host, self._net
        target = net.listeners.get(self.address)
        name = target[0].name if target is not None else self.address
        net.carry(host.name, name, partial(self._knock, attempt, name))
        host.after(_CONNECT_MS, partial(self._refused, attempt, "no answer"))

    def _knock(self, attempt: int, name: str) -> None:
        """At the other side."""
        net, listener = self._net, self._net.listener(self.address)
        if listener is None:
            if net.is_off(self.address):
                return
            back = partial(self._refused, attempt, "connection refused")
            net.carry(name, self._host.name, partial(self._host.post, back))
            return
        server, port = listener

        def accept() -> None:
            connection = SimConnection(net, self, self._host, server, port)
            up = partial(self._up, attempt, connection)
            net.carry(server.name, self._host.name, partial(self._host.post, up))

        server.post(accept)

    def _up(self, attempt: int, connection: "SimConnection") -> None:
        if self.over or self._connection is not None or attempt != self._attempt:
            connection.close_client()
            return
        if not connection.client_open:  # broken before it was known
            self._refused(attempt, "connection reset")
            return
        self._attempt += 1
        self._connection, self._first = connection, False
        self._back_off_ms = _FIRST_BACK_OFF_MS
        waiting, self._waiting = self._waiting, {}
        for number, (kind, body, timeout_ms) in waiting.items():
            connection.ask(number, kind, body, timeout_ms)
        if self._on_state is not None:
            self._on_state(True)

    def _refused(self, attempt: int, why: str) -> None:
        if self._connection is None and attempt == self._attempt and not self.over:
            self._down(why)
            self._try_again()

    def _try_again(self) -> None:
        self._attempt += 1
        self._host.after(self._back_off_ms, self._connect)
        self._back_off_ms = min(2 * self._back_off_ms, _MAX_BACK_OFF_MS)


class SimConnection(NetworkConnection):
    """Both ends; each learns of the other's end when the network lets it."""

    def __init__(self, net: SimNet, asker: SimPort, client: Host, server: Host, port: Port) -> None:
        self.hosts = (client.name, server.name)
        self.address = asker.address
        self._net = net
        self._asker = asker
        self._port = port
        self._ends = (_End(client), _End(server))
        self._in_flight: dict[int, int] = {}  # the asker's number -> the port's
        self._answered: dict[int, int] = {}  # pops whose answer may cross with a cancel
        self._number = net.opened(self)

    @property
    def client_open(self) -> bool:
        return self._ends[0].open

    # -- what the asker does

    def ask(self, number: int, kind: Kind, body: bytes, timeout_ms: int) -> None:
        net = self._net
        arrive = partial(self._arrived, number, kind, body, timeout_ms)
        send = partial(self._send, 0, arrive)
        if not net.held.hold(kind, send, answer=False):
            send()
        if kind >= _REPEATED_KINDS and net.manners.twice > net.rng.random():
            net.tally.hit(NetSometimes.TWICE)
            self._send(0, partial(self._arrived, -number, kind, body, timeout_ms))

    def tell_cancelled(self, number: int) -> None:
        self._send(0, partial(self._cancelled, number))

    def close_client(self) -> None:
        self._drop(0, "closed")

    def close_server(self) -> None:
        """Who serves here lets the asker go."""
        self._drop(1, "closed by the peer")

    # -- what the network does

    def break_off(self, why: str) -> None:
        self._net.tally.hit(NetSometimes.RESET)
        self._drop(0, why, tell=False)
        self._drop(1, why, tell=False)

    def host_gone(self, name: str, *, quietly: bool) -> None:
        end = self.hosts.index(name)
        self._close(end)
        self._ends[end].off = quietly
        if not self._ends[1 - end].open:
            return
        if quietly:
            self._net.tally.hit(NetSometimes.HALF_OPEN)
            self._give_up_later(1 - end)
        else:
            self._tell(end)

    # -- inside

    def _send(self, end: int, action: Action) -> None:
        """To the other end's loop, in order where the network keeps it."""
        mine, net = self._ends[end], self._net
        if not mine.open:
            return
        mine.sent += 1
        if net.link(self.hosts[end], self.hosts[1 - end]).cut:
            self._give_up_later(end)
        if net.manners.unruly:
            net.carry(self.hosts[end], self.hosts[1 - end], partial(self._came, end, action))
            return
        mine.frames.append(action)
        net.carry(
            self.hosts[end], self.hosts[1 - end], lambda: self._came(end, mine.frames.popleft())
        )

    def _came(self, end: int, action: Action) -> None:
        self._ends[end].came += 1
        other = self._ends[1 - end]
        if other.open:
            other.host.post(lambda: action() if other.open else None)
        elif other.host.up or not other.off:
            self._tell(1 - end)

    def _give_up_later(self, end: int) -> None:
        mine, net = self._ends[end], self._net
        expected = mine.sent

        def look() -> None:
            if mine.open and mine.came < expected:
                net.tally.hit(NetSometimes.PATIENCE)
                self._drop(end, "no sign of life")

        patience_ms = net.manners.patience_ms
        net.timeline.after(net.rng.randrange(patience_ms // 4, patience_ms), look)

    def _drop(self, end: int, why: str, *, tell: bool = True) -> None:
        mine = self._ends[end]
        if not mine.open:
            return
        self._close(end)
        if tell:
            self._tell(end)
        mine.host.post(partial(self._over, end, why))

    def _close(self, end: int) -> None:
        self._ends[end].open = False
        if not self._ends[1 - end].open:
            self._net.ended(self._number)

    def _tell(self, end: int) -> None:
        """The other end hears that this one is closed, when the link lets it."""
        other = 1 - end
        reset = partial(self._drop, other, "connection reset", tell=False)
        self._net.carry(self.hosts[end], self.hosts[other], reset)

    def _over(self, end: int, why: str) -> None:
        if end == 0:
            self._asker.lost(self, why)
            return
        in_flight, self._in_flight = self._in_flight, {}
        self._answered.clear()
        for port_id in in_flight.values():
            if port_id:
                self._port.cancel(port_id)

    def _arrived(self, number: int, kind: Kind, body: bytes, timeout_ms: int) -> None:
        self._in_flight[number] = 0
        on_reply = partial(self._reply, number, kind)
        try:
            port_id = self._port.request(kind, body, timeout_ms, on_reply)
        except PopmqError as refusal:
            on_reply(refusal)
            return
        if number in self._in_flight:
            self._in_flight[number] = port_id
        elif number in self._answered:
            self._answered[number] = port_id

    def _reply(self, number: int, kind: Kind, answer: Answer) -> None:
        port_id = self._in_flight.pop(number, None)
        if port_id is None:
            return
        if kind is _POP:
            self._answered[number] = port_id
        send = partial(self._send, 1, partial(self._asker.answered, number, answer))
        if number > 0 and not self._net.held.hold(kind, send, answer=True):
            send()

    def _cancelled(self, number: int) -> None:
        port_id = self._in_flight.pop(number, None)
        if port_id is None:
            port_id = self._answered.pop(number, None)
        if port_id:
            self._port.cancel(port_id)


class _End:
    """One end: whether it is open, and the frames on their way from it."""

    __slots__ = ("came", "frames", "host", "off", "open", "sent")

    def __init__(self, host: Host) -> None:
        self.host = host
        self.open = True
        self.off = False  # its machine went down with it
        self.sent = self.came = 0
        self.frames: deque[Action] = deque()
