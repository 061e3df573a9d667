"""popmq's roles as real processes: started, waited for, killed, and never left behind.

A role is ready when it prints its ready line, which also says where it listens; nothing here
sleeps and hopes.  What a role writes to stderr (its JSON log) is kept in a file beside its
data, and the end of it is part of every failure.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.request import urlopen

from programs import run_program

from popmq.cli.client import CallRefused, Client
from popmq.common.errors import Code
from popmq.common.wire import admin_pb2 as admin

READY_S = 90.0  # of a role, on a machine that has much else to do
POLL_S = 0.02
STOP_S = 10.0
LOCAL = "127.0.0.1"
SERVED_BY = [""]  # the last is what proxies get (conftest.py runs tests with both); "": default


class RoleFailed(AssertionError):
    """A role did not start, died, or did not stop as it should."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The ready line, taken apart; a field that the role does not print is empty."""

    endpoint: str = ""  # public gRPC: `up` and the proxy
    admin: str = ""  # the same, if the admin port is no unix socket
    controller: str = ""
    broker: str = ""  # the broker's name
    operator: str = ""  # the name of its Lease
    console: str = ""  # its URL
    frames: str = ""
    metrics: str = ""
    data: str = ""

    @classmethod
    def parse(cls, line: str) -> Self:
        """Raise ValueError for anything that is not a ready line."""
        match = re.fullmatch(r"ready: (.*?)(?:, data (.*))?", line.rstrip("\n"))
        if match is None:
            raise ValueError(f"not a ready line: {line!r}")
        words = match[1].replace(",", " ").split()
        fields = dict(zip(words[::2], words[1::2], strict=True))
        unknown = fields.keys() - {
            "endpoint",
            "admin",
            "controller",
            "broker",
            "operator",
            "console",
            "frames",
            "metrics",
        }
        if unknown:
            raise ValueError(f"unknown words {sorted(unknown)} in {line!r}")
        return cls(**fields, data=match[2] or "")


class OwnProcess(ABC):
    """A process of the test: enter to start it, leave to end it, gone afterwards in any case.

    Left without an exception it has to `end` by itself as it should.
    """

    @abstractmethod
    def start(self) -> object: ...

    @abstractmethod
    def end(self) -> None:
        """Ask it to end, unless it did already; raise when it does not end well."""

    @abstractmethod
    def stop(self) -> None:
        """For cleaning up: gone afterwards, without an opinion on how."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.end()
        finally:
            self.stop()


class Role(OwnProcess):
    """One `popmq` process. SIGTERM has to end it with exit code 0 within 10 s."""

    def __init__(
        self, name: str, arguments: list[str], *, folder: Path, settings: Mapping[str, str]
    ) -> None:
        self.name = name
        self.ready = Ready()
        self.settings = dict(settings)
        self.log = folder / f"{name}.log"
        self.arguments = arguments
        self._folder = folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def command(self) -> list[str]:
        return [sys.executable, "-m", "popmq.cli", *self.arguments]

    def start(self) -> Ready:
        """Start the process and return once it is ready."""
        assert self._process is None, f"{self.name} runs already"
        lines: SimpleQueue[str | None] = SimpleQueue()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self._folder,
                env=role_environment(self.settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = threading.Thread(
            target=_read_lines, args=(self._process, lines), name=f"{self.name}-stdout"
        )
        self._reader.start()
        self.ready = self._wait_ready(lines)
        return self.ready

    @property
    def folder(self) -> Path:
        """Its working directory."""
        return self._folder

    @property
    def pid(self) -> int:
        return self._running().pid

    def kill9(self) -> None:
        """SIGKILL: what the role had not made durable is gone."""
        process = self._running()
        process.kill()
        process.wait()
        self._forget()

    def terminate(self) -> None:
        """SIGTERM, and insist on a clean end."""
        process = self._running()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # its threads' stacks go to the log
            process.wait()
            self._forget()
            raise RoleFailed(
                f"{self.name} ignored SIGTERM for {STOP_S:g} s{self._tail()}"
            ) from None
        self._forget()
        if code != 0:
            raise RoleFailed(f"{self.name} ended SIGTERM with exit code {code}{self._tail()}")

    def wait(self, within_s: float) -> int:
        """Wait until it ends by itself; its exit code. TimeoutExpired when it does not end."""
        code = self._running().wait(within_s)
        self._forget()
        return code

    def restart(self) -> Ready:
        """Start again after `kill9` or `terminate`, with the same settings and folder."""
        return self.start()

    def end(self) -> None:
        if self._process is not None:
            self.terminate()

    def stop(self) -> None:
        if self._process is not None:
            self.kill9()

    def metric(self, name: str) -> int:
        """A whole number on the role's page of metrics; `name` has its labels, as printed."""
        with urlopen(self.ready.metrics, timeout=10) as reply:
            lines: list[str] = reply.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return int(float(values[name]))

    def _wait_ready(self, lines: "SimpleQueue[str | None]") -> Ready:
        process = self._running()
        try:
            line = lines.get(timeout=READY_S)
        except Empty:
            self.stop()
            raise RoleFailed(
                f"{self.name} was not ready within {READY_S:g} s{self._tail()}"
            ) from None
        if line is None:
            code = process.wait()
            self._forget()
            raise RoleFailed(f"{self.name} ended with code {code}, never ready{self._tail()}")
        return Ready.parse(line)

    def _running(self) -> "subprocess.Popen[str]":
        assert self._process is not None, f"{self.name} does not run"
        return self._process

    def _forget(self) -> None:
        process, reader = self._process, self._reader
        self._process = self._reader = None
        if reader is not None:
            reader.join()
        if process is not None and process.stdout is not None:
            process.stdout.close()

    def _tail(self) -> str:
        return f"; the end of its log:\n{tail(self.log)}"


