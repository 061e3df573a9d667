"""Reports to the brokers, once a second, which clients are alive here and which disconnected (D6).

Any call of a client counts.  The brokers keep the deliveries of a push consumer invisible
while it lives; this is all that they need for it, through any number of proxies.  What they
answer is for the clients that have a stream here: lite topics that they are to forget.

A report has descriptions of the clients that are new or have changed (`client_directory.py`).
A broker that lacks one, since it has just started or a report was lost, says so in its answer.

A good-bye counts only from the address that the client's other calls come from: it returns the
client's deliveries, so nobody else may send it (docs/security.md).
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from google.protobuf.message import DecodeError

from popmq.common.address import host_of
from popmq.common.clock import Clock
from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import ClientsReport, Kind, encode_clients
from popmq.common.quantities import KIB
from popmq.common.wire.admin_pb2 import DescribedClients
from popmq.common.wire.lite_pb2 import LiteNotices
from popmq.proxy.brokers.broker_ports import BrokerPorts
from popmq.proxy.messaging.client_directory import ClientDirectory
from popmq.proxy.rpc.wire_scan import chunk
from popmq.proxy.transport.interface import Caller

logger = logging.getLogger(__name__)

REPORT_S = 1.0
REPORT_TIMEOUT_MS = 5_000
CLIENTS_PER_REPORT = 1_000
DESCRIBED_BYTES = 256 * KIB  # in one report
SILENCE_MS = 30_000
ADDRESSES_LIMIT = 100_000
_CLIENTS = DescribedClients.CLIENTS_FIELD_NUMBER


class ClientAddresses:
    """The address of each client: that of its first call, and after 30 s without a call from there
    that of the next one.  At the bound the client that was silent for longest is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By hash, which an attacker cannot choose: ids may be long.
        self._hosts: OrderedDict[int, tuple[str, int]] = OrderedDict()

    def on_call(self, client_id: str, host: str) -> None:
        now_ms = self._clock.boot_ms()
        number = hash(client_id)
        known = self._hosts.get(number)
        if known is not None and known[0] != host and now_ms - known[1] < SILENCE_MS:
            return
        self._hosts[number] = host, now_ms
        self._hosts.move_to_end(number)
        if len(self._hosts) > ADDRESSES_LIMIT:
            self._hosts.popitem(last=False)

    def is_from(self, client_id: str, host: str) -> bool:
        known = self._hosts.get(hash(client_id))
        return known is not None and known[0] == host


class ClientReporter:
    def __init__(
        self,
        brokers: BrokerPorts,
        directory: ClientDirectory,
        clock: Clock,
        proxy: Callable[[], str],
        listens: Callable[[str], bool],
        on_ended: Callable[[str, Sequence[str]], None],
    ) -> None:
        """`proxy` is the name of this one among all; `listens`: whether that client can be told
        here of lite topics that ended, which `on_ended` does."""
        self._brokers = brokers
        self._directory = directory
        self._proxy = proxy
        self._listens = listens
        self._on_ended = on_ended
        self._addresses = ClientAddresses(clock)
        self._heard: dict[str, str] = {}  # the address of the first call since the last report
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Report once a second from now on; must be called on the loop."""
        self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._tick)

    def mark_seen(self, client_id: str, peer: str = "") -> None:
        if self._heard.get(client_id) != peer:
            self._heard.setdefault(client_id, peer)
            self._addresses.on_call(client_id, host_of(peer))

    def may_close(self, client_id: str, peer: str) -> bool:
        """Whether a good-bye from there is that client's own."""
        return self._addresses.is_from(client_id, host_of(peer))

    def on_call(self, client_id: str, call: Caller) -> None:
        """A gRPC client called."""
        self.mark_seen(client_id, call.peer)
        self._directory.on_call(client_id, call)

    def on_client_closed(self, client_id: str) -> None:
        """At once: its messages should go to others now."""
        self._heard.pop(client_id, None)
        self._directory.on_closed(client_id)
        self._tell(ClientsReport(closed=[client_id]))

    def stop(self) -> None:
        """Report what is left, and that its clients go elsewhere."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.report()
        for some in _pieces(self._directory.take_left(everybody=True)):
            self._tell(self._described(left=some))

    def _tick(self) -> None:
        self.report()
        self.start()

    def report(self) -> None:
        """Now, besides once a second."""
        connected, self._heard = sorted(self._heard), {}
        described = [client_id for client_id in connected if self._directory.mark_seen(client_id)]
        self._directory.forget_silent()
        # First, so that no broker asks for those that are new.
        for report in self._descriptions(self._directory.take_changed()):
            self._tell(report)
        for some in _pieces(self._directory.take_left()):
            self._tell(self._described(left=some))
        # Brokers ask for a description of the others in vain.
        others = sorted({*connected}.difference(described))
        for clients, tail in ((described, self._described().described), (others, b"")):
            for some in _pieces(clients):
                listening = list(filter(self._listens, some))
                report = ClientsReport(alive=some, listening_clients=listening, described=tail)
                self._tell(report)

    def _descriptions(self, contents: Sequence[bytes]) -> Iterator[ClientsReport]:
        """In as many reports as their size needs."""
        some: list[bytes] = []
        size = 0
        for content in contents:
            if size + len(content) > DESCRIBED_BYTES:
                yield self._described(some)
                some, size = [], 0
            some.append(content)
            size += len(content)
        if some:
            yield self._described(some)

    def _described(self, clients: Sequence[bytes] = (), left: Sequence[str] = ()) -> ClientsReport:
        described = DescribedClients(proxy=self._proxy(), left=left).SerializeToString()
        contents = (chunk(_CLIENTS, content) for content in clients)
        return ClientsReport(described=b"".join((described, *contents)))

    def _tell(self, report: ClientsReport) -> None:
        body = encode_clients(report)
        for name in self._reachable():
            self._send(name, body)

    def _send(self, broker: str, body: bytes) -> None:
        then = partial(self._answered, broker)
        self._brokers.port(broker).request(Kind.CLIENTS, body, REPORT_TIMEOUT_MS, then)

    def _answered(self, broker: str, answer: bytes | PopmqError) -> None:
        if not answer or isinstance(answer, PopmqError):
            return
        try:
            notices = LiteNotices.FromString(answer)
        except DecodeError:
            logger.error("what a broker has to tell clients cannot be read")
            return
        for notice in notices.ended:
            self._on_ended(notice.client_id, notice.names)
        try:
            for report in self._descriptions(self._directory.contents(notices.undescribed)):
                self._send(broker, encode_clients(report))
        except PopmqError:
            return  # it is away again, and asks when it is back

    def _reachable(self) -> Iterator[str]:
        for name in self._brokers.names():
            try:
                self._brokers.port(name)
            except PopmqError:
                continue  # it hears from us when it is back
            yield name


def _pieces(clients: Sequence[str]) -> Iterator[Sequence[str]]:
    """As many as fit in one report."""
    for at in range(0, len(clients), CLIENTS_PER_REPORT):
        yield clients[at : at + CLIENTS_PER_REPORT]
