"""The routes of one controller, followed by long polls; several are followed side by side.

While a controller is away its last word stays.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from google.protobuf.message import DecodeError

from popmq.common.errors import PopmqError
from popmq.common.protocol.messaging_payloads import Kind, Port
from popmq.common.wire import controller_pb2

logger = logging.getLogger(__name__)

ROUTES_WAIT_MS = 10_000
ROUTES_TIMEOUT_MS = ROUTES_WAIT_MS + 5_000
RETRY_MS = 500
SAME_VERSION_MS = 50  # a controller that answers early with nothing new is not asked in a loop

_NO_ROUTES: Mapping[str, controller_pb2.BrokerAddress] = MappingProxyType({})


class RouteWatch:
    """`on_routes` is called with this object after each answer; it must not be asked to stop."""

    def __init__(self, controller: Port, on_routes: Callable[["RouteWatch"], None]) -> None:
        self.brokers = _NO_ROUTES  # by broker group
        self.owner = ""
        self.absent: Sequence[str] = ()  # groups that the controller has not heard yet
        self._controller = controller
        self._on_routes = on_routes
        self._version = 0
        self._asking: int | None = None
        self._again: asyncio.TimerHandle | None = None
        self._stopped = False

    def start(self) -> None:
        """Ask for routes until `stop`; must be called on the loop."""
        self._again = None
        request = controller_pb2.RoutesRequest(known_version=self._version, wait_ms=ROUTES_WAIT_MS)
        body = request.SerializeToString()
        self._asking = self._controller.request(
            Kind.ROUTES, body, ROUTES_TIMEOUT_MS, self._answered
        )

    def stop(self) -> None:
        self._stopped = True
        if self._again is not None:
            self._again.cancel()
        if self._asking is not None:
            self._controller.cancel(self._asking)

    def _answered(self, answer: bytes | PopmqError) -> None:
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
        """Keep the routes; return how long to wait before asking again."""
        self.brokers = {broker.broker: broker for broker in routes.brokers}
        self.owner = routes.owner
        self.absent = routes.absent
        self._on_routes(self)
        same = routes.version == self._version
        self._version = routes.version
        return SAME_VERSION_MS if same else 0
