"""A popmq that is attacked: what it holds, how long its turns are, and what others see meanwhile.

The process runs under `watched.py`, which measures turns of the loop in CPU time, so other work of
the machine does not count.  REPLICAS=3 in the environment attacks three brokers, their controller
and a proxy, each a process, and counts what all of them hold together.
"""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen
from uuid import uuid4

import grpc
from e2e.processes import LOCAL, Role
from security.watched import SECONDS

from popmq.common.errors import Code
from popmq.proxy.api import definition_pb2 as pb
from popmq.proxy.api import service_pb2 as service

SERVICE = "/apache.rocketmq.v2.MessagingService/"
CLIENT = (("x-mq-client-id", "other"),)

MORE_RSS_BYTES = 256 << 20
LONGEST_TURN_S = 0.1  # on a machine that needs REFERENCE_S for `reference_work`
REFERENCE_S = 0.014
LIVEZ_S = 1.0
SLOW_PROBES = 3  # in a row, after which Kubernetes restarts a pod
LOG_LINES_PER_S = 100
REPLICAS = int(os.environ.get("ATTACKED_REPLICAS", "1"))


class Target(Role):
    """`popmq up` whose process may have `files` descriptors."""

    def __init__(
        self, folder: Path, *, files: int = 4_096, settings: Mapping[str, str] | None = None
    ) -> None:
        shown = {
            "POPMQ_HTTP_LISTEN": f"{LOCAL}:0",
            "POPMQ_STORE_DISK_STOP_PERCENT": "100",
            "POPMQ_STORE_SEGMENT_BYTES": "64MiB",
            **(settings or {}),
        }
        self._data = folder / "data"
        arguments = ["up", "--port", "0", "--data", str(self._data)]
        if REPLICAS > 1:
            arguments += ["--replicas", str(REPLICAS)]
        super().__init__("up", arguments, folder=folder, settings=shown)
        self._turns = folder / "turns"
        self._turns.mkdir(exist_ok=True)
        self._files = files

    def command(self) -> list[str]:
        watched = str(Path(__file__).with_name("watched.py"))
        return [sys.executable, watched, str(self._turns), str(self._files), *self.arguments]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.ready.endpoint.rpartition(":")
        return host, int(port)

    @property
    def metrics_address(self) -> tuple[str, int]:
        host, _, port = self.ready.metrics.split("/")[2].rpartition(":")
        return host, int(port)

    def metrics(self) -> list[bytes]:
        """The page of each process."""
        return [_page(f"http://{address}/metrics") for address in self._http_addresses()]

    def metric(self, name: str) -> int:
        """The sum over all processes."""
        lines = b"\n".join(self.metrics()).decode().splitlines()
        matches = [line for line in lines if line.startswith(f"{name} ")]
        assert matches, name
        return sum(int(float(line.split()[1])) for line in matches)

    def rss_bytes(self) -> int:
        pages = [Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in self._pids()]
        return sum(map(int, pages)) * resource.getpagesize()

    def log_text(self) -> str:
        logs = [self.log, *self._data.glob("logs/*.log")]
        return "".join(log.read_text() for log in logs)

    def longest_turn_s(self) -> float:
        """Of any process since `forget_turns`."""
        turns = [(self._turns / pid).read_bytes() for pid in self._pids()]
        return max(float(SECONDS.unpack(turn)[0]) for turn in turns)

    def forget_turns(self) -> None:
        for pid in self._pids():
            with (self._turns / pid).open("r+b") as file:
                file.write(SECONDS.pack(0))

    def _pids(self) -> list[str]:
        """All have to live."""
        pids = [path.name for path in self._turns.iterdir()]
        assert len(pids) == (1 if REPLICAS == 1 else REPLICAS + 3), pids
        return pids

    def _http_addresses(self) -> list[str]:
        if REPLICAS == 1:
            return [self.ready.metrics.split("/")[2]]
        processes = json.loads((self._data / "cluster.json").read_text())["processes"]
        return [process["listens"]["http.listen"] for process in processes]

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def livez_s(self) -> float:
        """How long the slowest process takes; a failure takes for ever."""
        slowest_s = 0.0
        for address in self._http_addresses():
            began_s = time.monotonic()
            try:
                _page(f"http://{address}/livez")
            except (URLError, OSError):
                return float("inf")
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        return slowest_s


