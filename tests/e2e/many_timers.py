"""Timers by the thousand: each says its number and its due time in its body."""

import asyncio
import struct
import time

from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import Delivery, Kind, PopRequest, Port, PutEntry
from popmq.common.topics import MessageType

QUEUES = 8
CALL_MS = 60_000
INVISIBLE_MS = 12 * 3_600_000  # nothing is delivered again during a test
_BODY = struct.Struct(">QQ")  # number, due time


def pop_request(topic: str, group: str, poll_ms: int) -> bytes:
    return hop.encode_pop(PopRequest(topic, group, group, 32, INVISIBLE_MS, poll_ms))


async def pop(port: Port, topic: str, group: str, poll_ms: int) -> list[Delivery]:
    reply = await call(port, Kind.POP, pop_request(topic, group, poll_ms), CALL_MS)
    return list(hop.decode_pop_reply(reply).deliveries)


def entry(number: int, due_ms: int) -> PutEntry:
    name = f"{number:032d}"
    properties = b"\x1a\x20" + name.encode()  # system_properties.message_id
    body = _BODY.pack(number, due_ms)
    return PutEntry(MessageType.DELAY, body, properties, 0, number % QUEUES, due_ms, name)


def taken_apart(delivery: Delivery) -> tuple[int, int]:
    """Number and due time of the timer."""
    number, due_ms = _BODY.unpack(delivery.head)
    return number, due_ms


def percentiles(values: list[int]) -> str:
    ordered = sorted(values)
    p50, p99 = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return f"p50 {p50} p99 {p99} max {ordered[-1]} ms"


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


async def sleep_until(at_ms: int) -> None:
    await asyncio.sleep(max(0, at_ms - wall_ms()) / 1000)
