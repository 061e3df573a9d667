"""Tells the brokers which clients were heard here, once a second, and who said good-bye (D6).

Any call of a client counts.  The brokers keep the deliveries of a push consumer invisible
while it lives; this is all that they need for it, through any number of proxies.  What they
answer is for the clients that have a stream here: lite topics that they are to forget.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from google.protobuf.message import DecodeError

from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import ClientsReport, Kind, encode_clients
from popmq.common.wire.lite_pb2 import LiteNotices
from popmq.proxy.brokers.broker_ports import BrokerPorts

logger = logging.getLogger(__name__)

REPORT_S = 1.0
REPORT_TIMEOUT_MS = 5_000
CLIENTS_PER_REPORT = 1_000


class ClientReporter:
    def __init__(
        self,
        brokers: BrokerPorts,
        listens: Callable[[str], bool],
        on_ended: Callable[[str, Sequence[str]], None],
    ) -> None:
        """`listens`: whether that client can be told here of lite topics that ended, which
        `on_ended` does."""
        self._brokers = brokers
        self._listens = listens
        self._on_ended = on_ended
        self._heard: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Report once a second from now on; must be called on the loop."""
        self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._tick)

    def mark_seen(self, client_id: str) -> None:
        self._heard.add(client_id)

    def on_client_closed(self, client_id: str) -> None:
        """At once: its messages should go to others now."""
        self._heard.discard(client_id)
        self._tell(ClientsReport(closed=[client_id]))

    def stop(self) -> None:
        """Report what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._report()

    def _tick(self) -> None:
        self._report()
        self.start()

    def _report(self) -> None:
        heard, self._heard = sorted(self._heard), set()
        for at in range(0, len(heard), CLIENTS_PER_REPORT):
            some = heard[at : at + CLIENTS_PER_REPORT]
            self._tell(
                ClientsReport(alive=some, listening_clients=list(filter(self._listens, some)))
            )

    def _tell(self, report: ClientsReport) -> None:
        body = encode_clients(report)
        for name in self._reachable():
            self._brokers.port(name).request(Kind.CLIENTS, body, REPORT_TIMEOUT_MS, self._answered)

    def _answered(self, answer: bytes | PopmqError) -> None:
        if not answer or isinstance(answer, PopmqError):
            return
        try:
            notices = LiteNotices.FromString(answer)
        except DecodeError:
            logger.error("what a broker has to tell clients cannot be read")
            return
        for one in notices.ended:
            self._on_ended(one.client_id, one.names)

    def _reachable(self) -> Iterator[str]:
        for name in self._brokers.names():
            try:
                self._brokers.port(name)
            except PopmqError:
                continue  # it hears from us when it is back
            yield name
