"""CPU of one send, one receive of 32 and one ack in one process: bytes of HTTP/2 in, bytes out.

    python -m bench.core_cost [--rounds 1] [--messages 4096] [--headers plain]

The path of `popmq up` without sockets, threads and the waits of a disk: lean connections, proxy,
broker, log in memory (tmpfs).  One turn brings 16 calls on each of 4 connections.  What the load
does itself is outside of the figures, and it checks every answer.  The minimum of the rounds is
printed as JSON, in microseconds for each message; `python -m bench core` compares two trees.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from popmq.cli.load.http2 import HEADER_VARIANTS, HeaderBlocks, Headers
from popmq.cli.load.requests import (
    ACK,
    BATCH,
    RECEIVE,
    SEND,
    AckTemplate,
    LoadMessage,
    ReceiveTemplate,
    SendTemplate,
    received,
)
from popmq.common.clock import SystemClock
from popmq.common.disk import RealDisk
from popmq.common.protocol.messaging_payloads import Kind, OnReply
from popmq.common.settings.settings import Settings
from popmq.proxy.brokers.broker_ports import StaticBrokers
from popmq.proxy.proxy import Proxy
from popmq.proxy.transport.lean import frames
from popmq.proxy.transport.lean.bounds import LeanCounters
from popmq.proxy.transport.lean.connection import LeanConnection
from popmq.proxy.transport.lean.inbox import SharedInflow
from popmq.proxy.transport.lean.messages import InflationTurns
from popmq.testing.harness.core_broker import CoreBroker

CONNECTIONS, CALLS = 4, 16  # CALLS of each connection in a turn
TOPIC = GROUP = "bench"
BROKER = "broker-a"
OK = b"\x0bgrpc-status\x010"
WINDOW = frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW)
MEMORY = Path("/dev/shm")


class DirectPort:
    """Passes requests to the broker in the order in which they come, when `serve` says so."""

    def __init__(self, core: CoreBroker) -> None:
        self._core = core
        self._waiting: list[tuple[Kind, bytes, int, OnReply]] = []

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        self._waiting.append((kind, body, timeout_ms, on_reply))
        return len(self._waiting)

    def cancel(self, request_id: int) -> None: ...

    def serve(self) -> bool:
        """Whether there was anything to do."""
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._core.server.request(*request)
        self._core.run_until_idle()
        return bool(waiting)


class Client:
    """One connection, both ends of it."""

    def __init__(self, connection: LeanConnection, headers: str) -> None:
        self.connection = connection
        self._blocks = HeaderBlocks(Headers("127.0.0.1:8081", "bench@1@0@aaaa", headers))
        self._stream_id = -1
        self.unsent = frames.PREFACE + frames.settings(
            {frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}
        )
        self.unsent += WINDOW

    def call(self, path: str, message: bytes) -> None:
        self._stream_id += 2
        block = self._blocks.block(path)
        self.unsent += frames.frame(frames.HEADERS, frames.END_HEADERS, self._stream_id, block)
        self.unsent += frames.frame(frames.DATA, frames.END_STREAM, self._stream_id, message)

    def widen(self, answer: bytes) -> None:
        """The server may send as many bytes of DATA again."""
        if size := sum(len(data) for data in _data(answer)):
            self.unsent += frames.window_update(0, size)


class Core:
    def __init__(self, folder: str, headers: str) -> None:
        settings = Settings()
        self._clock = SystemClock()
        store = replace(settings.store, segment_bytes=256 << 20)
        broker = replace(settings.broker, data=folder)
        settings = replace(settings, store=store, broker=broker)
        # A system clock in place of the one that tests turn by hand.
        self.core = CoreBroker(disk=RealDisk(), clock=self._clock, settings=settings)  # type: ignore[arg-type]
        self.core.topic(TOPIC, queues=8)
        self.core.group(GROUP)
        self._soon: list[Callable[[], None]] = []
        self._port = DirectPort(self.core)
        brokers = StaticBrokers({BROKER: self._port})
        self.proxy = Proxy(settings, brokers, self._clock, soon=self._soon.append)
        methods = {method.path: method for method in self.proxy.methods()}
        shared = SharedInflow(settings.lean, InflationTurns(self._soon.append))
        self.clients = []
        for _ in range(CONNECTIONS):
            connection = LeanConnection(
                methods,
                settings.lean,
                LeanCounters(),
                self._clock.boot_ms,
                lambda: None,
                shared,
                "127.0.0.1:1",
            )
            self.clients.append(Client(connection, headers))

    def turn(self) -> tuple[int, list[bytes]]:
        """All that clients have to say goes in, answers come out; nanoseconds of CPU, answers."""
        inputs = [(client.connection, client.unsent) for client in self.clients]
        for client in self.clients:
            client.unsent = b""
        begin_ns = time.process_time_ns()
        now_ms = self._clock.boot_ms()
        for connection, data in inputs:
            connection.receive(data, now_ms)
        self._end_turn()
        while self._port.serve():
            self._end_turn()
        answers = [connection.outbox.take() for connection, _ in inputs]
        spent_ns = time.process_time_ns() - begin_ns
        for client, answer in zip(self.clients, answers, strict=True):
            client.widen(answer)
        return spent_ns, answers

    def _end_turn(self) -> None:
        for callback in self._soon:  # those that come meanwhile are met too
            callback()
        self._soon.clear()


def measure(core: Core, messages: int) -> dict[str, float]:
    """Microseconds of CPU for each message."""
    send, ack = SendTemplate(TOPIC, 1024), AckTemplate(TOPIC, GROUP)
    receive = ReceiveTemplate(TOPIC, GROUP, BROKER, wait_ms=0, invisible_ms=300_000).message
    spent_ns = dict.fromkeys(("send", "receive", "ack"), 0)
    for _ in range(messages // (CONNECTIONS * CALLS)):
        for client in core.clients:
            for _ in range(CALLS):
                client.call(SEND, send.request(0))
        spent_ns["send"] += _answered(*core.turn(), CONNECTIONS * CALLS)
    left = messages
    while left > 0:
        for client in core.clients:
            client.call(RECEIVE, receive)
        took_ns, answers = core.turn()
        spent_ns["receive"] += _answered(took_ns, answers, CONNECTIONS)
        for client, answer in zip(core.clients, answers, strict=True):
            deliveries = _deliveries(answer)
            left -= len(deliveries)
            for delivery in deliveries:
                client.call(ACK, ack.request((delivery,)))
        spent_ns["ack"] += _answered(*core.turn(), CONNECTIONS * BATCH)
    core.core.run_steps()
    return {name: ns / messages / 1000 for name, ns in spent_ns.items()}


def _answered(spent_ns: int, answers: Sequence[bytes], count: int) -> int:
    good = sum(answer.count(OK) for answer in answers)
    assert good == count, f"{good} of {count} calls were answered with OK: {answers[0][:400]!r}"
    return spent_ns


def _deliveries(answer: bytes) -> list[LoadMessage]:
    messages, refusal = received("0", b"".join(_data(answer)))
    assert len(messages) == BATCH, f"{len(messages)} messages of {BATCH} came {refusal}"
    return messages


def _data(answer: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(answer):
        size = int.from_bytes(answer[at : at + 3])
        if answer[at + 3] == frames.DATA:
            yield answer[at + 9 : at + 9 + size]
        at += 9 + size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--messages", type=int, default=4_096)
    parser.add_argument("--headers", default="plain", choices=HEADER_VARIANTS)
    given = parser.parse_args()
    sys.setswitchinterval(0.0005)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        core = Core(folder, given.headers)
        core.turn()
        measure(core, CONNECTIONS * BATCH)  # caches and tables are filled
        gc.freeze()
        gc.set_threshold(100_000, 10, 10)
        rounds = [measure(core, given.messages) for _ in range(given.rounds)]
        lanes = {path: count for (_, path), count in core.proxy.metrics.calls_by_path.items()}
    least = {name: min(figures[name] for figures in rounds) for name in rounds[0]}
    print(json.dumps({"us": least, "calls": lanes}))


if __name__ == "__main__":
    main()
