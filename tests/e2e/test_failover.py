"""Brokers of a group as real processes: the master dies by kill -9 under load, again and again.

E2E_KILLS and E2E_SEED make the run of make test-more longer or repeat it.
"""

import asyncio
import itertools
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from e2e.replicated import GroupClient, ReplicatedGroup, agree, put

from popmq.common.errors import PopmqError
from popmq.common.protocol import messaging_payloads as hop
from popmq.common.protocol.frame_port import call
from popmq.common.protocol.messaging_payloads import Kind
from popmq.common.wire import admin_pb2 as admin

pytestmark = pytest.mark.more

KILLS = int(os.environ.get("E2E_KILLS", "2"))
SEED = int(os.environ.get("E2E_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
TOPIC = "failover"
CONSUMERS = "failover-group"
SENDERS = 4
INVISIBLE_MS = 4_000


@dataclass
class Books:
    """What clients were told."""

    sent: set[bytes] = field(default_factory=set)
    unknown: set[bytes] = field(default_factory=set)
    received: set[bytes] = field(default_factory=set)
    acked: dict[bytes, float] = field(default_factory=dict)
    acked_again: list[bytes] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    running: bool = True
    news: asyncio.Event = field(default_factory=asyncio.Event)  # something was sent


@pytest.mark.parametrize(
    ("kills", "durability"),
    [
        (KILLS, "disk"),
        pytest.param(3, "memory", marks=pytest.mark.heavy),
        pytest.param(10, "disk", marks=pytest.mark.long),
        pytest.param(10, "memory", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(180 + 30 * max(KILLS, 10))
def test_nothing_acknowledged_is_lost_when_masters_are_killed(
    tmp_path: Path, kills: int, durability: str
) -> None:
    """In memory, too: the others hold what a master alone takes with it."""
    books = Books()
    # Small snapshots, so that masters and slaves often compare their tables.
    settings = {"POPMQ_STORE_SNAPSHOT_BYTES": "256KiB"}
    with ReplicatedGroup(tmp_path, settings=settings) as group:
        asyncio.run(_drive(group, books, kills, durability, random.Random(SEED)))
    lost = books.sent - books.received
    gaps = sorted(books.gaps_s)
    print(
        f"\n{kills} x kill -9 of the master, {durability}, seed {SEED}: sent {len(books.sent)},"
        f" unknown {len(books.unknown)}, received {len(books.received)}, acked {len(books.acked)},"
        f" lost {len(lost)}, acked and seen again {len(books.acked_again)}; from kill to the next"
        f" acknowledged send: {', '.join(f'{gap:.2f} s' for gap in gaps)}"
    )
    assert len(books.sent) > 20 * kills
    assert not lost
    assert books.acked_again == []


async def _drive(
    group: ReplicatedGroup, books: Books, kills: int, durability: str, dice: random.Random
) -> None:
    async with GroupClient(group.address) as client:
        await client.in_sync(3)
        topic = admin.Topic(name=TOPIC, durability=durability)
        body = admin.CreateTopicRequest(topic=topic).SerializeToString()
        await client.ask(Kind.CREATE_TOPIC, body)
        async with asyncio.TaskGroup() as tasks:
            for number in range(SENDERS):
                tasks.create_task(_send(group.address, books, number))
            for _ in range(2):
                tasks.create_task(_consume(group.address, books))
            for _ in range(kills):
                await asyncio.sleep(1 + dice.random())
                await _kill_master(group, client, books)
            await asyncio.sleep(1)
            books.running = False
        await _drain(client, books)
        await agree(group, client)


async def _kill_master(group: ReplicatedGroup, client: GroupClient, books: Books) -> None:
    state = await client.in_sync(3)
    master = group.master(state)
    killed = time.monotonic()
    await asyncio.to_thread(master.kill9)
    async with asyncio.timeout(30):
        while not books.sent_at or books.sent_at[-1] < killed + 0.05:
            books.news.clear()
            await books.news.wait()
    books.gaps_s.append(next(at for at in books.sent_at if at >= killed + 0.05) - killed)
    await asyncio.to_thread(master.restart)
    after = await client.in_sync(3)
    assert after.record.epoch > state.record.epoch
    assert after.record.leader != state.record.leader


async def _send(address: str, books: Books, number: int) -> None:
    count = 0
    async with GroupClient(address) as client:
        while books.running:
            count += 1
            body = f"{number}-{count}".encode() + b"." * 500
            try:
                (result,) = hop.decode_put_reply(await client.once(Kind.PUT, put(TOPIC, body)))
            except PopmqError:
                books.unknown.add(body)
                await asyncio.sleep(0.05)
                continue
            assert not result.message, result
            books.sent.add(body)
            books.sent_at.append(time.monotonic())
            books.news.set()
            await asyncio.sleep(0.01)


async def _consume(address: str, books: Books) -> None:
    async with GroupClient(address) as client:
        while books.running:
            try:
                await _take(client, books)
            except PopmqError:
                await asyncio.sleep(0.05)


async def _take(client: GroupClient, books: Books) -> int:
    request = hop.encode_pop(hop.PopRequest(TOPIC, CONSUMERS, "c", 32, INVISIBLE_MS, 200))
    reply = hop.decode_pop_reply(await client.once(Kind.POP, request))
    for delivery in reply.deliveries:
        books.received.add(delivery.head)
        if delivery.head in books.acked:
            books.acked_again.append(delivery.head)
    if not reply.deliveries:
        return 0
    handles = [entry.handle for entry in reply.deliveries]
    acks = hop.encode_ack(hop.AckRequest(TOPIC, CONSUMERS, handles))
    results = hop.decode_ack_reply(await client.once(Kind.ACK, acks))
    for delivery, result in zip(reply.deliveries, results, strict=True):
        if not result.message:
            books.acked[delivery.head] = time.monotonic()
    return len(reply.deliveries)


async def _drain(client: GroupClient, books: Books) -> None:
    """Until nothing came for longer than anything could stay invisible."""
    quiet_from = time.monotonic()
    while time.monotonic() - quiet_from < INVISIBLE_MS / 1000 + 1.5:
        try:
            if await _take(client, books):
                quiet_from = time.monotonic()
        except PopmqError:
            await asyncio.sleep(0.05)


@pytest.mark.timeout(120)
def test_a_master_that_was_stopped_for_a_while_confirms_nothing_and_follows(
    tmp_path: Path,
) -> None:
    with ReplicatedGroup(tmp_path) as group:
        asyncio.run(_isolate(group, seconds=4))


async def _isolate(group: ReplicatedGroup, seconds: float) -> None:
    """SIGSTOP: it does not know that it was away, and its sockets took what was sent to it."""
    async with GroupClient(group.address) as client, GroupClient(group.address) as to_old:
        before = await client.in_sync(3)
        (leader,) = (
            member for member in before.members if member.broker.store_id == before.record.leader
        )
        master = group.of_node(leader.broker.node)
        await client.ask(Kind.PUT, put(TOPIC, b"before"))
        old = to_old.port(leader.broker.address)
        await call(old, Kind.PUT, put(TOPIC, b"warm"), 5_000)
        os.kill(master.pid, signal.SIGSTOP)
        try:
            late = [
                asyncio.create_task(call(old, Kind.PUT, put(TOPIC, b"late-%d" % number), 60_000))
                for number in range(20)
            ]
            await client.ask(Kind.PUT, put(TOPIC, b"meanwhile"))
            await asyncio.sleep(seconds)
        finally:
            os.kill(master.pid, signal.SIGCONT)
        answers = await asyncio.gather(*late, return_exceptions=True)
        assert all(isinstance(answer, PopmqError) for answer in answers), answers
        await agree(group, client)
        results = await _everything(client)
        assert results == {b"before", b"warm", b"meanwhile"}


async def _everything(client: GroupClient) -> set[bytes]:
    books = Books()
    await _drain(client, books)
    return books.received


@pytest.mark.timeout(180)
def test_a_slave_whose_disk_was_wiped_is_back_in_the_set_while_messages_flow(
    tmp_path: Path,
) -> None:
    books = Books()
    settings = {
        "POPMQ_STORE_SNAPSHOT_BYTES": "256KiB",
        "POPMQ_STORE_SEGMENT_BYTES": "8MiB",
        "POPMQ_STORE_RETENTION_BYTES": "16MiB",
        "POPMQ_MESSAGE_MAX_BODY_BYTES": "1MiB",
    }
    with ReplicatedGroup(tmp_path, settings=settings, own_segments=False) as group:
        took_s, sent = asyncio.run(_wipe(group, books))
    print(f"\nwiped and back in the set after {took_s:.1f} s, {sent} sent meanwhile")


async def _wipe(group: ReplicatedGroup, books: Books) -> tuple[float, int]:
    """How long it took (s), and how many messages were sent in that time.

    The master has deleted its first segments before, so an empty slave cannot be given the log
    from 0: that it agrees in the end shows that it began where the master's log begins.
    """
    async with GroupClient(group.address) as client, asyncio.TaskGroup() as tasks:
        state = await client.in_sync(3)
        filling = [tasks.create_task(_fill(group.address)) for _ in range(4)]
        await asyncio.gather(*filling)
        for number in range(2):
            tasks.create_task(_send(group.address, books, number))
        nodes = {
            member.broker.store_id: group.of_node(member.broker.node) for member in state.members
        }
        master = nodes.pop(state.record.leader)
        slave = next(iter(nodes.values()))
        starts_at = await _deleted_its_first_segment(group.data(master))
        await asyncio.to_thread(slave.kill9)
        identity = (group.data(slave) / "identity").read_text()
        await asyncio.to_thread(shutil.rmtree, group.data(slave))
        began, sent_before = time.monotonic(), len(books.sent)
        await asyncio.to_thread(slave.restart)
        await client.in_sync(3)
        took_s, sent = time.monotonic() - began, len(books.sent) - sent_before
        books.running = False
        assert (group.data(slave) / "identity").read_text() != identity
        await agree(group, client)
        assert _log_start(group.data(slave)) >= starts_at
    return took_s, sent


async def _deleted_its_first_segment(data: Path) -> int:
    """Wait until the log begins above 0, and where; retention looks every 10 s."""
    async with asyncio.timeout(60):
        while True:
            start = _log_start(data)
            if start > 0:
                return start
            await asyncio.sleep(0.1)


def _log_start(data: Path) -> int:
    return min(int(file.name) for file in (data / "commitlog").iterdir())


async def _fill(address: str) -> None:
    """So much that retention deletes the first segments at its next look."""
    async with GroupClient(address) as client:
        for number in range(15):
            await client.ask(Kind.PUT, put(TOPIC, b"%d" % number + bytes(900_000)))


@pytest.mark.timeout(120)
def test_a_master_that_is_told_to_stop_hands_over(tmp_path: Path) -> None:
    with ReplicatedGroup(tmp_path) as group:
        gap_s = asyncio.run(_stop_master(group))
    print(f"\nfrom SIGTERM to the next acknowledged send: {gap_s:.2f} s")


async def _stop_master(group: ReplicatedGroup) -> float:
    books = Books()
    async with GroupClient(group.address) as client, asyncio.TaskGroup() as tasks:
        before = await client.in_sync(3)
        tasks.create_task(_send(group.address, books, 0))
        await books.news.wait()
        (leader,) = (
            member for member in before.members if member.broker.store_id == before.record.leader
        )
        master = group.of_node(leader.broker.node)
        await asyncio.to_thread(master.terminate)
        stopped = time.monotonic()
        books.news.clear()
        await books.news.wait()
        books.running = False
        assert '"event": "not handed over"' not in master.log.read_text()
        await asyncio.to_thread(master.restart)
        await client.in_sync(3)
        pauses = [b - a for a, b in itertools.pairwise([*books.sent_at, stopped])]
    return max(pauses)
