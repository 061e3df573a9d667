"""The proxy as a process: transport, routes, and connections to the brokers."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from popmq.common.admin_endpoint import AdminEndpoint
from popmq.common.admin_socket import AdminSocket, SharedAdmin, bind_admin
from popmq.common.clock import Clock, SystemClock
from popmq.common.errors import ConfigError
from popmq.common.loop_iteration import LoopIteration
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.common.protocol.frame_port import FramePort
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Port
from popmq.common.settings.settings import (
    UNIX,
    Settings,
    format_address,
    parse_address,
    runtime_folder,
)
from popmq.proxy.admin.admin_port import (
    MAX_CONNECTIONS,
    AdminPort,
    only_for,
    refused,
)
from popmq.proxy.brokers.broker_ports import ClosablePort, RoutedBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.remoting.service import GroupPort
from popmq.proxy.rpc.health import Health
from popmq.proxy.rpc.metrics import proxy_metrics
from popmq.proxy.rpc.reflection import Reflection
from popmq.proxy.rpc.rpc import SERVICE
from popmq.proxy.transport.interface import Method, OtherProtocol, Transport
from popmq.proxy.transport.lean.bounds import CONNECTION_BOUNDS, STREAM_BOUNDS, TLS_REFUSALS
from popmq.proxy.transport.lean.self_signed import certificates_of
from popmq.proxy.transport.lean.server import LeanTransport

logger = logging.getLogger(__name__)

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
        worker: int = 0,
        shared_admin: SharedAdmin | None = None,
    ) -> None:
        """In `tls_folder` a certificate of our own making is kept, if none is set.

        `turn` is that of the ports which `open_port` makes.  `worker` counts those that share a
        port, from 1; 0 has it alone.  `shared_admin` is their admin port.
        """
        self._settings = settings
        self._tls_folder = tls_folder
        clock = clock or SystemClock()
        self._routed = RoutedBrokers(controllers, open_port, clock, self._resend_lites)
        self._turn = turn or LoopIteration()
        at_end = self._turn.call_at_end
        self._proxy = Proxy(settings, self._routed, clock, controllers, at_end, worker)
        self._transport: Transport | None = None
        self._remoting: list[LeanTransport] = []  # on ports of their own
        self._controller_ports: list[FramePort] = []
        self._stopping = False
        self._shares_port = worker > 0
        self._shared_admin = shared_admin
        self._admin: AdminPort | None = None
        self._own_admin: AdminSocket | None = None

    @classmethod
    def over_frames(
        cls, settings: Settings, *, worker: int = 0, shared_admin: SharedAdmin | None = None
    ) -> "ProxyProcess":
        """A proxy that finds the controller and the brokers over the network."""
        name = f"{settings.proxy.listen}/{worker}" if worker else settings.proxy.listen
        hello = Hello(role=ProcessRole.PROXY, name=name, cluster=settings.cluster.name)
        turn = LoopIteration()
        frames = FrameSettings.of(settings)

        def open_port(name: str, address: str) -> FramePort:
            port = FramePort(address, hello, settings=frames, peer_name=f"broker {name}", turn=turn)
            port.start()
            return port

        controllers = [
            FramePort(where, hello, settings=frames, peer_name=f"controller {where}")
            for where in settings.controller.addresses
        ]
        over_frames = cls(
            settings, controllers, open_port, turn=turn, worker=worker, shared_admin=shared_admin
        )
        over_frames._controller_ports = controllers
        return over_frames

    async def listen(self) -> str:
        """Serve clients and start to follow the routes; returns the address.

        Raises ConfigError for an address that would be open to anybody without a decision.
        """
        self._settings.check_client_ports()
        for controller in self._controller_ports:
            controller.start()
        self._routed.start()
        self._proxy.access.start()
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
        await self._listen_admin()
        await self._listen_remoting()
        self._proxy.clients.start()
        self._proxy.checks.start()
        self._proxy.remoting.start()
        return self._proxy.endpoint

    def _resend_lites(self, broker_group: str) -> None:
        self._proxy.lites.resend_to(broker_group)

    def _make_transport(self, host: str, port: int) -> Transport:
        if self._settings.proxy.transport == "lean":
            return self._make_lean(host, port)
        try:
            # Only here: grpcio is of the extra popmq[grpcio], and takes 60 ms of a start.
            from popmq.proxy.transport.grpcio_server import GrpcioTransport
        except ImportError as error:
            raise ConfigError(
                f"proxy.transport = grpcio needs {error.name}: pip install 'popmq[grpcio]'"
            ) from error
        return GrpcioTransport(self._public_methods(), host, port)

    def _make_lean(self, host: str, port: int, other: OtherProtocol | None = None) -> LeanTransport:
        transport = LeanTransport(
            self._public_methods(),
            host,
            port,
            limits=self._settings.lean,
            reuse_port=self._shares_port,
            certificates=certificates_of(self._settings.proxy, self._tls_folder),
            tls_only=self._settings.proxy.tls == "only",
            turn=self._turn,
            other=other or self._proxy.remoting,
        )
        self._proxy.access.peers.add_port(transport.peers)
        return transport

    def _public_methods(self) -> list[Method]:
        """Health and reflection are for anybody, and count in no limit of users."""
        open_methods = Health(lambda: self.is_ready, (SERVICE.strip("/"),)).methods()
        if self._settings.proxy.reflection:
            open_methods += Reflection().methods()
        if self._settings.proxy.admin_on_public:
            return [*self._proxy.methods(), *open_methods]
        admin = refused(self._proxy.admin_methods(), lambda: self._admin_endpoint)
        return [*self._proxy.messaging_methods(), *admin, *open_methods]

    async def _listen_admin(self) -> None:
        shared = self._shared_admin
        if shared is None and self._shares_port:
            return  # the parent could not make one, and has logged why
        if shared is None:
            self._own_admin = bind_admin(
                self._settings.proxy.admin_listen,
                public=self._proxy.endpoint,
                runtime_folder=runtime_folder(),
            )
            if self._own_admin is None:
                return
            shared = SharedAdmin(secrets.token_hex(8), self._own_admin)
        proxy, lean = self._settings.proxy, self._settings.lean
        is_unix = shared.socket.address.startswith(UNIX)
        transport = LeanTransport(
            only_for(shared.proxy_id, self._proxy.admin_methods()),
            "",
            0,
            limits=replace(lean, max_connections=min(lean.max_connections, MAX_CONNECTIONS)),
            certificates=None if is_unix else certificates_of(proxy, self._tls_folder),
            tls_only=proxy.tls == "only" and not is_unix,
            turn=self._turn,
        )
        self._proxy.access.peers.add_port(transport.peers)
        self._admin = AdminPort(shared.proxy_id, transport)
        await self._admin.listen(shared.socket)

    @property
    def _admin_endpoint(self) -> AdminEndpoint | None:
        return None if self._admin is None else self._admin.endpoint

    @property
    def admin_listens(self) -> str:
        """The address of the admin port; empty without one."""
        return "" if self._own_admin is None else self._own_admin.address

    async def _listen_remoting(self) -> None:
        """On ports of its own too, which take gRPC as the public port takes Remoting."""
        own = self._settings.remoting
        if own.listen:
            await self._listen_at(own.listen, "remoting.listen, --remoting-port")
        host, _ = parse_address(own.listen or self._settings.proxy.listen)
        for name, port in own.ports_of_groups().items():
            address = format_address(host, port)
            group = GroupPort(self._proxy.remoting, name)
            await self._listen_at(address, "remoting.group_ports", group)

    async def _listen_at(
        self, address: str, setting: str, other: OtherProtocol | None = None
    ) -> None:
        transport = self._make_lean(*parse_address(address), other)
        try:
            port = await transport.start()
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: another process does, or it is no address of this "
                f"machine ({setting})"
            ) from error
        self._remoting.append(transport)
        logger.info("listening for remoting clients", extra={"address": address, "port": port})

    async def routed(self) -> None:
        """Wait for the first routes."""
        while not self.has_routes:
            self._routed.changed.clear()
            await self._routed.changed.wait()
        if self._settings.auth.key_file:
            await self._proxy.access.ready.wait()

    @property
    def is_ready(self) -> bool:
        return self.has_routes and not self._stopping

    @property
    def has_routes(self) -> bool:
        return bool(self._routed.names())

    @property
    def brokers(self) -> Sequence[str]:
        return self._routed.names()

    async def stop(self) -> None:
        """Answer the receives that wait, give calls in progress a moment, then cut them."""
        self._stopping = True
        self._proxy.drain()
        await self._stop_transports(STOP_GRACE_S)
        await self._routed.stop()
        for controller in self._controller_ports:
            await controller.close()

    async def kill(self) -> None:
        """Cut every connection at once, as the end of the process would."""
        await self._stop_transports(0)
        self._proxy.clients.stop()
        self._proxy.checks.stop()
        self._proxy.access.stop()
        self._proxy.remoting.drain()
        await self._routed.stop()
        for controller in self._controller_ports:
            await controller.close()

    async def _stop_transports(self, grace_s: float) -> None:
        public = [] if self._transport is None else [self._transport]
        stopping = [port.stop(grace_s) for port in (*public, *self._remoting)]
        if self._admin is not None:
            stopping.append(self._admin.stop(grace_s))
        await asyncio.gather(*stopping)
        if self._own_admin is not None:
            self._own_admin.close()

    def metrics(self) -> list[Metric]:
        metrics = proxy_metrics(self._proxy.metrics)
        metrics.append(reading("proxy_retried", self._routed.retries))
        metrics.append(reading("proxy_waiting_for_master", self._routed.waiting))
        if isinstance(self._transport, LeanTransport):
            metrics += lean_metrics(self._transport)
        return metrics


def lean_metrics(transport: LeanTransport) -> list[Metric]:
    counts = transport.counters
    metrics = [
        reading("proxy_lean_connections", counts.connections),
        reading("proxy_lean_streams", counts.streams),
        reading("proxy_lean_incoming_bytes", counts.incoming_bytes),
        reading("proxy_lean_calls", counts.calls),
        reading("proxy_lean_faults", counts.faults),
        reading("proxy_lean_idle_closed", counts.idle_closed),
        reading("proxy_lean_aged", counts.aged),
    ]
    metrics += [
        reading("proxy_lean_tls_refused", counts.tls_refused[why], why) for why in TLS_REFUSALS
    ]
    if (certificates := transport.certificates) is not None:
        metrics.append(reading("proxy_lean_tls_reloads", certificates.reloaded))
        metrics.append(reading("proxy_lean_tls_reload_failures", certificates.refused))
    for bound in (*CONNECTION_BOUNDS, *STREAM_BOUNDS):
        metrics.append(reading("proxy_lean_cut_off", counts.cut_off[bound], bound))
    return metrics
