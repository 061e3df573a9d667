"""What pop costs the broker: a receive of 32, an ack, and a message in flight; durable check points
beside buffered ones.

    python -m bench.pop_cost [--messages 200000] [--rounds 3] [--in-flight-messages 1000000]

One broker in this process, asked by calls; every reply waits for what it has to wait for.  CPU is
user and system time of all threads, per operation.  The asker's own part is measured alone, beside
a port that has the same replies ready, and subtracted.  Rounds of both kinds are interleaved.  The
data goes to the current folder and is removed.  Memory is measured in a process of its own.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import resource
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from popmq.broker.node.broker_process import BrokerProcess
from popmq.common.errors import PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import (
    ACKED,
    Kind,
    OnReply,
    PopRequest,
    Port,
    PutEntry,
    PutRequest,
)
from popmq.common.settings.settings import Settings
from popmq.common.topics import CheckPoints, MessageType, SubscriptionGroup, TopicConfig

QUEUES = 8
BODY = 1_024
PROPERTIES = 120  # bytes; what the official Python client's system properties take
BATCH = 32
POPS_AT_ONCE = 4
ACKS_AT_ONCE = 64
LONG_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Cost:
    pop_us: float  # per receive of 32
    ack_us: float  # per message, one ack each
    batch_ack_us: float  # per message, 32 in a request
    log_bytes: float  # of check points and acks, per message
    pops_per_second: float


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class ReadyPort:
    """Answers everything with the same bytes, all that was asked in one turn of the loop at once:
    what a broker does for nothing."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._asked: list[OnReply] = []

    def request(self, kind: Kind, body: bytes, timeout_ms: int, on_reply: OnReply) -> int:
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._answer)
        self._asked.append(on_reply)
        return 0

    def cancel(self, request_id: int) -> None:
        return

    def _answer(self) -> None:
        asked, self._asked = self._asked, []
        for on_reply in asked:
            on_reply(self._reply)


class Kept:
    """Replies, one behind the other in memory that is there before the first one comes.

    Kept as they are they would make the broker write each reply into fresh pages, which costs more
    than encoding it does; a server that sends them has its memory back at once.
    """

    def __init__(self, size: int) -> None:
        self._bytes = bytearray(b"\1") * size
        self._ends = [0]

    def take(self, reply: bytes) -> None:
        start = self._ends[-1]
        end = start + len(reply)
        self._bytes[start:end] = reply
        self._ends.append(end)

    def __iter__(self) -> Iterator[bytes]:
        for start, end in pairwise(self._ends):
            yield bytes(self._bytes[start:end])


class Asker:
    """Keeps some requests of one kind going until there are no more."""

    def __init__(self, port: Port, at_once: int) -> None:
        self._port = port
        self._at_once = at_once

    async def run(
        self, kind: Kind, requests: Sequence[bytes], take: Callable[[bytes], None]
    ) -> None:
        left = iter(requests)
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        open_requests = 0

        def ask() -> None:
            nonlocal open_requests
            request = next(left, None)
            if request is None:
                if not open_requests and not done.done():
                    done.set_result(None)
                return
            open_requests += 1
            self._port.request(kind, request, 60_000, answered)

        def answered(answer: bytes | PopmqError) -> None:
            nonlocal open_requests
            open_requests -= 1
            if isinstance(answer, PopmqError):
                if not done.done():
                    done.set_exception(answer)
                return
            take(answer)
            loop.call_soon(ask)  # a buffered receive is answered inside the call

        for _ in range(self._at_once):
            ask()
        await asyncio.wait_for(done, 300)