class Served(Protocol):
    """A popmq that clients use, of whatever processes."""

    @property
    def endpoints(self) -> list[str]:
        """Of its proxies; at least one."""
        ...

    def popmq(self, *arguments: str) -> str: ...

    def create(self, *, topic: str, groups: list[str]) -> None: ...


NO_OWNER_YET = "owns topics and consumer groups is not known yet: try again"


def run_command(endpoint: str, folder: Path, *arguments: str) -> str:
    """Run the command line against a proxy; return what it printed. RoleFailed if it fails.

    While the controller of a cluster that has just begun does not know its brokers yet, commands
    are refused with a request to try again, which this does.
    """
    deadline_s = time.monotonic() + READY_S
    while True:
        done = run_program(
            [sys.executable, "-m", "popmq.cli", *arguments],
            cwd=folder,
            env=role_environment({"POPMQ_ENDPOINT": endpoint}),
            stdin=subprocess.DEVNULL,
            timeout=READY_S,
        )
        if done.returncode == 0:
            return done.stdout
        text = f"{done.stdout}{done.stderr}".strip()
        if NO_OWNER_YET not in text or time.monotonic() > deadline_s:
            raise RoleFailed(f"popmq {' '.join(arguments)} -> {done.returncode}: {text}")


def wait_for_owner(endpoint: str) -> None:
    """Return once the proxy reaches the broker group that owns topics and consumer groups.

    A proxy prints its ready line without knowing any broker group. RoleFailed after READY_S.
    """
    request = admin.DeleteGroupRequest(name="no-such-group")
    deadline_s = time.monotonic() + READY_S
    with Client(endpoint) as client:
        while True:
            try:
                client.call_admin(request, admin.GroupReply)
            except CallRefused as error:
                if error.number != Code.HA_NOT_AVAILABLE:
                    return
                if time.monotonic() > deadline_s:
                    raise RoleFailed(f"{endpoint} serves no commands: {error}") from error
            time.sleep(POLL_S)


