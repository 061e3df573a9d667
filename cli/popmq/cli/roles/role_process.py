"""The commands that run a role: `up` (all in one process), `controller`, `broker`, `proxy`.

A role prints one ready line on standard output when it serves, logs JSON on standard error,
and ends cleanly on SIGINT, SIGTERM and SIGHUP.
"""

import asyncio
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from popmq.cli.roles.life import RoleRunner
from popmq.cli.roles.proxy_workers import ProxyWorkers
from popmq.cli.roles.supervised_process import die_with_parent
from popmq.cli.terminal.command_line import Args
from popmq.cli.terminal.contexts import DEFAULT_ENDPOINT
from popmq.common.address import format_address
from popmq.common.disk import RealDisk
from popmq.common.errors import ConfigError
from popmq.common.metric_table.row import PREFIX
from popmq.common.metric_table.table import reading
from popmq.common.observability import (
    HttpEndpoint,
    MetricsRegistry,
    Readings,
    counters_collector,
    new_registry,
    setup_logging,
)
from popmq.common.protocol.frame_server import check_frame_address
from popmq.common.protocol.frames import FrameSettings
from popmq.common.settings.section import shown
from popmq.common.settings.settings import (
    UNIX,
    LoadedSettings,
    Settings,
    environment,
    load_settings,
    parse_address,
)
from popmq.common.unhandled import on_end_signal
from popmq.common.unix_socket import SOCKET_PATH_LIMIT
from popmq.common.version import VERSION

if TYPE_CHECKING:
    from popmq.broker.node.broker_process import BrokerProcess
    from popmq.cli.roles.cluster import Cluster, ClusterSize

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

Ready = Callable[[], tuple[bool, Mapping[str, object]]]
Start = Callable[[Settings, AsyncExitStack, RoleRunner], Awaitable[None]]


def run_up(args: Args) -> int:
    from popmq.cli.roles.cluster import ClusterSize, read_shape
    from popmq.cli.roles.one_process import UP_DEFAULTS

    flags = {
        "broker.data": args.data,
        "proxy.listen": format_address(args.host, args.port),
        "proxy.advertise": args.advertise,
        "listen.open_to_anybody": args.open_to_anybody or None,
        "proxy.admin_listen": None
        if args.admin_port is None
        else format_address(LOOPBACK, args.admin_port),
        "remoting.listen": args.remoting_port and format_address(args.host, args.remoting_port),
        "proxy.transport": args.transport,
        "proxy.workers": args.workers,
        "http.listen": format_address(args.host, args.http_port),
    }
    # Addresses of the file or of the environment count unless the flags say otherwise.
    loaded = load_settings(args.config, environment(), {}, defaults=UP_DEFAULTS).sources
    if args.host == LOOPBACK:
        for key, flag, default in (
            ("proxy.listen", args.port, 8081),
            ("http.listen", args.http_port, 5557),
        ):
            if flag == default and loaded[key] != "default":
                flags[key] = None
    read = _with_stored_segment_size(
        load_settings(args.config, environment(), flags, defaults=UP_DEFAULTS)
    )
    read = replace(read, settings=_with_users(read.settings, wanted=args.auth))
    read.settings.check_client_ports()
    shape = ClusterSize(args.groups, args.replicas, args.config or "")
    if len(shape.brokers) > 1:
        defaults = {
            key: shown(value)
            for key, value in UP_DEFAULTS.items()
            if read.sources[key] == "default"
        }
        cluster = partial(_many, shape, defaults)
        return run_role("up", read.settings, _with_console(cluster, args.console_port))
    if (known := read_shape(read.settings.broker.data)) is not None:
        raise ConfigError(
            f"{read.settings.broker.data} holds {known.groups} broker groups of {known.replicas}: "
            f"start it with --groups {known.groups} --replicas {known.replicas}"
        )
    return run_role("up", read.settings, _with_console(_up, args.console_port))


