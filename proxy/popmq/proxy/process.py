"""The proxy as a process: transport, routes, and connections to the brokers."""

from collections.abc import Callable, Sequence
from pathlib import Path

from popmq.common.clock import Clock, SystemClock
from popmq.common.errors import ConfigError
from popmq.common.loop_iteration import LoopIteration
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.common.protocol.frame_port import FramePort
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Port
from popmq.common.settings.settings import Settings, parse_address
from popmq.proxy.brokers.broker_ports import ClosablePort, RoutedBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.rpc.metrics import proxy_metrics
from popmq.proxy.transport.interface import Transport
from popmq.proxy.transport.lean.bounds import CONNECTION_BOUNDS, STREAM_BOUNDS, TLS_REFUSALS
from popmq.proxy.transport.lean.self_signed import certificates_of
from popmq.proxy.transport.lean.server import LeanTransport

STOP_GRACE_S = 2.0

OpenPort = Callable[[str, str], ClosablePort]


class ProxyProcess:
    def __init__(
        self,
        settings: Settings,
        controllers: Sequence[Port],
        open_port: OpenPort,
        *,
        clock: Clock | None = None,
        tls_folder: Path | None = None,
        turn: LoopIteration | None = None,
    ) -> None:
        """In `tls_folder` a certificate of our own making is kept, if none is set.

        `turn` is that of the ports which `open_port` makes.
        """
        self._settings = settings
        self._tls_folder = tls_folder
        clock = clock or SystemClock()
        self._routed = RoutedBrokers(controllers, open_port, clock, self._resend_lites)
        self._turn = turn or LoopIteration()
        self._proxy = Proxy(settings, self._routed, clock, controllers, self._turn.call_at_end)
        self._transport: Transport | None = None
        self._controller_ports: list[FramePort] = []
        self._shares_port = False

    @classmethod
    def over_frames(cls, settings: Settings, *, worker: int = 0) -> "ProxyProcess":
        """A proxy that finds the controller and the brokers over the network.

        `worker` counts those that share a port, from 1; 0 has it alone.
        """
        name = f"{settings.proxy.listen}/{worker}" if worker else settings.proxy.listen
        hello = Hello(role=ProcessRole.PROXY, name=name, cluster=settings.cluster.name)
        turn = LoopIteration()
        frames = FrameSettings(
            max_frame_bytes=settings.frames.max_frame_bytes,
            max_buffered_bytes=settings.frames.max_buffered_bytes,
            max_in_flight=settings.frames.max_in_flight,
        )

        def open_port(name: str, address: str) -> FramePort:
            port = FramePort(address, hello, settings=frames, peer_name=f"broker {name}", turn=turn)
            port.start()
            return port

        controllers = [
            FramePort(where, hello, settings=frames, peer_name=f"controller {where}")
            for where in settings.controller.addresses
        ]
        made = cls(settings, controllers, open_port, turn=turn)
        made._controller_ports = controllers
        made._shares_port = worker > 0
        return made

    async def listen(self) -> str:
        """Serve clients and start to follow the routes; returns the address."""
        for controller in self._controller_ports:
            controller.start()
        self._routed.start()
        host, port = parse_address(self._settings.proxy.listen)
        transport = self._make_transport(host, port)
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
        self._proxy.checks.start()
        return self._proxy.endpoint

    def _resend_lites(self, broker_group: str) -> None:
        self._proxy.lites.resend_to(broker_group)

    def _make_transport(self, host: str, port: int) -> Transport:
        methods = self._proxy.methods()
        if self._settings.proxy.transport == "lean":
            return LeanTransport(
                methods,
                host,
                port,
                limits=self._settings.lean,
                reuse_port=self._shares_port,
                certificates=certificates_of(self._settings.proxy, self._tls_folder),
                tls_only=self._settings.proxy.tls == "only",
                turn=self._turn,
            )
        from popmq.proxy.transport.grpcio_server import (
            GrpcioTransport,  # 60 ms of every other start
        )

        return GrpcioTransport(methods, host, port)

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
        for controller in self._controller_ports:
            await controller.close()

    async def kill(self) -> None:
        """Cut every connection at once, as the end of the process would."""
        if self._transport is not None:
            await self._transport.stop(0)
        self._proxy.clients.stop()
        self._proxy.checks.stop()
        await self._routed.stop()
        for controller in self._controller_ports:
            await controller.close()

    def metrics(self) -> list[Metric]:
        found = proxy_metrics(self._proxy.metrics)
        found.append(reading("proxy_retried", self._routed.retries))
        found.append(reading("proxy_waiting_for_master", self._routed.waiting))
        if isinstance(self._transport, LeanTransport):
            found += lean_metrics(self._transport)
        return found


def lean_metrics(transport: LeanTransport) -> list[Metric]:
    counts = transport.counters
    found = [
        reading("proxy_lean_connections", counts.connections),
        reading("proxy_lean_streams", counts.streams),
        reading("proxy_lean_incoming_bytes", counts.incoming_bytes),
        reading("proxy_lean_calls", counts.calls),
        reading("proxy_lean_faults", counts.faults),
        reading("proxy_lean_idle_closed", counts.idle_closed),
        reading("proxy_lean_aged", counts.aged),
    ]
    found += [
        reading("proxy_lean_tls_refused", counts.tls_refused[why], why) for why in TLS_REFUSALS
    ]
    if (certificates := transport.certificates) is not None:
        found.append(reading("proxy_lean_tls_reloads", certificates.reloaded))
        found.append(reading("proxy_lean_tls_reload_failures", certificates.refused))
    for bound in (*CONNECTION_BOUNDS, *STREAM_BOUNDS):
        found.append(reading("proxy_lean_cut_off", counts.cut_off[bound], bound))
    return found
