"""`popmq up --console-port N`: the web console as a supervised process beside the cluster."""

import asyncio
import os
from contextlib import AsyncExitStack
from importlib.util import find_spec

from popmq.cli.roles.life import RoleRunner
from popmq.cli.roles.supervised_process import SupervisedProcess, word_of
from popmq.common.errors import ConfigError
from popmq.common.settings.settings import Settings


def check_console_is_installed() -> None:
    """Raises ConfigError, before a store is made."""
    if missing := [name for name in ("htpy", "starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(
            f"--console-port needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'popmq[console]'"
        )


async def start_console(
    settings: Settings, stack: AsyncExitStack, life: RoleRunner, address: str
) -> None:
    """Start it and print where it is.  Raises ChildFailed when it does not come up."""
    folder = f"{settings.broker.data}/logs"
    os.makedirs(folder, exist_ok=True)
    endpoint = word_of(life.ready_line, "endpoint")
    arguments = ["console", "--endpoint", endpoint, "--listen", address]
    for flag, value in (
        ("--prometheus", settings.console.prometheus),
        ("--reports", settings.console.reports),
    ):
        arguments += [flag, value] if value else []
    child = SupervisedProcess("console", arguments, lambda: os.environ, f"{folder}/console.log")
    running = asyncio.create_task(child.run())
    stack.push_async_callback(child.stop)
    ready = asyncio.create_task(child.ready.wait())
    await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        ready.cancel()
        running.result()
        return  # it was stopped meanwhile
    life.track_task(running)
    print(f"console: {word_of(child.ready_line, 'console')}", flush=True)
