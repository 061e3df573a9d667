"""popmq as a peer: controller, broker and proxy apart, or all in one process."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.peers.peer import QUEUES
from bench.peers.processes import Process, free_port
from popmq.cli.load.consuming import Consumer, ConsumerSession, ConsumeStats
from popmq.cli.load.reactor import LoadError, Reactor
from popmq.cli.load.requests import AckTemplate, SendTemplate
from popmq.cli.load.sending import RocketMqSender
from popmq.cli.load.target import PopmqTopic
from popmq.common.errors import PopmqError

READY_S = 60
INVISIBLE_MS = 300_000


class Popmq:
    """`apart`: three processes. Every check is on, and every OK waits for its fdatasync."""

    def __init__(
        self,
        *,
        apart: bool = True,
        transport: str = "lean",
        variant: str = "indexed",
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"popmq {'apart' if apart else 'up'}" + (
            "" if transport == "lean" else f" {transport}"
        )
        how = "controller, broker, proxy apart" if apart else "all in one process"
        self.settings = f"{how}; fdatasync before each OK; --transport {transport}"
        self.warm_up = 20_000
        self._apart = apart
        self._transport = transport
        self._variant = variant
        self._more = dict(more or {})  # variables of the environment
        self._roles: list[Process] = []
        self._topic: PopmqTopic | None = None
        self._folder = Path()
        self._env: dict[str, str] = {}
        self._starts = 0
        self.endpoint = ""

    def start(self, folder: Path) -> None:
        controller, port = free_port(), free_port()
        env = {
            "POPMQ_CONTROLLER_LISTEN": f"127.0.0.1:{controller}",
            "POPMQ_CONTROLLER_ADDRESSES": f"127.0.0.1:{controller}",
            "POPMQ_BROKER_DATA": str(folder / "data"),
            "POPMQ_BROKER_LISTEN": "127.0.0.1:0",
            "POPMQ_PROXY_LISTEN": f"127.0.0.1:{port}",
            "POPMQ_PROXY_TRANSPORT": self._transport,
            "POPMQ_HTTP_LISTEN": "127.0.0.1:0",
            **self._more,
        }
        self.endpoint = f"127.0.0.1:{port}"
        self._folder, self._env = folder, env
        self.start_again()
        self._topic = _first_topic(self.endpoint)

    def start_again(self) -> None:
        """With the same data; back when every role says that it is ready."""
        assert not self._roles, "stop it first"
        for role in ("controller", "broker", "proxy") if self._apart else ("up",):
            argv = [sys.executable, "-m", "popmq.cli", role]
            # A log of its own for each start: the ready line is looked for in it.
            self._starts += 1
            process = Process(role, argv, self._folder, self._env, log=f"{role}-{self._starts}")
            self._roles.append(process)
        for process in self._roles:
            _ready(process)

    def processes(self) -> Sequence[Process]:
        return self._roles

    def role(self, name: str) -> Process:
        return next(process for process in self._roles if process.name == name)

    @property
    def topic(self) -> PopmqTopic:
        assert self._topic is not None, "start it first"
        return self._topic

    def lanes(self, reactor: Reactor, connections: int, body: int) -> Sequence[RocketMqSender]:
        template = SendTemplate(self.topic.topic, body)
        channels = self.topic.target(variant=self._variant).connect(reactor, connections)
        return [RocketMqSender(channel, template) for channel in channels]

    def stored(self) -> int:
        return self.topic.stored()

    def consume(
        self, reactor: Reactor, connections: int, loops: int, seconds: float, *, acks: str
    ) -> ConsumeStats:
        target = self.topic.target(variant=self._variant)
        channels = target.connect(reactor, connections)
        session = ConsumerSession(reactor, channels[0], target.group, [target.topic])
        receives = target.receives(wait_ms=100, invisible_ms=INVISIBLE_MS)
        ack = AckTemplate(target.topic, target.group)
        left = self.topic.left()
        consumed = Consumer(reactor, channels, receives, ack, loops=loops, acks=acks).run(seconds)
        session.close()
        if left - self.topic.left() != consumed.acks.done:
            raise LoadError(
                f"{consumed.acks.done} acks answered OK, but the group's lag went from {left} "
                f"to {self.topic.left()}"
            )
        return consumed

    def kill(self) -> None:
        """SIGKILL to all roles."""
        for process in self._roles:
            process.kill()
        self._roles.clear()

    def stop(self) -> None:
        for process in reversed(self._roles):
            process.stop()
        self._roles.clear()


def _ready(process: Process) -> None:
    """Wait for the ready line."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        process.check()
        if re.search(r"^ready: ", process.tail(), re.MULTILINE):
            return
        time.sleep(0.01)
    raise LoadError(f"{process.name} was not ready after {READY_S} s: {process.tail()}")


def _first_topic(endpoint: str) -> PopmqTopic:
    """Made as soon as the proxy knows its broker."""
    until = time.monotonic() + READY_S
    while True:
        try:
            return PopmqTopic(endpoint, "bench", "bench", queues=QUEUES)
        except PopmqError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
