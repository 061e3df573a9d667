"""A master that is cut off confirms nothing after another was elected: sends, pops and acks, those
that wait for memory only too.

It is stopped (SIGSTOP), or the test's own TCP proxies between the processes stop to carry what it
says, what it is told, or both.  Its own clients still reach it all the time; the others reach the
new master.  After that it has to cut what nobody else has, follow, and have the same tables.
"""

import asyncio
import os
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.cutter import Cutter
from e2e.processes import Role
from e2e.replicated import GroupClient, ReplicatedGroup, agree_on_tables, put

from popmq.common.errors import Code, PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import AckRequest, Delivery, Kind, PopRequest, Port
from popmq.common.wire import admin_pb2 as admin
from popmq.common.wire import controller_pb2 as pb

TOPIC, CONSUMERS, FILLER = "orders", "workers", "filler"
QUICK, BUFFERED = "quick", "buffered"  # sends in memory, check points in memory
ISOLATED_S = 20.0
INVISIBLE_MS = 300_000  # nothing comes back by itself during the test
CALL_MS = 120_000
MORE = 10  # of each kind, while the master is cut off
Answer = bytes | PopmqError
KINDS = {
    "send": Kind.PUT,
    "send in memory": Kind.PUT,
    "ack": Kind.ACK,
    "receive": Kind.POP,
    "buffered receive": Kind.POP,
}

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("way", ["stopped", "cut off", "mute", "deaf"])
@pytest.mark.timeout(240)
def test_an_isolated_master_confirms_nothing_and_follows_when_it_is_back(
    tmp_path: Path, way: str
) -> None:
    # Small snapshots, so that tables are compared soon.
    settings = {"POPMQ_STORE_SNAPSHOT_BYTES": "256KiB"}
    run = Run(ReplicatedGroup(tmp_path, settings=settings), way)
    inward, outward = run.ways()
    with run.group:
        asyncio.run(run.drive(inward, outward))
        cut = run.old.metric("popmq_replication_truncations_total")
        print(
            f"\nmaster {way} for {ISOLATED_S:g} s; another serves after {run.elected_s:.2f} s;"
            f" answers of the old one while it was: {run.early}, afterwards: {run.late};"
            f" truncations {cut}, back in the set {run.back_s:.2f} s later"
        )


