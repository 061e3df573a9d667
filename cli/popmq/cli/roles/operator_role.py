"""`popmq operator`: looks after the BrokerClusters of a Kubernetes cluster."""

import argparse
import asyncio
import signal
from contextlib import AsyncExitStack

from popmq.cli.messages import Subparsers
from popmq.cli.roles.life import RoleRunner
from popmq.cli.roles.role_process import role_settings, run_role, serve_http
from popmq.common.errors import ConfigError
from popmq.common.settings.settings import Settings


def add_parsers(subparsers: Subparsers, common: argparse.ArgumentParser) -> None:
    parser = subparsers.add_parser(
        "operator", help="one role as a process: looks after BrokerClusters of Kubernetes"
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings")
    parser.set_defaults(run=run_operator)


def run_operator(args: argparse.Namespace) -> int:
    return run_role("operator", role_settings(args), _operator)


async def _operator(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    try:
        # Only here: kopf and what it needs are of the extra popmq[operator].
        import aiohttp

        from popmq.operator.process import OperatorProcess
    except ImportError as error:
        raise ConfigError(
            f"popmq operator needs {error.name}: pip install 'popmq[operator]'"
        ) from error
    life.unhandled.tolerate(aiohttp.ClientError)
    operator = OperatorProcess(settings, life.end)
    stack.push_async_callback(operator.stop)
    metrics = await serve_http(
        settings,
        stack,
        "operator",
        lambda: (life.serving, {"leader": operator.elector.holds}),
        operator.metrics,
        alive=lambda: operator.alive,
    )
    life.track_task(asyncio.create_task(operator.run()))
    life.announce(f"ready: operator {settings.operator.lease}, {metrics}")
    # kopf takes the signals to itself when it starts; they are ours.
    life.track_task(asyncio.create_task(_keep_signals(operator.watching, life)))


async def _keep_signals(watching: asyncio.Event, life: RoleRunner) -> None:
    await watching.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, life.end, 0)
