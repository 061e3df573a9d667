"""One role as a child process that is started again when it dies, after a pause that grows.

A child is killed by the kernel when its parent ends, however that ends, so that a supervisor
leaves no orphans (`die_with_parent`).
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from popmq.cli.roles.commands import PARENT_FLAG
from popmq.common.errors import PopmqError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
CALM_S = 30.0  # a child that lived for so long begins with the first pause again
STOP_S = 20.0

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ChildFailed(PopmqError):
    """A child ended before it had ever been ready; the message is the last line of its log."""


class SupervisedProcess:
    """`arguments` are those of `popmq`; what it writes to stderr is appended to `log`.

    `environment()` is asked before each start: the ports that the child got the first time are
    its ports from then on.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Callable[[], Mapping[str, str]],
        log: str,
        *,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.log = log
        self.ready_line = ""  # of the process that runs now
        self.starts = 0
        self.ready = asyncio.Event()
        self.pid = 0  # 0: it does not run now
        self._arguments = [*arguments, PARENT_FLAG, str(os.getpid())]
        self._environment = environment
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._was_ready = False

    async def run(self) -> None:
        """Until it is stopped. Raises ChildFailed when it does not come up the first time."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping:
            began = asyncio.get_running_loop().time()
            code = await self._live()
            if self._stopping:
                return
            if not self._was_ready:
                raise ChildFailed(f"{self.name} ended with {code}: {self._last_words()}")
            if asyncio.get_running_loop().time() - began > CALM_S:
                pause_s = FIRST_PAUSE_S
            logger.warning(
                "a process ended and is started again",
                extra={"child": self.name, "exit_code": code, "pause_s": pause_s},
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for one that does not end within STOP_S."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # one that was stopped cannot end
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            logger.error("killed a process that did not stop", extra={"child": self.name})
            self._signal(signal.SIGKILL)
            await process.wait()

    def kill(self) -> None:
        self._stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _live(self) -> int:
        """One process from its start to its end; returns its exit code."""
        self.starts += 1
        log = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            # A session of its own: Ctrl-C in a terminal goes to the supervisor alone, which
            # stops its children in their order.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "popmq.cli",
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(self._environment()),
                start_new_session=True,
            )
        finally:
            os.close(log)
        self.pid = self._process.pid
        self._on_change()
        assert self._process.stdout is not None, "it was asked for"
        async for line in self._process.stdout:
            if line.startswith(b"ready: ") and not self.ready_line:
                self.ready_line = line.decode().strip()
                if self._was_ready:
                    logger.warning("is back", extra={"child": self.name, "child_pid": self.pid})
                self._was_ready = True
                self.ready.set()
                self._on_change()
        code = await self._process.wait()
        self.pid, self.ready_line = 0, ""
        self.ready.clear()
        self._on_change()
        return code

    def _last_words(self) -> str:
        try:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                lines = [line.strip() for line in file if line.strip()]
        except OSError:
            lines = []
        return f"{lines[-1] if lines else 'it said nothing'} ({self.log})"


def word_of(line: str, name: str) -> str:
    """What follows `name` in a ready line; empty when it is not there."""
    words = line.replace(",", " ").split()
    return next((after for word, after in pairwise(words) if word == name), "")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Raises SystemExit when `parent` has ended already.  Where there is no prctl, nothing.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)
