"""ControllerServer: registration and routes over frames (implements `hop.Port`)."""

import asyncio
import logging

from google.protobuf.message import DecodeError

from popmq.common.clock import Clock
from popmq.common.errors import Code, PopmqError, Refused
from popmq.common.hop import Kind, OnReply
from popmq.common.observe import Metric, MetricKind
from popmq.common.wire.controller_pb2 import (
    BrokerAddress,
    RegisterReply,
    RegisterRequest,
    RoutesReply,
    RoutesRequest,
)
from popmq.controller.routes import BROKER_LIMIT, Route, Routes

logger = logging.getLogger(__name__)

WAITER_LIMIT = 10_000
MAX_WAIT_MS = 60_000


class ControllerServer:
    def __init__(
        self, routes: Routes, clock: Clock, *, heartbeat_ms: int, dead_after_ms: int
    ) -> None:
        self._routes = routes
        self._clock = clock
        self._heartbeat_ms = heartbeat_ms
        self._dead_after_ms = dead_after_ms
        self._number = 0
        self._refused: dict[str, int] = {}  # by broker name, what was refused last
        self._waiting: dict[int, tuple[OnReply, asyncio.TimerHandle]] = {}

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self._number += 1
        try:
            match kind:
                case Kind.REGISTER:
                    on_reply(self._register(RegisterRequest.FromString(body)))
                case Kind.ROUTES:
                    self._tell_routes(RoutesRequest.FromString(body), on_reply)
                case _:
                    raise Refused(
                        Code.UNSUPPORTED, f"a controller does not serve requests of kind {kind}"
                    )
        except PopmqError as error:
            on_reply(error)
        except DecodeError:
            on_reply(Refused(Code.BAD_REQUEST, f"the request is no {kind.name}"))
        return self._number

    def cancel(self, request_id: int) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting[1].cancel()

    def stop(self) -> None:
        """Answer everybody who waits for a change."""
        for number in list(self._waiting):
            self._answer(number)

    def metrics(self) -> list[Metric]:
        now_ms = self._clock.boot_ms()
        known = self._routes.all()
        silent = [self._routes.silent_ms(route.broker, now_ms=now_ms) for route in known]
        alive = sum(1 for ms in silent if ms <= self._dead_after_ms)
        gauge = MetricKind.GAUGE
        return [
            Metric("controller_brokers", "Broker groups known.", len(known), gauge),
            Metric("controller_brokers_alive", "Heard of lately.", alive, gauge),
            Metric(
                "controller_routes_version", "Moves with the routes.", self._routes.version, gauge
            ),
        ]

    def _register(self, request: RegisterRequest) -> bytes:
        broker = request.broker
        route = Route(broker.broker, broker.address, broker.epoch, broker.store_id)
        try:
            changed = self._routes.register(request.cluster, route, now_ms=self._clock.boot_ms())
        except PopmqError as error:
            self._log_refused(route, error)
            raise
        if changed:
            self._refused.pop(route.broker, None)
            logger.info(
                "route changed",
                extra={"broker": route.broker, "address": route.address, "epoch": route.epoch},
            )
            self.stop()
        return RegisterReply(heartbeat_ms=self._heartbeat_ms).SerializeToString()

    def _log_refused(self, route: Route, error: PopmqError) -> None:
        """Once for each route: a broker that is refused tries again with every heartbeat."""
        name, seen = route.broker[:100], hash(route)
        if self._refused.get(name) == seen:
            return
        if len(self._refused) >= BROKER_LIMIT:
            self._refused.clear()
        self._refused[name] = seen
        logger.warning("registration refused", extra={"broker": name, "reason": str(error)})

    def _tell_routes(self, request: RoutesRequest, on_reply: OnReply) -> None:
        wait_ms = min(request.wait_ms, MAX_WAIT_MS)
        unchanged = request.known_version == self._routes.version
        if not unchanged or wait_ms <= 0 or len(self._waiting) >= WAITER_LIMIT:
            on_reply(self._reply())
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(wait_ms / 1000, self._answer, self._number)
        self._waiting[self._number] = (on_reply, timer)

    def _answer(self, number: int) -> None:
        on_reply, timer = self._waiting.pop(number)
        timer.cancel()
        on_reply(self._reply())

    def _reply(self) -> bytes:
        brokers = [
            BrokerAddress(
                broker=route.broker,
                address=route.address,
                epoch=route.epoch,
                store_id=route.store_id,
            )
            for route in self._routes.all()
        ]
        return RoutesReply(version=self._routes.version, brokers=brokers).SerializeToString()
