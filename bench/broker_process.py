"""A `popmq broker` for a benchmark: a process of its own, asked over frames by its unix socket."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.request import urlopen

from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as pb

CALL_MS = 60_000


class Broker:
    """A `popmq broker` in a process of its own, and what can be asked about it from outside."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.address = f"unix:{self.data}/frames.sock"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("POPMQ_")}
        settings = {
            "POPMQ_BROKER_DATA": str(self.data),
            "POPMQ_BROKER_LISTEN": "127.0.0.1:0",
            "POPMQ_HTTP_LISTEN": "127.0.0.1:0",
        }
        with (folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "popmq.cli", "broker"],
                cwd=folder,
                env={**inherited, **settings},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if not ready.startswith("ready: "):
            self.stop()
            raise RuntimeError((folder / "broker.log").read_text()[-2_000:])
        self._metrics = next(word for word in ready.split() if word.startswith("http"))
        self._metrics = self._metrics.rstrip(",")

    def metric(self, name: str) -> float:
        with urlopen(self._metrics, timeout=10) as reply:
            lines: list[str] = reply.read().decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextmanager
def started_broker(folder: Path) -> Iterator[Broker]:
    broker = Broker(folder)
    try:
        yield broker
    finally:
        broker.stop()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[FramePort]:
    port = FramePort(address, Hello(role=ProcessRole.PROXY, name="bench", cluster="popmq"))
    port.start()
    try:
        yield port
    finally:
        await port.close()


async def create_topic(port: FramePort, name: str, queues: int, kind: str) -> None:
    topic = pb.CreateTopicRequest(topic=pb.Topic(name=name, queues=queues, type=kind))
    await call(port, Kind.CREATE_TOPIC, topic.SerializeToString(), CALL_MS)


async def create_group(port: FramePort, name: str) -> None:
    group = pb.CreateGroupRequest(group=pb.Group(name=name, type="normal", start_at="oldest"))
    await call(port, Kind.CREATE_GROUP, group.SerializeToString(), CALL_MS)
