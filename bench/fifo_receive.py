"""CPU of a FIFO group's receive and ack, as the number of blocked messages grows.

    python -m bench.fifo_receive [--rounds 2000]

One core in memory, one queue, 200 keys of which half have a message in flight for ever; behind
those the given number of messages is blocked.  Each round sends one message of a free key,
receives it and acks it.  A receive must cost the same however much is blocked.
"""

import argparse
import time
from dataclasses import replace

from popmq.common.settings.settings import PopSettings
from popmq.common.topics import GroupType, MessageType
from popmq.testing.harness.core_broker import SMALL, CoreBroker

KEYS = 200
BLOCKED = (0, 500, 5_000, 9_000)
HOUR_MS = 3_600_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2_000)
    rounds: int = parser.parse_args().rounds
    print("blocked messages | us per send | us per receive | us per ack")
    for blocked in BLOCKED:
        print(f"{blocked:16} | {measure(blocked, rounds)}", flush=True)


def measure(blocked: int, rounds: int) -> str:
    core = CoreBroker(settings=replace(SMALL, pop=PopSettings(max_in_flight_per_queue=1_000_000)))
    core.topic("orders", queues=1, type=MessageType.FIFO)
    core.group("g", type=GroupType.FIFO)
    stuck = [f"stuck-{number}" for number in range(KEYS // 2)]
    for key in stuck:
        core.send("orders", b"x", message_group=key)
    while core.receive("orders", "g", invisible_ms=HOUR_MS):
        pass
    for number in range(blocked):
        core.send("orders", b"x", message_group=stuck[number % len(stuck)])
    while core.receive("orders", "g"):
        pass
    spent = [0.0, 0.0, 0.0]
    for number in range(rounds):
        start = time.process_time()
        core.send("orders", b"x", message_group=f"free-{number % (KEYS // 2)}")
        sent = time.process_time()
        (delivery,) = core.receive("orders", "g", limit=32)
        received = time.process_time()
        core.ack("orders", "g", delivery.handle)
        acked = time.process_time()
        for at, value in enumerate((sent - start, received - sent, acked - received)):
            spent[at] += value
    return " | ".join(f"{value / rounds * 1e6:11.0f}" for value in spent)


if __name__ == "__main__":
    main()
