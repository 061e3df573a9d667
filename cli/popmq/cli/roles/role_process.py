"""The commands that run a role: `up` (all in one process), `controller`, `broker`, `proxy`.

A role prints one ready line on standard output when it serves, logs JSON on standard error,
and ends cleanly on SIGINT and SIGTERM.
"""

import argparse
import asyncio
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from popmq.cli.roles.life import RoleRunner
from popmq.cli.roles.proxy_workers import ProxyWorkers
from popmq.cli.roles.supervised_process import PARENT_FLAG, die_with_parent
from popmq.common.errors import ConfigError
from popmq.common.metric_table.row import PREFIX
from popmq.common.metric_table.table import reading
from popmq.common.observability import (
    HttpEndpoint,
    Metric,
    counters_collector,
    new_registry,
    setup_logging,
)
from popmq.common.settings.section import shown
from popmq.common.settings.settings import Settings, environment, load_settings, parse_address

if TYPE_CHECKING:
    from popmq.broker.node.broker_process import BrokerProcess
    from popmq.cli.roles.cluster import Cluster, ClusterSize

logger = logging.getLogger(__name__)

# A unix socket's path has 108 bytes with its final zero (man 7 unix).
SOCKET_PATH_LIMIT = 107

Ready = Callable[[], tuple[bool, Mapping[str, object]]]
Start = Callable[[Settings, AsyncExitStack, RoleRunner], Awaitable[None]]


def add_parsers(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]",
    common: argparse.ArgumentParser,
) -> None:
    """Add the roles' commands; each sets `run`, a function of the arguments that returns 0 or 1."""
    up = subparsers.add_parser("up", help="controller, broker and proxy in one process")
    up.add_argument("--data", metavar="DIR", help="data directory (default ./popmq-data)")
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    up.add_argument("--port", type=int, default=8081, help="public gRPC port (%(default)s)")
    up.add_argument("--http-port", type=int, default=5557, help="metrics port (%(default)s)")
    up.add_argument("--advertise", metavar="HOST:PORT", help="what clients are told to connect to")
    up.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    up.add_argument("--groups", type=int, default=1, metavar="N", help="broker groups (1)")
    up.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="R",
        help="brokers of each group (1); with more than one broker each is a process of its own",
    )
    _add_transport(up)
    up.set_defaults(run=run_up)
    for name, run, what in (
        ("controller", run_controller, "registers brokers and tells routes"),
        ("broker", run_broker, "stores and delivers messages"),
        ("proxy", run_proxy, "speaks the public gRPC API"),
    ):
        role = subparsers.add_parser(name, help=f"one role as a process: {what}")
        role.add_argument("--config", metavar="FILE", help="a TOML file of settings")
        role.add_argument(PARENT_FLAG, type=int, help=argparse.SUPPRESS)
        if name == "proxy":
            _add_transport(role)
        role.set_defaults(run=run)


def _add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that share the public port (default 1)"
    )
    parser.add_argument(
        "--transport", metavar="NAME", help="what serves gRPC: lean (default) or grpcio"
    )


def run_up(args: argparse.Namespace) -> int:
    from popmq.cli.roles.cluster import ClusterSize, read_shape
    from popmq.cli.roles.one_process import UP_DEFAULTS

    flags = {
        "broker.data": args.data,
        "proxy.listen": f"{args.host}:{args.port}",
        "proxy.advertise": args.advertise,
        "proxy.transport": args.transport,
        "proxy.workers": args.workers,
        "http.listen": f"{args.host}:{args.http_port}",
    }
    # Addresses of the file or of the environment count unless the flags say otherwise.
    loaded = load_settings(args.config, environment(), {}, defaults=UP_DEFAULTS).sources
    if args.host == "127.0.0.1":
        for key, flag, default in (
            ("proxy.listen", args.port, 8081),
            ("http.listen", args.http_port, 5557),
        ):
            if flag == default and loaded[key] != "default":
                flags[key] = None
    read = load_settings(args.config, environment(), flags, defaults=UP_DEFAULTS)
    shape = ClusterSize(args.groups, args.replicas, args.config or "")
    if len(shape.brokers) > 1:
        defaults = {
            key: shown(value)
            for key, value in UP_DEFAULTS.items()
            if read.sources[key] == "default"
        }
        cluster = partial(_many, shape, defaults)
        return run_role("up", read.settings, cluster)
    if (known := read_shape(read.settings.broker.data)) is not None:
        raise ConfigError(
            f"{read.settings.broker.data} holds {known.groups} broker groups of {known.replicas}: "
            f"start it with --groups {known.groups} --replicas {known.replicas}"
        )
    return run_role("up", read.settings, _up)


