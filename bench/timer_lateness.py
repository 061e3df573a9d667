"""How late timers are delivered: at fixed rates, and many that are due in the same millisecond.

    python -m bench.timer_lateness [--rates 1000 10000] [--seconds 10] [--burst 50000] [--json FILE]

A `popmq broker` process, asked over frames by its unix socket.  *Stored*: the wall time of the
record that is the firing and the delivery, minus the due time.  *Received*: the time at which the
reply of a consumer's waiting receive was there, minus the due time; it holds the group commits of
the firing and of the receive.  CPU is the broker's while the timers were due, with that of the
receives and acks where there is a consumer.  The data goes to the current folder and is removed.
"""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.broker_process import Broker, connected, create_group, create_topic, started_broker
from bench.timer_load import QUEUES, Consumer, put_timers, sleep_until, wall_ms

BODY = 100
PUT_PER_S = 8_000  # timers are at least put that fast
FIRED_MS = 4_000  # so late is the last one at most
QUIET_S = 1.0  # between the last put and the first due time: files are flushed each second


@dataclass(frozen=True, slots=True)
class Lateness:
    """Milliseconds; 0 where nobody received."""

    case: str
    timers: int
    stored_p50: int
    stored_p99: int
    stored_max: int
    received_p50: int
    received_p99: int
    received_max: int
    broker_us: float  # CPU per timer


async def measure(broker: Broker, case: str, spacing_us: int, count: int, live: bool) -> Lateness:
    """`count` timers, `spacing_us` apart, with a consumer beside or after."""
    topic = "".join(letter for letter in case if letter.isalnum())
    async with connected(broker.address) as port:
        await create_topic(port, topic, QUEUES, "delay")
        await create_group(port, f"{topic}-group")
        first_ms = wall_ms() + int(1000 * (QUIET_S + 1 + count / PUT_PER_S))
        due = [first_ms + at * spacing_us // 1000 for at in range(count)]
        await put_timers(port, topic, due, body=BODY)
        await sleep_until(first_ms - 100)
        consumer = Consumer(port, topic, count)
        cpu_s, records = broker.cpu_s(), broker.metric("popmq_store_records_total")
        if live:
            await consumer.run()
        else:
            await sleep_until(due[-1] + FIRED_MS)
            if broker.metric("popmq_store_records_total") < records + count:
                raise AssertionError(f"not all were fired {FIRED_MS} ms after the last was due")
        cpu_s = broker.cpu_s() - cpu_s
        if not live:
            await consumer.run()
    if len(consumer.stored_late_ms) != count:
        raise AssertionError(f"{len(consumer.stored_late_ms)} of {count} delivered")
    received = percentiles(consumer.received_late_ms) if live else (0, 0, 0)
    stored = percentiles(consumer.stored_late_ms)
    return Lateness(case, count, *stored, *received, round(cpu_s / count * 1e6, 1))


def percentiles(values: Sequence[int]) -> tuple[int, int, int]:
    ordered = sorted(values)
    if ordered[0] < 0:
        raise AssertionError(f"a timer was {-ordered[0]} ms early")
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100], ordered[-1]


async def measure_all(
    broker: Broker, rates: list[int], seconds: float, burst: int
) -> list[Lateness]:
    latenesses = []
    for rate in rates:
        count = int(rate * seconds)
        case = f"{rate} a second"
        latenesses.append(await measure(broker, case, 1_000_000 // rate, count, live=True))
        case += ", nobody receives"
        latenesses.append(await measure(broker, case, 1_000_000 // rate, count, live=False))
    if burst:
        case = "one millisecond"
        latenesses.append(await measure(broker, case, 0, burst, live=True))
        case += ", nobody receives"
        latenesses.append(await measure(broker, case, 0, burst, live=False))
    return latenesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rates", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--burst", type=int, default=50_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=".", prefix="bench-timers-") as name,
        started_broker(Path(name).resolve()) as broker,
    ):
        latenesses = asyncio.run(measure_all(broker, args.rates, args.seconds, args.burst))
    print(f"{os.cpu_count()} cores, body {BODY} B; ms late, of the record and of the receive")
    print(
        "| case | timers | stored p50 | p99 | max | received p50 | p99 | max | broker us |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for lateness in latenesses:
        print("| " + " | ".join(str(value) for value in asdict(lateness).values()) + " |")
    if args.json:
        args.json.write_text(json.dumps([asdict(lateness) for lateness in latenesses], indent=1))


if __name__ == "__main__":
    main()