class Cluster:
    """Controller, one broker (or `replicas` of each of several groups) and some proxies, each in a
    process of its own.

    The broker keeps its first port, so that after `broker.kill9(); broker.restart()` it is
    found where it was.
    """

    def __init__(
        self,
        folder: Path,
        *,
        proxies: int = 1,
        groups: int = 1,
        replicas: int = 1,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        common = {"POPMQ_HTTP_LISTEN": f"{LOCAL}:0", **(settings or {})}
        self._folder = folder
        controller_address = f"{LOCAL}:{free_port()}"
        addresses = {"POPMQ_CONTROLLER_ADDRESSES": controller_address}
        self.controller = Role(
            "controller",
            ["controller"],
            folder=folder,
            settings={**common, "POPMQ_CONTROLLER_LISTEN": controller_address},
        )
        self.brokers = [
            Role(
                f"broker{number or ''}",
                ["broker"],
                folder=folder,
                settings={
                    **common,
                    **addresses,
                    "POPMQ_BROKER_NAME": f"broker-{chr(ord('a') + number // replicas)}",
                    "POPMQ_BROKER_NODE": f"node-{number}",
                    "POPMQ_REPLICATION_REPLICAS": str(replicas),
                    "POPMQ_BROKER_DATA": str(folder / f"broker{number or ''}-data"),
                    "POPMQ_BROKER_LISTEN": f"{LOCAL}:{free_port()}",
                    "POPMQ_TOPIC_AUTO_CREATE": "false",
                    "POPMQ_STORE_SEGMENT_BYTES": "64MiB",
                },
            )
            for number in range(groups * replicas)
        ]
        self.broker = self.brokers[0]
        self.proxies = [
            Role(
                f"proxy-{number}",
                ["proxy"],
                folder=folder,
                settings={**common, **addresses, "POPMQ_PROXY_LISTEN": f"{LOCAL}:0"},
            )
            for number in range(1, proxies + 1)
        ]
        self._stack = ExitStack()

    @property
    def endpoints(self) -> list[str]:
        return [proxy.ready.endpoint for proxy in self.proxies]

    def popmq(self, *arguments: str) -> str:
        """Run the command line against the first proxy; return what it printed."""
        return run_command(self.endpoints[0], self._folder, *arguments)

    def create(self, *, topic: str, groups: list[str]) -> None:
        self.popmq("topic", "create", topic)
        for group in groups:
            self.popmq("group", "create", group)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for role in (self.controller, *self.brokers, *self.proxies):
                stack.enter_context(role)
            for endpoint in self.endpoints:
                wait_for_owner(endpoint)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


def role_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment without any POPMQ_ setting of the developer's own, plus `settings`.

    A process that ends with SIGABRT or SIGSEGV writes the stacks of its threads to its log.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("POPMQ_")}
    transport = {"POPMQ_PROXY_TRANSPORT": SERVED_BY[-1]} if SERVED_BY[-1] else {}
    return {"PYTHONFAULTHANDLER": "1", **inherited, **transport, **settings}


def free_port() -> int:
    """A free port that no outgoing connection can be given.

    A proxy that keeps calling a killed broker's port inside the range of ephemeral ports may
    be given that very port and reach itself, and the broker could never listen there again.
    """
    first = 10_000
    candidates = list(range(first, _first_ephemeral_port()))
    random.shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOCAL, port))
            except OSError:
                continue
            return port
    raise RoleFailed(f"no free port below {_first_ephemeral_port()}")


def tail(path: Path, lines: int = 80) -> str:
    if not path.exists():
        return "(nothing)"
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) or "(nothing)"


def _first_ephemeral_port() -> int:
    setting = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if setting.exists():
        return max(10_100, int(setting.read_text().split()[0]))
    return 32_768


def _read_lines(process: "subprocess.Popen[str]", lines: "SimpleQueue[str | None]") -> None:
    """Hand over the ready line; go on reading, so that the role never blocks on a full pipe."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready: "):
            lines.put(line)
    lines.put(None)
