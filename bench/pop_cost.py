"""What pop costs the broker: a receive of 32, an ack, and a message in flight; durable check points
beside buffered ones.

    python -m bench.pop_cost [--messages 200000] [--rounds 3] [--in-flight-messages 1000000]

One broker in this process, asked by calls; every reply waits for what it has to wait for.  CPU is
user and system time of all threads, per operation; the asker's own part (encoding requests,
decoding replies) is measured alone and subtracted.  Rounds of both kinds are interleaved.  The
data goes to the current folder and is removed.
"""

import argparse
import asyncio
import gc
import os
import resource
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from popmq.broker.process import BrokerProcess
from popmq.common import hop
from popmq.common.config import Settings
from popmq.common.errors import Code, PopmqError
from popmq.common.hop import Kind, PopRequest, PutEntry, PutRequest
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


class Asker:
    """Keeps some requests of one kind going until there are no more."""

    def __init__(self, process: BrokerProcess, at_once: int) -> None:
        self._process = process
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
            self._process.port.request(kind, request, 60_000, answered)

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
    await Asker(process, 4).run(Kind.PUT, [request] * (count // 500), lambda reply: None)


def check_acks(reply: bytes) -> None:
    if {one.code for one in hop.decode_ack_reply(reply)} != {Code.OK}:
        raise AssertionError("an ack was refused")


async def measure(process: BrokerProcess, group: str, messages: int) -> Cost:
    """Half of the messages are acked one by one, half in batches."""
    request = hop.encode_pop(PopRequest("bench", group, "bench", BATCH, LONG_MS, 0))
    replies: list[bytes] = []
    records = process.broker.store.metrics
    began_bytes = records.bytes
    loop = asyncio.get_running_loop()
    began, began_at = cpu_s(), loop.time()
    await Asker(process, POPS_AT_ONCE).run(
        Kind.POP, [request] * (messages // BATCH), replies.append
    )
    pop_s, took_s = cpu_s() - began, loop.time() - began_at
    handles = []
    for reply in replies:
        handles += [one.handle for one in hop.decode_pop_reply(reply).deliveries]
    if len(handles) != messages // BATCH * BATCH:
        raise AssertionError(f"{len(handles)} of {messages} delivered")
    half = len(handles) // 2 // BATCH * BATCH
    singles = [hop.encode_ack(hop.AckRequest("bench", group, [one])) for one in handles[:half]]
    batches = [
        hop.encode_ack(hop.AckRequest("bench", group, handles[at : at + BATCH]))
        for at in range(half, len(handles), BATCH)
    ]
    costs = []
    for requests, at_once in ((singles, ACKS_AT_ONCE), (batches, POPS_AT_ONCE)):
        began = cpu_s()
        await Asker(process, at_once).run(Kind.ACK, requests, check_acks)
        costs.append(cpu_s() - began)
    written = records.bytes - began_bytes
    return Cost(
        pop_s / len(replies) * 1e6,
        costs[0] / half * 1e6,
        costs[1] / (len(handles) - half) * 1e6,
        written / len(handles),
        len(replies) / took_s,
    )


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def in_flight_bytes(process: BrokerProcess, group: str, messages: int) -> float:
    """Memory of the table per message in flight: all popped, none acked."""
    request = hop.encode_pop(PopRequest("bench", group, "bench", BATCH, LONG_MS, 0))
    gc.collect()
    before = rss_bytes()
    asked = [request] * (messages // BATCH)
    await Asker(process, POPS_AT_ONCE).run(Kind.POP, asked, lambda reply: None)
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


async def with_broker(messages: int, rounds: int, in_flight: int) -> None:
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-pop-") as folder:
        process = BrokerProcess(settings_of(folder, in_flight))
        await process.start()
        registry = process.broker.registry
        registry.create_topic(TopicConfig(0, "bench", QUEUES))
        await store(process, max(messages, in_flight))
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
        for kind, found in costs.items():
            cells = [
                f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"
                for values in (
                    [one.pop_us for one in found],
                    [one.ack_us for one in found],
                    [one.batch_ack_us for one in found],
                    [one.log_bytes for one in found],
                    [one.pops_per_second for one in found],
                )
            ]
            print(f"| {kind.name.lower()} | " + " | ".join(cells) + " |")
        registry.create_group(SubscriptionGroup(0, "held"))
        per_message = await in_flight_bytes(process, "held", in_flight)
        print(f"{in_flight} messages in flight: {per_message:.1f} bytes of memory each")
        await process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight-messages", type=int, default=1_000_000)
    args = parser.parse_args()
    asyncio.run(with_broker(args.messages, args.rounds, args.in_flight_messages))


if __name__ == "__main__":
    main()