def run_controller(args: argparse.Namespace) -> int:
    return _of_parent("controller", args, role_settings(args), _controller)


def run_broker(args: argparse.Namespace) -> int:
    return _of_parent("broker", args, role_settings(args), _broker)


def run_proxy(args: argparse.Namespace) -> int:
    flags = {"proxy.transport": args.transport, "proxy.workers": args.workers}
    return _of_parent("proxy", args, role_settings(args, flags), _proxy)


def _of_parent(role: str, args: argparse.Namespace, settings: Settings, start: Start) -> int:
    if args.parent is not None:
        die_with_parent(args.parent)
    return run_role(role, settings, start)


def role_settings(args: argparse.Namespace, flags: Mapping[str, object] | None = None) -> Settings:
    return load_settings(args.config, environment(), flags or {}).settings


# -- the four roles


# Each imports its own room: a proxy that starts need not wait for a broker's modules.


async def _up(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    from popmq.broker.node.broker_process import BrokerProcess
    from popmq.cli.roles.one_process import OneProcess

    if settings.proxy.workers > 1:
        await _up_with_workers(settings, stack, life)
        return
    tls_folder = _tls_folder(settings)
    one = OneProcess(settings, BrokerProcess(settings), tls_folder=tls_folder)
    life.on_crash(one.broker.fail)
    await one.start(*_unix_address(settings))
    stack.push_async_callback(one.stop)
    life.track_task(one.controller_heartbeat)
    one.broker.failed.add_done_callback(lambda failed: life.end(1))
    metrics = await serve_http(
        settings,
        stack,
        "up",
        lambda: (life.serving, {"broker": settings.broker.name}),
        one.metrics,
    )
    life.announce(f"ready: endpoint {one.endpoint}, {metrics}, data {settings.broker.data}")


async def _up_with_workers(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    """Broker and controller here; the proxies in processes of their own, over unix sockets."""
    from popmq.controller.process import ControllerProcess

    # Not in the data directory: a socket's path is short.
    folder = stack.enter_context(TemporaryDirectory(prefix="popmq-"))
    at_broker, at_controller = f"unix:{folder}/broker.sock", f"unix:{folder}/controller.sock"
    controller = ControllerProcess(settings)
    stack.push_async_callback(controller.stop)
    broker = await _start_broker(settings, stack, life)
    await broker.listen(at_broker, *_unix_address(settings))
    life.track_task(controller.start())
    await controller.listen(at_controller)
    life.track_task(asyncio.create_task(broker.register_in_process(controller.port, at_broker)))
    addresses = replace(settings.controller, addresses=(at_controller,))
    inner = replace(settings, controller=addresses)
    workers = await _workers(inner, stack, life, _tls_folder(settings))
    await workers.routed()
    stack.callback(broker.broker.stop)
    metrics = await serve_http(
        settings,
        stack,
        "up",
        lambda: (life.serving, {"broker": settings.broker.name}),
        lambda: [*controller.metrics(), *broker.metrics(), *workers.metrics()],
    )
    life.announce(f"ready: endpoint {workers.endpoint}, {metrics}, data {settings.broker.data}")


async def _workers(
    settings: Settings, stack: AsyncExitStack, life: RoleRunner, tls_folder: Path
) -> ProxyWorkers:
    """Started, with one certificate for all."""
    from popmq.proxy.transport.lean.self_signed import own_certificate

    proxy = settings.proxy
    if proxy.tls != "off" and not proxy.tls_certificate:
        certificate, key = own_certificate(proxy, tls_folder)
        proxy = replace(proxy, tls_certificate=certificate, tls_key=key)
    workers = ProxyWorkers(replace(settings, proxy=proxy))
    stack.push_async_callback(workers.stop)
    await workers.start()
    for keeping in workers.keeping:
        life.track_task(keeping)
    return workers


def _tls_folder(settings: Settings) -> Path:
    return Path(settings.broker.data) / "tls"


async def _many(
    shape: "ClusterSize",
    defaults: Mapping[str, str],
    settings: Settings,
    stack: AsyncExitStack,
    life: RoleRunner,
) -> None:
    """The whole cluster as processes; a second Ctrl-C while they stop kills them."""
    from popmq.cli.roles.cluster import Cluster

    cluster = Cluster(settings, shape, defaults)
    stack.push_async_callback(cluster.stop)
    life.track_task(asyncio.create_task(_kill_when_ended_again(life, cluster)))
    starting = asyncio.create_task(cluster.start())
    if not await life.first(starting):
        return
    life.track_task(asyncio.create_task(cluster.failed()))
    life.announce(
        f"ready: endpoint {cluster.endpoint}, metrics {cluster.metrics}, "
        f"data {settings.broker.data}"
    )


async def _kill_when_ended_again(life: RoleRunner, cluster: "Cluster") -> None:
    await life.ended_again.wait()
    cluster.kill()


async def _controller(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    from popmq.controller.process import ControllerProcess

    controller = ControllerProcess(settings)
    stack.push_async_callback(controller.stop)
    life.track_task(controller.start())
    address = await controller.listen()
    metrics = await serve_http(
        settings, stack, "controller", lambda: (life.serving, {}), controller.metrics
    )
    life.announce(f"ready: controller {address}, {metrics}")


async def _broker(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    broker = await _start_broker(settings, stack, life)
    address = (await broker.listen(settings.broker.listen, *_unix_address(settings)))[0]
    life.track_task(asyncio.create_task(broker.register(settings.broker.advertise or address)))
    metrics = await serve_http(
        settings,
        stack,
        "broker",
        lambda: (life.serving, {"epoch": broker.broker.store.epoch}),
        broker.metrics,
    )
    life.announce(
        f"ready: broker {settings.broker.name} frames {address}, {metrics}, "
        f"data {settings.broker.data}"
    )


async def _proxy(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    from popmq.proxy.process import ProxyProcess

    proxy: ProxyProcess | ProxyWorkers
    if settings.proxy.workers > 1:
        folder = stack.enter_context(TemporaryDirectory(prefix="popmq-"))
        proxy = await _workers(settings, stack, life, Path(folder))
        endpoint = proxy.endpoint
    else:
        proxy = ProxyProcess.over_frames(settings)
        stack.push_async_callback(proxy.stop)
        endpoint = await proxy.listen()
    metrics = await serve_http(
        settings,
        stack,
        "proxy",
        lambda: (life.serving and proxy.has_routes, {"brokers": list(proxy.brokers)}),
        proxy.metrics,
    )
    life.announce(f"ready: endpoint {endpoint}, {metrics}")


def _unix_address(settings: Settings) -> list[str]:
    """The broker's unix socket, unless its path is longer than the kernel takes."""
    path = f"{settings.broker.data}/frames.sock"
    return [f"unix:{path}"] if len(os.fsencode(os.path.abspath(path))) <= SOCKET_PATH_LIMIT else []


async def _start_broker(
    settings: Settings, stack: AsyncExitStack, life: RoleRunner
) -> "BrokerProcess":
    from popmq.broker.node.broker_process import BrokerProcess

    broker = BrokerProcess(settings)
    life.on_crash(broker.fail)
    stack.push_async_callback(broker.stop)
    await broker.start()
    broker.failed.add_done_callback(lambda failed: life.end(1))
    return broker


async def serve_http(
    settings: Settings,
    stack: AsyncExitStack,
    role: str,
    ready: Ready,
    read: Callable[[], list[Metric]],
    alive: Callable[[], bool] = lambda: True,
) -> str:
    """Serve /metrics and the rest; returns the words for the ready line."""
    registry = new_registry()
    running = reading("build_info", 1, version("popmq"), role)

    def readings() -> list[Metric]:
        # Pages are made on the loop, so this thread's time is the loop's.
        return [running, reading("loop_cpu_seconds", time.thread_time()), *read()]

    registry.register(counters_collector(PREFIX, readings))
    host, port = parse_address(settings.http.listen)
    endpoint = HttpEndpoint(host, port, registry, ready, role, alive)
    try:
        taken = await endpoint.start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.http.listen} for metrics: {error.strerror} "
            "(http.listen, --http-port)"
        ) from error
    stack.push_async_callback(endpoint.stop)
    return f"metrics http://{host}:{taken}/metrics"


# -- what they share


def run_role(role: str, settings: Settings, start: Start) -> int:
    """From nothing to the exit status."""
    setup_logging(role)
    # A shorter turn for the flusher's thread: it holds the lock for microseconds only.
    sys.setswitchinterval(0.0005)
    # Every queue has a file: take as many as the system lets us.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return asyncio.run(_live(role, settings, start))


async def _live(role: str, settings: Settings, start: Start) -> int:
    life = RoleRunner()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, life.end, 0)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(life.stop_tasks)
        await start(settings, stack, life)
        logger.info("serving", extra={"role_name": role, "pid": os.getpid()})
        await life.wait()
        logger.info("stopping", extra={"role_name": role})
    logger.info("stopped", extra={"role_name": role, "exit_code": life.code})
    return life.code
