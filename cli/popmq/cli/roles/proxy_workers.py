"""Several proxies behind one port, each a process with a core of its own.

The kernel shares new connections out among them (SO_REUSEPORT).  The parent serves no client: it
owns the address, starts a worker again that died, ends all, and shows what they count.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from popmq.cli.terminal.output import columns
from popmq.common.admin_socket import AdminSocket, bind_admin
from popmq.common.errors import ConfigError
from popmq.common.metric_table.table import reading
from popmq.common.observability import Metric
from popmq.common.settings.settings import (
    Settings,
    format_address,
    parse_address,
    runtime_folder,
)

logger = logging.getLogger(__name__)

STOP_S = 6.0  # a worker gives its calls 2 s, and its clients' last bytes one
BACK_OFF_S = (0.1, 1.0, 5.0, 15.0)  # before the next start, by how many failed in a row
STEADY_S = 10.0  # a worker that lived so long did not fail at its start
LINE_LIMIT_BYTES = 1 << 20


class ProxyWorkers:
    """`start`, then `stop`, once each. `settings.proxy.workers` of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._workers = [_Worker(number) for number in range(1, settings.proxy.workers + 1)]
        self.keeping: list[asyncio.Task[None]] = []  # a failure of one is ours
        self._reserved: socket.socket | None = None
        self._admin: AdminSocket | None = None
        self.endpoint = ""

    async def start(self) -> str:
        """The endpoint, once every worker listens. Raises ConfigError when one cannot."""
        proxy = self._settings.proxy
        host, port = parse_address(proxy.listen)
        self._reserved = _reserve(host, port, proxy.listen)
        self.endpoint = format_address(host, self._reserved.getsockname()[1])
        self._admin = bind_admin(
            proxy.admin_listen, public=self.endpoint, runtime_folder=runtime_folder()
        )
        first: dict[str, object] = {
            "settings": {**self._settings.flat(), "proxy.listen": self.endpoint}
        }
        inherits: list[int] = []
        if self._admin is not None:
            inherits.append(self._admin.sock.fileno())
            first["admin"] = [secrets.token_hex(8), inherits[0], self._admin.address]
        for worker in self._workers:
            self.keeping.append(asyncio.create_task(worker.keep(first, inherits)))
        for worker, keeping in zip(self._workers, self.keeping, strict=True):
            listening = asyncio.create_task(worker.listening.wait())
            await asyncio.wait((listening, keeping), return_when=asyncio.FIRST_COMPLETED)
            listening.cancel()
            if not worker.listening.is_set():
                raise ConfigError(f"worker {worker.number} did not start; its error stands above")
        return self.endpoint

    async def stop(self) -> None:
        """Drain all at once."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        for task in self.keeping:
            task.cancel()
        await asyncio.gather(*self.keeping, return_exceptions=True)
        if self._reserved is not None:
            self._reserved.close()
        if self._admin is not None:
            self._admin.close()

    @property
    def admin_listens(self) -> str:
        """The address of the admin port; empty without one."""
        return "" if self._admin is None else self._admin.address

    @property
    def brokers(self) -> list[str]:
        """That some worker knows."""
        return sorted({name for worker in self._workers for name in worker.brokers})

    @property
    def has_routes(self) -> bool:
        return any(worker.listening.is_set() and worker.brokers for worker in self._workers)

    async def routed(self) -> None:
        """Wait until every worker knows a broker."""
        for worker in self._workers:
            await worker.routed.wait()

    def table(self) -> str:
        """Where each process is: its pid, its port, and where it logs."""
        where = "standard error"
        rows = [("up", os.getpid(), "-", where)]
        rows += [
            (f"proxy worker {worker.number}", worker.pid, self.endpoint, where)
            for worker in self._workers
        ]
        return columns(("PROCESS", "PID", "LISTENS", "LOG"), rows)

    def metrics(self) -> list[Metric]:
        running = sum(worker.listening.is_set() for worker in self._workers)
        restarts = sum(worker.restarts for worker in self._workers)
        return [
            reading("proxy_workers", running),
            reading("proxy_worker_restarts", restarts),
            *self._of_workers(),
        ]

    def _of_workers(self) -> list[Metric]:
        # One name together, as the page wants it.
        metrics = [metric for worker in self._workers for metric in worker.metrics]
        return sorted(metrics, key=lambda metric: metric.name)


class _Worker:
    """One of them, in whatever process it is just now."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.listening = asyncio.Event()
        self.routed = asyncio.Event()
        self.restarts = 0
        self.brokers: list[str] = []
        self.metrics: list[Metric] = []
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        """Of its process; 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    async def keep(self, first: Mapping[str, object], inherits: Sequence[int]) -> None:
        """Run it, and start it again for ever; ends only if the first start fails.

        A process reads `first`, and has the descriptors `inherits`.
        """
        loop = asyncio.get_running_loop()
        failures = 0
        while not self._stopping:
            began = loop.time()
            code = await self._run(first, inherits)
            started = self.listening.is_set()
            self.listening.clear()
            self.brokers, self.metrics = [], []
            if self._stopping or (not started and not self.restarts):
                return
            failures = 0 if loop.time() - began > STEADY_S else failures + 1
            wait_s = BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]
            logger.error(
                "a worker died and is started again",
                extra={"worker": self.number, "exit_code": code, "wait_s": wait_s},
            )
            await asyncio.sleep(wait_s)
            self.restarts += 1

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        _signal(process.terminate)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            logger.error("a worker did not end in time", extra={"worker": self.number})
            _signal(process.kill)
            await process.wait()

    async def _run(self, first: Mapping[str, object], inherits: Sequence[int]) -> int:
        """One process from its start to its end; returns its exit code."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "popmq.cli.roles.proxy_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT_BYTES,
            pass_fds=inherits,
            # Ctrl-C is for the parent, which ends its children in order.
            start_new_session=True,
        )
        self._process = process
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if self._stopping:
                _signal(process.terminate)
            reply = {"number": self.number, **first}
            process.stdin.write(json.dumps(reply).encode() + b"\n")
            async for line in process.stdout:
                self._heard(json.loads(line))
            return await process.wait()
        finally:
            if process.returncode is None:
                _signal(process.kill)

    def _heard(self, report: Mapping[str, Any]) -> None:
        if "endpoint" in report:
            self.listening.set()
            assert self._process is not None
            pid = self._process.pid
            logger.info("a worker listens", extra={"worker": self.number, "worker_pid": pid})
            return
        self.brokers = report["brokers"]
        if self.brokers:
            self.routed.set()
        own = {"worker": str(self.number)}
        self.metrics = [
            replace(metric, labels={**metric.labels, **own}, buckets=buckets)
            for name, value, labels, buckets in report["metrics"]
            for metric in [reading(name, value, *labels)]
        ]


def _signal(send: Callable[[], None]) -> None:
    try:
        send()
    except ProcessLookupError:  # it has just ended by itself
        return


def _reserve(host: str, port: int, shown: str) -> socket.socket:
    """A socket that holds the address without listening, so that a worker can always come back.

    Raises ConfigError when somebody else has it; also another popmq with workers, whose sockets
    would share their clients with ours.
    """
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            where = probe.getsockname()
        held = socket.socket(family, kind, proto)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(where)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {shown}: another process does, or it is no address of this machine "
            "(proxy.listen, --port)"
        ) from error
    return held
