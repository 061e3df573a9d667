"""Very many timers that are due within one second: does the broker's loop go on meanwhile?

    python -m bench.timer_second [--timers 2000000] [--ahead 330] [--json FILE]

A `popmq broker` process, asked over frames by its unix socket.  All timers are due at random within
one second; nobody receives them.  *Turn*: how long the broker's loop took to answer its health
page, asked for every 10 ms over connections that wait for nothing else; each answer takes two turns
of the loop at least, and the other processes of the machine have their share in it.  Memory is
anonymous, so without pages of files.  The data goes to the current folder and is removed.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bench.broker_process import Broker, connected, create_topic
from bench.timer_growth import NO_DEDUP
from bench.timer_load import QUEUES, put_timers, sleep_until, wall_ms

BODY = 100
APART_S = 0.01
LOAD_MS = 65_000  # a full slot is loaded from a minute ahead on
QUIET_MS = 5_000


@dataclass(slots=True)
class Turns:
    """Milliseconds of each answer while it was asked."""

    loading: list[float] = field(default_factory=list)
    firing: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Second:
    timers: int
    stored_after_s: float  # all of them, after the first was due
    broker_us: float  # CPU per timer: load, fire, group commit, idle steps
    load_turn_p50: float
    load_turn_p99: float
    load_turn_max: float
    fire_turn_p50: float
    fire_turn_p99: float
    fire_turn_max: float
    pending_mib: float  # anonymous memory beyond that before the first put: before the loading
    loaded_mib: float  # right before the first is due
    after_mib: float


async def watch(url: str, into: list[float]) -> None:
    """Until cancelled."""
    parts = urlsplit(url)
    request = b"GET /livez HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"
    while True:
        began = time.perf_counter()
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(request)
        await reader.read()
        into.append((time.perf_counter() - began) * 1000)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        await asyncio.sleep(APART_S)


async def watched(url: str, into: list[float], until_ms: int) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(watch(url, into), max(0, until_ms - wall_ms()) / 1000)


async def measure(broker: Broker, timers: int, ahead_s: int) -> Second:
    rng, turns = random.Random(timers), Turns()
    first_ms = wall_ms() + ahead_s * 1_000
    before = broker.anonymous_bytes()
    async with connected(broker.address) as port:
        await create_topic(port, "second", QUEUES, "delay")
        due = (first_ms + rng.randrange(1_000) for _ in range(timers))
        await put_timers(port, "second", due, body=BODY)
    left_ms = first_ms - LOAD_MS - QUIET_MS - wall_ms()
    if left_ms < 0:
        raise AssertionError(f"puts took {-left_ms} ms too long: say --ahead {ahead_s * 2}")
    await sleep_until(first_ms - LOAD_MS - QUIET_MS)
    pending = broker.anonymous_bytes()
    cpu_s, records = broker.cpu_s(), broker.metric("popmq_store_records_total")
    await watched(broker.metrics_url, turns.loading, first_ms - 200)
    loaded = broker.anonymous_bytes()
    while broker.metric("popmq_store_records_total") < records + timers:
        await watched(broker.metrics_url, turns.firing, wall_ms() + 1_000)
    stored_s = (wall_ms() - first_ms) / 1000
    cpu_s = broker.cpu_s() - cpu_s
    await sleep_until(wall_ms() + QUIET_MS)
    return Second(
        timers,
        round(stored_s, 1),
        round(cpu_s / timers * 1e6, 1),
        *percentiles(turns.loading),
        *percentiles(turns.firing),
        *(mib(used - before) for used in (pending, loaded, broker.anonymous_bytes())),
    )


def percentiles(values: list[float]) -> tuple[float, float, float]:
    ordered = [round(value, 1) for value in sorted(values)]
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]


def mib(count: int) -> float:
    return round(count / (1 << 20), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--timers", type=int, default=2_000_000)
    parser.add_argument("--ahead", type=int, default=330, help="seconds for the puts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-timers-") as name:
        broker = Broker(Path(name).resolve(), NO_DEDUP)
        try:
            second = asyncio.run(measure(broker, args.timers, args.ahead))
        finally:
            broker.stop()
    print(f"{os.cpu_count()} cores, body {BODY} B; turns in ms")
    for key, value in asdict(second).items():
        print(f"{key}: {value}")
    if args.json:
        args.json.write_text(json.dumps(asdict(second), indent=1))


if __name__ == "__main__":
    main()
