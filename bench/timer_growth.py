"""What a timer costs the broker, how much memory a pending one takes, and a start with many.

    python -m bench.timer_growth [--pending 1000000 [10000000 ...]] [--body 100] [--json FILE]

A `popmq broker` process, asked over frames by its unix socket.  For each size: so many timers are
put, due at random within a day from an hour ahead on; then 100,000 that are due within five
seconds, with nobody who receives; then 1,000 that are due while the broker is down after a kill -9.
CPU is user and system time of all threads of the broker.  Memory is anonymous, so without the pages
of files, and compared with that after 100,000 timers, when every buffer has been used once.
Resends are not looked for (dedup.window_ms 0): that table has some 200 bytes for each message of
the last ten minutes, timer or not.  The data goes to the current folder and is removed.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.broker_process import Broker, connected, create_group, create_topic
from bench.timer_load import QUEUES, ack, pop, put_timers, sleep_until, wall_ms

HOUR_MS = 3_600_000
WARM_UP = 100_000  # the key index has sealed a file by then
NO_DEDUP = {"POPMQ_DEDUP_WINDOW_MS": "0"}
FIRED, FIRED_WITHIN_MS = 100_000, 5_000
PUT_PER_S = 8_000  # timers are at least put that fast
FILES_S = 3.0  # after the last put: everything is enqueued and in the files
IDLE_S = 3.0
DUE_WHILE_DOWN = 1_000
DOWN_MS = 1_500


@dataclass(frozen=True, slots=True)
class Growth:
    pending: int
    insert_us: float  # CPU per timer: put, group commit, enqueue, wheel and TimerLog
    expire_us: float  # CPU per timer: load, fire, group commit
    idle_percent: float  # of a core, with all of them pending
    bytes_each: float  # anonymous memory per pending timer
    start_bytes_each: float  # the same after the start
    ready_s: float  # from the start of the process after a kill
    first_delivery_s: float
    disk_mib: int


async def measure(folder: Path, pending: int, body: int) -> Growth:
    broker = Broker(folder, NO_DEDUP)
    try:
        empty_bytes = broker.anonymous_bytes()
        await put_far(broker, "warm", WARM_UP, body)
        used_bytes = broker.anonymous_bytes()
        cpu_s = broker.cpu_s()
        await put_far(broker, "far", pending, body)
        insert_s = broker.cpu_s() - cpu_s
        pending_bytes = broker.anonymous_bytes()
        idle_s = await idle(broker)
        insert_s -= idle_s / IDLE_S * FILES_S
        expire_s = await expire(broker, body, idle_s / IDLE_S)
        await put_near(broker, body)
        broker.kill()
        began = time.monotonic()
        broker = Broker(folder, NO_DEDUP)
        ready_s = time.monotonic() - began
        first_s = await first_delivery(broker) - began
        start_bytes = broker.anonymous_bytes()
    finally:
        broker.stop()
    return Growth(
        pending,
        round(insert_s / pending * 1e6, 1),
        round(expire_s / FIRED * 1e6, 1),
        round(idle_s / IDLE_S * 100, 1),
        round((pending_bytes - used_bytes) / pending, 2),
        round((start_bytes - empty_bytes) / pending, 2),
        round(ready_s, 2),
        round(first_s, 2),
        disk_mib(folder),
    )


def disk_mib(folder: Path) -> int:
    return sum(file.stat().st_blocks for file in folder.rglob("*")) * 512 >> 20


async def put_far(broker: Broker, topic: str, count: int, body: int) -> None:
    rng = random.Random(count)
    first_ms = wall_ms() + HOUR_MS
    async with connected(broker.address) as port:
        await create_topic(port, topic, QUEUES, "delay")
        due = (first_ms + rng.randrange(24 * HOUR_MS) for _ in range(count))
        await put_timers(port, topic, due, body=body)
    await asyncio.sleep(FILES_S)


async def idle(broker: Broker) -> float:
    """CPU seconds of IDLE_S."""
    cpu_s = broker.cpu_s()
    await asyncio.sleep(IDLE_S)
    return broker.cpu_s() - cpu_s


async def expire(broker: Broker, body: int, idle_share: float) -> float:
    """CPU seconds of FIRED timers, without what the broker uses in any case."""
    first_ms = wall_ms() + 2_000 + FIRED * 1_000 // PUT_PER_S
    async with connected(broker.address) as port:
        await create_topic(port, "soon", QUEUES, "delay")
        due = (first_ms + at * FIRED_WITHIN_MS // FIRED for at in range(FIRED))
        await put_timers(port, "soon", due, body=body)
    await sleep_until(first_ms - 100)
    began, cpu_s = time.monotonic(), broker.cpu_s()
    records = broker.metric("popmq_store_records_total")
    await sleep_until(first_ms + FIRED_WITHIN_MS + 2_000)
    used_s = broker.cpu_s() - cpu_s - idle_share * (time.monotonic() - began)
    if broker.metric("popmq_store_records_total") < records + FIRED:
        raise AssertionError("not all timers were fired 2 s after the last was due")
    return used_s


async def put_near(broker: Broker, body: int) -> None:
    due_ms = wall_ms() + DOWN_MS
    async with connected(broker.address) as port:
        await create_topic(port, "near", QUEUES, "delay")
        await create_group(port, "near-group")
        await put_timers(port, "near", [due_ms] * DUE_WHILE_DOWN, body=body)


async def first_delivery(broker: Broker) -> float:
    """When the first message of those that were due meanwhile was received; takes all of them."""
    first_s, left = 0.0, DUE_WHILE_DOWN
    async with connected(broker.address) as port:
        while left > 0:
            deliveries = await pop(port, "near")
            first_s = first_s or time.monotonic()
            left -= len(deliveries)
            await ack(port, "near", deliveries)
    return first_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pending", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--body", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for pending in args.pending:
        with tempfile.TemporaryDirectory(dir=".", prefix="bench-timers-") as name:
            results.append(asyncio.run(measure(Path(name).resolve(), pending, args.body)))
    print(f"{os.cpu_count()} cores, body {args.body} B, {FIRED} timers fired")
    print(
        "| pending | insert us | expire us | idle % | bytes each | after a start | ready s | "
        "first delivery s | disk MiB |\n|---|---|---|---|---|---|---|---|---|"
    )
    for growth in results:
        print("| " + " | ".join(str(value) for value in asdict(growth).values()) + " |")
    if args.json:
        args.json.write_text(json.dumps([asdict(growth) for growth in results], indent=1))


if __name__ == "__main__":
    main()
