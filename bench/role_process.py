"""A role of popmq for a benchmark: a process of its own, its CPU and its metrics."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import urlopen


class RoleProcess:
    """Enter to start it, leave to end it. `settings` are named without POPMQ_."""

    def __init__(self, command: str, name: str, folder: Path, settings: dict[str, str]) -> None:
        self.settings = settings
        self._command = command
        self._name = name
        self._folder = folder
        self._metrics = ""
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("POPMQ_")}
        given = {f"POPMQ_{key}": value for key, value in self.settings.items()}
        log_path = self._folder / f"{self._name}.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "popmq.cli", self._command],
                cwd=self._folder,
                env={**inherited, "POPMQ_HTTP_LISTEN": "127.0.0.1:0", **given},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if not ready.startswith("ready: "):
            self._process.kill()
            raise RuntimeError(log_path.read_text()[-2_000:])
        self._metrics = next(w for w in ready.split() if w.startswith("http")).rstrip(",")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float:
        with urlopen(self._metrics, timeout=10) as reply:
            lines: list[str] = reply.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return f"127.0.0.1:{port}"