@dataclass(slots=True)
class Run:
    group: ReplicatedGroup
    way: str
    old: Role = field(init=False)
    elected_s: float = 0.0
    back_s: float = 0.0
    early: dict[str, int] = field(default_factory=dict)  # confirmed, by kind of request
    late: dict[str, int] = field(default_factory=dict)
    _inward: Cutter = field(init=False)
    _outward: Cutter = field(init=False)

    async def drive(self, inward: dict[str, Cutter], outward: dict[str, Cutter]) -> None:
        async with AsyncExitStack() as stack:
            for cutter in (*inward.values(), *outward.values()):
                await stack.enter_async_context(cutter)
            client = await stack.enter_async_context(GroupClient(self.group.address))
            near = await stack.enter_async_context(GroupClient(self.group.address))
            before = await client.in_sync(3)
            self.old = self.group.master(before)
            self._inward, self._outward = inward[self.old.name], outward[self.old.name]
            await self._play(client, near.port(self.old.settings["POPMQ_BROKER_LISTEN"]), before)

    async def _play(self, client: GroupClient, old: Port, before: pb.GroupState) -> None:
        await create(client)
        for number in range(5 * MORE):
            await client.ask(Kind.PUT, put(TOPIC, b"early-%d" % number))
        held = [await pop_one(client) for _ in range(4 * MORE)]
        acked, to_old, to_new = (held[at : at + MORE] for at in range(0, 3 * MORE, MORE))
        for delivery in acked:
            await client.ask(Kind.ACK, ack(delivery))
        self._isolate()
        began = time.monotonic()
        try:
            asked = {
                "send": [ask(old, Kind.PUT, put(TOPIC, b"late-%d" % n)) for n in range(MORE)],
                "send in memory": [ask(old, Kind.PUT, put(QUICK, b"late")) for _ in range(MORE)],
                "ack": [ask(old, Kind.ACK, ack(entry)) for entry in to_old],
                "receive": [ask(old, Kind.POP, pop(1)) for _ in range(MORE)],
                "buffered receive": [ask(old, Kind.POP, pop(1, BUFFERED)) for _ in range(MORE)],
            }
            await self._elected(client, before)
            self.elected_s = time.monotonic() - began
            for number in range(MORE):
                await client.ask(Kind.PUT, put(TOPIC, b"meanwhile-%d" % number))
            for delivery in to_new:  # a handle of the old master is good at the new one
                assert confirmed(Kind.ACK, await client.ask(Kind.ACK, ack(delivery)))
            await asyncio.sleep(began + ISOLATED_S - time.monotonic())
            self.early = {
                what: sum(confirmed(KINDS[what], task.result()) for task in tasks if task.done())
                for what, tasks in asked.items()
            }
        finally:
            self._bring_back()
        back = time.monotonic()
        await client.in_sync(3)
        self.back_s = time.monotonic() - back
        answers = {what: await asyncio.gather(*tasks) for what, tasks in asked.items()}
        self._judge(answers)
        await self._only_what_was_said(client, held, acked + to_new, answers)
        await agree_on_tables(self.group, client, FILLER)

    def _judge(self, answers: dict[str, list[Answer]]) -> None:
        self.late = {
            what: sum(confirmed(KINDS[what], reply) for reply in replies)
            for what, replies in answers.items()
        }
        assert not any(self.early.values()), self.early
        # Of what one way carried both others may have a record, and then it is confirmed indeed.
        if self.way != "deaf":
            assert not any(self.late.values()), self.late

    async def _only_what_was_said(
        self,
        client: GroupClient,
        held: list[Delivery],
        acked: list[Delivery],
        answers: dict[str, list[Answer]],
    ) -> None:
        """Every confirmed send is there, no unconfirmed ack counts twice, no acked one comes back.

        What was held and not acknowledged is acknowledged now; the rest of the topic is taken.
        """
        done = {entry.head for entry in acked}
        for delivery in held:
            if delivery.head not in done:
                assert confirmed(Kind.ACK, await client.ask(Kind.ACK, ack(delivery))), delivery.head
        results: list[bytes] = []
        while reply := await client.ask(Kind.POP, pop(32)):
            deliveries = hop.decode_pop_reply(reply).deliveries
            if not deliveries:
                break
            results += [entry.head for entry in deliveries]
        assert len(results) == len(set(results)), results
        assert not {entry.head for entry in held} & set(results)
        popped = {
            entry.head
            for reply in answers["receive"]
            if isinstance(reply, bytes)
            for entry in hop.decode_pop_reply(reply).deliveries
        }
        kept = {
            b"late-%d" % n for n, item in enumerate(answers["send"]) if confirmed(Kind.PUT, item)
        }
        early = {b"early-%d" % number for number in range(5 * MORE)}
        owed = (
            early - {entry.head for entry in held}
            | {b"meanwhile-%d" % n for n in range(MORE)}
            | kept
        )
        assert owed - popped <= set(results), owed - popped - set(results)
        strangers = set(results) - owed
        assert all(stranger.startswith(b"late-") for stranger in strangers), strangers
        assert not strangers or self.way == "deaf"

    def ways(self) -> tuple[dict[str, Cutter], dict[str, Cutter]]:
        """To each broker, and from each broker to the controller; the brokers are told of them."""
        inward, outward = {}, {}
        for broker in self.group.brokers:
            inward[broker.name] = Cutter(broker.settings["POPMQ_BROKER_LISTEN"])
            outward[broker.name] = Cutter(self.group.address)
            broker.settings["POPMQ_BROKER_ADVERTISE"] = inward[broker.name].address
            broker.settings["POPMQ_CONTROLLER_ADDRESSES"] = outward[broker.name].address
        return inward, outward

    def _isolate(self) -> None:
        match self.way:
            case "stopped":
                os.kill(self.old.pid, signal.SIGSTOP)
            case "cut off":
                self._inward.cut()
                self._outward.cut()
            case "mute":
                self._inward.cut(forth=False)
                self._outward.cut(back=False)
            case "deaf":
                self._inward.cut(back=False)
                self._outward.cut(forth=False)

    def _bring_back(self) -> None:
        if self.way == "stopped":
            os.kill(self.old.pid, signal.SIGCONT)
        self._inward.mend()
        self._outward.mend()

    async def _elected(self, client: GroupClient, before: pb.GroupState) -> None:
        """Another has an epoch of its own, and confirms."""
        async with asyncio.timeout(ISOLATED_S):
            while True:
                if (await client.state()).record.epoch > before.record.epoch:
                    break
                await asyncio.sleep(0.05)
        await client.ask(Kind.PUT, put(FILLER, b"the new master serves"))


def ask(port: Port, kind: Kind, body: bytes) -> "asyncio.Task[Answer]":
    async def answered() -> Answer:
        try:
            return await call(port, kind, body, CALL_MS)
        except PopmqError as refusal:
            return refusal

    return asyncio.create_task(answered())


async def create(client: GroupClient) -> None:
    topic = admin.Topic(name=QUICK, durability="memory")
    body = admin.CreateTopicRequest(topic=topic).SerializeToString()
    await client.ask(Kind.CREATE_TOPIC, body)
    group = admin.Group(name=BUFFERED, check_points="buffered")
    await client.ask(Kind.CREATE_GROUP, admin.CreateGroupRequest(group=group).SerializeToString())


def pop(limit: int, group: str = CONSUMERS) -> bytes:
    return hop.encode_pop(PopRequest(TOPIC, group, CONSUMERS, limit, INVISIBLE_MS, 0))


def ack(delivery: Delivery) -> bytes:
    return hop.encode_ack(AckRequest(TOPIC, CONSUMERS, [delivery.handle]))


async def pop_one(client: GroupClient) -> Delivery:
    (delivery,) = hop.decode_pop_reply(await client.ask(Kind.POP, pop(1))).deliveries
    return delivery


def confirmed(kind: Kind, answer: Answer) -> bool:
    """Whether the client was told that it is done, or was given a message."""
    if isinstance(answer, PopmqError):
        return False
    match kind:
        case Kind.PUT:
            return all(result.code == Code.OK for result in hop.decode_put_reply(answer))
        case Kind.ACK:
            return all(result.code == Code.OK for result in hop.decode_ack_reply(answer))
        case _:
            return bool(hop.decode_pop_reply(answer).deliveries)
