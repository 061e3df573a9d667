"""Server processes of a benchmark: started on loopback, watched through /proc, stopped by pid."""

import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from popmq.cli.load.reactor import LoadError

TICKS = os.sysconf("SC_CLK_TCK")
STOP_S = 30
PORTS = (15_000, 31_000)


class Process:
    """One server with all that it starts. Its output is in `<folder>/<name>.log`."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        *,
        log: str = "",
    ) -> None:
        self.name = name
        self.log = folder / f"{log or name}.log"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("POPMQ_")}
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                cwd=folder,
                env={**inherited, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def pids(self) -> list[int]:
        """Its own and those of everything below it."""
        pids, fresh = [], [self.pid]
        while fresh:
            pid = fresh.pop()
            pids.append(pid)
            for task in _read_dir(Path(f"/proc/{pid}/task")):
                fresh += map(int, _read(task / "children").split())
        return pids

    def check(self) -> None:
        """LoadError if it has ended."""
        if self._process.poll() is not None:
            raise LoadError(f"{self.name} ended with {self._process.returncode}: {self.reason()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]

    def reason(self) -> str:
        """The last lines of its output that speak of a failure, else its last lines."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        bad = [line for line in lines if re.search(r"(?i)exception|error|fail", line)]
        return " / ".join((bad or lines)[-3:])[:600]

    def pause(self) -> None:
        self._signal(self.pids(), signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(self.pids(), signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(self.pids()[1:], signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what is there after half a minute."""
        below = self.pids()[1:]
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._signal(below, signal.SIGKILL)  # started by our process, so ours to end

    def _signal(self, pids: Sequence[int], number: int) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def cpu_s(processes: Sequence[Process]) -> float:
    """User and system time of all threads, with that of ended children."""
    total = 0
    for process in processes:
        for pid in process.pids():
            fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            if fields:
                total += sum(map(int, fields[11:15]))
    return total / TICKS


def memory_mb(processes: Sequence[Process]) -> float:
    """Resident memory, pages of files included."""
    total = 0
    for process in processes:
        for pid in process.pids():
            for line in _read(Path(f"/proc/{pid}/status")).splitlines():
                if line.startswith("VmRSS:"):
                    total += int(line.split()[1])
    return total / 1024


def device_flushes(folder: Path) -> int:
    """FLUSH requests that the disk under `folder` has done: what every fsync comes down to.

    Of the whole machine; -1 where the kernel does not tell.
    """
    device = os.stat(folder).st_dev
    params = (str(os.major(device)), str(os.minor(device)))
    for line in _read(Path("/proc/diskstats")).splitlines():
        fields = line.split()
        if tuple(fields[:2]) == params and len(fields) >= 20:
            return int(fields[18])
    return -1


def machine_cpu_s() -> float:
    """CPU time that anybody used since the start of the machine."""
    fields = list(map(int, _read(Path("/proc/stat")).splitlines()[0].split()[1:]))
    return (sum(fields[:3]) + sum(fields[5:8])) / TICKS


def free_port(*, beside: Sequence[int] = ()) -> int:
    """A port that nobody listens on, and none `beside` it (-2: two below).

    It is below those that the kernel gives to outgoing connections, of which a load has many.
    """
    for _ in range(1_000):
        port = random.randrange(*PORTS)
        if all(map(_is_free, (port, *(port + off for off in beside)))):
            return port
    raise LoadError(f"no free port from {PORTS[0]} to {PORTS[1]}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_for_port(process: Process, port: int, *, limit_s: float = 120) -> None:
    """Until somebody listens; LoadError when the process ends or the time does."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        process.check()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise LoadError(f"{process.name}: nobody listens on {port} after {limit_s:g} s")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _read_dir(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except FileNotFoundError:
        return []
