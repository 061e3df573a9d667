"""Timers put into a broker and taken out again: what the benchmarks of timers share."""

import asyncio
import struct
import time
from collections.abc import Iterable
from itertools import islice

from bench.broker_process import CALL_MS
from popmq.common.errors import Code
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.messaging_payloads import (
    AckRequest,
    Delivery,
    Kind,
    PopRequest,
    PutEntry,
    PutRequest,
)
from popmq.common.topics import MessageType

QUEUES = 8
BATCH = 500
IN_FLIGHT = 4
POLL_MS = 1_000
INVISIBLE_MS = 3_600_000
_DUE = struct.Struct(">Q")


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


async def sleep_until(at_ms: int) -> None:
    await asyncio.sleep(max(0, at_ms - wall_ms()) / 1000)


async def put_timers(port: FramePort, topic: str, due: Iterable[int], *, body: int) -> None:
    """A timer for each of the due times, which are in its body; all of them are ahead."""
    rest = enumerate(due)
    filling = bytes(body - _DUE.size)

    async def put_batches() -> None:
        while batch := list(islice(rest, BATCH)):
            entries = [
                _entry(f"{topic}-{number:0{31 - len(topic)}d}", at, filling) for number, at in batch
            ]
            request = hop.encode_put(PutRequest(topic, entries))
            results = hop.decode_put_reply(await call(port, Kind.PUT, request, CALL_MS))
            if [(result.code, result.due_ms) for result in results] != [
                (Code.OK, at) for _, at in batch
            ]:
                raise AssertionError("a message was refused, or is no timer: it came too late")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(put_batches())


def _entry(message_id: str, due_ms: int, filling: bytes) -> PutEntry:
    properties = b"\x1a\x20" + message_id.encode()  # system_properties.message_id
    body = _DUE.pack(due_ms) + filling
    return PutEntry(MessageType.DELAY, body, properties, 0, -1, due_ms, message_id)


class Consumer:
    """Takes `count` timers of a topic with long polls, and acks them; how late each was."""

    def __init__(self, port: FramePort, topic: str, count: int) -> None:
        self._port = port
        self._topic = topic
        self._left = count
        self.stored_late_ms: list[int] = []  # until the record that is the firing
        self.received_late_ms: list[int] = []

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(self._take())

    async def _take(self) -> None:
        while self._left > 0:
            deliveries = await pop(self._port, self._topic)
            now_ms = wall_ms()
            self._left -= len(deliveries)
            for delivery in deliveries:
                (due_ms,) = _DUE.unpack_from(delivery.head)
                self.stored_late_ms.append(delivery.stored_ms - due_ms)
                self.received_late_ms.append(now_ms - due_ms)
            if deliveries:
                await ack(self._port, self._topic, deliveries)


async def pop(port: FramePort, topic: str) -> list[Delivery]:
    request = PopRequest(topic, f"{topic}-group", "bench", 32, INVISIBLE_MS, POLL_MS)
    reply = await call(port, Kind.POP, hop.encode_pop(request), CALL_MS)
    return list(hop.decode_pop_reply(reply).deliveries)


async def ack(port: FramePort, topic: str, deliveries: list[Delivery]) -> None:
    request = AckRequest(topic, f"{topic}-group", [delivery.handle for delivery in deliveries])
    reply = await call(port, Kind.ACK, hop.encode_ack(request), CALL_MS)
    if {result.code for result in hop.decode_ack_reply(reply)} != {Code.OK}:
        raise AssertionError("an ack was refused")
