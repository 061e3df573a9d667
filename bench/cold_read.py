"""What a consumer of old messages, which are on the disk only, does to the latency of new ones.

    python -m bench.cold_read [--gib 4] [--seconds 8] [--rounds 5] [--hot-rate 2000]
                              [--old-in-flight 4] [--json FILE]

A `popmq broker` process, asked over frames by its unix socket.  Topic hot: `--hot-rate` messages
of 1 KB a second (0: 16 in flight, as fast as they are answered), and one consumer that long-polls
and acks; the latency is from the moment a message was due to be put to its delivery.  In each round
first alone, then while a consumer in a process of its own reads on from the oldest of `--gib` of
messages of 1 KB whose pages were dropped from memory, then the same with their pages in memory:
the difference is the disk's part.  Rounds are interleaved, because the machine moves by itself;
medians of the rounds are compared.  The data goes to the current folder and is removed.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import struct
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bench.broker_process import (
    CALL_MS,
    Broker,
    connected,
    create_group,
    create_topic,
    started_broker,
)
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.messaging_payloads import Kind, PopRequest, PutEntry, PutRequest
from popmq.common.topics import MessageType

QUEUES = 8
BODY = 1_024
PROPERTIES = 120  # bytes; what the official Python client's system properties take
IN_FLIGHT = 16  # when there is no rate
HOT_POPS = 4
BATCH = 500  # of the old messages
POLL_MS = 1_000
WARM_UP_S = 1.5
ALONE, FROM_DISK, FROM_MEMORY = "alone", "old from the disk", "old from memory"
_NOW = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class Phase:
    title: str
    hot_per_second: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    broker_cores: float
    cold_pops: int
    old_per_second: int
    old_mb_per_second: float
    disk_mb: int  # what the broker's reads fetched from the disk
    flush_ms: float  # mean of the group commits, two of which are in each latency


async def prepare(address: str, gib: float) -> None:
    """Make topics and groups, and store the old messages."""
    async with connected(address) as port:
        for name in ("hot", "old"):
            await create_topic(port, name, QUEUES, "normal")
            await create_group(port, f"{name}-group")
        await create_group(port, "warm-group")
        entries = [
            PutEntry(MessageType.NORMAL, bytes(BODY), bytes(PROPERTIES), 0, number % QUEUES)
            for number in range(BATCH)
        ]
        request = hop.encode_put(PutRequest("old", entries))
        batches = iter(range(int(gib * (1 << 30) / (BODY + PROPERTIES + 80) / BATCH)))

        async def put() -> None:
            for _ in batches:
                reply = await call(port, Kind.PUT, request, CALL_MS)
                if {result.code for result in hop.decode_put_reply(reply)} != {Code.OK}:
                    raise AssertionError("an old message was not stored")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(put())


def old_files(data: Path) -> list[Path]:
    """Where the bodies of old messages and the units that point to them are."""
    folders = (data / "commitlog", data / "consumequeue")
    return [file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()]


def drop_pages(files: list[Path]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def load_pages(files: list[Path]) -> None:
    for file in files:
        with file.open("rb", buffering=0) as content:
            while content.read(8 << 20):
                pass


class Hot:
    """Producer and consumer of new messages; the latencies that were seen."""

    def __init__(self, port: FramePort, rate: int) -> None:
        self._port = port
        self._rate = rate
        self._sending = True
        self._sent = 0
        self._received = 0
        self.latencies: list[float] = []

    async def run(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(HOT_POPS):
                tasks.create_task(self._consume())
            if self._rate:
                await self._put_at_rate(tasks, seconds)
            else:
                for number in range(IN_FLIGHT):
                    tasks.create_task(self._put_on(number))
                await asyncio.sleep(seconds)
            self._sending = False
        if self._received != self._sent:
            raise AssertionError(f"{self._sent} stored, {self._received} delivered")

    async def _put_at_rate(self, tasks: asyncio.TaskGroup, seconds: float) -> None:
        """A message that is put late, because the loop was busy, was due all the same."""
        start = time.perf_counter()
        for number in range(int(seconds * self._rate)):
            due = start + number / self._rate
            if (ahead := due - time.perf_counter()) > 0:
                await asyncio.sleep(ahead)
            self._sent += 1
            tasks.create_task(self._put(number, due))

    async def _put_on(self, number: int) -> None:
        for count in itertools.count(number):
            if not self._sending:
                return
            await self._put(count, time.perf_counter())
            self._sent += 1

    async def _put(self, number: int, due: float) -> None:
        body = _NOW.pack(due) + bytes(BODY - _NOW.size)
        entry = PutEntry(MessageType.NORMAL, body, bytes(PROPERTIES), 0, number % QUEUES)
        request = hop.encode_put(PutRequest("hot", [entry]))
        (result,) = hop.decode_put_reply(await call(self._port, Kind.PUT, request, CALL_MS))
        if result.code != Code.OK:
            raise AssertionError(result)

    async def _consume(self) -> None:
        while self._sending or self._received < self._sent:
            request = PopRequest("hot", "hot-group", "hot", 32, 600_000, POLL_MS)
            reply = await call(self._port, Kind.POP, hop.encode_pop(request), CALL_MS)
            deliveries = hop.decode_pop_reply(reply).deliveries
            now = time.perf_counter()
            self.latencies += (now - _NOW.unpack_from(delivery.head)[0] for delivery in deliveries)
            self._received += len(deliveries)
            if deliveries:
                acks = hop.AckRequest(
                    "hot", "hot-group", [delivery.handle for delivery in deliveries]
                )
                await call(self._port, Kind.ACK, hop.encode_ack(acks), CALL_MS)


def consume_old(address: str, group: str, in_flight: int, pipe: Connection) -> None:
    """The process of the other consumer: says when it is there, pops and acks between "go" and
    "stop", and sends its count."""
    pipe.send("there")
    pipe.recv()

    async def consume() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), stop.set)
        count = 0

        async def pop_and_ack(port: FramePort) -> None:
            nonlocal count
            while not stop.is_set():
                request = PopRequest("old", group, "old", 32, 600_000, POLL_MS)
                reply = await call(port, Kind.POP, hop.encode_pop(request), CALL_MS)
                deliveries = hop.decode_pop_reply(reply).deliveries
                if not deliveries:
                    return  # all were read
                acks = hop.AckRequest("old", group, [delivery.handle for delivery in deliveries])
                await call(port, Kind.ACK, hop.encode_ack(acks), CALL_MS)
                count += len(deliveries)

        async with connected(address) as port, asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(pop_and_ack(port))
        loop.remove_reader(pipe.fileno())
        pipe.send(count)

    asyncio.run(consume())


def told(pipe: Connection) -> str:
    if not pipe.poll(CALL_MS / 1000):
        raise AssertionError("the consumer of old messages does not answer")
    return str(pipe.recv())


@dataclass(frozen=True, slots=True)
class Load:
    """What runs in each phase."""

    seconds: float
    hot_rate: int
    old_in_flight: int


def measure(broker: Broker, title: str, group: str, load: Load) -> Phase:
    """The hot path for some seconds, beside a consumer of old messages if `group` names one."""

    async def hot(seconds: float) -> Hot:
        async with connected(broker.address) as port:
            running = Hot(port, load.hot_rate)
            await running.run(seconds)
        return running

    pipe, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(
        target=consume_old, args=(broker.address, group, load.old_in_flight, theirs), daemon=True
    )
    if group:
        other.start()
        told(pipe)
    asyncio.run(hot(WARM_UP_S))
    cold_pops, disk_mb = broker.metric("popmq_cold_pops_total"), broker.disk_mb()
    flushes, flush_s = broker.flushes()
    cpu, began = broker.cpu_s(), time.monotonic()
    if group:
        pipe.send("go")
    try:
        seen = asyncio.run(hot(load.seconds))
        took_s, cpu = time.monotonic() - began, broker.cpu_s() - cpu
        count = 0
        if group:
            pipe.send("stop")
            count = int(told(pipe))
            other.join()
    finally:
        if group and other.is_alive():
            other.kill()
            other.join()
    cold_pops = broker.metric("popmq_cold_pops_total") - cold_pops
    flushes, flush_s = (
        new - old for new, old in zip(broker.flushes(), (flushes, flush_s), strict=True)
    )
    ordered = sorted(seen.latencies)
    return Phase(
        title,
        round(len(ordered) / took_s),
        round(statistics.median(ordered) * 1e3, 2),
        round(ordered[len(ordered) * 99 // 100] * 1e3, 2),
        round(ordered[-1] * 1e3, 1),
        round(cpu / took_s, 2),
        int(cold_pops),
        round(count / took_s),
        round(count * BODY / took_s / 1e6, 1),
        broker.disk_mb() - disk_mb,
        round(flush_s / max(1, flushes) * 1e3, 2),
    )


def measure_rounds(broker: Broker, rounds: int, load: Load) -> list[Phase]:
    files = old_files(broker.data)
    phases = []
    for _ in range(rounds):
        phases.append(measure(broker, ALONE, "", load))
        drop_pages(files)
        phases.append(measure(broker, FROM_DISK, "old-group", load))
        load_pages(files)
        phases.append(measure(broker, FROM_MEMORY, "warm-group", load))
    return phases


def report(phases: list[Phase]) -> None:
    print(
        "| beside | hot/s | p50 ms | p99 ms | max ms | broker cores | cold pops | old/s | "
        "old MB/s | disk MB | flush ms |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for phase in phases:
        print("| " + " | ".join(str(value) for value in asdict(phase).values()) + " |")
    p99s = {
        title: sorted(phase.p99_ms for phase in phases if phase.title == title)
        for title in (ALONE, FROM_DISK, FROM_MEMORY)
    }
    alone_ms = statistics.median(p99s[ALONE])
    print(f"p99 alone {alone_ms:.2f} ms ({p99s[ALONE][0]} to {p99s[ALONE][-1]})")
    for title in (FROM_DISK, FROM_MEMORY):
        found_p99s = p99s[title]
        median_ms = statistics.median(found_p99s)
        print(
            f"p99 beside {title} {median_ms:.2f} ms ({found_p99s[0]} to {found_p99s[-1]}): "
            f"x {median_ms / alone_ms:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hot-rate", type=int, default=2_000)
    parser.add_argument("--old-in-flight", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = Load(args.seconds, args.hot_rate, args.old_in_flight)
    with (
        tempfile.TemporaryDirectory(dir=".", prefix="bench-cold-") as name,
        started_broker(Path(name).resolve()) as broker,
    ):
        asyncio.run(prepare(broker.address, args.gib))
        phases = measure_rounds(broker, args.rounds, load)
    print(f"{os.cpu_count()} cores, {args.gib:g} GiB of old messages, {args.old_in_flight} pops")
    report(phases)
    if args.json:
        args.json.write_text(json.dumps([asdict(phase) for phase in phases], indent=1))


if __name__ == "__main__":
    main()
