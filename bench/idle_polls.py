"""What receives that wait cost an idle broker: CPU of its process per second, by their number.

    python -m bench.idle_polls [--waiters 10000] [--groups 20] [--seconds 20]

The broker is a process of its own, as a pod runs it; the receives wait over one connection of
frames, as a proxy's do.  First the idle broker is measured without any, then with all of them.
The data goes to the current folder and is removed.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from popmq.common.errors import PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import Kind, PopRequest
from popmq.common.wire import admin_pb2 as pb

POLL_MS = 3_600_000  # nobody's time is over while it is measured
DEADLINE_MS = POLL_MS + 60_000
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of all threads of the process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def share(pid: int, seconds: float) -> float:
    """Percent of one core that the process takes while nobody asks it for anything."""
    began, loop = cpu_s(pid), asyncio.get_running_loop()
    at = loop.time()
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - began) / (loop.time() - at) * 100


class Crowd:
    """Receives that wait; none is answered while nothing is sent."""

    def __init__(self, port: FramePort) -> None:
        self._port = port
        self.answered = 0

    def ask(self, group: str) -> None:
        body = hop.encode_pop(PopRequest("bench", group, "bench", 32, 60_000, POLL_MS))
        self._port.request(Kind.POP, body, DEADLINE_MS, self._hear)

    def _hear(self, answer: bytes | PopmqError) -> None:
        self.answered += 1


async def measure(pid: int, address: str, waiters: int, groups: int, seconds: float) -> None:
    port = FramePort(address, Hello(role=ProcessRole.PROXY, name="bench", cluster="popmq"))
    port.start()
    topic = pb.CreateTopicRequest(topic=pb.Topic(name="bench", queues=8))
    await call(port, Kind.CREATE_TOPIC, topic.SerializeToString(), 10_000)
    for number in range(groups):
        group = pb.CreateGroupRequest(group=pb.Group(name=f"g{number}"))
        await call(port, Kind.CREATE_GROUP, group.SerializeToString(), 10_000)
    print("| receives that wait | % of a core | memory MB |\n|---|---|---|", flush=True)
    await asyncio.sleep(2)  # what the start left to do
    print(f"| 0 | {await share(pid, seconds):.2f} | {rss_mb(pid):.0f} |", flush=True)
    crowd = Crowd(port)
    for number in range(waiters):
        crowd.ask(f"g{number % groups}")
        if number % 500 == 499:
            # An answered request behind them: all in front were taken.
            lag = pb.LagRequest(group="g0", topic="bench").SerializeToString()
            await call(port, Kind.LAG, lag, 10_000)
    print(f"| {waiters} | {await share(pid, seconds):.2f} | {rss_mb(pid):.0f} |", flush=True)
    if crowd.answered:
        raise AssertionError(f"{crowd.answered} receives were answered: they did not wait")
    await port.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--waiters", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-idle-") as folder:
        broker = subprocess.Popen(
            [sys.executable, "-m", "popmq.cli", "broker"],
            env={
                **os.environ,
                "POPMQ_BROKER_DATA": f"{folder}/data",
                "POPMQ_BROKER_LISTEN": "127.0.0.1:0",
                "POPMQ_HTTP_LISTEN": "127.0.0.1:0",
                "POPMQ_STORE_SEGMENT_BYTES": "16MiB",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert broker.stdout is not None
            line = broker.stdout.readline()
            match = re.search(r"frames (\S+?),? ", line + " ")
            if match is None:
                raise SystemExit(f"the broker is not ready: {line!r}")
            print(f"load average before: {os.getloadavg()[0]:.2f}", flush=True)
            asyncio.run(measure(broker.pid, match[1], args.waiters, args.groups, args.seconds))
            print(f"load average after: {os.getloadavg()[0]:.2f}")
        finally:
            broker.terminate()
            broker.wait(20)


if __name__ == "__main__":
    main()
