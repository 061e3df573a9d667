"""Durable sends with 1, 2 and 3 replicas on one machine: rate, wait, CPU of master and slaves.

    python -m bench.replicated_sends [--seconds 5] [--in-flight 64] [--body 1024] [--replicas 1 2 3]
                                     [--durability disk memory]

Controller and brokers are processes of their own, asked over frames without a proxy; every
reply waits until all of the SyncStateSet have the message on their disks, or with `memory`
hold it.  They share one disk and its fsyncs here, so only the ratios say something.  At the end
all logs must end alike.
"""

import argparse
import asyncio
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.role_process import RoleProcess, free_address
from popmq.common.errors import Code, PopmqError
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello, ProcessRole
from popmq.common.protocol.messaging_payloads import (
    Kind,
    PutEntry,
    PutRequest,
    decode_put_reply,
    encode_put,
)
from popmq.common.topics import MessageType
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb

GROUP = "group-a"
TOPIC = "bench"


@dataclass(frozen=True, slots=True)
class Result:
    replicas: int
    per_second: float
    p50_ms: float
    p99_ms: float
    master_us: float  # CPU per message
    slave_us: float
    lag_kib: float  # of the slave furthest behind, the middle of what was seen


async def measure(folder: Path, replicas: int, durability: str, args: argparse.Namespace) -> Result:
    with ExitStack() as stack:
        where = free_address()
        stack.enter_context(
            RoleProcess("controller", "controller", folder, {"CONTROLLER_LISTEN": where})
        )
        brokers = [
            stack.enter_context(
                RoleProcess(
                    "broker",
                    f"node-{number}",
                    folder,
                    {
                        "CONTROLLER_ADDRESSES": where,
                        "BROKER_NAME": GROUP,
                        "BROKER_NODE": f"node-{number}",
                        "BROKER_DATA": str(folder / f"data-{number}"),
                        "BROKER_LISTEN": free_address(),
                        "REPLICATION_REPLICAS": str(replicas),
                        "TOPIC_AUTO_CREATE": "true",
                    },
                )
            )
            for number in range(replicas)
        ]
        hello = Hello(role=ProcessRole.PROXY, name="bench", cluster="popmq")
        controller = FramePort(where, hello)
        controller.start()
        address = await _master(controller, replicas)
        port = FramePort(address, hello)
        port.start()
        try:
            await _make_topic(port, durability)
            await _load(port, args, seconds=1.0)  # warm
            before = [broker.cpu_s() for broker in brokers]
            lags: list[float] = []
            watching = asyncio.create_task(_watch(brokers, lags, replicas))
            began = time.monotonic()
            waits = await _load(port, args, seconds=args.seconds)
            took_s = time.monotonic() - began
            watching.cancel()
            used = [broker.cpu_s() - cpu for broker, cpu in zip(brokers, before, strict=True)]
            await _agree(controller, replicas)
        finally:
            await port.close()
            await controller.close()
        master = next(
            n for n, broker in enumerate(brokers) if broker.settings["BROKER_LISTEN"] == address
        )
        slaves = [cpu for number, cpu in enumerate(used) if number != master]
        waits.sort()
        return Result(
            replicas,
            len(waits) / took_s,
            waits[len(waits) // 2],
            waits[len(waits) * 99 // 100],
            used[master] / len(waits) * 1e6,
            statistics.mean(slaves) / len(waits) * 1e6 if slaves else 0.0,
            statistics.median(lags) / 1024 if lags else 0.0,
        )


async def _master(controller: FramePort, replicas: int) -> str:
    """Wait until a master serves, with all in the set; its address."""
    async with asyncio.timeout(60):
        while True:
            with suppress(PopmqError):
                reply = await call(controller, Kind.ROUTES, b"", 1_000)
                routes = [broker for broker in pb.RoutesReply.FromString(reply).brokers]
                if routes and (
                    replicas == 1 or len((await _state(controller)).members) == replicas
                ):
                    return routes[0].address
            await asyncio.sleep(0.1)


async def _make_topic(port: FramePort, durability: str) -> None:
    topic = admin.Topic(name=TOPIC, durability=durability)
    body = admin.CreateTopicRequest(topic=topic).SerializeToString()
    async with asyncio.timeout(60):
        while True:
            try:
                await call(port, Kind.CREATE_TOPIC, body, 5_000)
            except PopmqError as error:
                if error.code is not Code.NOT_MASTER:
                    raise
                await asyncio.sleep(0.05)  # it was elected, and is about to serve
            else:
                return


async def _state(controller: FramePort) -> pb.GroupState:
    body = pb.ListReplicasRequest(group=GROUP).SerializeToString()
    reply = await call(controller, Kind.LIST_REPLICAS, body, 1_000)
    return pb.ListReplicasReply.FromString(reply).groups[0]


async def _agree(controller: FramePort, replicas: int) -> None:
    if replicas == 1:
        return
    for _ in range(150):
        if len({member.end for member in (await _state(controller)).members}) == 1:
            return
        await asyncio.sleep(0.2)
    raise RuntimeError("the logs do not end alike")


async def _watch(brokers: Sequence[RoleProcess], lags: list[float], replicas: int) -> None:
    for _ in range(1_000 if replicas > 1 else 0):
        await asyncio.sleep(0.25)
        values = [
            await asyncio.to_thread(broker.metric, "popmq_replication_lag_bytes")
            for broker in brokers
        ]
        lags.append(max(values))


async def _load(port: FramePort, args: argparse.Namespace, *, seconds: float) -> list[float]:
    """Send for so long, so many at once; milliseconds of each send that was answered OK."""
    entry = PutEntry(MessageType.NORMAL, bytes(args.body), bytes(120))
    body = encode_put(PutRequest(TOPIC, [entry]))
    end = time.monotonic() + seconds
    waits: list[float] = []

    async def sender() -> None:
        while time.monotonic() < end:
            began = time.monotonic()
            (result,) = decode_put_reply(await call(port, Kind.PUT, body, 10_000))
            assert not result.message, result
            waits.append((time.monotonic() - began) * 1_000)

    await asyncio.gather(*(sender() for _ in range(args.in_flight)))
    return waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--durability", nargs="+", default=["disk", "memory"])
    args = parser.parse_args()
    print("replicas  waits for  sends/s  p50 ms  p99 ms  master us  slave us  lag KiB")
    for replicas, durability in itertools.product(args.replicas, args.durability):
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(measure(Path(folder), replicas, durability, args))
        print(
            f"{result.replicas:8} {durability:>10} {result.per_second:8.0f} {result.p50_ms:7.1f}"
            f" {result.p99_ms:7.1f} {result.master_us:10.0f} {result.slave_us:9.0f}"
            f" {result.lag_kib:8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        raise SystemExit(str(error)) from error
