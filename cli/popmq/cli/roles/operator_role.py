"""`popmq operator`: looks after the BrokerClusters of a Kubernetes cluster."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from popmq.cli.roles.life import RoleRunner
from popmq.cli.roles.role_process import role_settings, run_role, serve_http
from popmq.cli.terminal.command_line import Args
from popmq.common.errors import ConfigError
from popmq.common.settings.settings import Settings
from popmq.common.unhandled import on_end_signal


def run_operator(args: Args) -> int:
    return run_role("operator", role_settings(args), _operator)


async def _operator(settings: Settings, stack: AsyncExitStack, life: RoleRunner) -> None:
    try:
        # Only here: kopf and what it needs are of the extra popmq[operator].
        import aiohttp

        from popmq.operator.kube.access import find_access
        from popmq.operator.process import OperatorProcess
    except ImportError as error:
        raise ConfigError(
            f"popmq operator needs {error.name}: pip install 'popmq[operator]'"
        ) from error
    life.unhandled.tolerate(aiohttp.ClientError)
    access = await find_access(settings.operator.kubeconfig)
    operator = OperatorProcess(settings, access, life.end)
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
    on_end_signal(partial(life.end, 0))
