"""`popmq console`: serves the pages on a loopback address until SIGINT, SIGTERM or SIGHUP."""

import asyncio
import logging
import socket
import threading
from contextlib import nullcontext
from functools import partial

from popmq.cli.resource_names import client_of
from popmq.cli.roles.supervised_process import die_with_parent
from popmq.cli.terminal.command_line import Args
from popmq.common.address import format_address, is_loopback, parse_address
from popmq.common.errors import ConfigError
from popmq.common.observability import setup_logging
from popmq.common.settings.console_settings import ConsoleSettings
from popmq.common.settings.settings import environment, load_settings
from popmq.common.signing import Signer
from popmq.common.unhandled import on_end_signal

THREADS = 128
STOP_S = 2  # a page that is being made may end


def run_console(args: Args) -> int:
    if args.parent is not None:
        die_with_parent(args.parent)
    flags = {"console.prometheus": args.prometheus, "console.reports": args.reports}
    settings = load_settings(args.config, environment(), flags).settings.console
    listening = listen(args.listen, any_machine=args.open_to_anybody or args.login)
    setup_logging("console")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    return asyncio.run(_serve(args, settings, listening))


def listen(address: str, *, any_machine: bool = False) -> socket.socket:
    """Raises ConfigError for an address that is taken, and for one that other machines reach
    unless `any_machine` may use it."""
    host, port = parse_address(address)
    if not any_machine and not is_loopback(host):
        raise ConfigError(
            f"--listen {address} can be reached from other machines, and while the cluster has no "
            "users the console has no login: listen on 127.0.0.1 and use ssh -L or kubectl "
            "port-forward, say --login to require one, or, if it is meant, --open-to-anybody"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address} (--listen): {error.strerror}") from error


async def _serve(args: Args, settings: ConsoleSettings, listening: socket.socket) -> int:
    try:
        import uvicorn
        from anyio import to_thread

        from popmq.console.web.server import application
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the console needs packages that are not installed ({error.name}): "
            "pip install 'popmq[console]'"
        ) from error
    from popmq.console.client import ConsoleClient
    from popmq.console.fetches import Fetches
    from popmq.console.page import Console
    from popmq.console.prometheus import Prometheus
    from popmq.console.redrives import Redrives
    from popmq.console.reports import Reports
    from popmq.console.sessions import Sessions, keep

    fetches = Fetches()
    prometheus = Prometheus(settings.prometheus, fetches) if settings.prometheus else None
    reports = Reports(settings.reports, fetches) if settings.reports else None

    def open_console(signer: Signer) -> Console:
        client = ConsoleClient(client_of(args, signer))
        return Console(client, Redrives(client), signer.access_key, prometheus, reports)

    sessions, ended = Sessions(open_console, always=args.login), threading.Event()
    config = uvicorn.Config(
        application(sessions, any_host=args.open_to_anybody or args.login),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
    )
    server = uvicorn.Server(config)
    # Pages that wait for the same answer hold a thread each.
    to_thread.current_default_thread_limiter().total_tokens = THREADS
    # uvicorn's own handlers would end the process by the signal, and not with status 0.
    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
    on_end_signal(partial(setattr, server, "should_exit", True))
    threading.Thread(target=keep, args=(sessions, ended), name="history", daemon=True).start()
    host, port = listening.getsockname()[:2]
    shown = format_address(host, port)
    print(f"ready: console http://{shown}/, endpoint {args.endpoint}", flush=True)
    try:
        await server.serve(sockets=[listening])
    finally:
        ended.set()
        sessions.close()
    return 0
