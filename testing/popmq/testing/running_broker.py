"""RunningBroker: a whole popmq on a real port, whose time a test moves (docs/concepts/testing.md).

What runs is what `popmq up` runs: controller, broker, proxy, the gRPC server.  Only the clock,
and where the files are, come from here.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar

from popmq.broker.node.broker_process import BrokerProcess
from popmq.cli.roles.one_process import UP_DEFAULTS, OneProcess
from popmq.common.settings.settings import Settings, load_settings
from popmq.common.signing import Signer
from popmq.common.step_loop import FlusherThread
from popmq.proxy.auth.first_admin import make_admin_file, read_admin_file
from popmq.proxy.auth.sealing import make_key_file
from popmq.testing.broker_calls import BrokerCalls, Duration, milliseconds
from popmq.testing.disk.lying_disk import LyingDisk
from popmq.testing.harness.clock import ClientClock, SkippingClock
from popmq.testing.loop_thread import LoopFlusher, LoopThread

START_S = STOP_S = 30.0
ADVANCE_S = 60.0

# Small, so that a start is quick; to the millisecond, so that time is what the test says it is.
DEFAULTS = {
    **UP_DEFAULTS,
    "broker.data": "memory",
    "proxy.listen": "127.0.0.1:0",
    "store.segment_bytes": "8MiB",
    "store.reserved_segments": 1,
    "pop.revive_step_ms": 1,
}

T = TypeVar("T")


class RunningBroker(BrokerCalls):
    """Enter it to start it; leaving stops it and lets go of its port, threads and memory.

    The port stays the same over `restart` and `crash`.  Calls may come from several threads;
    those two, and leaving, only when no other call is in progress.
    """

    def __init__(
        self,
        *,
        data: str | Path | None = None,
        freeze: bool = False,
        settings: Mapping[str, object] | None = None,
        users: bool = False,
    ) -> None:
        super().__init__()
        folder = None if data is None else str(data)
        requested = {**(settings or {}), **({"broker.data": folder} if folder else {})}
        # The environment belongs to the machine, not to the test.
        self._settings = load_settings(None, {}, requested, defaults=DEFAULTS).settings
        self._users = users
        self._user_files: TemporaryDirectory[str] | None = None
        self._disk = None if folder else LyingDisk()
        self._clock = SkippingClock(frozen=freeze)
        self._patience = ClientClock(self._clock)
        self._loop: LoopThread | None = None
        self._one: OneProcess | None = None

    def __enter__(self) -> Self:
        assert self._loop is None, "this broker runs already"
        if self._users:
            self._keep_user_files()
        self._loop = LoopThread("popmq-broker")
        try:
            self._call(self._start(), START_S)
        except BaseException:
            self._loop.stop()
            self._loop = None
            self._drop_user_files()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hang_up()
        assert self._loop is not None
        try:
            if self._one is not None:  # else a restart failed, and has said so
                self._call(self._stop(), STOP_S)
        finally:
            self._loop.stop()
            self._loop = self._one = None
            self._drop_user_files()

    @property
    def endpoint(self) -> str:
        """HOST:PORT for any RocketMQ 5 client."""
        return self._running().endpoint

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def access_key(self) -> str:
        """Of the Super user; empty without `users`."""
        return self._signer().access_key

    @property
    def secret(self) -> str:
        return self._signer().secret

    def now_ms(self) -> int:
        """The broker's wall clock, in milliseconds since 1970."""
        return self._clock.wall_ms()

    def advance(self, duration: Duration) -> None:
        """Let so much time pass (`"90s"`, `"3d"`, a timedelta), in no time.

        The clock jumps once.  On return everything that became due by then was done: retries
        can be received, dead letters are written, and receives that waited were answered: with
        what became due, or with nothing where their time was over.
        """
        ms = milliseconds(duration)
        self._call(self._advance(self._running(), ms), ADVANCE_S)

    def restart(self) -> None:
        """Stop cleanly and start again: waiting receives are answered, connections are lost."""
        self._again(self._stop)

    def crash(self) -> None:
        """Die as by kill -9 and start again: connections break in the middle of calls.

        In memory the power goes too: what was not synced is lost.  In files the machine lives
        on, and only what the broker had not written yet is.
        """
        self._again(self._crash)

    # -- on the loop

    async def _start(self) -> None:
        in_memory = self._disk is not None
        broker = BrokerProcess(
            self._settings,
            disk=self._disk,
            clock=self._clock,
            waits=self._patience,
            make_flusher=LoopFlusher if in_memory else FlusherThread,
        )
        process = OneProcess(self._settings, broker, proxy_clock=self._patience)
        await process.start()
        self._one = process

    async def _stop(self) -> None:
        process, self._one = self._running(), None
        await process.stop()

    async def _crash(self) -> None:
        process, self._one = self._running(), None
        await process.kill()
        if self._disk is not None:
            self._disk.restore_power()

    async def _advance(self, process: OneProcess, ms: int) -> None:
        self._clock.advance(ms)
        await process.broker.settle()
        # Last: who waits gets what became due before being told that the wait is over.
        self._patience.advance(ms)
        await process.broker.settle()

    # -- inside

    def _again(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End and start, where it was."""
        proxy = replace(self._settings.proxy, listen=self.endpoint)
        self._settings = replace(self._settings, proxy=proxy)
        self._hang_up()
        self._call(end(), STOP_S)
        self._call(self._start(), START_S)

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        assert self._loop is not None
        return self._loop.call(work, timeout_s)

    def _running(self) -> OneProcess:
        if self._one is None:
            raise RuntimeError("the broker does not run: use it inside `with broker() as b:`")
        return self._one

    def _address(self) -> str:
        return self.endpoint

    def _signer(self) -> Signer:
        path = self._settings.auth.admin_file
        return Signer(*read_admin_file(path)) if path else Signer()

    def _keep_user_files(self) -> None:
        """Of the first user and its sealing key; not in memory, since a proxy reads files."""
        self._user_files = TemporaryDirectory(prefix="popmq-users-")
        key_file, admin_file = (
            f"{self._user_files.name}/{name}" for name in ("auth.key", "admin.json")
        )
        make_key_file(key_file)
        make_admin_file(admin_file)
        auth = replace(self._settings.auth, key_file=key_file, admin_file=admin_file)
        self._settings = replace(self._settings, auth=auth)

    def _drop_user_files(self) -> None:
        if self._user_files is not None:
            self._user_files.cleanup()
            self._user_files = None
