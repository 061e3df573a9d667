"""The master dies by kill -9 while timers fire: each is delivered once, and none before its time.

One of the kills takes the controller too.  Two groups read the topic: a live one meanwhile, and
an auditor afterwards, who gets each stored copy once, so that a timer that fired twice is two
messages to him.  E2E_SEED repeats a run.
"""

import asyncio
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.many_timers import (
    QUEUES,
    entry,
    percentiles,
    pop_request,
    sleep_until,
    taken_apart,
    wall_ms,
)
from e2e.processes import Role
from e2e.replicated import GroupClient, ReplicatedGroup, agree, put

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.messaging_payloads import Delivery, Kind, PutRequest
from popmq.common.wire import admin_pb2 as pb

SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPIC = "timers"
LIVE, AUDITOR = "live", "auditor"
KILLS = ("master", "master and controller", "master")
BATCH = 500
CLIENTS = 4
POLL_MS = 500
PAUSE_S = 0.02  # between tries while nobody serves
FIRED_S = 60.0  # for what is due, after the last
# timer.checkpoint_sync_ms and controller.heartbeat_ms
CHECK_POINT_AGE_MS = 3_000 + 500


@pytest.mark.parametrize(
    ("timers", "window_ms"),
    [
        pytest.param(10_000, 30_000, marks=[pytest.mark.heavy, pytest.mark.timeout(240)]),
        pytest.param(20_000, 30_000, marks=[pytest.mark.long, pytest.mark.timeout(240)]),
        pytest.param(100_000, 90_000, marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_each_timer_is_delivered_once_and_not_before_its_time_though_masters_are_killed(
    tmp_path: Path, timers: int, window_ms: int
) -> None:
    with ReplicatedGroup(tmp_path) as group:
        run = Run(group, timers, window_ms, random.Random(SEED))
        asyncio.run(run.drive())
    print(f"\n{run.table()}")
    stored = Counter(number for number, _ in map(taken_apart, run.audited))
    assert [number for number in range(timers) if stored[number] != 1] == []
    assert stored.total() == timers
    assert {delivery.attempt for delivery in run.audited} == {1}
    assert [item for item in run.audited if item.stored_ms < taken_apart(item)[1]] == []
    assert [late for late in run.lateness if late < 0] == []
    assert len(run.ages_ms) == len(KILLS)
    assert max(run.ages_ms) <= CHECK_POINT_AGE_MS


@dataclass(slots=True)
class Run:
    group: ReplicatedGroup
    timers: int
    window_ms: int
    dice: random.Random
    outages_ms: list[int] = field(default_factory=list)  # from the kill to a new master
    ages_ms: list[int] = field(default_factory=list)  # of the check point that each one had
    lateness: list[int] = field(default_factory=list)  # of deliveries to the live group
    audited: list[Delivery] = field(default_factory=list)
    _receiving: bool = True

    async def drive(self) -> None:
        async with GroupClient(self.group.address) as client:
            await client.in_sync(3)
            await create(client)
            first_ms = wall_ms() + 2_000 + self.timers // 2
            await self._fill(client, first_ms)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CLIENTS):
                    tasks.create_task(self._receive_loop())
                await self._kill_loop(client, first_ms)
                await sleep_until(first_ms + self.window_ms)
                await self._audit(client)
                self._receiving = False
            await agree(self.group, client)

    def table(self) -> str:
        return "\n".join(
            (
                f"{self.timers} timers in {self.window_ms} ms, seed {SEED}, killed: "
                f"{', '.join(KILLS)}; away for {self.outages_ms} ms",
                f"TimerCheckPoints of the promoted, as old as {self.ages_ms} ms at the kill",
                f"{len(self.lateness)} received live, late by {percentiles(self.lateness)};"
                f" {len(self.audited)} stored",
            )
        )

    async def _fill(self, client: GroupClient, first_ms: int) -> None:
        firsts = iter(range(0, self.timers, BATCH))

        async def put_batches() -> None:
            for first in firsts:
                due = [first_ms + self.dice.randrange(self.window_ms) for _ in range(BATCH)]
                entries = [entry(first + at, due_ms) for at, due_ms in enumerate(due)]
                body = hop.encode_put(PutRequest(TOPIC, entries))
                results = hop.decode_put_reply(await client.ask(Kind.PUT, body))
                assert {result.code for result in results} == {Code.OK}

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(put_batches())
        assert wall_ms() < first_ms, "filling took longer than it was given"

    async def _kill_loop(self, client: GroupClient, first_ms: int) -> None:
        part_ms = self.window_ms // len(KILLS)
        for number, what in enumerate(KILLS):
            await sleep_until(first_ms + number * part_ms + part_ms // 4)
            before = await client.in_sync(3)
            master = self.group.master(before)
            killed_ms = wall_ms()
            await asyncio.to_thread(master.kill9)
            if "controller" in what:
                await asyncio.to_thread(self.group.controller.kill9)
                await asyncio.to_thread(self.group.controller.restart)
            promoted = await self._promoted(client, before.record.epoch)
            self.outages_ms.append(wall_ms() - killed_ms)
            self.ages_ms.append(killed_ms - timers_read_ms(promoted, before.record.epoch + 1))
            await asyncio.to_thread(master.restart)

    async def _promoted(self, client: GroupClient, epoch: int) -> Role:
        """The next one that serves."""
        await client.ask(Kind.PUT, put("another", b"it serves"), timeout_s=FIRED_S)
        state = await client.state()
        assert state.record.epoch == epoch + 1, state
        return self.group.master(state)

    async def _receive_loop(self) -> None:
        async with GroupClient(self.group.address) as client:
            while self._receiving:
                try:
                    reply = await client.once(Kind.POP, pop_request(TOPIC, LIVE, POLL_MS))
                except PopmqError:
                    await asyncio.sleep(PAUSE_S)
                    continue
                now_ms = wall_ms()
                deliveries = hop.decode_pop_reply(reply).deliveries
                self.lateness += [now_ms - due_ms for _, due_ms in map(taken_apart, deliveries)]

    async def _audit(self, client: GroupClient) -> None:
        """All there is, and then once more: one too many would come then."""
        async with asyncio.timeout(FIRED_S):
            while len(self.audited) < self.timers:
                await self._take(client)
        while await self._take(client, POLL_MS):
            pass

    async def _take(self, client: GroupClient, poll_ms: int = 0) -> int:
        reply = await client.once(Kind.POP, pop_request(TOPIC, AUDITOR, poll_ms))
        deliveries = hop.decode_pop_reply(reply).deliveries
        self.audited += deliveries
        return len(deliveries)


async def create(client: GroupClient) -> None:
    topic = pb.CreateTopicRequest(topic=pb.Topic(name=TOPIC, queues=QUEUES, type="delay"))
    created = await client.ask(Kind.CREATE_TOPIC, topic.SerializeToString())
    assert pb.TopicReply.FromString(created).status.code == Code.OK
    for name in (LIVE, AUDITOR):
        group = pb.CreateGroupRequest(group=pb.Group(name=name, type="normal", start_at="oldest"))
        await client.ask(Kind.CREATE_GROUP, group.SerializeToString())


def timers_read_ms(broker: Role, epoch: int) -> int:
    """Up to when (wall ms) the last master had read its timers, as this one was told by then."""
    lines = map(json.loads, broker.log.read_text().splitlines())
    (leading,) = (line for line in lines if line["event"] == "leading" and line["epoch"] == epoch)
    return int(leading["timers_read_ms"])
