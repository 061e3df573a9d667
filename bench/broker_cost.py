"""CPU per message of the broker alone: append + index + reply, in process and through frames.

    python -m bench.broker_cost [--seconds 5] [--rounds 3] [--body 1024] [--json FILE]

No proxy and no gRPC.  Every reply waits for the fdatasync that covers it.  CPU is user and
system time of all threads of the broker's side; in the frames case asker and broker are two
processes and both are shown.  Every reply is decoded, and at the end the queue offsets must
add up to the messages answered OK.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from popmq.broker.node.broker_process import BrokerProcess
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.frame_port import FramePort
from popmq.common.protocol.frames import FrameSettings, Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import (
    Kind,
    OnReply,
    Port,
    PutEntry,
    PutRequest,
    PutResult,
    decode_put_reply,
    encode_put,
    encode_put_reply,
)
from popmq.common.settings.settings import Settings
from popmq.common.topics import MessageType, TopicConfig

QUEUES = 8
PROPERTIES = 120  # bytes; what the official Python client's system properties take


@dataclass(frozen=True, slots=True)
class Result:
    way: str
    in_flight: int
    messages: int
    per_second: int
    broker_us: float  # CPU of the broker's process per message
    asker_us: float  # of the asking process; in process: measured alone and subtracted
    p50_ms: float
    p99_ms: float
    messages_per_fsync: float


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Load:
    """Keeps `in_flight` PUTs of one message each going; checks every reply."""

    def __init__(self, port: Port, *, in_flight: int, body: int, done: asyncio.Event) -> None:
        self._port = port
        self._in_flight = in_flight
        self.done = done
        self._bodies = [
            encode_put(
                PutRequest(
                    "bench", [PutEntry(MessageType.NORMAL, bytes(body), bytes(PROPERTIES), 0, q)]
                )
            )
            for q in range(QUEUES)
        ]
        self._open = 0
        self._next = 0
        self._stop_at = 0.0
        self.latencies: list[float] = []

    def start(self, seconds: float) -> None:
        self._stop_at = time.perf_counter() + seconds
        for _ in range(self._in_flight):
            self._ask()

    def _ask(self) -> None:
        self._open += 1
        self._next += 1
        asked = time.perf_counter()

        def answered(answer: bytes | PopmqError) -> None:
            if isinstance(answer, PopmqError):
                raise answer
            (result,) = decode_put_reply(answer)
            if result.code != Code.OK:
                raise AssertionError(result)
            now = time.perf_counter()
            self.latencies.append(now - asked)
            self._open -= 1
            if now < self._stop_at:
                self._ask()
            elif self._open == 0:
                self.done.set()

        self._port.request(Kind.PUT, self._bodies[self._next % QUEUES], 10_000, answered)


def summary(
    way: str,
    in_flight: int,
    load: Load,
    wall_s: float,
    broker_s: float,
    asker_s: float,
    fsyncs: int,
) -> Result:
    count = len(load.latencies)
    ordered = sorted(load.latencies)
    return Result(
        way,
        in_flight,
        count,
        round(count / wall_s),
        round(broker_s / count * 1e6, 1),
        round(asker_s / count * 1e6, 1),
        round(ordered[count // 2] * 1e3, 2),
        round(ordered[count * 99 // 100] * 1e3, 2),
        round(count / max(1, fsyncs), 1),
    )


async def started_broker(folder: str) -> BrokerProcess:
    settings = Settings()
    broker = BrokerProcess(replace(settings, broker=replace(settings.broker, data=folder)))
    await broker.start()
    broker.broker.registry.create_topic(TopicConfig(0, "bench", QUEUES))
    return broker


def check_stored(broker: BrokerProcess, answered: int) -> None:
    topic = broker.broker.registry.topic("bench")
    stored = sum(broker.broker.store.queue(topic.id, q).count for q in range(QUEUES))
    if stored != answered:
        raise AssertionError(f"{answered} answered OK, {stored} stored")


async def in_process(in_flight: int, body: int, seconds: float) -> Result:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        broker = await started_broker(folder)
        warm = Load(broker.port, in_flight=in_flight, body=body, done=asyncio.Event())
        total = await run(warm, 0.5)
        done = asyncio.Event()
        load = Load(broker.port, in_flight=in_flight, body=body, done=done)
        flushes = broker.broker.store.metrics.flushes
        cpu, wall = cpu_s(), time.perf_counter()
        load.start(seconds)
        await done.wait()
        cpu, wall = cpu_s() - cpu, time.perf_counter() - wall
        flushes = broker.broker.store.metrics.flushes - flushes
        check_stored(broker, total + len(load.latencies))
        await broker.stop()
    asker_s = await asker_alone_us(body) * len(load.latencies) / 1e6
    return summary("in process", in_flight, load, wall, cpu - asker_s, asker_s, flushes)


class AnsweringPort:
    """Answers every PUT at once with a reply of the right shape: what is left is the asker."""

    def __init__(self) -> None:
        self._reply = encode_put_reply([PutResult(queue_id=3, queue_offset=1 << 20)])

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        asyncio.get_running_loop().call_soon(on_reply, self._reply)
        return 1

    def cancel(self, request_id: int) -> None:
        raise AssertionError("nothing is cancelled here")


async def asker_alone_us(body: int) -> float:
    """CPU per message of the load generator itself."""
    load = Load(AnsweringPort(), in_flight=256, body=body, done=asyncio.Event())
    cpu = cpu_s()
    count = await run(load, 1.0)
    return (cpu_s() - cpu) / count * 1e6


async def run(load: Load, seconds: float) -> int:
    """Run a load to its end; how many messages."""
    load.start(seconds)
    await load.done.wait()
    return len(load.latencies)


def serve_frames(folder: str, pipe: Connection) -> None:
    """The broker's process: says where it listens, then answers b"cpu" until b"stop"."""

    async def serve() -> None:
        broker = await started_broker(folder)
        (address,) = await broker.listen(f"unix:{folder}/bench.sock")
        pipe.send(address)
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def asked() -> None:
            question = pipe.recv()
            if question == "stop":
                stop.set()
            elif question == "cpu":
                pipe.send((cpu_s(), broker.broker.store.metrics.flushes))
            else:
                check_stored(broker, int(question))
                pipe.send("stored")

        loop.add_reader(pipe.fileno(), asked)
        await stop.wait()
        loop.remove_reader(pipe.fileno())
        await broker.stop()

    asyncio.run(serve())