def _with_console(start: Start, port: int | None) -> Start:
    """The same start, and the web console behind it when a port is named."""
    if port is None:
        return start
    from popmq.cli.roles.console_child import check_console_is_installed, start_console

    check_console_is_installed()
    address = format_address(LOOPBACK, port)

    async def both(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
        _check_addresses({"--console-port": address})
        await start(settings, stack, life)
        if life.ready_line:  # else it was ended before
            console = start_console(settings, stack, life, address)
            await life.first(asyncio.create_task(console))

    return both


def _with_users(settings: Settings, *, wanted: bool) -> Settings:
    """`popmq up --auth` keeps its keys in the data directory; a later start finds them there."""
    from popmq.proxy.auth.sealing import make_key_file

    data, auth = settings.broker.data, settings.auth
    key_file = auth.key_file or os.path.join(data, "auth.key")
    if wanted:
        os.makedirs(data, exist_ok=True)
        if not auth.key_file:
            make_key_file(key_file)
        admin_file = auth.admin_file or os.path.join(data, "admin.json")
        auth = replace(auth, key_file=key_file, admin_file=admin_file)
    elif not auth.key_file and os.path.exists(key_file):
        auth = replace(auth, key_file=key_file)
    return replace(settings, auth=auth)


def run_controller(args: Args) -> int:
    return _of_parent("controller", args, role_settings(args), _controller)


def run_broker(args: Args) -> int:
    loaded = _with_stored_segment_size(load_settings(args.config, environment(), {}))
    return _of_parent("broker", args, loaded.settings, _broker)


def run_proxy(args: Args) -> int:
    flags = {
        "listen.open_to_anybody": args.open_to_anybody or None,
        "proxy.admin_listen": args.admin_listen,
        "proxy.transport": args.transport,
        "proxy.workers": args.workers,
    }
    settings = role_settings(args, flags)
    settings.check_client_ports()
    return _of_parent("proxy", args, settings, _proxy)


def _of_parent(role: str, args: Args, settings: Settings, start: Start) -> int:
    if args.parent is not None:
        die_with_parent(args.parent)
    return run_role(role, settings, start)


def _with_stored_segment_size(loaded: LoadedSettings) -> LoadedSettings:
    """A store that is there keeps the size of its segments unless a setting says otherwise."""
    from popmq.broker.log.segment_file import segment_bytes_of

    settings = loaded.settings
    if loaded.sources["store.segment_bytes"] != "default":
        return loaded
    try:
        stored = segment_bytes_of(RealDisk(), settings.broker.data)
    except OSError:
        return loaded  # the start says what is wrong with the folder
    if not stored:
        return loaded
    return replace(
        loaded, settings=replace(settings, store=replace(settings.store, segment_bytes=stored))
    )


def role_settings(args: Args, flags: Mapping[str, object] | None = None) -> Settings:
    return load_settings(args.config, environment(), flags or {}).settings


# -- the four roles


# Each imports its own room: a proxy that starts need not wait for a broker's modules.


async def _up(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    from popmq.broker.node.broker_process import BrokerProcess
    from popmq.cli.roles.one_process import OneProcess

    if settings.proxy.workers > 1:
        await _up_with_workers(settings, stack, life)
        return
    _check_addresses(_public_addresses(settings))
    tls_folder = _tls_folder(settings)
    process = OneProcess(settings, BrokerProcess(settings), tls_folder=tls_folder)
    life.on_crash(process.broker.fail)
    await process.start(*_unix_address(settings))
    stack.push_async_callback(process.stop)
    life.track_task(process.controller_heartbeat)
    process.broker.failed.add_done_callback(lambda failed: life.end(1))
    metrics = await serve_http(
        settings,
        stack,
        "up",
        lambda: (life.serving, {"broker": settings.broker.name}),
        process.metrics,
    )
    admin = _shown_admin(process.proxy.admin_listens)
    life.announce(
        f"ready: endpoint {process.endpoint}, {admin}{metrics}, data {settings.broker.data}"
    )
    _print_hint(process.endpoint)


async def _up_with_workers(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    """Broker and controller here; the proxies in processes of their own, over unix sockets."""
    from popmq.controller.process import ControllerProcess

    _check_addresses(_public_addresses(settings))
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
        lambda: chain(controller.metrics(), broker.metrics(), workers.metrics()),
    )
    admin = _shown_admin(workers.admin_listens)
    life.announce(
        f"ready: endpoint {workers.endpoint}, {admin}{metrics}, data {settings.broker.data}"
    )
    if sys.stdout.isatty():
        print(workers.table())
    _print_hint(workers.endpoint)


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

    cluster = Cluster(settings, shape, defaults, on_progress=_print_progress)
    stack.push_async_callback(cluster.stop)
    life.track_task(asyncio.create_task(_kill_when_ended_again(life, cluster)))
    starting = asyncio.create_task(cluster.start())
    if not await life.first(starting):
        return
    life.track_task(asyncio.create_task(cluster.failed()))
    _warn_of_full_disk(settings)
    life.announce(
        f"ready: endpoint {cluster.endpoint}, {_shown_admin(cluster.admin_listens)}"
        f"metrics {cluster.metrics}, "
        f"data {settings.broker.data}"
    )
    if sys.stdout.isatty():
        print(cluster.table())
    _print_hint(cluster.endpoint)


def _shown_admin(address: str) -> str:
    """Of the ready line: a port, as it may be any; commands find a unix socket by themselves."""
    return f"admin {address}, " if address and not address.startswith(UNIX) else ""


def _warn_of_full_disk(settings: Settings) -> None:
    """The brokers say it too, each in a log of its own."""
    from popmq.broker.log.disk_guard import used_percent

    folder, limit = settings.broker.data, settings.store.disk_stop_percent
    used = used_percent(*RealDisk().space(folder))
    if used >= limit:
        why = f"the disk of {folder} is {used:.1f} % used, sends stop at {limit} %"
        logger.warning("sends are refused", extra={"why": f"{why} (store.disk_stop_percent)"})


def _print_progress(text: str) -> None:
    """One line that is written over, on a terminal; empty: it is gone."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{f'waiting: {text}' if text else ''}")
        sys.stderr.flush()


def _print_hint(endpoint: str) -> None:
    """For people: what to type next."""
    if sys.stdout.isatty():
        where = "" if endpoint == DEFAULT_ENDPOINT else f" --endpoint {endpoint}"
        print(f"next: popmq send hello 'first message'{where}", flush=True)


async def _kill_when_ended_again(life: RoleRunner, cluster: "Cluster") -> None:
    await life.ended_again.wait()
    cluster.kill()


async def _controller(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    from popmq.controller.process import ControllerProcess

    where = {"controller.listen": settings.controller.listen, "http.listen": settings.http.listen}
    _check_addresses(where)
    controller = ControllerProcess(settings)
    stack.push_async_callback(controller.stop)
    life.track_task(controller.start())
    address = await controller.listen()
    metrics = await serve_http(
        settings, stack, "controller", lambda: (life.serving, {}), controller.metrics
    )
    life.announce(f"ready: controller {address}, {metrics}")


async def _broker(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    check_frame_address(settings.broker.listen, FrameSettings.of(settings))
    _check_addresses({"broker.listen": settings.broker.listen, "http.listen": settings.http.listen})
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
    life.announce(f"ready: endpoint {endpoint}, {_shown_admin(proxy.admin_listens)}{metrics}")


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


def _public_addresses(settings: Settings) -> dict[str, str]:
    return {
        "proxy.listen, --port": settings.proxy.listen,
        "proxy.admin_listen, --admin-port": settings.proxy.admin_listen,
        "remoting.listen, --remoting-port": settings.remoting.listen,
        "http.listen, --http-port": settings.http.listen,
    }


def _check_addresses(addresses: Mapping[str, str]) -> None:
    """Raises ConfigError when one cannot be listened on, before a store is made for nothing."""
    for setting, address in addresses.items():
        if not address or address.startswith(UNIX):
            continue
        host, port = parse_address(address)
        try:
            info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, place = info[0]
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(place)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: another process does, or it is no address of this "
                f"machine ({setting}): {error.strerror}"
            ) from error


async def serve_http(
    settings: Settings,
    stack: AsyncExitStack,
    role: str,
    ready: Ready,
    read: Callable[[], Readings],
    alive: Callable[[], bool] = lambda: True,
) -> str:
    """Serve /metrics and the rest; returns the words for the ready line."""
    registry = new_registry()
    running = reading("build_info", 1, VERSION, role)

    def readings() -> Readings:
        # Pages are made on the loop, so this thread's time is the loop's.
        yield from (running, reading("loop_cpu_seconds", time.thread_time()))
        yield from read()

    registry.register(counters_collector(PREFIX, readings))

    def endpoint(host: str, port: int, pages: MetricsRegistry | None) -> HttpEndpoint:
        return HttpEndpoint(host, port, pages, ready, role, alive)

    http = settings.http
    if http.health_listen:
        await _listen(stack, endpoint, http.health_listen, None, "http.health_listen")
    where = "http.listen, --http-port"
    return f"metrics http://{await _listen(stack, endpoint, http.listen, registry, where)}/metrics"


async def _listen(
    stack: AsyncExitStack,
    endpoint: Callable[[str, int, MetricsRegistry | None], HttpEndpoint],
    address: str,
    registry: MetricsRegistry | None,
    setting: str,
) -> str:
    """Serve the pages there; the address with the port that was taken."""
    host, port = parse_address(address)
    served = endpoint(host, port, registry)
    try:
        taken = await served.start()
    except OSError as error:
        pages = "metrics" if registry is not None else "health checks"
        raise ConfigError(
            f"cannot listen on {address} for {pages}: {error.strerror} ({setting})"
        ) from error
    stack.push_async_callback(served.stop)
    return format_address(host, taken)


# -- what they share


def run_role(role: str, settings: Settings, start: Start) -> int:
    """From nothing to the exit status."""
    # On a terminal `up` shows what is wrong; its ready line says the rest.
    setup_logging(role, "warning" if role == "up" and sys.stderr.isatty() else "info")
    # A shorter turn for the flusher's thread: it holds the lock for microseconds only.
    sys.setswitchinterval(0.0005)
    # Every queue has a file: take as many as the system lets us.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return asyncio.run(_live(role, settings, start))


async def _live(role: str, settings: Settings, start: Start) -> int:
    life = RoleRunner()
    on_end_signal(partial(life.end, 0))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(life.stop_tasks)
        await start(settings, stack, life)
        logger.info("serving", extra={"role_name": role, "pid": os.getpid()})
        await life.wait()
        logger.info("stopping", extra={"role_name": role})
    logger.info("stopped", extra={"role_name": role, "exit_code": life.code})
    return life.code
