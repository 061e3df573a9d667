"""The broker dies by kill -9 while timers fire: each is delivered once, and none before its time.

Two groups read the topic: a live one through the kills, and an auditor afterwards, who gets each
stored copy once, so that a timer that fired twice is two messages to him.  E2E_SEED repeats a run.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.many_timers import entry, percentiles, pop, sleep_until, taken_apart, wall_ms
from e2e.processes import LOCAL, Role

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import FramePort, call
from popmq.common.protocol.frames import Hello
from popmq.common.protocol.frames import ProcessRole as FrameRole
from popmq.common.protocol.messaging_payloads import AckRequest, Delivery, Kind, PutRequest
from popmq.common.wire import admin_pb2 as pb

SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPIC = "timers"
LIVE, AUDITOR = "live", "auditor"
KILLS = 3
BATCH = 500
POPS = 4
CALL_MS = 60_000
POLL_MS = 500
CONSUMED_MS = 2_000  # the live group may be that far behind when it stops
SETTLED_MS = 1_000  # after a start: what was due meanwhile is fired first
PAUSE_S = 0.02  # between tries while the broker is away


@pytest.mark.parametrize(
    ("timers", "window_ms"),
    [
        pytest.param(10_000, 15_000, marks=pytest.mark.more),
        pytest.param(100_000, 60_000, marks=[pytest.mark.long, pytest.mark.timeout(400)]),
    ],
)
def test_each_timer_is_delivered_once_and_not_before_its_time_though_the_broker_is_killed(
    tmp_path: Path, timers: int, window_ms: int
) -> None:
    broker = Role(
        "broker",
        ["broker"],
        folder=tmp_path,
        settings={
            "POPMQ_HTTP_LISTEN": f"{LOCAL}:0",
            "POPMQ_BROKER_LISTEN": f"{LOCAL}:0",
            "POPMQ_BROKER_DATA": "data",
            "POPMQ_STORE_SEGMENT_BYTES": "64MiB",
        },
    )
    run = Run(broker, timers, window_ms, random.Random(SEED))
    with broker:
        asyncio.run(run.drive())
    print(f"\n{run.table()}")

    assert len(run.outages) == KILLS
    stored = Counter(number for number, *_ in map(taken_apart, run.audited))
    assert [number for number in range(timers) if stored[number] != 1] == []
    assert stored.total() == timers
    assert {delivery.attempt for delivery in run.audited} == {1}
    assert [item for item in run.audited if item.stored_ms < taken_apart(item)[1]] == []

    assert [late for _, late in run.lateness if late < 0] == []
    places = {(item.queue_id, item.queue_offset) for item in run.audited}
    assert {(item.queue_id, item.queue_offset) for item in run.live} <= places


@dataclass(slots=True)
class Run:
    """One broker, filled with timers and killed while they fire."""

    broker: Role
    timers: int
    window_ms: int
    dice: random.Random
    outages: list[tuple[int, int]] = field(default_factory=list)  # killed, ready: wall ms
    live: list[Delivery] = field(default_factory=list)
    lateness: list[tuple[int, int]] = field(default_factory=list)  # due, ms until received
    audited: list[Delivery] = field(default_factory=list)
    _receiving: bool = True

    async def drive(self) -> None:
        async with self._port() as port:
            await create(port)
            first_ms = wall_ms() + 1_000 + self.timers // 5
            await self._fill(port, first_ms)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(POPS):
                    tasks.create_task(self._receive_loop(port))
                await self._kill_loop(first_ms)
                await sleep_until(first_ms + self.window_ms + CONSUMED_MS)
                self._receiving = False
            await self._audit(port)

    def table(self) -> str:
        """Of deliveries as the live group saw them, in the broker's and the client's clock."""
        outside, stored = [], []
        for delivery, (due_ms, late_ms) in zip(self.live, self.lateness, strict=True):
            if not any(
                killed - SETTLED_MS < due_ms < ready + SETTLED_MS for killed, ready in self.outages
            ):
                outside.append(late_ms)
                stored.append(delivery.stored_ms - due_ms)
        restarts = ", ".join(f"{(ready - killed) / 1000:.2f} s" for killed, ready in self.outages)
        return "\n".join(
            (
                f"{self.timers} timers in {self.window_ms} ms, seed {SEED}, killed for {restarts}",
                f"outside of that, {len(outside)} of them: stored late by {percentiles(stored)},"
                f" received late by {percentiles(outside)}",
                f"longest {max(late for _, late in self.lateness)} ms, replies lost to a kill"
                f" {self.timers - len(self.live)} messages",
            )
        )

    async def _fill(self, port: FramePort, first_ms: int) -> None:
        firsts = iter(range(0, self.timers, BATCH))

        async def put_batches() -> None:
            for first in firsts:
                due = [first_ms + self.dice.randrange(self.window_ms) for _ in range(BATCH)]
                entries = [entry(first + at, due_ms) for at, due_ms in enumerate(due)]
                request = hop.encode_put(PutRequest(TOPIC, entries))
                results = hop.decode_put_reply(await call(port, Kind.PUT, request, CALL_MS))
                assert [(result.code, result.due_ms) for result in results] == [
                    (Code.OK, number) for number in due
                ]

        async with asyncio.TaskGroup() as tasks:
            for _ in range(POPS):
                tasks.create_task(put_batches())

    async def _kill_loop(self, first_ms: int) -> None:
        part_ms = self.window_ms // KILLS
        for kill in range(KILLS):
            at_ms = kill * part_ms + self.dice.randrange(part_ms // 4, part_ms // 2)
            await sleep_until(first_ms + at_ms)
            killed_ms = wall_ms()
            self.broker.kill9()
            await asyncio.to_thread(self.broker.restart)
            self.outages.append((killed_ms, wall_ms()))

    async def _receive_loop(self, port: FramePort) -> None:
        while self._receiving:
            try:
                deliveries = await pop(port, TOPIC, LIVE, POLL_MS)
            except PopmqError:
                await asyncio.sleep(PAUSE_S)
                continue
            now_ms = wall_ms()
            self.live += deliveries
            self.lateness += [(due, now_ms - due) for _, due in map(taken_apart, deliveries)]
            if deliveries:
                await self._ack(port, deliveries)

    async def _ack(self, port: FramePort, deliveries: list[Delivery]) -> None:
        """An ack that a kill takes away harms nobody: the message is invisible for hours."""
        acks = hop.encode_ack(AckRequest(TOPIC, LIVE, [delivery.handle for delivery in deliveries]))
        try:
            results = hop.decode_ack_reply(await call(port, Kind.ACK, acks, CALL_MS))
        except PopmqError:
            return
        assert {result.code for result in results} == {Code.OK}

    async def _audit(self, port: FramePort) -> None:
        """Once the port is connected again: the last start may have been a moment ago."""
        acks = hop.encode_ack(AckRequest(TOPIC, AUDITOR, []))
        while not await answered(call(port, Kind.ACK, acks, CALL_MS)):  # noqa: ASYNC110 - polled
            await asyncio.sleep(PAUSE_S)

        async def receive() -> None:
            while deliveries := await pop(port, TOPIC, AUDITOR, 0):
                self.audited += deliveries

        async with asyncio.TaskGroup() as tasks:
            for _ in range(POPS):
                tasks.create_task(receive())

    @asynccontextmanager
    async def _port(self) -> AsyncIterator[FramePort]:
        """The broker over its unix socket."""
        address = f"unix:{self.broker.folder}/data/frames.sock"
        port = FramePort(address, Hello(role=FrameRole.PROXY, name="timers", cluster="popmq"))
        port.start()
        try:
            yield port
        finally:
            await port.close()


async def create(port: FramePort) -> None:
    topic = pb.CreateTopicRequest(topic=pb.Topic(name=TOPIC, queues=8, type="delay"))
    new_call = await call(port, Kind.CREATE_TOPIC, topic.SerializeToString(), CALL_MS)
    assert pb.TopicReply.FromString(new_call).status.code == Code.OK
    for name in (LIVE, AUDITOR):
        group = pb.CreateGroupRequest(group=pb.Group(name=name, type="normal", start_at="oldest"))
        await call(port, Kind.CREATE_GROUP, group.SerializeToString(), CALL_MS)


async def answered(request: Awaitable[bytes]) -> bool:
    try:
        await request
    except PopmqError:
        return False
    return True
