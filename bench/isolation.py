"""What consumers do to others: the time from a send to its delivery, beside a stuck consumer and
beside 49 other groups of the same queue.

    python -m bench.isolation [--samples 200] [--rounds 3] [--held 50000]

The broker is a process of its own, asked over its unix socket; every topic has one queue.  In a
sample the group's receive waits already; then one message of 1 KB is sent.  Two group commits are
in the time, the message's and the check point's.  The topics take turns, round by round.  The data
goes to the current folder and is removed.  Under virtual time the same is asserted:
tests/broker/test_isolation.py.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.broker_process import CALL_MS, connected, create_group, create_topic, started_broker
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.messaging_payloads import (
    Delivery,
    Kind,
    PopRequest,
    PutEntry,
    PutRequest,
)
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as pb

BODY = 1_024
HELD_MS = 3_600_000
POLL_MS = 20_000
TIMED = "timed"  # the group whose deliveries are measured


@dataclass(slots=True)
class Case:
    """A topic, and who reads it beside the group that is measured."""

    topic: str
    what: str
    others: tuple[str, ...] = ()  # groups that wait for each message, too
    stuck: str = ""  # the group that a consumer who never acks is of
    found_ms: list[float] = field(default_factory=list)

    def row(self) -> str:
        parts = statistics.quantiles(self.found_ms, n=100)
        return f"| {self.what} | {parts[49]:.2f} | {parts[89]:.2f} | {parts[98]:.2f} |"


def cases(held: int) -> list[Case]:
    fifty = tuple(f"other-{number:02}" for number in range(49))
    return [
        Case("alone", "nobody"),
        Case("of-the-group", f"a consumer of the same group that holds {held:,}", stuck=TIMED),
        Case("of-another", f"a consumer of another group that holds {held:,}", stuck="stuck"),
        Case("fifty", "49 groups that get each message, too", others=fifty),
    ]


async def put(port: FramePort, topic: str, count: int) -> None:
    entries = [PutEntry(MessageType.NORMAL, bytes(BODY), b"", 0, 0)] * count
    await call(port, Kind.PUT, hop.encode_put(PutRequest(topic, entries)), CALL_MS)


async def receive(
    port: FramePort, topic: str, group: str, *, poll_ms: int = POLL_MS
) -> Sequence[Delivery]:
    request = PopRequest(topic, group, group, 32, HELD_MS, poll_ms)
    reply = await call(port, Kind.POP, hop.encode_pop(request), CALL_MS)
    return hop.decode_pop_reply(reply).deliveries


async def stick(port: FramePort, case: Case, held: int) -> None:
    """Its consumer receives and never acks."""
    for at in range(0, held, 500):
        await put(port, case.topic, min(500, held - at))
    left = held
    while left > 0:
        left -= len(await receive(port, case.topic, case.stuck, poll_ms=0))
    if case.stuck != TIMED:  # those are new to the group that is measured
        while got := await receive(port, case.topic, TIMED, poll_ms=0):
            await ack(port, case.topic, TIMED, got)


async def ack(port: FramePort, topic: str, group: str, got: Sequence[Delivery]) -> None:
    request = hop.AckRequest(topic, group, [delivery.handle for delivery in got])
    await call(port, Kind.ACK, hop.encode_ack(request), CALL_MS)


async def sample(port: FramePort, case: Case) -> float:
    """Seconds from the send to the delivery to the group that is measured, the last one woken."""
    loop = asyncio.get_running_loop()
    groups = (*case.others, TIMED)
    waiting = [asyncio.create_task(receive(port, case.topic, group)) for group in groups]
    await asyncio.sleep(0)
    # An answered request behind them: all of them wait.
    lag = pb.LagRequest(group=TIMED, topic=case.topic).SerializeToString()
    await call(port, Kind.LAG, lag, CALL_MS)
    began_s = loop.time()
    sent = asyncio.create_task(put(port, case.topic, 1))
    await waiting[-1]
    took_s = loop.time() - began_s
    await sent
    for group, task in zip(groups, waiting, strict=True):
        got = await task
        if len(got) != 1:
            raise AssertionError(f"{group} got {len(got)} messages of {case.topic}")
        await ack(port, case.topic, group, got)
    return took_s


async def measure(port: FramePort, samples: int, rounds: int, held: int) -> None:
    found_cases = cases(held)
    for group in (*found_cases[-1].others, "stuck", TIMED):
        await create_group(port, group)
    for case in found_cases:
        await create_topic(port, case.topic, 1, "normal")
        if case.stuck:
            await stick(port, case, held)
        await sample(port, case)
    for _ in range(rounds):
        for case in found_cases:
            for _ in range(samples):
                case.found_ms.append(1_000 * await sample(port, case))
    print("| beside | p50 ms | p90 ms | p99 ms |\n|---|---|---|---|")
    print("\n".join(case.row() for case in found_cases), flush=True)


async def run(address: str, samples: int, rounds: int, held: int) -> None:
    async with connected(address) as port:
        await measure(port, samples, rounds, held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--held", type=int, default=50_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-isolation-") as folder:
        print(f"load average before: {os.getloadavg()[0]:.2f}", flush=True)
        with started_broker(Path(folder).absolute()) as broker:
            asyncio.run(run(broker.address, args.samples, args.rounds, args.held))
        print(f"load average after: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