async def store(process: BrokerProcess, count: int) -> None:
    entries = [
        PutEntry(MessageType.NORMAL, bytes(BODY), bytes(PROPERTIES), 0, number % QUEUES)
        for number in range(500)
    ]
    request = hop.encode_put(PutRequest("bench", entries))
    await Asker(process.port, 4).run(Kind.PUT, [request] * -(-count // 500), lambda reply: None)


async def cost_of(
    port: Port, at_once: int, kind: Kind, requests: Sequence[bytes], take: Callable[[bytes], None]
) -> tuple[float, float]:
    """CPU and time of a request, in seconds."""
    loop = asyncio.get_running_loop()
    began, began_at = cpu_s(), loop.time()
    await Asker(port, at_once).run(kind, requests, take)
    return (cpu_s() - began) / len(requests), (loop.time() - began_at) / len(requests)


async def measure_pops(
    process: BrokerProcess, group: str, messages: int
) -> tuple[float, float, list[bytes]]:
    """CPU and time of a receive, and the handles."""
    request = hop.encode_pop(PopRequest("bench", group, "bench", BATCH, LONG_MS, 0))
    requests = [request] * (messages // BATCH)
    kept = Kept(len(requests) * BATCH * (BODY + PROPERTIES + 256))
    cpu, took = await cost_of(process.port, POPS_AT_ONCE, Kind.POP, requests, kept.take)
    replies = list(kept)
    ready = ReadyPort(replies[0])
    again = Kept(len(requests) * BATCH * (BODY + PROPERTIES + 256))
    own, _ = await cost_of(ready, POPS_AT_ONCE, Kind.POP, requests, again.take)
    handles = []
    for reply in replies:
        handles += [delivery.handle for delivery in hop.decode_pop_reply(reply).deliveries]
    if len(handles) != messages // BATCH * BATCH:
        raise AssertionError(f"{len(handles)} of {messages} delivered")
    return cpu - own, took, handles


async def measure_acks(
    process: BrokerProcess, group: str, handles: list[bytes], in_request: int, at_once: int
) -> float:
    """CPU of an ack."""
    requests = [
        hop.encode_ack(hop.AckRequest("bench", group, handles[at : at + in_request]))
        for at in range(0, len(handles), in_request)
    ]
    good = hop.encode_ack_reply([ACKED] * in_request)

    def check(reply: bytes) -> None:
        if reply != good:
            raise AssertionError(f"an ack was refused: {hop.decode_ack_reply(reply)}")

    cpu, _ = await cost_of(process.port, at_once, Kind.ACK, requests, check)
    own, _ = await cost_of(ReadyPort(good), at_once, Kind.ACK, requests, check)
    return (cpu - own) / in_request


async def measure(process: BrokerProcess, group: str, messages: int) -> Cost:
    """Half of the messages are acked one by one, half in batches."""
    records = process.broker.store.metrics
    began_bytes = records.bytes
    pop_s, took_s, handles = await measure_pops(process, group, messages)
    half = len(handles) // 2 // BATCH * BATCH
    ack_s = await measure_acks(process, group, handles[:half], 1, ACKS_AT_ONCE)
    batch_s = await measure_acks(process, group, handles[half:], BATCH, POPS_AT_ONCE)
    written = records.bytes - began_bytes
    return Cost(pop_s * 1e6, ack_s * 1e6, batch_s * 1e6, written / len(handles), 1 / took_s)


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def in_flight_bytes(process: BrokerProcess, group: str, messages: int) -> float:
    """Memory of the table per message in flight: all popped, none acked."""
    request = hop.encode_pop(PopRequest("bench", group, "bench", BATCH, LONG_MS, 0))
    gc.collect()
    before = rss_bytes()
    asked = [request] * (messages // BATCH)
    await Asker(process.port, POPS_AT_ONCE).run(Kind.POP, asked, lambda reply: None)
    gc.collect()
    held = process.broker.table.in_flight
    if held != messages // BATCH * BATCH:
        raise AssertionError(f"{held} of {messages} in flight")
    return (rss_bytes() - before) / held


def settings_of(folder: str, in_flight: int) -> Settings:
    plain = Settings()
    return replace(
        plain,
        broker=replace(plain.broker, data=f"{folder}/data"),
        pop=replace(
            plain.pop,
            max_in_flight_per_queue=10_000_000,
            max_in_flight_per_broker=max(10_000_000, in_flight),
        ),
    )


async def with_broker(messages: int, rounds: int) -> None:
    async with broker_with(messages) as process:
        registry = process.broker.registry
        costs: dict[CheckPoints, list[Cost]] = {kind: [] for kind in CheckPoints}
        for number in range(rounds):
            for kind in CheckPoints:
                name = f"{kind.name.lower()}-{number}"
                registry.create_group(SubscriptionGroup(0, name, check_points=kind))
                costs[kind].append(await measure(process, name, messages))
                registry.delete_group(name)
        print(
            "| check points | us per receive of 32 | us per ack | us per ack in batches of 32 |",
            end="",
        )
        print(" log bytes per message | receives/s |\n|---|---|---|---|---|---|")
        for kind, found_costs in costs.items():
            cells = [
                f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"
                for values in (
                    [found_cost.pop_us for found_cost in found_costs],
                    [found_cost.ack_us for found_cost in found_costs],
                    [found_cost.batch_ack_us for found_cost in found_costs],
                    [found_cost.log_bytes for found_cost in found_costs],
                    [found_cost.pops_per_second for found_cost in found_costs],
                )
            ]
            print(f"| {kind.name.lower()} | " + " | ".join(cells) + " |")


@asynccontextmanager
async def broker_with(messages: int) -> AsyncIterator[BrokerProcess]:
    """One that holds so many messages, none of them received."""
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-pop-") as folder:
        process = BrokerProcess(settings_of(folder, messages))
        await process.start()
        process.broker.registry.create_topic(TopicConfig(0, "bench", QUEUES))
        await store(process, messages)
        yield process
        await process.stop()


async def with_messages_in_flight(messages: int) -> float:
    """Bytes each, in a process that has done nothing else."""
    async with broker_with(messages) as process:
        process.broker.registry.create_group(SubscriptionGroup(0, "held"))
        return await in_flight_bytes(process, "held", messages)


def bytes_in_flight(messages: int) -> float:
    return asyncio.run(with_messages_in_flight(messages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight-messages", type=int, default=1_000_000)
    args = parser.parse_args()
    asyncio.run(with_broker(args.messages, args.rounds))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as another:
        each = another.submit(bytes_in_flight, args.in_flight_messages).result()
    print(f"{args.in_flight_messages} messages in flight: {each:.1f} bytes of memory each")


if __name__ == "__main__":
    main()