async def through_frames(in_flight: int, body: int, seconds: float) -> Result:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=serve_frames, args=(folder, theirs)
        )
        process.start()
        hello = Hello(role=ProcessRole.PROXY, name="bench", cluster=Settings().cluster.name)
        settings = replace(FrameSettings.of(Settings()), max_in_flight=100_000)
        port = FramePort(pipe.recv(), hello, settings=settings)
        port.start()
        total = await run(Load(port, in_flight=in_flight, body=body, done=asyncio.Event()), 0.5)
        done = asyncio.Event()
        load = Load(port, in_flight=in_flight, body=body, done=done)
        pipe.send("cpu")
        broker_cpu, flushes = pipe.recv()
        cpu, wall = cpu_s(), time.perf_counter()
        load.start(seconds)
        await done.wait()
        cpu, wall = cpu_s() - cpu, time.perf_counter() - wall
        pipe.send("cpu")
        broker_cpu_after, flushes_after = pipe.recv()
        pipe.send(str(total + len(load.latencies)))
        if pipe.recv() != "stored":
            raise AssertionError("the broker did not store what it answered")
        await port.close()
        pipe.send("stop")
        process.join()
    return summary(
        "frames",
        in_flight,
        load,
        wall,
        broker_cpu_after - broker_cpu,
        cpu,
        flushes_after - flushes,
    )


def median(results: Sequence[Result]) -> Result:
    """The round whose broker cost is the middle one."""
    middle = statistics.median_low([result.broker_us for result in results])
    return next(result for result in results if result.broker_us == middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rounds: dict[tuple[str, int], list[Result]] = {}
    for _ in range(args.rounds):
        for in_flight in (1, 256):
            for way in (in_process, through_frames):
                result = asyncio.run(way(in_flight, args.body, args.seconds))
                rounds.setdefault((result.way, in_flight), []).append(result)
    print(f"{os.cpu_count()} cores, body {args.body} B, {args.rounds} rounds of {args.seconds} s")
    print("| way | in flight | messages/s | broker us | asker us | p50 ms | p99 ms | per fsync |")
    print("|---|---|---|---|---|---|---|---|")
    middles = [median(results) for results in rounds.values()]
    for item in middles:
        spread = [r.broker_us for r in rounds[(item.way, item.in_flight)]]
        print(
            f"| {item.way} | {item.in_flight} | {item.per_second} | {item.broker_us} "
            f"({min(spread)}-{max(spread)}) | {item.asker_us} | {item.p50_ms} | {item.p99_ms} | "
            f"{item.messages_per_fsync} |"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(median) for median in middles], indent=1))


if __name__ == "__main__":
    main()
