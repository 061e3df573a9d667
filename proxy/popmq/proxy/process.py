"""The proxy as a process: transport, routes, and connections to the brokers."""

from collections.abc import Callable, Sequence

from popmq.common.clock import Clock, SystemClock
from popmq.common.config import Settings, parse_address
from popmq.common.errors import ConfigError
from popmq.common.frame_port import FramePort
from popmq.common.frames import FrameSettings, Hello, Role
from popmq.common.hop import Port
from popmq.common.observe import Metric, MetricKind
from popmq.proxy.brokers import ClosablePort, RoutedBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.transport.grpcio_server import GrpcioTransport

STOP_GRACE_S = 2.0

OpenPort = Callable[[str, str], ClosablePort]


class ProxyProcess:
    def __init__(
        self,
        settings: Settings,
        controller: Port,
        open_port: OpenPort,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        clock = clock or SystemClock()
        self._routed = RoutedBrokers(controller, open_port, clock)
        self._proxy = Proxy(settings, self._routed, clock)
        self._transport: GrpcioTransport | None = None
        self._controller_port: FramePort | None = None

    @classmethod
    def over_frames(cls, settings: Settings) -> "ProxyProcess":
        """A proxy that finds the controller and the brokers over the network."""
        hello = Hello(role=Role.PROXY, name=settings.proxy.listen, cluster=settings.cluster.name)
        frames = FrameSettings(
            max_frame_bytes=settings.frames.max_frame_bytes,
            max_buffered_bytes=settings.frames.max_buffered_bytes,
            max_in_flight=settings.frames.max_in_flight,
        )

        def open_port(name: str, address: str) -> FramePort:
            port = FramePort(address, hello, settings=frames, peer_name=f"broker {name}")
            port.start()
            return port

        # One controller is asked; the others are for when several run (the replication issue).
        where = settings.controller.addresses[0]
        controller = FramePort(where, hello, settings=frames, peer_name=f"controller {where}")
        made = cls(settings, controller, open_port)
        made._controller_port = controller
        return made

    async def listen(self) -> str:
        """Serve clients and start to follow the routes; returns the address."""
        if self._controller_port is not None:
            self._controller_port.start()
        self._routed.start()
        host, port = parse_address(self._settings.proxy.listen)
        transport = GrpcioTransport(self._proxy.methods(), host, port)
        try:
            taken = await transport.start()
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._settings.proxy.listen}: another process does, or it is "
                "no address of this machine (proxy.listen, --port)"
            ) from error
        self._transport = transport
        self._proxy.listening_on(host, taken)
        self._proxy.clients.start()
        return self._proxy.endpoint

    async def routed(self) -> None:
        """Wait for the first routes."""
        while not self.has_routes:
            self._routed.changed.clear()
            await self._routed.changed.wait()

    @property
    def has_routes(self) -> bool:
        return bool(self._routed.names())

    @property
    def brokers(self) -> Sequence[str]:
        return self._routed.names()

    async def stop(self) -> None:
        """Answer the receives that wait, give calls in progress a moment, then cut them."""
        self._proxy.drain()
        if self._transport is not None:
            await self._transport.stop(STOP_GRACE_S)
        await self._routed.stop()
        if self._controller_port is not None:
            await self._controller_port.close()

    async def kill(self) -> None:
        """Cut every connection at once, as the end of the process would."""
        if self._transport is not None:
            await self._transport.stop(0)
        self._proxy.clients.stop()
        await self._routed.stop()
        if self._controller_port is not None:
            await self._controller_port.close()

    def metrics(self) -> list[Metric]:
        counts = self._proxy.metrics
        gauge = MetricKind.GAUGE
        return [
            Metric("proxy_sends", "Messages stored for clients.", counts.sends),
            Metric("proxy_receives", "ReceiveMessage calls.", counts.receives),
            Metric("proxy_received", "Messages handed to clients.", counts.received),
            Metric("proxy_acks", "Acks answered OK.", counts.acks),
            Metric("proxy_changes", "Invisible durations changed.", counts.changes),
            Metric("proxy_open_streams", "Telemetry streams.", counts.open_streams, gauge),
            Metric("proxy_waiting_receives", "Long polls.", counts.waiting_receives, gauge),
            *(
                Metric("proxy_refused", "Refusals by code.", count, labels={"code": str(code)})
                for code, count in counts.refused.items()
            ),
        ]