@dataclass
class Attack:
    """What was seen while it lasted."""

    target: Target
    most_rss_bytes: int = 0
    livez_s: list[float] = field(default_factory=list)
    sends: int = 0
    refused: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self._over.is_set():
            self.most_rss_bytes = max(self.most_rss_bytes, self.target.rss_bytes())
            self.livez_s.append(self.target.livez_s())
            self._over.wait(0.05)

    def send(self) -> None:
        """What another client does meanwhile."""
        with grpc.insecure_channel(self.target.ready.endpoint) as channel:
            send = channel.unary_unary(
                f"{SERVICE}SendMessage",
                request_serializer=service.SendMessageRequest.SerializeToString,
                response_deserializer=service.SendMessageResponse.FromString,
            )
            while not self._over.is_set() or not self.sends:
                try:
                    status = send(_message(), metadata=CLIENT, timeout=30).status
                except grpc.RpcError as error:
                    self.refused.append(str(error))
                else:
                    self.sends += status.code == Code.OK.value
                    if status.code != Code.OK.value:
                        self.refused.append(status.message)
                self._over.wait(0.02)

    def until_sent(self) -> None:
        """Until the other client has sent a message: its topic is there then."""
        while not self.sends and not self._over.wait(0.01):
            pass

    def end(self) -> None:
        self._over.set()


def reference_work() -> float:
    """The CPU time of some work, in seconds; of three times the shortest."""
    took_s = []
    for _ in range(3):
        began_s = time.thread_time()
        table = {}
        for number in range(100_000):
            table[number & 1023] = (number, b"%d" % number)
        took_s.append(time.thread_time() - began_s)
    return min(took_s)


@contextmanager
def attacking(target: Target) -> Iterator[Attack]:
    """The body attacks; afterwards everything has to hold that users rely on."""
    attack = Attack(target)
    threads = [threading.Thread(target=attack.watch), threading.Thread(target=attack.send)]
    rss_bytes, log_lines = target.rss_bytes(), target.log_text().count("\n")
    slowness = reference_work() / REFERENCE_S
    target.forget_turns()
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        yield attack
    finally:
        attack.end()
        for thread in threads:
            thread.join()
    lasted_s = max(1.0, time.monotonic() - began_s)
    slowness = max(1.0, slowness, reference_work() / REFERENCE_S)
    lines = target.log_text().count("\n") - log_lines
    more_bytes = attack.most_rss_bytes - rss_bytes
    turn_s = target.longest_turn_s()
    print(
        f"{lasted_s:.1f} s on a machine {slowness:.1f} times as slow: "
        f"+{more_bytes >> 20} MiB, longest turn {turn_s * 1000:.0f} ms, "
        f"/livez {max(attack.livez_s) * 1000:.0f} ms at most, {attack.sends} sends of others, "
        f"{len(attack.refused)} refused, {lines} lines of log"
    )
    assert more_bytes <= MORE_RSS_BYTES
    assert turn_s <= LONGEST_TURN_S * slowness
    assert not _slow_probes(attack.livez_s)
    assert attack.refused == []
    assert attack.sends > 0
    assert lines <= LOG_LINES_PER_S * lasted_s


def _slow_probes(took_s: list[float]) -> bool:
    """Whether so many in a row were slow that a pod would be restarted."""
    slow = [probe_s > LIVEZ_S for probe_s in took_s]
    return any(all(slow[at : at + SLOW_PROBES]) for at in range(len(slow) - SLOW_PROBES + 1))


def _page(url: str) -> bytes:
    with urlopen(url, timeout=30) as reply:
        return bytes(reply.read())


def _message() -> service.SendMessageRequest:
    message = pb.Message(topic=pb.Resource(name="others"), body=b"x" * 100)
    message.system_properties.message_id = uuid4().hex
    return service.SendMessageRequest(messages=[message])
