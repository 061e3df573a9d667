"""One of several proxies behind one port: a child process of `proxy_workers.py`.

It is told its settings by one line on standard input, whose end means that the parent is gone,
and tells by lines on standard output where it listens and, once a second, its metrics.
"""

import asyncio
import json
import resource
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from popmq.cli.roles.life import RoleRunner
from popmq.cli.roles.role_process import run_role
from popmq.common.admin_socket import AdminSocket, SharedAdmin
from popmq.common.errors import PopmqError
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.common.settings.settings import Settings, load_settings
from popmq.proxy.process import ProxyProcess

REPORT_S = 1.0


def main() -> int:
    document = json.loads(sys.stdin.buffer.readline())
    number: int = document["number"]
    admin = _inherited(document.get("admin"))
    try:
        settings = load_settings(None, {}, document["settings"]).settings
        return run_role(f"proxy-{number}", settings, partial(_serve, number, admin))
    except PopmqError as error:
        print(f"popmq: worker {number}:", " ".join(str(error).split()), file=sys.stderr)
        return 1


def _inherited(admin: tuple[str, int, str] | None) -> SharedAdmin | None:
    """Without one, the parent could not make it, and has logged why."""
    if admin is None:
        return None
    proxy_id, descriptor, address = admin
    return SharedAdmin(proxy_id, AdminSocket.inherited(descriptor, address))


async def _serve(
    number: int,
    admin: SharedAdmin | None,
    settings: Settings,
    stack: AsyncExitStack,
    life: RoleRunner,
) -> None:
    await asyncio.get_running_loop().connect_read_pipe(lambda: _ParentGone(life), sys.stdin)
    proxy = ProxyProcess.over_frames(settings, worker=number, shared_admin=admin)
    stack.push_async_callback(proxy.stop)
    endpoint = await proxy.listen()
    life.announce(json.dumps({"endpoint": endpoint}))
    life.track_task(asyncio.create_task(_report(proxy)))


class _ParentGone(asyncio.Protocol):
    """Nobody would end us, or start us again: better to make room."""

    def __init__(self, life: RoleRunner) -> None:
        self._life = life

    def connection_lost(self, error: Exception | None) -> None:
        self._life.end(0)


async def _report(proxy: ProxyProcess) -> None:
    """For ever. A parent that does not read misses reports, and holds nobody up."""
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout)
    while True:
        if pipe.get_write_buffer_size() == 0:
            pipe.write(json.dumps(_readings(proxy)).encode() + b"\n")
        await asyncio.sleep(REPORT_S)


def _readings(proxy: ProxyProcess) -> dict[str, Any]:
    metrics = [*proxy.metrics(), *_own_metrics()]
    rows = [
        [metric.name, metric.value, list(metric.labels.values()), metric.buckets]
        for metric in metrics
    ]
    return {"brokers": list(proxy.brokers), "metrics": rows}


def _own_metrics() -> list[Metric]:
    with open("/proc/self/statm", "rb") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
    return [
        reading("proxy_worker_cpu_seconds", time.process_time()),
        reading("proxy_worker_resident_bytes", resident),
    ]


if __name__ == "__main__":
    sys.exit(main())
